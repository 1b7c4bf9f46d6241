"""``onboard verify`` and ``onboard check``: prove a generated package again, and see whether it has drifted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onboard.errors import UsageError
from onboard.plan.lock import Lock, drift, locate, read_lock
from onboard.plan.names import class_prefix
from onboard.plan.targets import Layout, layout
from onboard.verify.progress import Progress
from onboard.verify.run import ProofResult, run_tests


@dataclass(frozen=True)
class VerifyResult:
    """The result of the generated tests."""

    lock: Lock
    tests: ProofResult
    edited: tuple[str, ...]

    @property
    def exit_status(self) -> int:
        """0 where everything passed and every mutant was caught, else 1."""
        return self.tests.exit_status

    def as_json(self) -> Mapping[str, Any]:
        """What ``onboard verify --json`` prints."""
        warnings = [
            f"{path} differs from what onboard wrote; the result is that of the edited file" for path in self.edited
        ]
        return {
            "schema_version": 1,
            "architecture": self.lock.architecture,
            "model_type": self.lock.model_type,
            "name": self.lock.name,
            "kind": self.lock.kind,
            **self.tests.as_json(),
            "warnings": warnings,
        }


@dataclass(frozen=True)
class CheckResult:
    """How each generated file compares with the lock."""

    rows: tuple[tuple[str, str], ...]

    @property
    def exit_status(self) -> int:
        """1 where any file has drifted."""
        return int(any(state != "same" for _, state in self.rows))

    def as_json(self) -> Mapping[str, Any]:
        """What ``onboard check --json`` prints."""
        return {"schema_version": 1, "files": [{"path": path, "state": state} for path, state in self.rows]}


def verify(path: Path, *, mutants: bool, parallel: bool, progress: Progress) -> VerifyResult:
    """Run the generated tests of a package.

    Args:
        path: the project, or the model's package folder in a checkout.
        mutants: also plant the mistakes that the tests must catch.
        parallel: also measure parallelism; not there yet.
        progress: told about every test that ends.

    Raises:
        UsageError: there is no lock file, or ``parallel`` is asked for.
    """
    if parallel:
        raise UsageError(
            "--parallel is not there yet",
            "this version proves a package in one process; capability flags stay false",
            "leave --parallel out",
        )
    lock, root, places = _located(path)
    edited = tuple(item.path for item in drift(root, lock) if item.state == "edited")
    return VerifyResult(lock, run_tests(root, places, progress, mutants=mutants), edited)


def check(path: Path) -> CheckResult:
    """Compare a package's files with its lock.

    Raises:
        UsageError: there is no lock file.
    """
    lock, root, places = _located(path)
    rows = [(item.path, str(item.state)) for item in drift(root, lock)]
    if places.registry is not None:
        rows.append((places.registry, _registered(root / places.registry, lock, places)))
    return CheckResult(tuple(rows))


def _registered(registry: Path, lock: Lock, places: Layout) -> str:
    """``same`` where the registry leads to the model, ``edited`` where elsewhere, ``missing`` where nowhere."""
    from onboard.plan.registry import insert_row

    try:
        text = registry.read_text(encoding="utf-8")
        row = (lock.architecture, f"{places.import_package}.model", f"{class_prefix(lock.architecture)}ForCausalLM")
        return "same" if insert_row(text, *row, force=False) == text else "missing"
    except OSError:
        return "missing"
    except UsageError:
        return "edited"


def _located(path: Path) -> tuple[Lock, Path, Layout]:
    file, root = locate(path)
    lock = read_lock(file)
    target = lock.answers.get("target")
    return lock, root, layout("intree" if target == "intree" else "plugin", lock.name, lock.kind)
