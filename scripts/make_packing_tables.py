"""Write the tables of docs/packing.md, from the rules, the families and the kinds of damage that the package has.

python scripts/make_packing_tables.py            print the page as it should be
python scripts/make_packing_tables.py --write    write it
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from onboard.packing.data.damage import DAMAGES
from onboard.packing.families import FAMILIES
from onboard.packing.rules import Rule
from onboard.packing.settings import PATHS
from onboard.packing.traps import TRAPS
from onboard.packing.upstream import UPSTREAM

PAGE = Path(__file__).parents[1] / "docs" / "packing.md"


def tables() -> dict[str, str]:
    """Each table by its name in the page."""
    return {
        "errors": _rules(UPSTREAM),
        "traps": _rules(TRAPS),
        "families": _table(
            ("family", "packing", "where", "what happens otherwise"),
            (
                (family.name, f"{opt_out.packing}{opt_out.in_brackets}", opt_out.who, opt_out.then)
                for family in FAMILIES
                for opt_out in family.opt_outs
            ),
        ),
        "damage": _table(
            ("id", "", "damage", "what mends it"),
            ((damage.id, damage.severity, damage.what, damage.mend) for damage in DAMAGES.values()),
        ),
    }


def page(text: str) -> str:
    """The page with its tables made again."""
    for name, table in tables().items():
        begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
        text, found = re.subn(
            f"{re.escape(begin)}.*?{re.escape(end)}",
            lambda _, new=f"{begin}\n\n{table}\n{end}": new,
            text,
            flags=re.DOTALL,
        )
        if found != 1:
            raise SystemExit(f"docs/packing.md has {found} places for the table {name!r}")
    return text


def _rules(rules: Iterable[Rule]) -> str:
    rows = (
        (
            rule.id,
            rule.when,
            rule.then,
            ", ".join(f"`{PATHS[name]}`" for name in rule.reads if name in PATHS),
            rule.source,
        )
        for rule in rules
    )
    return _table(("id", "when", "what happens", "keys", "source"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def main() -> None:
    """Print the page, or write it."""
    new = page(PAGE.read_text(encoding="utf-8"))
    if "--write" in sys.argv[1:]:
        PAGE.write_text(new, encoding="utf-8")
    else:
        sys.stdout.write(new)


if __name__ == "__main__":
    main()
