"""``onboard inspect``: what a model is and how its code would look, without torch or transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onboard.errors import Unsupported
from onboard.packing.models import ModelPacking, model_packing
from onboard.pipeline.reading import published_tensors, read
from onboard.pipeline.referring import as_recognised, has_class, recognise_source
from onboard.spec.arch import ArchSpec
from onboard.spec.derive import derive
from onboard.spec.kind import Evidence
from onboard.spec.nearest import nearest
from onboard.spec.recognise import Recognised
from onboard.spec.show import show
from onboard.spec.static import fill_in, measured_architecture
from onboard.spec.validate import check_config


@dataclass(frozen=True)
class Inspection:
    """What ``onboard inspect`` shows."""

    source: Mapping[str, Any]
    source_label: str
    kind: str
    architecture: str | None
    model_type: str | None
    evidence: Sequence[Evidence]
    is_: str | None = None
    reason: str | None = None
    spec: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[tuple[str, str, str, str]] = ()
    nearest: Sequence[tuple[str, str]] = ()
    warnings: Sequence[str] = ()
    review: Sequence[Mapping[str, str]] = ()
    recognised: Recognised | None = None
    packing: ModelPacking | None = None

    @property
    def exit_status(self) -> int:
        """3 for what onboard does not write, else 0."""
        return 3 if self.kind == "unsupported" else 0

    def as_json(self) -> dict[str, Any]:
        """DESIGN's JSON of ``onboard inspect``."""
        evidence = [{"key": item.key, "value": item.value, "says": item.says} for item in self.evidence]
        common = {"schema_version": 1, "source": dict(self.source), "kind": self.kind}
        named = {"architecture": self.architecture, "model_type": self.model_type, "evidence": evidence}
        if self.kind == "unsupported":
            return {**common, "is": self.is_, "reason": self.reason, **named, "warnings": list(self.warnings)}
        found = self.recognised
        return {
            **common,
            **named,
            "recognised": found and {"architecture": found.architecture, "why": found.why},
            "unproven": [item.as_json() for item in found.unproven] if found else [],
            "spec": dict(self.spec),
            "packing": self.packing and self.packing.as_json(),
            "nearest": [{"architecture": name, "why": why} for name, why in self.nearest],
            "warnings": list(self.warnings),
            "review": [dict(item) for item in self.review],
        }


def inspect_source(given: str, *, revision: str | None) -> Inspection:
    """Say what a source is, and how its code would look.

    Raises:
        OnboardError: the source cannot be read, or has a name that the reference does not know.
    """
    source = read(given, revision=revision)
    kind, facts = source.kind, source.facts
    common: dict[str, Any] = {
        "source": facts.source.as_json(),
        "source_label": facts.source.id or facts.source.path or given,
        "kind": kind.kind,
        "architecture": kind.architecture,
        "model_type": kind.model_type,
        "evidence": kind.evidence,
        "packing": model_packing(facts.config, kind),
    }
    if kind.kind == "unsupported":
        return Inspection(**common, is_=kind.is_, reason=kind.reason, warnings=facts.warnings)
    if kind.kind != "dense":
        word = {"moe": "mixtures of experts", "vlm": "vision-language models"}[kind.kind]
        warning = f"this version describes dense decoders only; {word} are recognised, not yet written"
        return Inspection(**common, warnings=(*facts.warnings, warning))
    model_type, recognised = kind.model_type or "", None
    if not has_class(source):
        try:
            recognised = recognise_source(source)
        except Unsupported as error:
            return Inspection(**common, warnings=(*facts.warnings, f"{error.what} {error.why} {error.do}"))
        source = as_recognised(source, recognised)
        model_type, common = recognised.model_type, {**common, "recognised": recognised}
    measured = measured_architecture(model_type)
    if measured is None:
        warning = (
            f"the architecture {kind.architecture or kind.model_type} has not been measured; "
            "`onboard new` asks the reference where transformers has one"
        )
        return Inspection(**common, warnings=(*facts.warnings, warning))
    check_config(source.decoder)
    filled = fill_in(source.decoder, measured)
    spec = derive(source.decoder, source.architecture, source.model_type, filled)
    return Inspection(
        **common,
        spec=spec.as_json(),
        rows=_rows(spec),
        nearest=nearest(measured, model_type),
        warnings=facts.warnings,
        review=[
            {"what": item.what.rstrip("."), "do": item.do} for item in (*published_tensors(source, spec), *spec.review)
        ],
    )


def _rows(spec: ArchSpec) -> list[tuple[str, str, str, str]]:
    rows = []
    for path, value in spec.leaves():
        section, _, name = path.partition(".")
        if section == "checkpoint":
            continue
        # Fields at the spec's top level form a section of their own.
        rows.append((section if name else "model", name or section, show(value), str(spec.provenance[path])))
    return sorted(rows, key=lambda row: row[0] != "model")
