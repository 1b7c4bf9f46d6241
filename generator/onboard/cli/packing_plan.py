"""``onboard packing plan``: a configuration that keeps every rule, or an existing one that does again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from onboard.cli._group import State, complete_path, declare_command
from onboard.cli._output import Output
from onboard.cli._text import printable
from onboard.cli.packing_check import show
from onboard.errors import UsageError, VerificationFailed

_SIZE = click.IntRange(min=1)


@declare_command(
    "plan",
    examples=(
        "onboard packing plan Qwen/Qwen3-8B --tp 2 --cp 2 --seq-length 8192",
        "onboard packing plan ./my-vlm --tp 4 --sequence-parallel --world-size 8",
        "onboard packing plan Qwen/Qwen3-8B --pack-size 8192 --as python",
        "onboard packing plan --fix train.yaml --out train.yaml",
    ),
)
@click.argument("model", required=False, shell_complete=complete_path)
@click.option("--revision", metavar="REV", help="Branch, tag or commit of a model on the Hub.")
@click.option("--tp", type=_SIZE, default=1, help="Tensor parallel size.")
@click.option("--cp", type=_SIZE, default=1, help="Context parallel size.")
@click.option("--pp", type=_SIZE, default=1, help="Pipeline parallel size.")
@click.option("--ep", type=_SIZE, default=1, help="Expert parallel size.")
@click.option("--sequence-parallel", is_flag=True, help="Split activations along the sequence over TP.")
@click.option("--seq-length", type=_SIZE, default=4096, help="Tokens of the longest sample.  [4096]")
@click.option("--global-batch-size", type=_SIZE, default=32, help="Rows a step.  [32]")
@click.option("--micro-batch-size", type=_SIZE, help="Rows packed into one, with in-batch packing.  [2]")
@click.option("--world-size", type=_SIZE, help="Processes.  [TP*PP*CP]")
@click.option("--packing", type=click.Choice(("offline", "in-batch")), help="Which packing.  [by kind of model]")
@click.option("--pack-size", type=_SIZE, help="Tokens of a packed row, with offline packing.")
@click.option(
    "--dataset",
    type=click.Choice(("hf_sft", "energon", "mock_vlm")),
    default="hf_sft",
    help="Dataset of in-batch packing.  [hf_sft]",
)
@click.option("--peft", metavar="NAME", help="An adapter, such as lora; else full fine-tuning.")
@click.option("--as", "language", type=click.Choice(("yaml", "python")), default="yaml", help="What to write.")
@click.option("--fix", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Mend this configuration.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file, not to stdout.")
def command(state: State, model: str | None, fix: Path | None, out: Path | None, **options: Any) -> int:
    """Plan a configuration for packed sequences, or mend one.

    Offline packing for text models, in-batch packing for vision-language models, with the multiples that the layout
    needs. What it writes passes `onboard packing check --strict`. A model whose family opts out is refused, with
    the reason. With --fix the rest of the file stays as it is.
    """
    if (model is None) == (fix is None):
        raise UsageError(
            "cannot tell what to plan",
            "a MODEL to plan for or --fix CONFIG is needed, and not both",
            "see `onboard packing plan --help`",
        )
    if fix is not None:
        return _fix(state.output, fix, out)
    assert model is not None
    return _plan(state.output, model, out, options)


def _plan(output: Output, model: str, out: Path | None, options: dict[str, Any]) -> int:
    from onboard.packing.editing import as_yaml
    from onboard.packing.families import look_up
    from onboard.packing.planning import Request, as_python, plan

    language = options.pop("language")
    known = look_up(model, revision=options.pop("revision"))
    planned = plan(Request(known, **options))
    output.json(planned.as_json())
    _write(output, as_python(planned) if language == "python" else as_yaml(planned.mapping), out)
    output.remark(
        f"{planned.packing} packing; " + ", ".join(f"{key} {value}" for key, value in planned.computed.items())
    )
    for note in planned.notes:
        output.remark(f"note: {note}")
    if known.by_name is not None:
        output.remark(f"note: the config.json of {known.label} was not read: {known.by_name}")
    return 0


def _fix(output: Output, config: Path, out: Path | None) -> int:
    from onboard.packing.checking import model_of, read_mapping
    from onboard.packing.editing import edited
    from onboard.packing.fixing import fix

    mapping = read_mapping(config)
    fixed = fix(mapping, model_of(mapping, config.parent))
    text, kept = edited(_text_of(config), mapping, fixed.changes)
    output.json(
        {
            "mended": list(fixed.mended),
            "changes": {change.path: change.value for change in fixed.changes},
            "config": dict(fixed.mapping),
            "left": fixed.verdict.as_json(),
        }
    )
    _write(output, text, out)
    for step in fixed.steps:
        output.remark(f"{step.rule.id}: {step.mend}")
    if not kept:
        output.remark("note: the file was written anew, without its comments")
    if not fixed.verdict.findings:
        return 0
    output.results_to_stderr()
    show(output, fixed.verdict)
    ids = ", ".join(finding.rule.id for finding in fixed.verdict.findings)
    output.error(
        VerificationFailed(
            f"{config} is not mended completely",
            f"what is left needs a decision: {ids}",
            "decide what is said above, then run the command again",
            code="packing.left",
        )
    )
    return 1


def _text_of(config: Path) -> str:
    """The file's text, its line ends as they are."""
    try:
        return config.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"cannot mend {config}", f"it is not UTF-8: {error}", "save it as UTF-8", code="packing.bad_config"
        ) from error


def _write(output: Output, text: str, out: Path | None) -> None:
    if out is None:
        if output.human:
            output.raw(text)
        return
    # Beside the file and then in its place: a full disk leaves the old one.
    beside = out.with_name(f".{out.name}.part")
    try:
        beside.write_bytes(text.encode("utf-8"))
        beside.replace(out)
    finally:
        beside.unlink(missing_ok=True)
    output.remark(f"wrote {printable(out)}")
