"""Runs the generated tests in a subprocess and reads their result from pytest's JUnit report."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from onboard._child import command
from onboard.errors import OnboardError, UsageError, VerificationFailed
from onboard.plan.targets import Layout
from onboard.verify.progress import Progress

TIMEOUT_SECONDS = 900


@dataclass(frozen=True)
class ProofResult:
    """What the generated tests said.

    Attributes:
        parity: for each setting, the largest absolute difference of a logit and the largest logit, in fp32.
        planted, caught: mutants, and those that a comparison with the reference caught.
        failures: ``test: first line of its error``.
        skips: ``test: reason``.
    """

    passed: int
    failed: int
    skipped: int
    seconds: float
    parity: tuple[tuple[str, float, float], ...]
    planted: int
    caught: int
    failures: tuple[str, ...]
    skips: tuple[str, ...]
    survived: tuple[str, ...]

    @property
    def max_abs_logit_diff(self) -> float | None:
        """Largest absolute difference of a logit over all settings, None where parity was not reached."""
        return max((difference for _, difference, _ in self.parity), default=None)

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
            "parity": {
                "max_abs_logit_diff": self.max_abs_logit_diff,
                "dtype": "float32",
                "settings": [
                    {"name": name, "max_abs_logit_diff": difference, "max_abs_logit": largest}
                    for name, difference, largest in self.parity
                ],
            },
            "mutants": {"planted": self.planted, "caught": self.caught, "survived": list(self.survived)},
        }


def run_tests(root: Path, places: Layout, progress: Progress, *, mutants: bool = True) -> ProofResult:
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
        raise UsageError(
            f"no generated tests in {tests}", "the folder is not there", "give the folder that `onboard new` wrote"
        )
    with tempfile.TemporaryDirectory(prefix="onboard-verify-") as folder:
        report = Path(folder) / "report.xml"
        arguments = [
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
            # Not those above: the package may lie in a stranger's folder.
            f"--confcutdir={root}",
            "-c",
            os.devnull,
        ]
        if not mutants:
            arguments.append(f"--ignore={tests / 'test_mutants.py'}")
        began = time.monotonic()
        progress.start("running the generated tests", _count(tests) or None)
        output = _run(command("pytest", arguments), root, places, progress)
        if not report.is_file():
            lines = output.strip().splitlines() or ["no output"]
            # What pytest cannot import is the last error of a traceback, which it marks.
            why = next((line[1:].strip() for line in reversed(lines) if line.startswith("E  ")), lines[-1])[:300]
            if "pytest" not in why and "nemo_automodel'" not in why:
                raise VerificationFailed(
                    "the generated tests do not start",
                    why,
                    f"mend it; `pytest {tests}` shows the whole traceback",
                    code="verify.cannot_start",
                )
            raise OnboardError(
                "the generated tests could not run",
                why,
                "run `onboard doctor`; it needs pytest and nemo-automodel (pip install 'onboard-models[automodel]')",
                code="verify.cannot_run",
            )
        result = _read(report, time.monotonic() - began)
    progress.done(f"{result.passed} passed, {result.failed} failed")
    return result


def _run(words: list[str], root: Path, places: Layout, progress: Progress) -> str:
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
        words, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        # A timer of its own: a test that hangs prints no line at which the time could be looked at.
        timer = threading.Timer(TIMEOUT_SECONDS, end)
        timer.daemon = True
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if " PASSED" in line or " FAILED" in line or " SKIPPED" in line:
                    progress.advance(1)
        except BaseException:
            process.kill()
            raise
        finally:
            timer.cancel()
    if late.is_set():
        last = (lines or ["no output"])[-1].strip()
        raise VerificationFailed(
            f"the generated tests did not end within {TIMEOUT_SECONDS} s and were stopped",
            f"the last line that they printed was: {last[:200]}",
            "run that test by itself, with pytest",
            code="verify.timeout",
        )
    return "".join(lines)


def _count(tests: Path) -> int:
    """A rough number of tests, for the progress bar: parametrised ones count once."""
    return sum(file.read_text(encoding="utf-8").count("\ndef test_") for file in tests.glob("test_*.py"))


def _read(report: Path, seconds: float) -> ProofResult:
    passed = planted = caught = 0
    failures, skips, survived, parity = [], [], [], []
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
        properties = {found.get("name"): found.get("value", "nan") for found in case.iter("property")}
        if "max_abs_logit_diff" in properties:
            setting = (case.get("name") or "").partition("[")[2].rstrip("]")
            parity.append((setting, float(properties["max_abs_logit_diff"]), float(properties["max_abs_logit"])))
    return ProofResult(
        passed,
        len(failures),
        len(skips),
        seconds,
        tuple(parity),
        planted,
        caught,
        tuple(failures),
        tuple(skips),
        tuple(survived),
    )


def _last_line(node: ElementTree.Element) -> str:
    message = (node.get("message") or node.text or "").strip().splitlines()
    return (message[0] if message else "no message")[:300]
