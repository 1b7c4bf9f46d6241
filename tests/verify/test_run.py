"""The result of the generated tests is read from pytest's report, and says no where anything is not proven."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from onboard.errors import UsageError, VerificationFailed
from onboard.plan.targets import layout
from onboard.verify import run
from onboard.verify.run import ProofResult, _read, run_tests

PLACES = layout("plugin", "x", "dense")


class Quiet:
    def __init__(self) -> None:
        self.advanced = 0

    def start(self, label: str, total: int | None = None) -> None:
        self.total = total

    def advance(self, n: int = 1, note: str | None = None) -> None:
        self.advanced += n

    def done(self, note: str | None = None) -> None:
        self.note = note


def case(classname: str, name: str, inside: str = "") -> str:
    return f'<testcase classname="{classname}" name="{name}" time="0.1">{inside}</testcase>'


def measured(difference: str, largest: str) -> str:
    return (
        f'<properties><property name="max_abs_logit_diff" value="{difference}"/>'
        f'<property name="max_abs_logit" value="{largest}"/></properties>'
    )


def read(tmp_path: Path, *cases: str) -> ProofResult:
    report = tmp_path / "report.xml"
    report.write_text(f'<?xml version="1.0"?><testsuites><testsuite>{"".join(cases)}</testsuite></testsuites>')
    return _read(report, 2.5)


FAILURE = '<failure message="AssertionError: assert 6.7 &lt; 0.0001&#10;more">tb</failure>'
PASSED = case("tests.test_parity", "test_logits[base]", measured("1.5e-06", "9.5"))
CAUGHT = case("tests.test_mutants", "test_caught[gate and up swapped]")
SURVIVED = case("tests.test_mutants", "test_caught[theta off]", FAILURE)
FAILED = case("tests.test_parity", "test_padding[left]", FAILURE)
SKIPPED = case("tests.test_packing", "test_te", '<skipped type="pytest.skip" message="needs TE"/>')


def test_all_passed(tmp_path: Path) -> None:
    result = read(tmp_path, PASSED, CAUGHT)
    assert (result.passed, result.failed, result.skipped, result.seconds) == (2, 0, 0, 2.5)
    assert (result.planted, result.caught, result.survived) == (1, 1, ())
    assert result.parity == (("base", 1.5e-06, 9.5),)
    assert result.max_abs_logit_diff == 1.5e-06
    assert result.exit_status == 0


def test_a_failure_is_named_with_its_first_line(tmp_path: Path) -> None:
    result = read(tmp_path, PASSED, FAILED)
    assert result.failures == ("test_parity::test_padding[left]: AssertionError: assert 6.7 < 0.0001",)
    assert (result.passed, result.failed, result.exit_status) == (1, 1, 1)


@pytest.mark.parametrize(
    "inside", ['<error message="fixture broke">tb</error>', "<error>only text</error>", "<failure/>"]
)
def test_an_error_is_a_failure(tmp_path: Path, inside: str) -> None:
    result = read(tmp_path, PASSED, case("tests.test_x", "test_y", inside))
    assert (result.failed, result.exit_status) == (1, 1)
    assert result.failures[0].startswith("test_x::test_y: ")
    assert len(result.failures[0]) > len("test_x::test_y: ")


def test_a_mutant_that_no_test_noticed(tmp_path: Path) -> None:
    result = read(tmp_path, PASSED, CAUGHT, SURVIVED)
    assert (result.planted, result.caught, result.exit_status) == (2, 1, 1)
    assert result.survived == ("test_mutants::test_caught[theta off]",)
    assert result.as_json()["mutants"] == {"planted": 2, "caught": 1, "survived": list(result.survived)}


def test_a_skipped_mutant_is_not_caught(tmp_path: Path) -> None:
    skipped = case("tests.test_mutants", "test_caught[x]", '<skipped message="no"/>')
    result = read(tmp_path, PASSED, skipped)
    assert (result.planted, result.caught, result.exit_status) == (1, 0, 1)


def test_a_skip_says_why(tmp_path: Path) -> None:
    result = read(tmp_path, PASSED, SKIPPED, case("tests.test_a", "test_b", "<skipped/>"))
    assert result.skips == ("test_packing::test_te: needs TE", "test_a::test_b: no reason given")
    assert result.exit_status == 0


def test_nothing_ran(tmp_path: Path) -> None:
    """No failure is no proof."""
    assert read(tmp_path).exit_status == 1
    assert read(tmp_path, SKIPPED).exit_status == 1


def test_the_largest_difference_counts(tmp_path: Path) -> None:
    other = case("tests.test_parity", "test_logits[tied]", measured("3e-05", "8.0"))
    assert read(tmp_path, PASSED, other).max_abs_logit_diff == 3e-05


def test_no_parity_is_none_and_json(tmp_path: Path) -> None:
    result = read(tmp_path, CAUGHT)
    payload = json.loads(json.dumps(result.as_json()))
    assert payload["parity"] == {"max_abs_logit_diff": None, "dtype": "float32", "settings": []}
    assert set(payload) == {"tests", "parity", "mutants"}
    assert {"passed", "failed", "skipped", "seconds"} <= set(payload["tests"])


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, 0),
        ({"failed": 1}, 1),
        ({"passed": 0}, 1),
        ({"caught": 1}, 1),
        ({"planted": 0, "caught": 0}, 0),
        ({"skipped": 5}, 0),
    ],
)
def test_exit_status(change: dict[str, int], status: int) -> None:
    good = ProofResult(3, 0, 0, 1.0, (), 2, 2, (), (), ())
    assert dataclasses.replace(good, **change).exit_status == status


@pytest.fixture
def project(tmp_path: Path) -> Path:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tmp_path / "src").mkdir()
    (tests / "test_mutants.py").write_text(
        "import pytest\n\n@pytest.mark.parametrize('name', ['a', 'b'])\ndef test_m(name):\n    assert name == 'a'\n"
    )
    (tests / "test_parity.py").write_text(
        "import os, here\n\n\ndef test_p(record_property):\n    record_property('max_abs_logit_diff', 0.5)\n"
        "    record_property('max_abs_logit', 2.0)\n    assert os.environ['OMP_NUM_THREADS'] == '1'\n"
        "    assert os.environ['HF_HUB_OFFLINE'] == '1'\n"
    )
    (tmp_path / "src" / "here.py").write_text("")
    return tmp_path


def test_a_real_run(project: Path) -> None:
    progress = Quiet()
    result = run_tests(project, PLACES, progress)
    assert (result.passed, result.failed, result.planted, result.caught) == (2, 1, 2, 1)
    assert result.max_abs_logit_diff == 0.5
    assert progress.advanced == 3
    assert not list(project.rglob("__pycache__")), "a run leaves nothing behind"


def test_without_mutants(project: Path) -> None:
    result = run_tests(project, PLACES, Quiet(), mutants=False)
    assert (result.passed, result.planted, result.exit_status) == (1, 0, 0)


def test_configuration_around_is_not_read(project: Path) -> None:
    (project / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (project.parent / "conftest.py").write_text("raise SystemExit('a stranger')\n")
    assert run_tests(project, PLACES, Quiet(), mutants=False).exit_status == 0
    (project.parent / "conftest.py").unlink()


def test_no_tests_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        run_tests(tmp_path, PLACES, Quiet())


def test_tests_that_cannot_be_imported_do_not_pass(project: Path) -> None:
    (project / "src" / "here.py").write_text("def broken(:\n")
    result = run_tests(project, PLACES, Quiet(), mutants=False)
    assert result.exit_status == 1
    assert any("test_parity" in failure for failure in result.failures)


def test_a_conftest_that_cannot_be_imported_is_an_error(project: Path) -> None:
    (project / "tests" / "conftest.py").write_text("import no_such_module\n")
    with pytest.raises(VerificationFailed) as caught:
        run_tests(project, PLACES, Quiet())
    assert caught.value.code == "verify.cannot_start"
    assert "no_such_module" in caught.value.why


def test_a_test_that_hangs_is_ended(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "tests" / "test_parity.py").write_text("import time\n\n\ndef test_p():\n    time.sleep(60)\n")
    monkeypatch.setattr(run, "TIMEOUT_SECONDS", 2)
    with pytest.raises(VerificationFailed) as caught:
        run_tests(project, PLACES, Quiet())
    assert caught.value.code == "verify.timeout"
