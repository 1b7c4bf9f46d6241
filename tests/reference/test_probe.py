"""The whole measurement, with alternatives planted in transformers' modules: found where served, else refused."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from onboard.reference.probe import answer, probe
from onboard.reference.roles import Unexplained
from torch import nn
from transformers.models.llama import modeling_llama as llama

from .toys import LLAMA

RAW: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **LLAMA, "hidden_act": "gelu"}


def measure(**keys: Any) -> dict[str, Any]:
    return probe("LlamaForCausalLM", "llama", {**RAW, **keys})


def test_as_it_is() -> None:
    found = measure()
    assert json.loads(json.dumps(found)) == found
    assert found["norm"]["offset"] == 0.0
    assert found["mlp"]["activation"] == "gelu"
    assert found["attention"]["window_key"] is None
    assert set(found["rope"]["served"]) == {"linear", "llama3", "yarn"}
    assert found["tied_leaves_out"] == ["lm_head.weight"]


def test_offset_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = llama.LlamaRMSNorm.forward

    def offset(self: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) + forward(self, x) / self.weight

    monkeypatch.setattr(llama.LlamaRMSNorm, "forward", offset)
    assert measure()["norm"]["offset"] == 1.0


def test_gate_and_up_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))

    monkeypatch.setattr(llama.LlamaMLP, "forward", forward)
    native = {row["reference"].rpartition(".")[2]: row["native"][0].rpartition(".")[2] for row in measure()["modules"]}
    assert (native["gate_proj"], native["up_proj"]) == ("up_proj", "gate_proj")


def unrotated(q: torch.Tensor, k: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q, k


def interleaved(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any) -> Any:
    def turn(x: torch.Tensor) -> torch.Tensor:
        c, s = (part[..., : part.shape[-1] // 2].repeat_interleave(2, -1).unsqueeze(1) for part in (cos, sin))
        return x * c + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * s

    return turn(q), turn(k)


def test_other_rotations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", interleaved)
    assert measure()["attention"]["rotary"] == "interleaved"
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", unrotated)
    found = measure()
    assert (found["attention"]["rotary"], found["rope"]) == (None, None)


def test_rotation_on_some_layers_without_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three layers does not rotate."""
    original, calls = llama.apply_rotary_pos_emb, itertools.count()

    def planted(*args: Any, **kwargs: Any) -> Any:
        return (unrotated if next(calls) % LLAMA["num_hidden_layers"] == 1 else original)(*args, **kwargs)

    monkeypatch.setattr(llama, "apply_rotary_pos_emb", planted)
    with pytest.raises(Unexplained) as caught:
        measure()
    assert caught.value.part == "rope"


def test_an_mlp_that_differs_in_a_later_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    init = llama.LlamaDecoderLayer.__init__

    def planted(self: Any, config: Any, layer_idx: int) -> None:
        init(self, config, layer_idx)
        if layer_idx == 1:
            self.mlp.act_fn = nn.SiLU()

    monkeypatch.setattr(llama.LlamaDecoderLayer, "__init__", planted)
    with pytest.raises(Unexplained) as caught:
        measure()
    assert caught.value.part == "mlp"


def test_a_norm_that_differs_in_a_later_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    init = llama.LlamaDecoderLayer.__init__

    def planted(self: Any, config: Any, layer_idx: int) -> None:
        init(self, config, layer_idx)
        if layer_idx == 2:
            self.input_layernorm.variance_epsilon = 0.1

    monkeypatch.setattr(llama.LlamaDecoderLayer, "__init__", planted)
    with pytest.raises(Unexplained) as caught:
        measure()
    assert caught.value.part == "norm"
    assert any("layers.2.input_layernorm" in line for line in caught.value.nearest)


def test_a_scaled_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = llama.LlamaDecoderLayer.forward

    def planted(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return layer(self, hidden_states, **kwargs) + 0.1 * hidden_states

    monkeypatch.setattr(llama.LlamaDecoderLayer, "forward", planted)
    with pytest.raises(Unexplained) as caught:
        measure()
    assert caught.value.part == "block"


@pytest.mark.parametrize(
    ("request_", "error", "part"),
    [
        ({"architecture": "NoSuchForCausalLM", "model_type": None, "config": RAW}, "no_class", None),
        (
            {"architecture": "RwkvForCausalLM", "model_type": "rwkv", "config": {"model_type": "rwkv"}},
            "unexplained",
            "block",
        ),
        (
            {"architecture": "LlamaForCausalLM", "model_type": "llama", "config": {**RAW, "num_key_value_heads": 3}},
            "refused",
            None,
        ),
    ],
)
def test_an_answer_is_json_also_where_it_is_an_error(request_: dict[str, Any], error: str, part: str | None) -> None:
    found = json.loads(answer(request_))
    assert found["error"] == error
    if part:
        assert found["part"]
