"""What reaches the terminal, the pipe and the JSON reader."""

from __future__ import annotations

import json
import os
import struct
import subprocess

import pytest
import stub_pipeline
from child_process import argv, clean_environment
from onboard.cli._output import as_json_text
from onboard.cli._text import printable, printable_lines, sentence, shortened, without_tokens


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("two\nlines\tand\r\u2028more", "two lines and  more"),
        ("\x1b[2J\x07", "\\x1b[2J\\x07"),
        ("\u202eabc\u200b", "\\u202eabc\\u200b"),
        ("\udcff", "\\udcff"),
        ("\U000e0041", "\\U000e0041"),
        ("caf\u00e9 \u6a21\u578b", "caf\u00e9 \u6a21\u578b"),
        (12, "12"),
    ],
)
def test_printable(text, shown):
    assert printable(text) == shown


def test_printable_lines_keeps_lines_and_tabs():
    assert printable_lines("a\tb\n\x1bc\n") == "a\tb\n\\x1bc\n"


@pytest.mark.parametrize("limit", [5, 6, 20, 59])
def test_shortened_keeps_both_ends_and_the_limit(limit):
    text = "a" + "x" * 58 + "z"
    short = shortened(text, limit)
    assert len(short) == limit
    assert (short[0], short[-1]) == ("a", "z")
    assert shortened(text, 60) == text


def test_sentence_takes_strings_and_objects():
    assert sentence("a\nb") == "a b"
    assert sentence({"what": "rope", "why": None, "keys": ["a", "b"]}) == "rope: a, b"


def test_tokens_are_hidden():
    assert without_tokens("Bearer hf_abcDEF1234, hf_home") == "Bearer hf_***, hf_home"


def test_json_is_valid_for_strict_readers():
    text = as_json_text({"a": [float("inf"), float("-inf"), float("nan"), 1.5], "b": {"\udcff\x9b": {3}}})
    assert text.isascii()
    payload = json.loads(text, parse_constant=pytest.fail)
    assert payload == {"schema_version": 1, "a": ["Infinity", "-Infinity", "NaN", 1.5], "b": {"\udcff\x9b": [3]}}


@pytest.mark.parametrize("command", ["inspect", "new"])
def test_json_is_alone_on_stdout_whatever_libraries_print(onboard, command):
    result = onboard(command, "acme/noisy", "--json")
    assert json.loads(result.stdout)["schema_version"] == 1
    for source in ("printed by a library", "written by C code", "printed by a child"):
        assert source in result.stderr


@pytest.mark.parametrize("words", [["--json", "inspect", "acme/dense"], ["inspect", "--format=json", "acme/dense"]])
def test_options_work_on_the_group_and_on_the_command(invoke, words):
    assert json.loads(invoke(*words).stdout)["kind"] == "dense"


def test_command_option_wins_over_group_option(invoke):
    assert invoke("--json", "inspect", "acme/dense", "--format", "human").stdout.startswith("source")


@pytest.mark.parametrize("command", ["inspect", "new"])
def test_quiet_prints_nothing(onboard, command):
    result = onboard(command, "acme/dense", "--format", "quiet")
    assert (result.stdout, result.stderr, result.returncode) == ("", "", 0)


def test_hostile_text_cannot_reach_the_terminal(onboard):
    result = onboard("inspect", "acme/evil")
    assert result.returncode == 0
    assert "[red]x[/red]" in result.stdout
    assert not {"\x1b", "\x07", "\u202e"} & set(result.stdout + result.stderr)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_any_encoding_of_stdout_works(encoding):
    environment = clean_environment(PYTHONIOENCODING=encoding)
    for words in (("inspect", "acme/evil"), ("inspect", "acme/evil", "--json"), ("new", "acme/dense")):
        child = subprocess.run(argv(*words), env=environment, capture_output=True, check=False)
        assert (child.returncode, b"Traceback" in child.stderr) == (0, False)
        child.stdout.decode(encoding)


def test_pipe_gets_no_colour_and_one_line_an_item(onboard):
    lines = onboard("inspect", "acme/dense").stdout.splitlines()
    row = "  head_dim             128    rule: hidden_size / num_attention_heads"
    assert row in lines
    assert not any(line != line.rstrip() for line in lines)


def on_terminal(*words: str, columns: int = 80, **variables: str) -> tuple[int, str]:
    """Run with stdout and stderr on a terminal of 80 columns."""
    fcntl, pty, termios = (pytest.importorskip(name) for name in ("fcntl", "pty", "termios"))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    child = subprocess.Popen(argv(*words), env=clean_environment(**variables), stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        said += part
    os.close(ours)
    return child.wait(10), said.decode()


def test_terminal_gets_colour_and_progress():
    status, said = on_terminal("new", "acme/dense")
    assert status == 0
    assert "\x1b[32m" in said
    assert "rendering: 2 files" in said
    assert said.count("\x1b[?25l") == said.count("\x1b[?25h"), "the cursor stays hidden"


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
def test_terminal_without_colour(variables):
    for words in (("inspect", "acme/dense"), ("inspect", "acme/gated"), ("inspect", "acme/t5")):
        _, said = on_terminal(*words, **variables)
        assert "\x1b" not in said


def test_no_color_leaves_progress_uncoloured():
    _, said = on_terminal("new", "acme/dense", NO_COLOR="1")
    assert "\x1b[3" not in said
    assert "\x1b[1m" not in said


def test_error_on_a_terminal_is_red_and_leaves_the_cursor():
    status, said = on_terminal("new", "acme/gated")
    assert status == 4
    assert "\x1b[31m" in said
    assert said.count("\x1b[?25l") == said.count("\x1b[?25h")


@pytest.mark.parametrize("source", ["acme/dense", "acme/evil"])
def test_terminal_lines_fit_the_width(source):
    _, said = on_terminal("inspect", source, NO_COLOR="1")
    assert max(len(line.rstrip("\r")) for line in said.split("\n")) <= 80


def test_long_values_leave_room_for_the_others():
    _, said = on_terminal("inspect", "acme/evil", NO_COLOR="1")
    assert len(said.splitlines()) < 75
    table = said[said.index("field ") : said.index("evidence")]
    assert table.count("long") > 15


def test_debug_does_not_open_a_way_for_escape_sequences():
    _, said = on_terminal("inspect", "acme/bug", "--debug", NO_COLOR="1")
    assert "\x1b" not in said


def test_stub_is_hostile_enough():
    assert {"\x1b", "\x07", "\u202e", "\n", "["} <= set(stub_pipeline.EVIL)
