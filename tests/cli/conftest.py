from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

HERE = Path(__file__).parent
GENERATOR = HERE.parents[1] / "generator"
for folder in (HERE, GENERATOR):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from child_process import argv, clean_environment  # noqa: E402

Completed = subprocess.CompletedProcess


@pytest.fixture
def onboard() -> Callable[..., Completed[str]]:
    """Run `onboard` in a child process."""

    def run(*words: str, stub: bool = True, cwd: Path | None = None, **variables: str) -> Completed[str]:
        return subprocess.run(
            argv(*words, stub=stub),
            env=clean_environment(**variables),
            cwd=cwd,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=30,
            check=False,
        )

    return run


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The stub in this process, and what it was called with."""
    import stub_pipeline

    for name, module in stub_pipeline.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    stub_pipeline.CALLS.clear()
    yield stub_pipeline.CALLS
    stub_pipeline.CALLS.clear()


@pytest.fixture
def invoke(calls: list[Any]) -> Callable[..., Result]:
    """Run `onboard` in this process."""
    from onboard.cli._group import root

    def run(*words: str) -> Result:
        return CliRunner(env={"NO_COLOR": None, "TERM": "xterm"}).invoke(root, list(words))

    return run
