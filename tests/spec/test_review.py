"""What the review says of a config.json from which transformers cannot build the real model."""

from __future__ import annotations

from typing import Any

import pytest
from onboard.spec.review import not_built


def found(real: dict[str, Any], tiny: dict[str, Any]) -> dict[str, Any]:
    return {"reference_class": "NewForCausalLM", "real": {"values": {}, "error": "KeyError: 'x'", **real}, "tiny": tiny}


@pytest.mark.parametrize(
    ("real", "tiny", "said"),
    [
        ({}, {"head_dim": 16}, "the missing values are filled in"),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            {"rope_parameters": {"rope_type": "longrope", "factor": 1.0}},
            "the missing values (rope_parameters.factor) are filled in",
        ),
        (
            {"values": {"first_k_dense_replace": 0}},
            {"first_k_dense_replace": 3},
            "all layers are dense, in spite of first_k_dense_replace=0",
        ),
        ({"values": {"first_k_dense_replace": 3}}, {"first_k_dense_replace": 3}, "the missing values are filled in"),
    ],
)
def test_what_the_proof_assumes(real: dict[str, Any], tiny: dict[str, Any], said: str) -> None:
    (item,) = not_built(found(real, tiny))
    assert "cannot build NewForCausalLM from this config.json: KeyError: 'x'" in item.what
    assert said in item.do


def test_nothing_where_it_is_built() -> None:
    assert not_built(found({"error": None}, {})) == []
