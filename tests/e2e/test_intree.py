"""Into a checkout of the framework: upstream's places, upstream's header, one registry row, and nothing else."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

from .command import EXAMPLES, assert_proven, assert_shape, new, run

REGISTRY = "nemo_automodel/_transformers/registry.py"
PACKAGE = "nemo_automodel/components/models/olmo2"
TESTS = "tests/unit_tests/models/olmo2"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The installed framework's sources, as if somebody had cloned them."""
    spec = importlib.util.find_spec("nemo_automodel")
    assert spec is not None
    assert spec.submodule_search_locations
    root = tmp_path / "checkout"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(spec.submodule_search_locations[0], root / "nemo_automodel", ignore=ignored)
    (root / "tests" / "unit_tests" / "models").mkdir(parents=True)
    return root


def contents(root: Path) -> dict[str, bytes]:
    files = (path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def test_a_model_goes_into_a_checkout(checkout, tmp_path):
    before = contents(checkout)
    words = (str(EXAMPLES / "olmo-2-7b"), "--into", str(checkout))
    payload = new(*words, home=tmp_path / "home")
    assert_shape(payload)
    # Proven in the checkout itself: a test that imported the installed framework would not find this architecture.
    assert_proven(payload)
    assert payload["target"] == "intree"
    assert payload["import"] == {
        "sys_path": str(checkout),
        "package": "nemo_automodel.components.models.olmo2",
        "model_module": "nemo_automodel.components.models.olmo2.model",
        "model_class": "Olmo2ForCausalLM",
        "adapter_class": "Olmo2StateDictAdapter",
    }

    after = contents(checkout)
    assert {file for file in before if after.get(file) != before[file]} == {REGISTRY}
    added = after.keys() - before.keys()
    assert added == set(payload["files"]) - {REGISTRY}
    places = (PACKAGE, TESTS, "examples/llm_finetune/olmo2", "docs/model-coverage/llm")
    assert {next((place for place in places if file.startswith(f"{place}/")), file) for file in added} == set(places)
    for file in ("model.py", "state_dict_adapter.py", "__init__.py", "REVIEW.md", ".onboard.lock.json"):
        assert f"{PACKAGE}/{file}" in added

    check_the_registry(before[REGISTRY].decode(), after[REGISTRY].decode())
    check_the_headers(checkout, added)
    check_that_a_second_run_changes_nothing(checkout, words, tmp_path / "home")


def check_the_registry(before: str, after: str) -> None:
    """One row more, where the alphabet wants it; every other byte as it was."""
    row = """
        (
            "Olmo2ForCausalLM",
            ("nemo_automodel.components.models.olmo2.model", "Olmo2ForCausalLM"),
        ),"""
    assert after.count(row) == 1
    assert after.replace(row, "") == before


def check_the_headers(checkout: Path, added: set[str]) -> None:
    """The same comment as upstream's newest files, with their year."""
    header = re.compile(r"((?:#.*\n)+)")
    newest = header.match((checkout / "nemo_automodel/components/models/qwen3/model.py").read_text(encoding="utf-8"))
    assert newest is not None
    assert re.match(r"# Copyright \(c\) 20\d\d, NVIDIA", newest[1])
    for file in added:
        if file.endswith(".py"):
            text = (checkout / file).read_text(encoding="utf-8")
            assert text.startswith(newest[1]), file


def check_that_a_second_run_changes_nothing(checkout: Path, words: tuple[str, ...], home: Path) -> None:
    """Not even a file's time, but for the two that hold the results of the tests."""
    before = contents(checkout)
    times = {file: (checkout / file).stat().st_mtime_ns for file in before}
    new(*words, home=home)
    assert contents(checkout) == before
    touched = {file for file in before if (checkout / file).stat().st_mtime_ns != times[file]}
    assert touched <= {f"{PACKAGE}/REVIEW.md", f"{PACKAGE}/.onboard.lock.json"}


def test_a_hand_written_model_is_not_overwritten(checkout, tmp_path):
    before = contents(checkout)
    done = run("new", str(EXAMPLES / "qwen3-0.6b"), "--into", str(checkout), "--json", home=tmp_path / "home")
    assert done.returncode == 2, done.stderr
    assert json.loads(done.stdout)["error"]["what"]
    assert contents(checkout) == before


def test_inside_a_checkout_the_checkout_is_the_target(checkout, tmp_path):
    """Without --into or --target, from a shell that stands in it; --dry-run leaves no trace."""
    before = contents(checkout)
    place = checkout / "tests" / "unit_tests"
    done = run("new", str(EXAMPLES / "olmo-2-7b"), "--dry-run", "--json", home=tmp_path / "home", cwd=place)
    assert done.returncode == 0, done.stderr
    payload = json.loads(done.stdout)
    assert (payload["target"], payload["out"]) == ("intree", str(checkout))
    assert contents(checkout) == before
