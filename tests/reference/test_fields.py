"""A field is live where the reference's output or parameters follow it, and only then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from onboard.reference.fields import live_fields
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from .toys import LLAMA, ids

FIELDS: dict[str, Any] = {
    **LLAMA,
    "attention_bias": False,
    "mlp_bias": True,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-5,
    "pretraining_tp": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def live(name: str = "LlamaForCausalLM", **fields: Any) -> dict[str, dict[str, Any]]:
    return live_fields(getattr(transformers, name), {**FIELDS, **fields}, ids())


def test_a_llama() -> None:
    found = live()
    assert set(found) == {"attention_bias", "mlp_bias", "attention_dropout", "rms_norm_eps"}
    assert {name: entry["effect"] for name, entry in found.items()} == {
        "attention_bias": "parameters",
        "mlp_bias": "parameters",
        "attention_dropout": "training",
        "rms_norm_eps": "logits",
    }
    layers = range(LLAMA["num_hidden_layers"])
    names = {f"model.layers.{index}.self_attn.{part}_proj.bias" for index in layers for part in "qkvo"}
    assert (set(found["attention_bias"]["added"]), found["attention_bias"]["removed"]) == (names, [])
    gone = {f"model.layers.{index}.mlp.{part}_proj.bias" for index in layers for part in ("gate", "up", "down")}
    assert (found["mlp_bias"]["added"], set(found["mlp_bias"]["removed"])) == ([], gone)


@pytest.mark.parametrize("value", [None, 3.0])
def test_a_soft_cap(value: float | None) -> None:
    own = {"layer_types": ["full_attention"] * 3, "query_pre_attn_scalar": 24, "attn_logit_softcapping": None}
    found = live("Gemma3ForCausalLM", final_logit_softcapping=value, **own)
    assert found["final_logit_softcapping"]["effect"] == "logits"
    assert found["query_pre_attn_scalar"]["effect"] == "logits"


@pytest.mark.parametrize(
    "key", ["residual_multiplier", "embedding_multiplier", "logits_scaling", "attention_multiplier"]
)
def test_multipliers(key: str) -> None:
    found = live("GraniteForCausalLM", **{key: 1.0})
    assert found[key] == {"effect": "logits", "added": [], "removed": [], "other": 1.5}


def test_dropouts_act_in_training_only() -> None:
    found = live("Phi3ForCausalLM", pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0)
    assert found["resid_pdrop"]["effect"] == found["attention_dropout"]["effect"] == "training"
    assert "embd_pdrop" not in found, "declared and never read"


def test_a_field_that_only_a_patched_module_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module decides, not a list of names."""
    forward = LlamaMLP.forward

    def scaled(self: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) * self.config.pretraining_tp

    monkeypatch.setattr(LlamaMLP, "forward", scaled)
    assert live()["pretraining_tp"]["effect"] == "logits"


def test_a_dead_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.functional, "dropout", lambda x, *_, **__: x)
    assert "attention_dropout" not in live()


def test_a_field_that_takes_no_other_value_is_named() -> None:
    class Strict(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            if config.pretraining_tp != 1:
                raise ValueError("no")
            super().__init__(config)

    assert live_fields(Strict, FIELDS, ids())["pretraining_tp"]["effect"] == "unvaried"
