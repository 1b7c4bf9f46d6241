"""``onboard new``: write the onboarding change of a model, and prove it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onboard.cli import _summary
from onboard.cli._group import State, complete_path, declare_command
from onboard.cli._output import Column, Output
from onboard.cli._progress import progress_for
from onboard.cli._text import plural
from onboard.errors import UsageError

if TYPE_CHECKING:
    from onboard.pipeline.making import NewRequest, NewResult

_FILE_COLUMNS = (Column("action"), Column("file"), Column("lines", right=True), Column("why", style="dim"))
_FOLDER = click.Path(file_okay=False, path_type=Path)
_CHECKOUT = click.Path(exists=True, file_okay=False, path_type=Path)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@declare_command(
    "new",
    examples=(
        "onboard new Qwen/Qwen3-0.6B",
        "onboard new ./my-model --out ./nemo-automodel-mine",
        "onboard new Qwen/Qwen3-0.6B --into ~/Automodel --dry-run",
        "onboard new Qwen/Qwen3-0.6B --dry-run --diff > change.patch",
        "onboard new Qwen/Qwen3-0.6B --json > result.json",
    ),
)
@click.argument("source", shell_complete=complete_path)
@click.option(
    "--target",
    type=click.Choice(("plugin", "intree")),
    help="A pip-installable project, or files in a checkout of AutoModel. Default: the latter inside a checkout.",
)
@click.option("--out", type=_FOLDER, metavar="DIR", help="Where the plugin project goes.")
@click.option("--into", type=_CHECKOUT, metavar="CHECKOUT", help="The checkout of AutoModel to write into.")
@click.option("--name", metavar="NAME", help="The package's name. Default: from the model_type.")
@click.option("--revision", metavar="REV", help="Branch, tag or commit of a model on the Hub.")
@click.option(
    "--style",
    type=click.Choice(("auto", "native", "reuse")),
    default="auto",
    help="auto: native where every part is confirmed by numbers, else transformers' decoder is reused; native: "
    "nothing is reused; reuse: the decoder always is.",
)
@click.option("--no-verify", is_flag=True, help="Write, and do not run the generated tests.")
@click.option("--dry-run", is_flag=True, help="Show which files would be written, and why; write nothing.")
@click.option("--diff", is_flag=True, help="Print the changes as a patch on stdout, the rest on stderr.")
@click.option("--force", is_flag=True, help="Replace what is there; edited files are kept in a backup.")
@click.option(
    "--trust-remote-code",
    is_flag=True,
    help="Where transformers has no class, run the model's own code as the reference.",
)
@click.option("--license-header", type=_FILE, metavar="FILE", help="A text that opens every generated Python file.")
def command(
    state: State,
    source: str,
    target: str | None,
    out: Path | None,
    into: Path | None,
    name: str | None,
    revision: str | None,
    style: str,
    no_verify: bool,
    dry_run: bool,
    diff: bool,
    force: bool,
    trust_remote_code: bool,
    license_header: Path | None,
) -> int:
    """Write a model's AutoModel support, and run its tests.

    Writes model, state dict adapter, registration, tests, example recipe and coverage page, then proves them
    against transformers. All files are written, or none.
    """
    _refuse_contradictions(target, out, into)
    from onboard.pipeline.making import NewRequest, make

    request = NewRequest(
        source=source,
        revision=revision,
        target=target,
        out=out,
        into=into,
        name=name,
        style=style,
        verify=not no_verify,
        dry_run=dry_run,
        diff=diff,
        force=force,
        trust_remote_code=trust_remote_code,
        license_header=license_header,
    )
    output = state.output
    with progress_for(output) as progress:
        result = make(request, progress)
    payload = dict(result.as_json())
    if result.diff is not None:
        payload.setdefault("diff", result.diff)
    output.json(payload)
    _show(output, request, result, payload)
    if result.exit_status:
        output.error(_summary.failure(payload, f"see what failed above, then `onboard verify {_proof(payload)}`"))
    return result.exit_status


def _refuse_contradictions(target: str | None, out: Path | None, into: Path | None) -> None:
    do = "give --out for a plugin project, or --into for a checkout"
    if out is not None and into is not None:
        raise UsageError("--out and --into exclude each other", "the files go to one place", do)
    if into is not None and target == "plugin":
        raise UsageError("--into and --target plugin exclude each other", "a plugin is not part of a checkout", do)
    if out is not None and target == "intree":
        raise UsageError("--out and --target intree exclude each other", "in-tree files go into a checkout", do)


def _show(output: Output, request: NewRequest, result: NewResult, payload: Mapping[str, Any]) -> None:
    if not output.human:
        return
    if request.diff and result.diff is not None:
        output.patch(result.diff)
        output.results_to_stderr()
    changed = sum(row["action"] != "same" for row in result.summary_rows)
    same = len(result.summary_rows) - changed
    if request.dry_run:
        rows = [
            (str(row["action"]), str(row["path"]), str(row["lines"]), str(row["reason"])) for row in result.summary_rows
        ]
        output.table(_FILE_COLUMNS, rows)
        output.line()
    did = "would write" if request.dry_run else "wrote"
    unchanged = f"; {same} already as they should be" if same else ""
    output.line(f"{did} {plural(changed, 'file')} to {_place(payload)} ({payload.get('target')}){unchanged}", "bold")
    source = payload.get("source") or {}
    revision = f" at {source['revision']}" if source.get("revision") else ""
    model = (
        ("model", f"{source.get('id') or source.get('path') or request.source}{revision}", ""),
        ("architecture", f"{payload.get('architecture')} ({payload.get('model_type')}, {payload.get('kind')})", ""),
    )
    proof = [] if request.dry_run else _summary.proof_rows(payload)
    output.pairs([*model, *_summary.origins_row(payload), *proof])
    _summary.lists(output, payload)
    if request.dry_run:
        output.line()
        output.line("Nothing was written.")
    else:
        output.bullets("next", _next_steps(request, result, payload))


def _next_steps(request: NewRequest, result: NewResult, payload: Mapping[str, Any]) -> list[str]:
    place = _place(payload)
    steps = []
    review = next((path for path in _paths(payload) if path.endswith("REVIEW.md")), None)
    if review is not None:
        folder = str(payload.get("out") or "")
        steps.append(f"read {_quoted(review if os.path.isabs(review) else os.path.join(folder, review))}")
    if result.exit_status:
        return steps  # the error says what comes first
    if payload.get("target") == "plugin":
        steps.append(f"pip install -e {place}")
    else:
        steps.append(f"git -C {place} status")
    if not request.verify:
        steps.append(f"onboard verify {_proof(payload)}")
    return steps


def _paths(payload: Mapping[str, Any]) -> list[str]:
    files = payload.get("files") or ()
    return [str(item.get("path", "")) if isinstance(item, Mapping) else str(item) for item in files]


def _place(payload: Mapping[str, Any]) -> str:
    return _quoted(str(payload.get("out") or "."))


def _proof(payload: Mapping[str, Any]) -> str:
    """What `onboard verify` takes: the project, or the model's folder in a checkout."""
    return _quoted(str(payload.get("verify_path") or payload.get("out") or "."))


def _quoted(path: str) -> str:
    """The shortest way to write ``path`` in a shell in this folder."""
    near = os.path.relpath(path) if os.path.isabs(path) else path
    return shlex.quote(path if near.startswith("..") else near)
