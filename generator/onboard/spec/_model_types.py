"""The table of model types: asked only where no property of a config decides.

``model_types.json`` is written by ``scripts/make_model_type_table.py`` from the auto classes of transformers, with a
few model types from the Hub whose configs show no trace of what they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from onboard.spec._signs import Evidence


@dataclass(frozen=True, slots=True)
class Listed:
    """What the table says of a model type.

    Attributes:
        group: ``"decoder"``, ``"image-text"``, ``"encoder-decoder"``, ``"encoder"``, ``"audio"``, ``"vision"``, ...
        from_hub: it is one of those whose configs show no trace of what they are.
        evidence: the model type, with what the table says of it.
    """

    group: str
    from_hub: bool
    evidence: Evidence


@lru_cache(maxsize=1)
def _table() -> tuple[Mapping[str, str], Mapping[str, str], str]:
    data = json.loads(Path(__file__).with_name("model_types.json").read_text(encoding="utf-8"))
    types = {name: group for group, names in data["model_types"].items() for name in names}
    return types, data["seen_on_the_hub"], data["made_from"]


def listed_as(model_type: str | None) -> Listed | None:
    """What the table says of a model type, or None where it does not have it."""
    if model_type is None:
        return None
    types, hub, source = _table()
    group = hub.get(model_type) or types.get(model_type)
    if group is None:
        return None
    where = "the model types seen on the Hub" if model_type in hub else f"the auto classes of {source}"
    says = f"is among {where} as {group}; no key of the config decides"
    return Listed(group, model_type in hub, Evidence("model_type", model_type, says))
