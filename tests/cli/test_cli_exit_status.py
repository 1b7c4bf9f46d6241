"""Exit statuses, the three lines of an error, and the JSON error object."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from child_process import argv, clean_environment

STATUSES = {
    "acme/dense": 0,
    "acme/usage": 2,
    "acme/unsupported": 3,
    "acme/gated": 4,
    "acme/bug": 5,
    "acme/child-pipe": 5,
    "acme/full": 2,
    "acme/interrupt": 130,
}


@pytest.mark.parametrize("command", ["inspect", "new"])
@pytest.mark.parametrize(("source", "status"), STATUSES.items())
def test_status_of_each_kind_of_end(invoke, command, source, status):
    result = invoke(command, source, "--format", "quiet")
    assert result.exit_code == status
    assert result.stdout == ""
    assert [line.split(":")[0].strip() for line in result.stderr.splitlines()] == (
        ["error", "why", "do"] if status else []
    )


@pytest.mark.parametrize(("source", "status"), [(k, v) for k, v in STATUSES.items() if v])
def test_error_in_json_is_the_one_thing_on_stdout(invoke, source, status):
    result = invoke("--json", "inspect", source)
    assert result.exit_code == status
    payload = json.loads(result.stdout)
    assert list(payload) == ["schema_version", "error"]
    assert list(payload["error"]) == ["code", "what", "why", "do"]
    assert all(payload["error"].values())
    assert result.stderr == ""


def test_error_is_three_lines(invoke):
    assert invoke("inspect", "acme/gated").stderr == (
        "error: acme/gated cannot be read\n  why: it is gated\n  do: accept its terms, then set HF_TOKEN\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inspect"], "Missing argument 'SOURCE'"),
        (["inspect", "x", "--bogus"], "--bogus"),
        (["inspcet", "x"], "Did you mean 'inspect'?"),
        (["registry", "x"], "The commands are new, inspect"),
        (["new", "x", "--target", "elsewhere"], "'elsewhere' is not one of"),
        (["new", "x", "--into", "/no/such/folder"], "does not exist"),
        (["verify", "/no/such/folder"], "does not exist"),
        (["check", "/no/such/folder"], "does not exist"),
        (["inspect", "x", "--format", "xml"], "'xml' is not one of"),
    ],
)
def test_usage_errors(invoke, words, said):
    result = invoke(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert result.stderr.count("\n") == 3
    for position in (0, len(words)):
        in_json = invoke(*words[:position], "--json", *words[position:])
        # The last `--format` wins where it can be read; here nothing was read to its end.
        assert (in_json.exit_code, in_json.stderr) == (2, "")
        assert said in json.loads(in_json.stdout)["error"]["why"]


def test_word_after_double_dash_is_no_option(invoke):
    assert invoke("inspect", "x", "y", "--", "--json").stdout == ""


@pytest.mark.parametrize(
    "words",
    [
        ["--out", "a", "--into", "."],
        ["--into", ".", "--target", "plugin"],
        ["--out", "a", "--target", "intree"],
    ],
)
def test_contradictory_places_are_refused(invoke, calls, words):
    result = invoke("new", "acme/dense", *words)
    assert result.exit_code == 2
    assert "exclude each other" in result.stderr
    assert calls == []


def test_bug_asks_for_a_report_without_the_token_or_a_traceback(invoke):
    result = invoke("inspect", "acme/bug")
    assert "ValueError: boom with hf_*** \\x1b[31m" in result.stderr
    assert "please report it" in result.stderr
    assert "`onboard inspect acme/bug`" in result.stderr
    assert "Traceback" not in result.stderr
    assert "abcdefghijklmnop" not in result.stderr


@pytest.mark.parametrize("words", [["--debug", "inspect", "acme/bug"], ["inspect", "acme/bug", "--debug"]])
def test_debug_shows_the_traceback(invoke, words):
    result = invoke(*words)
    assert "Traceback (most recent call last)" in result.stderr
    assert "abcdefghijklmnop" not in result.stderr
    assert "\x1b" not in result.stderr
    assert json.loads(invoke(*words, "--json").stdout)["error"]["code"] == "bug"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_signal_removes_temporary_folders(number, status):
    words = argv("inspect", "acme/slow")
    with subprocess.Popen(words, env=clean_environment(), stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        folder = Path(child.stderr.readline().split()[1])
        assert folder.is_dir()
        time.sleep(0.05)
        child.send_signal(number)
        rest = child.stderr.read()
        assert child.wait(10) == status
    assert not folder.exists()
    assert rest.startswith("error: ")
    assert rest.count("\n") == 3


@pytest.mark.parametrize("words", [("inspect", "acme/dense"), ("inspect", "acme/dense", "--json"), ("--help",)])
def test_reader_that_leaves_is_no_error(words):
    child = subprocess.Popen(
        argv(*words), env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    with child.stderr:
        assert child.stderr.read() == ""
    assert child.wait(10) == 0


def test_reader_that_leaves_does_not_change_the_verdict():
    child = subprocess.Popen(
        argv("new", "acme/failing"), env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdout is not None
    child.stdout.close()
    assert child.wait(10) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [("inspect", "acme/dense"), ("--help",)])
def test_full_disk_is_said(words):
    with open("/dev/full", "w") as full:
        child = subprocess.run(
            argv(*words), env=clean_environment(), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert child.returncode == 2
    assert "No space left on device" in child.stderr
    assert child.stderr.count("\n") == 3


@pytest.mark.skipif(sys.platform == "win32", reason="closes file descriptors as a POSIX shell does")
@pytest.mark.parametrize("closing", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_no_error(closing):
    line = " ".join([*argv("inspect", "acme/dense"), closing])
    assert subprocess.run(["sh", "-c", line], env=clean_environment(), capture_output=True, check=False).returncode == 0
