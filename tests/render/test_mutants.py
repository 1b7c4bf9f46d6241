"""A mistake is planted where the tiny model can show it, and only there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from onboard.render.mutants import mutants
from onboard.spec.derive import derive
from onboard.spec.static import fill_in, measured_architecture

EXAMPLES = Path(__file__).parents[2] / "examples"
LONG, SHORT = [4.0, 2.0], [2.0, 1.0]


def planted(example: str, rope_parameters: dict[str, Any]) -> set[str]:
    """Names of the mutants of an example whose tiny config has these rotary parameters."""
    raw = json.loads((EXAMPLES / example / "config.json").read_text(encoding="utf-8"))
    measured = fill_in(raw, measured_architecture(raw["model_type"]))
    spec = derive(raw, raw["architectures"][0], raw["model_type"], measured)
    return {mutant.name for mutant in mutants(spec, {**measured["tiny"], "rope_parameters": rope_parameters}, {})}


@pytest.mark.parametrize(
    ("factors", "shows"),
    [
        ({"long_factor": LONG, "short_factor": SHORT}, True),
        ({"long_factor": LONG, "short_factor": LONG}, False),
        ({}, False),
    ],
)
def test_factors_are_exchanged_where_they_differ(factors: dict[str, Any], shows: bool) -> None:
    names = planted("phi-4-mini", {"rope_type": "longrope", "rope_theta": 1e4, **factors})
    assert ("long and short factors exchanged" in names) is shows
    assert "rope scaling ignored" in names


def test_parameters_are_exchanged_where_the_layer_types_differ() -> None:
    plain, wide = ({"rope_type": "default", "rope_theta": theta} for theta in (1e4, 1e6))
    name = "rope parameters of the layer types exchanged"
    assert name in planted("gemma-3-1b", {"full_attention": wide, "sliding_attention": plain})
    assert name not in planted("gemma-3-1b", {"full_attention": plain, "sliding_attention": dict(plain)})
