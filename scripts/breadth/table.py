"""The table of a sweep: made from records, put between the markers of a page, and read again by the test of a dozen."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from breadth.scope import Subject
from breadth.store import Record

PASSED = "all tests passed"
COLUMNS = (
    "config",
    "architecture",
    "kind",
    "result",
    "native parts",
    "novel parts",
    "largest logit difference",
    "mutants caught",
    "seconds",
)
_LONGEST = 200
_SIGNALS = {-11: "SIGSEGV", -9: "SIGKILL", -6: "SIGABRT", -15: "SIGTERM"}


class NoMarkers(ValueError):
    """A page has no place for the table."""


@dataclass(frozen=True)
class Row:
    """One row, as it stands in a page.

    Attributes:
        native, parts: how many of the parts are native, of how many; None where nothing was made.
    """

    name: str
    architecture: str
    result: str
    native: int | None
    parts: int | None

    @property
    def passed(self) -> bool:
        """Whether everything was proven."""
        return self.result.startswith(PASSED)


def passed(record: Record) -> bool:
    """Whether `onboard new` ended well: tests were run, none failed, and each mutant was caught."""
    tests, mutants = _of(record, "tests"), _of(record, "mutants")
    return (
        record.exit == 0
        and bool(tests.get("passed"))
        and tests.get("failed") == 0
        and mutants.get("planted") == mutants.get("caught")
    )


def all_native(record: Record) -> bool:
    """Whether nothing of transformers' own code is reused, and nothing novel."""
    modules = _modules(record)
    return bool(modules) and all(module.get("origin") == "native" for module in modules)


def result(record: Record) -> str:
    """How it ended, in a few words."""
    memory = "while the machine had no memory left: " if record.out_of_memory and not passed(record) else ""
    return memory + _result(record)


def _result(record: Record) -> str:
    tests, mutants = _of(record, "tests"), _of(record, "mutants")
    if record.stopped:
        return record.stopped
    if record.exit is not None and record.exit < 0:
        return f"killed by {_SIGNALS.get(record.exit, f'signal {-record.exit}')}"
    if tests:
        skipped = f", {tests.get('skipped')} skipped" if tests.get("skipped") else ""
        counts = f"{tests.get('passed')}{skipped}"
        if passed(record):
            # Proven against another class: that the model computes the same is inferred, and listed.
            open_points = len((record.answer or {}).get("unproven") or ())
            return f"{PASSED} ({counts})" + (f", {open_points} points unproven" if open_points else "")
        if tests.get("failed"):
            first = (tests.get("failures") or ["no name"])[0]
            return f"{tests['failed']} failed, {counts} passed; first: {first}"
        lost = (mutants.get("planted") or 0) - (mutants.get("caught") or 0)
        return f"exit {record.exit}: {counts} passed, {lost} mutants not caught"
    return f"exit {record.exit}: {_reason(record)}"


def row(subject: Subject, record: Record) -> str:
    """One row of the table."""
    modules, mutants = _modules(record), _of(record, "mutants")
    native = sum(module.get("origin") == "native" for module in modules)
    novel = [str(module.get("path")) for module in modules if module.get("origin") == "novel"]
    difference = _of(record, "parity").get("max_abs_logit_diff")
    ran = mutants.get("caught") is not None
    cells = (
        subject.name,
        str((record.answer or {}).get("architecture") or subject.architecture),
        str((record.answer or {}).get("kind") or subject.kind),
        result(record),
        f"{native} of {len(modules)} ({100 * native // len(modules)} %)" if modules else "",
        ", ".join(f"`{path}`" for path in novel),
        f"{difference:.1e}" if isinstance(difference, int | float) else "",
        f"{mutants['caught']} of {mutants['planted']}" if ran else "",
        f"{record.seconds:.0f}",
    )
    return "| " + " | ".join(_cell(text) for text in cells) + " |"


def counts(records: Sequence[Record], in_scope: int | None = None) -> str:
    """The line above the table: how many end well, and how many of these need nothing of transformers' own code."""
    good = [record for record in records if passed(record)]
    native = sum(all_native(record) for record in good)
    text = f"{len(good)} of {len(records)} end with all tests passed; "
    text += f"{native} of them without a reused or novel submodule."
    if in_scope is not None and in_scope != len(records):
        text += f" {in_scope - len(records)} of the {in_scope} in scope were not run."
    return text


def table(
    subjects: Sequence[Subject], records: Mapping[str, Record], made_with: str, in_scope: int | None = None
) -> str:
    """The whole text between the markers.

    Args:
        subjects: in the order of the rows; those without a record are left out.
        records: by name.
        made_with: versions, and how many ran side by side.
        in_scope: how many a whole sweep has, where the subjects are some of them.
    """
    there = [subject for subject in subjects if subject.name in records]
    lines = (
        counts([records[subject.name] for subject in there], in_scope),
        made_with,
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + " --- |" * len(COLUMNS),
        *(row(subject, records[subject.name]) for subject in there),
    )
    return "\n".join(lines) + "\n"


def markers(what: str) -> tuple[str, str]:
    """The two lines of a page between which the table of ``what`` stands (``sweep`` or ``configs``)."""
    flag = " --configs" if what == "configs" else ""
    return f"<!-- begin: scripts/sweep.py{flag} -->\n", f"<!-- end: scripts/sweep.py{flag} -->\n"


def put(page: str, what: str, text: str) -> str:
    """The page with the text between its markers.

    Raises:
        NoMarkers: it has not each of them once, in order.
    """
    begin, end = markers(what)
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise NoMarkers(f"it needs the lines {begin.strip()} and {end.strip()}, once each, in this order")
    before, rest = page.split(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"


def read_rows(page: str, what: str = "sweep") -> tuple[Row, ...]:
    """The rows that stand between a page's markers.

    Raises:
        NoMarkers: the page has none.
    """
    begin, end = markers(what)
    if begin not in page or end not in page:
        raise NoMarkers(f"there is no {begin.strip()} in the page")
    lines = [line for line in page.split(begin)[1].split(end)[0].splitlines() if line.startswith("| ")]
    rows = []
    for line in lines[2:]:  # after the head and the line below it
        cells = dict(zip(COLUMNS, (_plain(cell) for cell in re.split(r"(?<!\\)\|", line)[1:-1]), strict=True))
        share = re.match(r"(\d+) of (\d+)", cells["native parts"])
        native, parts = (int(share[1]), int(share[2])) if share else (None, None)
        rows.append(Row(cells["config"], cells["architecture"], cells["result"], native, parts))
    return tuple(rows)


def _cell(text: str) -> str:
    """Text that stays one cell of one row: one line, no bar, no marker of HTML outside of code."""
    line = " ".join(text.split())
    line = line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."
    return line.replace("|", "\\|").replace("<", "&lt;")


def _plain(cell: str) -> str:
    return cell.strip().replace("&lt;", "<").replace("\\|", "|")


def _reason(record: Record) -> str:
    error = _of(record, "error")
    parts = [str(error[key]).strip() for key in ("what", "why") if error.get(key)]
    if parts:
        return " ".join(part.splitlines()[0] for part in parts)
    lines = record.said.strip().splitlines()
    return f"no answer; the last line was: {lines[-1]}" if lines else "no answer, and nothing was said"


def _of(record: Record, key: str) -> Mapping[str, Any]:
    value = (record.answer or {}).get(key)
    return value if isinstance(value, Mapping) else {}


def _modules(record: Record) -> list[Mapping[str, Any]]:
    found = _of(record, "origins").get("modules")
    return [module for module in found if isinstance(module, Mapping)] if isinstance(found, list) else []
