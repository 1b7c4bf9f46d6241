"""Where results and remarks go: results to stdout, everything else to stderr.

``human`` is for people, on a terminal and in a pipe alike. A terminal gets colour and lines that fit its width; a pipe
gets no colour and one line an item, however long, so that grep and cut work on it. ``json`` prints one object and
nothing else. ``quiet`` prints errors only. Everything that is printed passes :func:`~onboard.cli._text.printable` here,
so that no command can forget it.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, TextIO

from onboard.cli._text import printable, printable_lines
from onboard.errors import OnboardError

SCHEMA_VERSION = 1
_VALUE_LIMIT = 120
_LINE_LIMIT = 600
_WIDEST = 120
_NARROWEST = 40
# A pipe has no width; this one only has to be wider than any row.
_PIPE_WIDTH = 4000

# What a style of ours is called by click and by rich.
_CLICK_STYLES: dict[str, dict[str, Any]] = {
    "": {},
    "bold": {"bold": True},
    "dim": {"dim": True},
    "good": {"fg": "green"},
    "warn": {"fg": "yellow"},
    "bad": {"fg": "red", "bold": True},
}
_RICH_STYLES = {"": "", "bold": "bold", "dim": "dim", "good": "green", "warn": "yellow", "bad": "bold red"}


def is_terminal(stream: TextIO | None) -> bool:
    """Whether ``stream`` is a terminal that understands cursor movement."""
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False


def may_colour(stream: TextIO | None) -> bool:
    """Whether ``stream`` may get colour: a terminal, and NO_COLOR is not set."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def styled(text: str, style: str, colour: bool) -> str:
    """``text`` in one of the styles, where there is colour."""
    if not colour or not style:
        return text
    import click

    return click.style(text, **_CLICK_STYLES[style])


def write(stream: TextIO | None, text: str) -> None:
    """Write and flush.

    A reader that left (``onboard ... | head -1``) is no error: what the command found out, and with it the exit
    status, does not depend on who reads it.
    """
    if stream is None:  # started with the stream closed
        return
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        silence(stream)


def silence(stream: TextIO) -> None:
    """Let what is still buffered go nowhere, or Python complains about it at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
        stream.flush()


def tolerate_any_encoding() -> None:
    """Let a stream that cannot encode a character print its escape instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def as_json_text(payload: Mapping[str, Any]) -> str:
    """The one JSON object of a command: valid for strict readers, ASCII, ``schema_version`` first."""
    return json.dumps(_plain({"schema_version": SCHEMA_VERSION, **payload}), indent=2, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        # JSON has no such numbers, and a real config has them (mamba's `time_step_limit`).
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=str)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no place in JSON")


def error_text(error: OnboardError, colour: bool) -> str:
    """The three lines of an error."""
    lines = (("error:", "bad", error.what), ("  why:", "dim", error.why), ("  do:", "dim", error.do))
    return "".join(f"{styled(label, style, colour)} {printable(line, _LINE_LIMIT)}\n" for label, style, line in lines)


@dataclass(frozen=True)
class Column:
    """A column of a table: its title, its style, its alignment, and where a terminal wraps it."""

    title: str
    style: str = ""
    right: bool = False
    widest: int | None = None


# What a table shows: a value, or a value and its style.
Cell = str | int | tuple[str, str]


