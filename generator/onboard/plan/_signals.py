"""Ctrl-C and kill, held back to the moments at which stopping is clean."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_HELD = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP")
    if hasattr(signal, name)  # Windows has no SIGHUP.
)
_pending: list[int] = []


class Interrupted(BaseException):
    """Raised by :func:`step` when a signal came in; never leaves :func:`held`."""


def _step(name: str) -> None:
    """Called between any two actions on the disk; does nothing. Tests replace it, to stop or kill a run right there."""


def step(name: str) -> None:
    """A point at which a run may be given up: a signal that came in takes effect here, by way of a rollback."""
    _step(name)
    if _pending and threading.current_thread() is threading.main_thread():
        raise Interrupted(name)


def mark(name: str) -> None:
    """A point past which a run is only finished, or rolled back, never given up."""
    _step(name)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Let signals take effect only at steps, and after the block, with the handlers that were there before.

    So a rollback is never itself interrupted. What the signal would have done, it does in the end: Ctrl-C raises
    ``KeyboardInterrupt``, SIGTERM ends the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    for number in _HELD:
        handler = signal.getsignal(number)
        # An ignored signal stays ignored (nohup); None is a handler that Python did not install and cannot restore.
        if handler not in (signal.SIG_IGN, None):
            before[number] = handler
            signal.signal(number, _remember)
    interrupted = False
    try:
        yield
    except Interrupted:
        interrupted = True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        arrived, _pending[:] = _pending[:], []
        for number in dict.fromkeys(arrived):
            signal.raise_signal(number)
    if interrupted:
        # Somebody's own handler let the signal pass, but the work was given up.
        raise KeyboardInterrupt


def _remember(number: int, _frame: FrameType | None) -> None:
    _pending.append(number)
