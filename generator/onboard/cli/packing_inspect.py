"""``onboard packing inspect``: a look into packed data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from onboard.cli._group import State, complete_path, declare_command
from onboard.cli._output import Column, Output
from onboard.cli._text import plural, printable
from onboard.errors import VerificationFailed

if TYPE_CHECKING:
    from onboard.packing.data.inspecting import Inspection
    from onboard.packing.data.rows import Wanted

_COLUMNS = (Column("fill", right=True), Column("rows", right=True), Column("", style="good"))
_BAR = 50
_SIZE = click.IntRange(min=1)


@declare_command(
    "inspect",
    examples=(
        "onboard packing inspect packed/training_4096.idx.parquet",
        "onboard packing inspect 'packed/shard_*.parquet' --config train.yaml",
        "onboard packing inspect packed --hf-model Qwen/Qwen3-8B --json",
    ),
)
@click.argument("data", shell_complete=complete_path)
@click.option("--metadata", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The metadata file.")
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="What trains on the data.")
@click.option("--hf-model", metavar="MODEL", help="Whose vocabulary and padding token to check against.")
@click.option("--vocab-size", type=_SIZE, help="Token ids are below it.")
@click.option("--pad-id", type=click.IntRange(min=0), help="The token that fills up.")
@click.option("--pack-size", type=_SIZE, help="Tokens that a row may hold.")
@click.option("--pad-seq-to-mult", type=_SIZE, help="What lengths have to be a multiple of.")
@click.option("--pad-cu-seqlens", is_flag=True, help="Training pads the boundaries; needs metadata.")
@click.option("--strict", is_flag=True, help="Exit 1 for a warning too, not only for an error.")
def command(
    state: State,
    data: str,
    metadata: Path | None,
    config: Path | None,
    hf_model: str | None,
    vocab_size: int | None,
    pad_id: int | None,
    pack_size: int | None,
    pad_seq_to_mult: int | None,
    pad_cu_seqlens: bool,
    strict: bool,
) -> int:
    """Look into packed data.

    DATA is a .parquet or .npy file that packing wrote, a pattern, or a directory of such files. Parquet is read as a
    stream. Shows how full the rows are, and each kind of damage with the numbers of its rows, counted from 0. Exits 1
    for damage that makes training wrong.
    """
    from onboard.packing.data.inspecting import inspect_data
    from onboard.packing.data.rows import Wanted

    given = Wanted(pack_size, pad_seq_to_mult, pad_id, vocab_size)
    wanted, pads = _wanted(given, config, hf_model)
    inspection = inspect_data(data, wanted, metadata_path=metadata, pad_cu_seqlens=pad_cu_seqlens or pads)
    output = state.output
    output.json(inspection.as_json())
    _show(output, inspection)
    status = inspection.exit_status(strict)
    if status:
        ids = ", ".join(found.damage.id for found in inspection.findings)
        output.error(
            VerificationFailed(
                f"{printable(data)} is damaged",
                f"{plural(len(inspection.findings), 'finding')}: {ids}",
                "see what is said of each above; packing the data again mends most",
                code="packing.damaged",
            )
        )
    return status


def _wanted(given: Wanted, config: Path | None, hf_model: str | None) -> tuple[Wanted, bool]:
    """What is given, completed by the configuration and the model; and whether the boundaries are padded."""
    from onboard.packing.checking import model_of, read_mapping
    from onboard.packing.data.rows import Wanted
    from onboard.packing.families import look_up
    from onboard.packing.settings import Settings

    settings, known = None, None
    if config is not None:
        mapping = read_mapping(config)
        settings = Settings.read(mapping)
        known = model_of(mapping, config.parent) if hf_model is None else None
    if hf_model is not None:
        known = look_up(hf_model)
    size = settings.pack_size if settings and settings.pack_size > 0 else None
    wanted = Wanted(
        given.pack_size or size,
        given.pad_multiple or (settings.pad_multiple if settings else None),
        given.pad_id if given.pad_id is not None else (known.eos_ids[0] if known and len(known.eos_ids) == 1 else None),
        given.vocab_size or (known.vocab_size if known else None),
    )
    return wanted, bool(settings and settings.pad_cu_seqlens)


def _show(output: Output, inspection: Inspection) -> None:
    payload = inspection.as_json()
    totals = inspection.totals
    stored = f"{totals.tokens} tokens, {totals.losses} of them in the loss"
    shape = (
        f"{payload['packing_factor']} a row, {totals.most_sequences} at most; the longest has "
        f"{totals.longest_sequence} tokens, all lengths are multiples of {totals.common_divisor}"
    )
    output.pairs(
        [
            ("files", f"{len(inspection.files)}, {inspection.files[0]}" + (" ..." if inspection.files[1:] else ""), ""),
            ("rows", f"{totals.rows}, {totals.rows_without_loss} without loss", "bold"),
            ("tokens", stored, ""),
            ("sequences", f"{totals.sequences}; {shape}", ""),
            ("pack size", f"{payload['pack_size']} ({payload['pack_size_from']})", ""),
            ("efficiency", f"{payload['efficiency']} %", "bold"),
            ("metadata", str(payload["metadata"]["path"] or "none"), ""),
        ]
    )
    if totals.measured_rows:
        output.line()
        output.table(_COLUMNS, _histogram(payload["fill"]))
    for found in inspection.findings:
        is_error = found.damage.severity == "error"
        output.line()
        output.line(f"{found.damage.id} {found.damage.severity}: {found.damage.what}", "bad" if is_error else "warn")
        more = ", ..." if found.count > len(found.rows) else ""
        rows = f"{', '.join(map(str, found.rows))}{more} ({plural(found.count, 'row')})" if found.rows else ""
        pairs = [
            ("  rows", rows, ""),
            ("  such as", "; ".join(found.examples), ""),
            ("  mend", found.damage.mend, "good"),
        ]
        output.pairs([pair for pair in pairs if pair[1]])
    if not inspection.findings:
        output.line()
        output.line("no damage found", "good")
    for remark in inspection.remarks:
        output.remark(remark)


def _histogram(bins: list[dict[str, int]]) -> list[tuple[str, str, str]]:
    most = max(max(item["rows"] for item in bins), 1)
    # ASCII, as every table here: a bar that is not empty has at least one mark.
    return [
        (f"{item['from']}-{item['to']} %", str(item["rows"]), "#" * -(-item["rows"] * _BAR // most)) for item in bins
    ]
