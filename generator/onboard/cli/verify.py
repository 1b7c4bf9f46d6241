"""``onboard verify``: run what proves a generated change."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from onboard.cli import _summary
from onboard.cli._group import State, declare_command
from onboard.cli._progress import progress_for


@declare_command(
    "verify",
    examples=(
        "onboard verify nemo-automodel-qwen3",
        "onboard verify nemo-automodel-qwen3 --mutants",
        "onboard verify nemo-automodel-qwen3 --json | jq .tests",
    ),
)
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--mutants", is_flag=True, help="Plant mistakes, and see that the tests catch each.")
@click.option("--parallel", is_flag=True, help="Not there yet: capability flags are not measured.")
def command(state: State, path: Path, mutants: bool, parallel: bool) -> int:
    """Run the tests of a generated change.

    PATH is a project or a package that onboard wrote. Exits 1 when a test fails or a planted mistake passes.
    """
    from onboard.pipeline.verifying import verify

    output = state.output
    with progress_for(output) as progress:
        result = verify(path, mutants=mutants, parallel=parallel, progress=progress)
    payload = result.as_json()
    output.json(payload)
    if output.human:
        output.line(f"verified {path}" if not result.exit_status else f"{path} is not proven", "bold")
        output.pairs(_summary.proof_rows(payload))
        _summary.lists(output, payload)
    if result.exit_status:
        do = f"mend what failed, then `onboard verify {shlex.quote(str(path))}` again"
        output.error(_summary.failure(payload, do))
    return result.exit_status
