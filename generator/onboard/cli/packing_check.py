"""``onboard packing check``: what Megatron-Bridge refuses in a configuration, and what it should."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from onboard.cli._group import State, declare_command
from onboard.cli._output import Output
from onboard.cli._text import plural
from onboard.errors import VerificationFailed

if TYPE_CHECKING:
    from onboard.packing.checking import Verdict
    from onboard.packing.rules import Finding


@declare_command(
    "check",
    examples=(
        "onboard packing check train.yaml",
        "onboard packing check train.yaml --strict --format quiet",
        "onboard packing check train.json --json | jq .first_error",
    ),
)
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--strict", is_flag=True, help="Exit 1 for a trap too, not only for an error.")
def command(state: State, config: Path, strict: bool) -> int:
    """Check a configuration for packed sequences.

    CONFIG is a YAML or JSON file with sections such as train, model and dataset; what it leaves out has the default
    that Megatron-Bridge gives it. Errors (P) are what Megatron-Bridge would refuse, in the order in which it does;
    traps (T) are what it lets through and what then goes wrong. Exits 1 for an error.
    """
    from onboard.packing.checking import check_file

    verdict, _ = check_file(config)
    output = state.output
    output.json(verdict.as_json())
    show(output, verdict)
    status = verdict.exit_status(strict)
    if status:
        ids = ", ".join(dict.fromkeys(finding.rule.id for finding in verdict.findings))
        output.error(
            VerificationFailed(
                f"{config} does not pass",
                f"{plural(len(verdict.findings), 'finding')}: {ids}",
                f"make the changes above, or let `onboard packing plan --fix {config}` make them",
                code="packing.check",
            )
        )
    return status


def show(output: Output, verdict: Verdict) -> None:
    """Print a verdict for people."""
    for finding in verdict.findings:
        _show_finding(output, finding)
    settings = verdict.settings
    packing = "offline packing" if settings.offline else "in-batch packing" if settings.in_batch else "no packing"
    summary = f"{settings.kind}, {packing}, data parallel size {settings.dp}"
    if verdict.errors:
        output.line(f"Megatron-Bridge refuses this ({verdict.first_error} first): {summary}", "bad")
    elif verdict.findings:
        traps = plural(len(verdict.findings), "trap")
        output.line(f"Megatron-Bridge accepts this, with {traps} in it: {summary}", "warn")
    else:
        output.line(f"fine: {summary}", "good")
    for remark in verdict.remarks:
        output.remark(remark)


def _show_finding(output: Output, finding: Finding) -> None:
    from onboard.packing.rules import shown

    severity, style = ("error", "bad") if finding.rule.severity == "error" else ("trap", "warn")
    output.line(f"{finding.rule.id} {severity}: {finding.rule.when}".replace("`", ""), style)
    values = ", ".join(f"{key} = {shown(value)}" for key, value in finding.values.items())
    rows = [("  values", values, ""), ("  then", finding.rule.then, ""), ("  mend", str(finding.mend), "good")]
    output.pairs([row for row in rows if row[1]])
    output.line()
