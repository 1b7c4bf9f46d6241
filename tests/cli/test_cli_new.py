"""`onboard new`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import stub_pipeline


def test_defaults(invoke, calls):
    assert invoke("new", "acme/dense").exit_code == 0
    assert dataclasses.asdict(calls[0]) == {
        **dict.fromkeys(("revision", "target", "out", "into", "name", "license_header")),
        **dict.fromkeys(("dry_run", "diff", "force", "trust_remote_code"), False),
        "source": "acme/dense",
        "style": "auto",
        "verify": True,
    }


def test_every_option_reaches_the_request(invoke, calls, tmp_path):
    header = tmp_path / "header.txt"
    header.write_text("# mine\n")
    words = ["--target", "intree", "--into", str(tmp_path), "--name", "n", "--revision", "r", "--style", "reuse"]
    words += ["--no-verify", "--dry-run", "--diff", "--force", "--trust-remote-code", "--license-header", str(header)]
    assert invoke("new", "acme/dense", *words).exit_code == 0
    assert calls[0] == stub_pipeline.NewRequest(
        source="acme/dense",
        revision="r",
        target="intree",
        out=None,
        into=tmp_path,
        name="n",
        style="reuse",
        verify=False,
        dry_run=True,
        diff=True,
        force=True,
        trust_remote_code=True,
        license_header=header,
    )
    invoke("new", "acme/dense", "--out", "there")
    assert calls[1].out == Path("there")


def test_human(invoke):
    result = invoke("new", "acme/dense")
    assert result.stdout == (
        "wrote 2 files to 'nemo automodel' (plugin)\n"
        "model         acme/dense at 0123abc\n"
        "architecture  AcmeForCausalLM (acme, dense)\n"
        "origins       9 native, 1 reused, 1 novel\n"
        "tests         41 passed, 0 failed, 2 skipped in 12.3 s\n"
        "parity        largest difference of a logit 3.50e-07 in float32\n"
        "mutants       6 caught of 6 planted\n"
        "capabilities  tp yes, pp no, ep not measured\n"
        "\n"
        "warnings\n"
        "  - a warning\n"
        "\n"
        "to review\n"
        "  1. the novel norm\n"
        "  2. rope: unusual\n"
        "\n"
        "next\n"
        "  - read 'nemo automodel/REVIEW.md'\n"
        "  - pip install -e 'nemo automodel'\n"
    )
    steps = [line.split(" (")[0] for line in result.stderr.splitlines()]
    assert steps == ["rendering ...", "rendering: 2 files", "tests ...", "tests: done"]


def test_json(invoke):
    result = invoke("new", "acme/dense", "--json")
    payload = json.loads(result.stdout)
    assert payload["tests"] == stub_pipeline.SUMMARY["tests"]
    assert "diff" not in payload
    assert result.stderr == ""


def test_failed_verification(invoke):
    result = invoke("new", "acme/failing")
    assert result.exit_code == 1
    assert "failed\n  - test_parity: 0.3\n" in result.stdout
    assert "5 caught of 6 planted" in result.stdout
    assert "pip install" not in result.stdout
    assert "error: verification failed\n  why: 2 tests failed and 1 planted mistake passed the tests\n" in result.stderr


def test_failed_verification_in_json_is_the_result(invoke):
    result = invoke("new", "acme/failing", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["tests"]["failed"] == 2


def test_without_verification_says_so_and_what_to_run(invoke):
    said = invoke("new", "acme/dense", "--no-verify").stdout
    assert "tests         not run\n" in said
    assert "  - onboard verify 'nemo automodel'\n" in said
    assert "parity" not in said


def test_dry_run_shows_each_file_and_its_reason(invoke):
    said = invoke("new", "acme/dense", "--dry-run").stdout
    assert "create  src/nemo_automodel_acme/model.py     92  always\n" in said
    assert "would write 2 files" in said
    assert said.endswith("Nothing was written.\n")
    assert "pip install" not in said
    assert "not run" not in said


@pytest.mark.parametrize("words", [[], ["--dry-run"]])
def test_diff_is_alone_on_stdout(invoke, words):
    result = invoke("new", "acme/dense", "--diff", *words)
    assert result.stdout == stub_pipeline.DIFF
    assert "2 files to" in result.stderr


def test_files_that_stay_are_not_called_written(invoke):
    first = invoke("new", "acme/again").stdout.splitlines()[0]
    assert first == "wrote 1 file to 'nemo automodel' (plugin); 1 already as they should be"


def test_diff_in_json(invoke):
    assert json.loads(invoke("new", "acme/dense", "--diff", "--json").stdout)["diff"] == stub_pipeline.DIFF


def test_in_a_checkout_the_next_step_is_its_status(invoke):
    said = invoke("new", "acme/dense", "--target", "intree").stdout
    assert "  - git -C 'nemo automodel' status\n" in said
    assert "pip install" not in said
