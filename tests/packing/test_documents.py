"""docs/packing.md says what the rules say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import yaml
from onboard.packing.checking import RULES, check
from onboard.packing.settings import PATHS

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "packing.md"


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location(
        "make_packing_tables", REPOSITORY / "scripts" / "make_packing_tables.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_up_to_date(maker):
    assert maker.page(PAGE.read_text()) == PAGE.read_text(), "run scripts/make_packing_tables.py --write"


def test_every_rule_is_in_the_page():
    text = PAGE.read_text()
    assert all(f"| {rule.id} | {rule.when} |" in text for rule in RULES)


def test_every_key_is_named_in_the_page():
    text = PAGE.read_text()
    for path in PATHS.values():
        # Some are told by the ending that they have in common with others.
        key = path.rpartition(".")[2].removesuffix("model_parallel_size").removesuffix("context_parallel_size")
        assert key in text, path


def test_the_example_passes():
    block = PAGE.read_text().split("```yaml\n")[1].split("```")[0]
    assert check(yaml.safe_load(block)).findings == ()
