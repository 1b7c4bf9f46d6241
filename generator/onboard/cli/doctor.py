"""``onboard doctor``: the environment, and what is wrong with it."""

from __future__ import annotations

from onboard.cli._group import State, declare_command
from onboard.cli._output import Column

_COLUMNS = (Column("state"), Column("what"), Column("found"))
_MARKS = {"ok": ("ok", "good"), "warn": ("warn", "warn"), "fail": ("FAIL", "bad")}


@declare_command(
    "doctor", examples=("onboard doctor", "onboard doctor --json | jq '.checks[] | select(.status != \"ok\")'")
)
def command(state: State) -> int:
    """Say what is wrong with the environment.

    Looks at Python, the packages and the settings, and says what to do about each. Imports none of the
    packages. Exits 1 when something makes `onboard new` impossible.
    """
    from onboard import __version__
    from onboard.cli._environment import examine

    checks = examine()
    failed = [check for check in checks if check.status == "fail"]
    output = state.output
    output.json({"ok": not failed, "version": __version__, "checks": [check.as_json() for check in checks]})
    output.table(_COLUMNS, [(_MARKS[check.status], check.name, check.found) for check in checks])
    output.bullets("to do", [f"{check.name}: {check.do}" for check in checks if check.do], style="warn")
    output.line()
    if failed:
        names = ", ".join(check.name for check in failed)
        output.line(f"`onboard new` cannot work before this is mended: {names}", "bad")
    else:
        output.line("`onboard new` can work here.", "good")
    return 1 if failed else 0
