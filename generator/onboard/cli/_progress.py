"""Progress, on stderr: bars on a terminal, a line for each beginning and end elsewhere, nothing when nobody reads it.

All three have the methods of :class:`onboard.pipeline.making.Progress`.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from onboard.cli._output import Output, is_terminal, may_colour, write
from onboard.cli._text import printable

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_NOTE_LIMIT = 60


class Silent:
    """No progress: for ``--format quiet``, and for JSON that a program reads."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def start(self, label: str, total: int | None = None) -> None:
        """Begin a step."""

    def advance(self, n: int = 1, note: str | None = None) -> None:
        """Go on by ``n`` of the step's total."""

    def done(self, note: str | None = None) -> None:
        """End the step."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class Lines(Silent):
    """A line when a step begins and one when it ends, as a log wants it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._label: str | None = None
        self._began = 0.0

    def start(self, label: str, total: int | None = None) -> None:
        """Begin a step."""
        if self._label is not None:
            self.done()
        self._label, self._began = printable(label), time.monotonic()
        write(self._stream, f"{self._label} ...\n")

    def done(self, note: str | None = None) -> None:
        """End the step."""
        if self._label is not None:
            write(self._stream, _ended(self._label, note, self._began) + "\n")
        self._label = None


class Bars(Silent):
    """A bar, or a spinner where the total is not known, replaced by one line when the step ends."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rich: RichProgress | None = None
        self._task: TaskID | None = None
        self._label = ""
        self._began = 0.0

    def start(self, label: str, total: int | None = None) -> None:
        """Begin a step."""
        if self._rich is not None:
            self.done()
        self._label, self._began = printable(label), time.monotonic()
        self._rich = _bar(self._stream, total)
        self._task = self._rich.add_task(self._label, total=total, note="")
        self._rich.start()

    def advance(self, n: int = 1, note: str | None = None) -> None:
        """Go on by ``n`` of the step's total."""
        if self._rich is None or self._task is None:
            return
        self._rich.advance(self._task, n)
        if note is not None:
            self._rich.update(self._task, note=printable(note, _NOTE_LIMIT))

    def done(self, note: str | None = None) -> None:
        """End the step."""
        if self._rich is not None:
            self.close()
            write(self._stream, _ended(self._label, note, self._began) + "\n")

    def close(self) -> None:
        """Take the bar away and show the cursor again."""
        if self._rich is not None:
            self._rich.stop()
            self._rich = None


def _ended(label: str, note: str | None, began: float) -> str:
    seconds = f"{time.monotonic() - began:.1f} s"
    return f"{label}: {printable(note, _NOTE_LIMIT)} ({seconds})" if note else f"{label}: done ({seconds})"


def _bar(stream: TextIO, total: int | None) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    colour = may_colour(stream)
    unicode = (getattr(stream, "encoding", None) or "").lower().startswith("utf")
    console = Console(file=stream, force_terminal=True, no_color=not colour, highlight=False, markup=False, emoji=False)
    described = TextColumn("{task.description}", markup=False)
    noted = TextColumn("{task.fields[note]}", style="dim" if colour else "none", markup=False)
    spinner = SpinnerColumn("dots" if unicode else "line")
    # stdout is the result's: rich must not touch it.
    if total is None:
        columns = (spinner, described, TimeElapsedColumn(), noted)
        return Progress(*columns, console=console, transient=True, redirect_stdout=False)
    counted = (spinner, described, BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), noted)
    return Progress(*counted, console=console, transient=True, redirect_stdout=False)


def progress_for(output: Output) -> Silent:
    """The progress that suits where stderr goes; a context manager that leaves the terminal as it was."""
    stream = output.stderr
    if stream is None or output.format == "quiet":
        return Silent()
    if is_terminal(stream):
        return Bars(stream)
    return Lines(stream) if output.human else Silent()
