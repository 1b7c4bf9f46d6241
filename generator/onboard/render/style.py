"""Formats and lints generated code with ruff, by upstream's rules and independent of any configuration around."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ruff.__main__ import find_ruff_bin

LINE_LENGTH = 120
RULES = "E,F,I,W,UP,B,D,RUF100"
"""What generated code must pass: upstream's rules (E, F, I, D) and some that keep it modern."""
# Upstream's own exceptions: docstrings of modules, magic methods and nested classes.
IGNORED = "D100,D104,D105,D107,UP046,UP047"


def format_sources(sources: Mapping[str, str], first_party: Sequence[str]) -> dict[str, str]:
    """Sort imports and format all Python files at once; other files come back as they are.

    Args:
        sources: path to text.
        first_party: packages whose imports form the last group.

    Returns:
        Path to formatted text.

    Raises:
        ValueError: a Python file does not parse; a bug of a template.
    """
    with tempfile.TemporaryDirectory(prefix="onboard-style-") as folder:
        root = Path(folder)
        python = [path for path in sources if path.endswith(".py")]
        for path in python:
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(sources[path], encoding="utf-8")
        own = f"lint.isort.known-first-party={list(first_party)!r}"
        _ruff(["check", "--fix-only", "--select", "F401,I", "--exit-zero", "--config", own, *_isolated(), "."], root)
        _ruff(["format", *_isolated(), "."], root)
        return {
            path: (root / path).read_text(encoding="utf-8") if path in python else text
            for path, text in sources.items()
        }


def lint(root: Path, first_party: Sequence[str] = ()) -> str:
    """Findings of ruff in a folder by :data:`RULES`, one a line; empty where there are none.

    Args:
        root: the folder.
        first_party: packages whose imports form the last group, as in :func:`format_sources`.
    """
    arguments = ["check", "--select", RULES, "--ignore", IGNORED, "--output-format", "concise", *_isolated()]
    config = ["--config", "lint.pydocstyle.convention='google'"]
    own = ["--config", f"lint.isort.known-first-party={list(first_party)!r}"]
    done = _ruff([*arguments, *config, *own, "."], root, check=False)
    return "" if done.returncode == 0 else done.stdout


def _isolated() -> list[str]:
    return ["--isolated", "--quiet", "--no-cache", "--line-length", str(LINE_LENGTH), "--target-version", "py310"]


def _ruff(arguments: list[str], root: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([find_ruff_bin(), *arguments], cwd=root, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise ValueError(f"ruff {arguments[0]}: {done.stderr.strip() or done.stdout.strip()}")
    return done
