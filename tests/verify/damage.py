"""Generated packages with one mistake in them, and their tests run in a fork, which need not import torch again."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from onboard.verify import run


def damaged(project: Path, target: Path, file: str, *edits: tuple[str, str]) -> Path:
    """A copy of a project in which one file of the package was edited by hand."""
    shutil.copytree(project, target, ignore=shutil.ignore_patterns("__pycache__"))
    edited = next((target / "src").glob(f"*/{file}"))
    text = edited.read_text(encoding="utf-8")
    for old, new in edits:
        assert old in text, f"{file} has no {old!r}: the mistake would not be planted"
        text = text.replace(old, new)
    edited.write_text(text, encoding="utf-8")
    return target


def _child(arguments: list[str], sys_path: str, folder: str) -> None:
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = sys_path
    sys.path.insert(0, sys_path)
    sys.dont_write_bytecode = True
    os._exit(int(pytest.main(arguments)))


def in_a_fork(monkeypatch: pytest.MonkeyPatch, tests: Sequence[str] = (), only: str = "") -> None:
    """Let ``onboard verify`` run its tests in a fork of this process.

    Args:
        monkeypatch: undoes it.
        tests: the generated test files to run; all of them where it is empty.
        only: the one test in them to run, up to its first failure; all where it is empty.
    """
    import nemo_automodel._transformers.auto_model
    import nemo_automodel.components.models.common  # noqa: F401

    def forked(words: list[str], root: Path, places: Any, progress: Any) -> str:
        arguments = words[3:]  # after python -c <the child's first lines>
        assert arguments[0] == str(root / places.tests_dir)
        if tests:
            arguments[:1] = [str(root / places.tests_dir / f"{name}.py") for name in tests]
        if only:
            arguments += ["-x", "-k", only]
        arguments += ["-p", "no:hypothesispytest", "-p", "no:timeout"]
        child = multiprocessing.get_context("fork").Process(
            target=_child, args=(arguments, str(root / places.sys_path), str(root))
        )
        child.start()
        child.join(120)
        assert child.exitcode is not None, "the generated tests hang"
        return ""

    monkeypatch.setattr(run, "_run", forked)
