"""The table says what the records say, and can be read back from a page."""

from __future__ import annotations

import pytest
from breadth.table import NoMarkers, Row, all_native, counts, passed, put, read_rows, result, row, table

from .records import proven, record, refused, subject

GOOD = record("llama", proven("native", "native", "native"))
REUSED = record("mamba", proven("native", "reused", "novel"))
REFUSED = record("dots1", refused("Not explained.\nmore", "A | B < C"), exit=3)
PAGE = "# Head\n<!-- begin: scripts/sweep.py -->\nold\n<!-- end: scripts/sweep.py -->\ntail\n"


@pytest.mark.parametrize(
    ("one", "good", "text"),
    [
        (GOOD, True, "all tests passed (100)"),
        (record("a", proven("native", skipped=2)), True, "all tests passed (100, 2 skipped)"),
        (record("a", proven("native") | {"unproven": [{}] * 5}), True, "all tests passed (100), 5 points unproven"),
        (
            record("a", proven("native", failed=2, failures=["t: m"]), exit=1),
            False,
            "2 failed, 100 passed; first: t: m",
        ),
        (record("a", proven("native", passed=0), exit=1), False, "exit 1: 0 passed, 0 mutants not caught"),
        (record("a", {**proven(), "mutants": {"planted": 9, "caught": 7}}, exit=1), False, "2 mutants not caught"),
        (record("a", {**proven("native"), "tests": None}), False, "exit 0: no answer, and nothing was said"),
        (REFUSED, False, "exit 3: Not explained. A | B < C"),
        (record("a", exit=5, said="x\nValueError: y\n"), False, "exit 5: no answer; the last line was: ValueError: y"),
        (record("a", exit=-11), False, "killed by SIGSEGV"),
        (record("a", exit=-40), False, "killed by signal 40"),
        (record("a", exit=None, stopped="stopped after 9 s"), False, "stopped after 9 s"),
        (record("a", refused("W.", "Y."), exit=3, out_of_memory=True), False, "while the machine had no memory left: "),
        (record("a", proven("native"), out_of_memory=True), True, "all tests passed (100)"),
    ],
)
def test_each_way_to_end_has_its_words(one, good, text):
    assert passed(one) is good
    assert text in result(one)
    assert result(one).startswith("all tests passed") is good


def test_the_line_above_counts():
    records = [GOOD, REUSED, REFUSED]
    assert counts(records) == "2 of 3 end with all tests passed; 1 of them without a reused or novel submodule."
    assert counts(records, 3) == counts(records)
    assert counts(records, 82).endswith(" 79 of the 82 in scope were not run.")
    assert [all_native(one) for one in records] == [True, False, False]


def test_a_row_has_each_figure():
    cells = [cell.strip() for cell in row(subject("mamba"), REUSED).strip("| ").split(" | ")]
    assert cells == [
        "mamba",
        "LlamaForCausalLM",
        "dense",
        "all tests passed (100)",
        "1 of 3 (33 %)",
        "`model.part2`",
        "2.5e-06",
        "9 of 9",
        "12",
    ]


def test_a_refusal_is_one_row_with_its_reason():
    text = row(subject("dots1", kind="moe"), REFUSED)
    assert "\n" not in text
    assert text == ("| dots1 | Dots1ForCausalLM | moe | exit 3: Not explained. A \\| B &lt; C |  |  |  |  | 12 |")


def test_what_was_written_is_read_again():
    subjects = [subject("llama"), subject("mamba"), subject("dots1"), subject("not run")]
    records = {one.name: one for one in (GOOD, REUSED, REFUSED)}
    page = put(PAGE, "sweep", table(subjects, records, "Run with torch.", 82))
    assert page.startswith("# Head\n<!-- begin")
    assert page.endswith("<!-- end: scripts/sweep.py -->\ntail\n")
    assert "old" not in page
    assert "2 of 3 end with all tests passed" in page
    assert "\nRun with torch.\n" in page
    rows = read_rows(page)
    assert rows == (
        Row("llama", "LlamaForCausalLM", "all tests passed (100)", 3, 3),
        Row("mamba", "LlamaForCausalLM", "all tests passed (100)", 1, 3),
        Row("dots1", "Dots1ForCausalLM", "exit 3: Not explained. A | B < C", None, None),
    )
    assert [one.passed for one in rows] == [True, True, False]
    assert put(page, "sweep", table(subjects, records, "Run with torch.", 82)) == page


@pytest.mark.parametrize(
    "page", ["", "<!-- begin: scripts/sweep.py -->\n", PAGE + PAGE, "\n".join(reversed(PAGE.splitlines())) + "\n"]
)
def test_a_page_without_its_two_markers_is_refused(page):
    with pytest.raises(NoMarkers, match=r"begin: scripts/sweep\.py"):
        put(page, "sweep", "t")


def test_a_page_may_hold_a_table_of_each_sort():
    page = PAGE + PAGE.replace("sweep.py", "sweep.py --configs")
    page = put(put(page, "configs", table([subject("mamba")], {"mamba": REUSED}, "c")), "sweep", "none\n")
    assert [one.name for one in read_rows(page, "configs")] == ["mamba"]
    with pytest.raises(NoMarkers):
        read_rows("no table", "sweep")
