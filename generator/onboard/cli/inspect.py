"""``onboard inspect``: what onboard understands of a model, and how it knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from onboard.cli._group import State, complete_path, declare_command
from onboard.cli._output import Column, Output
from onboard.cli._text import printable, sentence
from onboard.errors import Unsupported

if TYPE_CHECKING:
    from onboard.pipeline.inspecting import Inspection

_COLUMNS = (Column("field", widest=36), Column("value"), Column("from", style="dim"))
_NAME_LIMIT = 100
_WRITABLE = "onboard writes dense decoder language models; give it the id of one of these"


@declare_command(
    "inspect",
    examples=(
        "onboard inspect Qwen/Qwen3-0.6B",
        "onboard inspect ./my-model/config.json",
        "onboard inspect Qwen/Qwen3-0.6B --revision main --json | jq .spec",
    ),
)
@click.argument("source", shell_complete=complete_path)
@click.option("--revision", metavar="REV", help="Branch, tag or commit of a model on the Hub.")
def command(state: State, source: str, revision: str | None) -> int:
    """Show what a model is, and how onboard knows.

    Kind, architecture, and where each field came from. Reads config.json and the checkpoint's headers; downloads
    no weights and runs none of the model's code. Exits 3, with the reason, for what is no decoder; mixtures of
    experts and vision-language models are recognised, and not written yet.
    """
    from onboard.pipeline.inspecting import inspect_source

    inspection = inspect_source(source, revision=revision)
    output = state.output
    payload = inspection.as_json()
    output.json(payload)
    _show(output, inspection, payload)
    if inspection.exit_status:
        output.error(_unsupported(inspection, payload))
    return inspection.exit_status


def _show(output: Output, inspection: Inspection, payload: dict[str, Any]) -> None:
    model_type = f" ({printable(inspection.model_type, _NAME_LIMIT)})" if inspection.model_type else ""
    nearest = "; ".join(f"{name} ({why})" if why else name for name, why in inspection.nearest)
    found = payload.get("recognised")
    header = (
        ("source", printable(inspection.source_label, _NAME_LIMIT), "bold"),
        ("kind", inspection.kind, "warn" if inspection.exit_status else "good"),
        ("architecture", f"{printable(inspection.architecture or 'not named', _NAME_LIMIT)}{model_type}", ""),
        ("recognised", f"{found['architecture']}: {printable(found['why'])}" if found else "", "warn"),
        ("nearest", nearest, ""),
        ("packing", printable(inspection.packing.line) if inspection.packing else "", ""),
    )
    output.pairs([row for row in header if row[1]])
    rows = _by_section(inspection.rows)
    if rows:
        output.line()
        output.table(_COLUMNS, rows)
    output.bullets("evidence", [_evidence(item) for item in inspection.evidence])
    unproven = [f"{item['what']} {item['do']}" for item in payload.get("unproven") or ()]
    output.bullets("unproven", [sentence(item) for item in unproven], style="warn", numbered=True)
    output.bullets("warnings", [sentence(item) for item in inspection.warnings], style="warn")
    output.bullets("to review", [sentence(item) for item in payload.get("review") or ()], style="warn", numbered=True)


def _by_section(rows: Any) -> list[Any]:
    sections: dict[str, list[tuple[str, str, str]]] = {}
    for section, field, value, provenance in rows:
        sections.setdefault(section, []).append((f"  {printable(field)}", value, provenance))
    return [row for section, fields in sections.items() for row in (section, *fields)]


def _evidence(item: Any) -> str:
    value = printable(item.value, 60)
    key = printable(item.key, 60)
    return f"{key} = {value}: {item.says}" if value else f"{key}: {item.says}"


def _unsupported(inspection: Inspection, payload: dict[str, Any]) -> Unsupported:
    is_ = f": it is {inspection.is_}" if inspection.is_ else ""
    return Unsupported(
        f"{printable(inspection.source_label, _NAME_LIMIT)} is not supported{is_}",
        inspection.reason or "no reason was found",
        payload.get("do") or _WRITABLE,
        is_=inspection.is_,
    )
