"""Progress outside a terminal; on one it is tested in test_cli_output.py."""

from __future__ import annotations

import io

import pytest
from onboard.cli._output import Output
from onboard.cli._progress import Bars, Lines, Silent, progress_for


@pytest.mark.parametrize(("format", "kind"), [("human", Lines), ("json", Silent), ("quiet", Silent)])
def test_kind_outside_a_terminal(format, kind):
    assert type(progress_for(Output(format, io.StringIO(), io.StringIO()))) is kind


@pytest.mark.parametrize(("format", "kind"), [("human", Bars), ("json", Bars), ("quiet", Silent)])
def test_kind_on_a_terminal(monkeypatch, format, kind):
    monkeypatch.setenv("TERM", "xterm")
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: True)
    assert type(progress_for(Output(format, io.StringIO(), stderr))) is kind


def test_stderr_that_is_closed():
    assert type(progress_for(Output("human", io.StringIO(), None))) is Silent


def test_lines_say_beginnings_and_ends():
    stream = io.StringIO()
    with Lines(stream) as progress:
        progress.done()
        progress.start("one\x1b", 3)
        progress.advance(2, "half way")
        progress.start("two")
        progress.done("it\nworked")
    said = [line.split(" (")[0] for line in stream.getvalue().splitlines()]
    assert said == ["one\\x1b ...", "one\\x1b: done", "two ...", "two: it worked"]


def test_bars_take_hostile_notes_and_calls_out_of_order():
    stream = io.StringIO()
    with Bars(stream) as progress:
        progress.advance()
        progress.done()
        progress.start("[red]one", 3)
        progress.advance(note="[/nope]\x1b[2J")
        progress.start("two")
        progress.advance()
    assert "\x1b[2J" not in stream.getvalue()
    assert "[red]one: done" in stream.getvalue()
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 2
