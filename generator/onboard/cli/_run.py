"""From an exception to an exit status and three lines.

0 fine; 1 verification failed, or drift; 2 usage; 3 unsupported; 4 the Hub; 5 a bug of ours; 130 interrupted; 143
terminated.
"""

from __future__ import annotations

import contextlib
import errno
import platform
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, TextIO

import click

from onboard import __version__
from onboard.cli._group import State
from onboard.cli._output import as_json_text, error_text, may_colour, silence, tolerate_any_encoding, write
from onboard.cli._text import printable_lines, without_tokens
from onboard.errors import OnboardError, UsageError

_INTERRUPTED = 130
# What the machine refuses, as opposed to what we did wrong.
_ENVIRONMENT = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.EMFILE}


class _Terminated(SystemExit):
    """SIGTERM or SIGHUP: unwinds the stack, so that temporary folders are removed and child processes ended."""


def run(root: click.Group, argv: Sequence[str]) -> int:
    """Run one command line.

    Args:
        root: the group.
        argv: the words after the program's name.

    Returns:
        The exit status.
    """
    tolerate_any_encoding()
    state = State(argv=list(argv))
    try:
        with _signals_unwind():
            status = _invoke(root, state)
            _flush()
            return status
    except click.exceptions.Exit as left:
        _flush()
        return left.exit_code
    except (KeyboardInterrupt, click.Abort) as error:
        _report(state, error, _stopped("interrupted", "it was stopped from the keyboard"))
        return _INTERRUPTED
    except _Terminated as error:
        _report(state, error, _stopped("terminated", "it was sent a signal to end"))
        return int(error.code or 0)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and not state.started:
            # Before a command runs only help is printed. Once it runs, our own writing knows about readers that leave,
            # and a broken pipe is one to a child process.
            silence(sys.stdout)
            return 0
        known = _as_onboard_error(error, state)
        _drop_unwritten()
        _report(state, error, known)
        return known.exit_status


def _invoke(root: click.Group, state: State) -> int:
    # Not click's own main: that one exits 1 on a broken pipe, and 1 means that verification failed.
    with root.make_context("onboard", list(state.argv), obj=state) as ctx:
        status = root.invoke(ctx)
    return status if isinstance(status, int) else 0


def _as_onboard_error(error: Exception, state: State) -> OnboardError:
    if isinstance(error, OnboardError):
        return error
    if isinstance(error, click.ClickException):
        ctx = getattr(error, "ctx", None)
        path = ctx.command_path if isinstance(ctx, click.Context) else "onboard"
        return UsageError("the command line cannot be read", error.format_message(), f"see `{path} --help`")
    if isinstance(error, OSError) and error.errno in _ENVIRONMENT:
        where = f" ({error.filename})" if error.filename else ""
        return UsageError(
            f"the system refused a file{where}",
            error.strerror or str(error),
            "check the permissions, the free space and the path, then run the command again",
            code="usage.file",
        )
    message = without_tokens(str(error))
    return OnboardError(
        "onboard made a mistake; the fault is not in your command",
        f"{type(error).__name__}: {message}" if message else type(error).__name__,
        f"please report it with the output of the same command and --debug: onboard {__version__}, Python "
        f"{platform.python_version()}, `{without_tokens(shlex.join(['onboard', *state.argv]))}`",
    )


def _stopped(code: str, why: str) -> OnboardError:
    return OnboardError(
        code,
        why,
        "run the command again, or `onboard verify` what is written already; no half-written files were left",
        code=code,
    )


def _report(state: State, error: BaseException, known: OnboardError) -> None:
    """Print an error, in JSON to stdout or as three lines to stderr."""
    if state.debug:
        trace = "".join(traceback.format_exception(error))
        _last_words(sys.stderr, without_tokens(printable_lines(trace)))
    if state.wants_json:
        payload: dict[str, Any] = {"error": known.as_json()}
        _last_words(sys.stdout, as_json_text(payload))
    else:
        _last_words(sys.stderr, error_text(known, may_colour(sys.stderr)))


def _last_words(stream: TextIO, text: str) -> None:
    try:
        write(stream, text)
    except OSError:  # a full disk: the exit status still tells
        silence(stream)


@contextlib.contextmanager
def _signals_unwind() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def unwind(number: int, frame: FrameType | None) -> None:
        raise _Terminated(128 + number)

    before = {}
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        # nohup ignores SIGHUP on purpose.
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            before[number] = signal.signal(number, unwind)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _flush() -> None:
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        silence(sys.stdout)


def _drop_unwritten() -> None:
    """Give up on what stdout cannot take (a full disk): Python would try again at exit, fail, and end with 120."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        silence(sys.stdout)
