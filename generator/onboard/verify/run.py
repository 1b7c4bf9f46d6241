"""Runs the generated tests in a subprocess and reads their result from pytest's JUnit report."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from onboard.errors import OnboardError, UsageError
from onboard.plan.targets import Layout
from onboard.verify.progress import Progress

TIMEOUT_SECONDS = 900


@dataclass(frozen=True)
class TestResult:
    """What the generated tests said.

    Attributes:
        max_abs_logit_diff: largest absolute difference of a logit over all variants, None where parity was not reached.
        planted, caught: mutants, and those that a comparison with the reference caught.
        failures: ``test: first line of its error``.
        skips: ``test: reason``.
    """

    passed: int
    failed: int
    skipped: int
    seconds: float
    max_abs_logit_diff: float | None
    planted: int
    caught: int
    failures: tuple[str, ...]
    skips: tuple[str, ...]
    survived: tuple[str, ...]

    @property
    def exit_status(self) -> int:
        """0 where everything passed and every mutant was caught, else 1."""
        return 0 if self.passed and not self.failed and self.caught == self.planted else 1

    def as_json(self) -> dict[str, Any]:
        """The keys ``tests``, ``parity`` and ``mutants`` of DESIGN's JSON."""
        return {
            "tests": {
                "passed": self.passed,
                "failed": self.failed,
                "skipped": self.skipped,
                "seconds": round(self.seconds, 2),
                "failures": list(self.failures),
                "skips": list(self.skips),
            },
            "parity": {"max_abs_logit_diff": self.max_abs_logit_diff, "dtype": "float32"},
            "mutants": {"planted": self.planted, "caught": self.caught, "survived": list(self.survived)},
        }


def run_tests(root: Path, places: Layout, progress: Progress, *, mutants: bool = True) -> TestResult:
    """Run the generated tests of one package.

    Args:
        root: the plugin's project folder, or the checkout.
        places: the layout below it.
        progress: told about every test that ends.
        mutants: also plant mistakes.

    Raises:
        UsageError: the tests are not there, or cannot run in this environment.
    """
    tests = root / places.tests_dir
    if not tests.is_dir():
        raise UsageError(f"no generated tests in {tests}", "the folder is not there", "give the folder that `onboard new` wrote")
    with tempfile.TemporaryDirectory(prefix="onboard-verify-") as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            str(tests),
            f"--junit-xml={report}",
            "-v",
            "--tb=short",
            "--color=no",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "--import-mode=importlib",
            f"--rootdir={root}",
            "-c",
            os.devnull,
        ]
        if not mutants:
            command.append(f"--ignore={tests / 'test_mutants.py'}")
        began = time.monotonic()
        progress.start("running the generated tests", _count(tests) or None)
        output = _run(command, root, places, progress)
        if not report.is_file():
            last = (output.strip().splitlines() or ["no output"])[-1]
            raise OnboardError(
                "the generated tests could not run",
                last[:300],
                "run `onboard doctor`; pytest and nemo-automodel must be installed (pip install 'onboard-models[automodel]')",
                code="verify.cannot_run",
            )
        result = _read(report, time.monotonic() - began)
    progress.done(f"{result.passed} passed, {result.failed} failed")
    return result


def _run(command: list[str], root: Path, places: Layout, progress: Progress) -> str:
    paths = [str(root / places.sys_path), os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
    }
    lines: list[str] = []
    with subprocess.Popen(
        command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        try:
            assert process.stdout is not None
            deadline = time.monotonic() + TIMEOUT_SECONDS
            for line in process.stdout:
                lines.append(line)
                if " PASSED" in line or " FAILED" in line or " SKIPPED" in line:
                    progress.advance(1)
                if time.monotonic() > deadline:
                    process.kill()
        except BaseException:
            process.kill()
            raise
    return "".join(lines)


def _count(tests: Path) -> int:
    """A rough number of tests, for the progress bar: parametrised ones count once."""
    return sum(file.read_text(encoding="utf-8").count("\ndef test_") for file in tests.glob("test_*.py"))


def _read(report: Path, seconds: float) -> TestResult:
    passed = planted = caught = 0
    failures, skips, survived, differences = [], [], [], []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name')}"
        mutant = case.get("classname", "").endswith("test_mutants")
        planted += mutant
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        skip = case.find("skipped")
        if bad is not None:
            failures.append(f"{name}: {_last_line(bad)}")
            if mutant:
                survived.append(name)
        elif skip is not None:
            skips.append(f"{name}: {skip.get('message') or 'no reason given'}")
        else:
            passed += 1
            caught += mutant
        for found in case.iter("property"):
            if found.get("name") == "max_abs_logit_diff":
                differences.append(float(found.get("value", "nan")))
    return TestResult(
        passed,
        len(failures),
        len(skips),
        seconds,
        max(differences) if differences else None,
        planted,
        caught,
        tuple(failures),
        tuple(skips),
        tuple(survived),
    )


def _last_line(node: ElementTree.Element) -> str:
    message = (node.get("message") or node.text or "").strip().splitlines()
    return (message[0] if message else "no message")[:300]
