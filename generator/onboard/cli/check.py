"""``onboard check``: has the generated part drifted?"""

from __future__ import annotations

from pathlib import Path

import click

from onboard.cli._group import State, declare_command
from onboard.cli._output import Column
from onboard.cli._text import plural
from onboard.errors import VerificationFailed

_COLUMNS = (Column("state"), Column("file"))


@declare_command(
    "check",
    examples=("onboard check nemo-automodel-qwen3", "onboard check . --format quiet || echo drifted"),
)
@click.argument("path", type=click.Path(exists=True, path_type=Path))
def command(state: State, path: Path) -> int:
    """Say whether generated files were edited since.

    Compares PATH, file by file, with what onboard wrote there. Exits 1 when a generated file was edited or is missing.
    """
    from onboard.pipeline.verifying import check

    result = check(path)
    output = state.output
    output.json(result.as_json())
    output.table(_COLUMNS, [(found, file) for file, found in result.rows])
    if result.exit_status:
        # How a drifted file is called is the lock file's business; what most files are is not worth an error line.
        states = [found for _, found in result.rows]
        counts = ", ".join(f"{states.count(found)} {found}" for found in dict.fromkeys(states))
        output.error(
            VerificationFailed(
                f"{path} has drifted",
                f"{plural(len(states), 'file')}: {counts}",
                "look at the differences; keep what is meant, and take back what is not",
                code="check.drift",
            )
        )
    return result.exit_status