class Output:
    """The results of one command.

    Args:
        format: ``human``, ``json`` or ``quiet``.
        stdout: where results go.
        stderr: where remarks go.
    """

    def __init__(self, format: str, stdout: TextIO | None, stderr: TextIO | None) -> None:
        self.format = format
        self.human = format == "human"
        self.stdout = stdout
        self.stderr = stderr
        self._to_stderr = False

    def results_to_stderr(self) -> None:
        """From here on stdout belongs to something else (a patch), and people read the results on stderr."""
        self._to_stderr = True

    @property
    def _stream(self) -> TextIO | None:
        return self.stderr if self._to_stderr else self.stdout

    @property
    def _width(self) -> int:
        if not is_terminal(self._stream):
            return _PIPE_WIDTH
        return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size((80, 24)).columns))

    def json(self, payload: Mapping[str, Any]) -> None:
        """Print the JSON object, if JSON was asked for."""
        if self.format == "json":
            write(self.stdout, as_json_text(payload))

    def raw(self, text: str) -> None:
        """Print ``text`` to stdout: byte for byte into a pipe, fit for the screen on a terminal."""
        write(self.stdout, printable_lines(text) if self.stdout is not None and self.stdout.isatty() else text)

    def patch(self, diff: str) -> None:
        """Print a unified diff to stdout, coloured on a terminal."""
        if not may_colour(self.stdout):
            self.raw(diff)
            return
        styles = {"+++": "bold", "---": "bold", "@@": "dim", "+": "good", "-": "bad"}
        lines = []
        for line in printable_lines(diff).split("\n"):
            style = next((style for start, style in styles.items() if line.startswith(start)), "")
            lines.append(styled(line, style, True))
        write(self.stdout, "\n".join(lines))

    def line(self, text: str = "", style: str = "") -> None:
        """Print one paragraph for people."""
        if self.human:
            self._paragraph(text, style, "", "")

    def bullets(self, title: str, items: Iterable[str], *, style: str = "bold", numbered: bool = False) -> None:
        """Print a titled list for people, or nothing when there is nothing to list."""
        items = list(items)
        if not self.human or not items:
            return
        self.line()
        self.line(title, style)
        for number, item in enumerate(items, 1):
            mark = f"  {number}. " if numbered else "  - "
            self._paragraph(item, "", mark, " " * len(mark))

    def pairs(self, rows: Sequence[tuple[str, str, str]]) -> None:
        """Print (label, text, style) rows for people, the texts aligned."""
        if not self.human or not rows:
            return
        margin = max(len(label) for label, _, _ in rows) + 2
        for label, text, style in rows:
            self._paragraph(text, style, printable(label).ljust(margin), " " * margin)

    def table(self, columns: Sequence[Column], rows: Iterable[Sequence[Cell] | str]) -> None:
        """Print a table for people. A row that is a string alone is the title of the rows below it."""
        if not self.human:
            return
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        colour = may_colour(self._stream)
        # No lines drawn: it reads well without them, pastes well, and needs no character outside ASCII.
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for column in columns:
            table.add_column(
                Text(column.title),
                style=_RICH_STYLES[column.style],
                max_width=column.widest if is_terminal(self._stream) else None,
                overflow="fold",
                justify="right" if column.right else "left",
            )
        for row in rows:
            if isinstance(row, str):
                table.add_row(Text(printable(row, _VALUE_LIMIT), style="bold"))
            else:
                # Text, not str: square brackets in a value are not markup.
                pairs = (cell if isinstance(cell, tuple) else (str(cell), "") for cell in row)
                table.add_row(*(Text(printable(text, _VALUE_LIMIT), _RICH_STYLES[style]) for text, style in pairs))
        target = io.StringIO()
        console = Console(
            file=target,
            width=self._width,
            color_system="standard" if colour else None,
            force_terminal=colour,
            no_color=not colour,
            legacy_windows=False,
        )
        console.print(table)
        write(self._stream, "".join(line.rstrip() + "\n" for line in target.getvalue().splitlines()))

    def remark(self, text: str) -> None:
        """Print one line for people to stderr: not a result."""
        if self.human:
            write(self.stderr, printable(text) + "\n")

    def error(self, error: OnboardError) -> None:
        """Print the three lines of an error to stderr, where JSON does not already say it."""
        if self.human and is_terminal(self.stdout) and is_terminal(self.stderr):
            self.line()
        if self.format != "json":
            write(self.stderr, error_text(error, may_colour(self.stderr)))

    def _paragraph(self, text: str, style: str, first: str, other: str) -> None:
        text = printable(text, _LINE_LIMIT)
        width = self._width
        lines = [text]
        if len(first) + len(text) > width:
            room = max(width - len(first), 20)
            lines = textwrap.wrap(text, room, break_on_hyphens=False) or [""]
        colour = may_colour(self._stream)
        indents = [first] + [other] * (len(lines) - 1)
        pairs = zip(indents, lines, strict=True)
        text = "".join((indent + styled(line, style, colour)).rstrip() + "\n" for indent, line in pairs)
        write(self._stream, text)
