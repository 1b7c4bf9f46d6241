"""A dozen of the architectures that docs/coverage.md records as passed, another dozen each day, run again.

ONBOARD_DOZEN_SEED, which the head of pytest's report names, chooses them. One test an architecture, so that the workers
share them.
"""

from __future__ import annotations

import os
import random

import pytest
from breadth.runner import REPOSITORY, Limits, run_all
from breadth.scope import Scope, find_scope
from breadth.table import Row, passed, read_rows, result

SEED = os.environ["ONBOARD_DOZEN_SEED"]
RECORDED = read_rows((REPOSITORY / "docs" / "coverage.md").read_text(encoding="utf-8"))


def choose(rows: tuple[Row, ...], seed: str, number: int = 12) -> list[Row]:
    """A sample of the rows that passed, the same for the same seed and page; all of them where they are fewer."""
    good = sorted((row for row in rows if row.passed), key=lambda row: row.name)
    return random.Random(seed).sample(good, min(number, len(good)))


CHOSEN = choose(RECORDED, SEED)


@pytest.fixture(scope="module")
def scope() -> Scope:
    return find_scope()


def test_the_choice_follows_the_seed():
    rows = tuple(
        Row(f"type{index}", "AForCausalLM", "all tests passed" if index % 2 else "exit 3", 8, 8) for index in range(60)
    )
    chosen = choose(rows, "2026-01-01")
    assert len({row.name for row in chosen}) == 12
    assert all(row.passed for row in chosen)
    assert chosen == choose(rows[::-1], "2026-01-01")
    assert chosen != choose(rows, "2026-01-02")
    assert len(choose(rows[:8], "2026-01-01")) == 4


def test_the_page_records_architectures_of_the_scope(scope):
    names = [row.name for row in RECORDED]
    assert CHOSEN, "docs/coverage.md records no architecture that passed; `make sweep` fills it"
    assert len(set(names)) == len(names)
    architectures = {subject.name: subject.architecture for subject in scope.subjects}
    assert {row.name: row.architecture for row in RECORDED}.items() <= architectures.items()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("recorded", CHOSEN, ids=[row.name for row in CHOSEN])
def test_it_still_ends_as_recorded(recorded, scope):
    subject = next(subject for subject in scope.subjects if subject.name == recorded.name)
    (record,) = run_all([subject], {subject.name: ""}, workers=1, limits=Limits(seconds=570))
    report = f"{result(record)} (ONBOARD_DOZEN_SEED={SEED})\n{record.answer}\n{record.said}"
    assert passed(record), report
    assert record.answer is not None
    origins = record.answer["origins"]
    assert origins["native"] >= recorded.native, report
    assert origins["reused"] + origins["novel"] <= recorded.parts - recorded.native, report
