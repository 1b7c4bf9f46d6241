"""How the tests run `onboard` in a child process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
GENERATOR = HERE.parents[1] / "generator"


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's environment without what changes colours, encodings or the Hub."""
    drop = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "COLUMNS", "LINES", "PYTHONIOENCODING", "PYTHONUTF8")
    kept = {k: v for k, v in os.environ.items() if k not in drop and not k.startswith(("HF_", "TTY_"))}
    return {**kept, "PYTHONPATH": str(GENERATOR), "TERM": "xterm", "PYTHONIOENCODING": "utf-8", **variables}


def argv(*words: str, stub: bool = True) -> list[str]:
    """The command line of a child process, with the stub or the real pipeline."""
    return (
        [sys.executable, str(HERE / "stub_pipeline.py"), *words] if stub else [sys.executable, "-m", "onboard", *words]
    )
