"""Child processes of onboard: the reference's probe and the generated tests.

A child imports nothing from the current folder, which may be a stranger's checkout with a ``torch.py`` in it; it ends
when this process ends, also by SIGKILL; and what its libraries print cannot get into its answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import TextIO

# Runs before anything else is imported. With -c, Python puts the current folder first on sys.path.
_BOOT = (
    "import sys; sys.path[:1] = [entry for entry in sys.path[:1] if entry]; "
    "from onboard._child import start; start({parent}, {module!r}, {answers!r})"
)
_PR_SET_PDEATHSIG = 1
_POLL_S = 1.0

_answer: TextIO | None = None


def command(module: str, arguments: Sequence[str] = (), *, answers: bool = False) -> list[str]:
    """The command line that runs a module in a child of this process.

    Args:
        module: what ``python -m`` would be given.
        arguments: the words after it.
        answers: the module writes an answer to :func:`answer_stream`; anything else on its stdout goes to stderr.
    """
    boot = _BOOT.format(parent=os.getpid(), module=module, answers=answers)
    return [sys.executable, "-c", boot, *arguments]


def start(parent: int, module: str, answers: bool) -> None:
    """Run a module in the child; called by :func:`command`'s line."""
    import runpy

    global _answer
    _end_with(parent)
    if answers:
        _answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def answer_stream() -> TextIO:
    """Where the child writes its answer: what was stdout when it started."""
    return _answer or sys.stdout


def bound_memory(most: int) -> None:
    """Let a size that no check knows fail as an error in this process instead of filling the machine's memory."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def _end_with(parent: int) -> None:
    """End this process when its parent has ended, so that a killed run leaves nothing running."""
    bound = False
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            bound = ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0
    if os.getppid() != parent:
        os._exit(1)
    if not bound:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)
