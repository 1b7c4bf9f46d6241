"""`onboard verify` and `onboard check`."""

from __future__ import annotations

import json

import pytest


@pytest.mark.parametrize(
    ("words", "flags"),
    [([], (False, False)), (["--mutants"], (True, False)), (["--parallel"], (False, True))],
)
def test_verify_passes_its_flags_on(invoke, calls, tmp_path, words, flags):
    result = invoke("verify", str(tmp_path), *words)
    assert result.exit_code == 0
    assert calls == [(tmp_path, *flags)]
    assert result.stdout.splitlines()[1] == "tests         41 passed, 0 failed, 2 skipped in 12.3 s"


def test_verify_fails(invoke, tmp_path):
    path = tmp_path / "failing"
    path.mkdir()
    result = invoke("verify", str(path))
    assert result.exit_code == 1
    assert "is not proven" in result.stdout
    assert result.stderr.splitlines()[-3] == "error: verification failed"
    in_json = invoke("verify", str(path), "--json")
    assert (in_json.exit_code, json.loads(in_json.stdout)["mutants"]["caught"]) == (1, 5)
    assert in_json.stderr == ""


def test_check(invoke, tmp_path):
    result = invoke("check", str(tmp_path))
    assert (result.exit_code, result.stderr) == (0, "")
    assert "as written  model.py" in result.stdout


def test_check_finds_drift(invoke, tmp_path):
    path = tmp_path / "drifted"
    path.mkdir()
    result = invoke("check", str(path))
    assert result.exit_code == 1
    assert "edited      REVIEW.md" in result.stdout
    assert "has drifted\n  why: 2 files: 1 as written, 1 edited\n" in result.stderr
    in_json = invoke("check", str(path), "--json")
    assert (in_json.exit_code, in_json.stderr) == (1, "")
    assert len(json.loads(in_json.stdout)["files"]) == 2
