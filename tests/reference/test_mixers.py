"""Mixers of transformers in native layers: how they are built and called, and what makes them impossible to reuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from onboard.reference.probe import probe
from onboard.reference.roles import Unexplained, attention_layers
from onboard.spec.derive import derive
from transformers import BambaConfig, FalconH1Config, Lfm2Config, LlamaConfig, Mamba2Config
from transformers.models.bamba import modeling_bamba as bamba

RAW: dict[str, Any] = {
    "architectures": ["BambaForCausalLM"],
    "model_type": "bamba",
    "num_hidden_layers": 6,
    "attn_layer_indices": [2, 5],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_d_head": 16,
    "mamba_n_heads": 8,
    "mamba_d_state": 8,
    "vocab_size": 300,
}


def measure() -> dict[str, Any]:
    return probe("BambaForCausalLM", "bamba", RAW)


def test_the_layers_with_an_attention() -> None:
    """Transformers' cache says which layers keep keys and values, and which a state."""
    assert attention_layers(LlamaConfig(num_hidden_layers=3), 3) == (0, 1, 2)
    assert attention_layers(BambaConfig(num_hidden_layers=4, attn_layer_indices=[1, 3]), 4) == (1, 3)
    assert attention_layers(Lfm2Config(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]), 3) == (1,)
    with pytest.raises(Unexplained, match="keys and values of its own alone"):
        attention_layers(Mamba2Config(num_hidden_layers=2), 2)
    with pytest.raises(Unexplained, match="keys and values of its own alone"):
        attention_layers(FalconH1Config(num_hidden_layers=2), 2)


def test_what_is_measured() -> None:
    found = measure()
    mixer = found["mixer"]
    assert (mixer["name"], mixer["class"], mixer["kind"]) == ("mamba", "BambaMixer", "linear_attention")
    assert mixer["arguments"] == {"config": "config", "layer_idx": "layer_idx"}
    assert mixer["call"] == {
        "hidden_states": "hidden_states",
        "cache_params": "past_key_values",
        "attention_mask": "attention_mask",
    }
    assert mixer["layers"] == 'config.layer_types[layer_idx] == "linear_attention"'
    assert {"mamba_d_state", "mamba_n_heads"} <= set(mixer["reads"])
    assert "num_key_value_heads" not in mixer["reads"]
    assert found["attention"]["rotary"] == "half"
    assert found["mlp"]["gated"]


def test_the_spec() -> None:
    """Each tensor is expected in the layers that have it; fields that the mixer reads are served."""
    found = {**measure(), "origin": "tiny reference"}
    spec = derive(RAW, "BambaForCausalLM", "bamba", found)
    assert spec.layer_kinds == ("linear_attention", "linear_attention", "full_attention") * 2
    layers = {row.native[0].split(".")[3]: row.layers for row in spec.checkpoint.rows if "{layer}" in row.disk}
    assert layers["mamba"] == 'config.layer_types[layer_idx] == "linear_attention"'
    assert layers["self_attn"] == 'config.layer_types[layer_idx] != "linear_attention"'
    assert layers["mlp"] == layers["input_layernorm"] == ""
    assert not [field.key for field in spec.fixed if field.key.startswith("mamba")]
    switched = [row for row in spec.checkpoint.rows if row.only_if == "attention_bias"]
    assert len(switched) == 4


def test_a_mixer_that_is_given_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, call = bamba.BambaMixer.forward, bamba.BambaMixer.__call__

    def with_factor(
        self: Any, hidden_states: Any, cache_params: Any = None, attention_mask: Any = None, factor: Any = None
    ) -> Any:
        return forward(self, hidden_states, cache_params, attention_mask)

    def give(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(self, *args, factor=torch.ones(2), **kwargs)

    monkeypatch.setattr(bamba.BambaMixer, "forward", with_factor)
    monkeypatch.setattr(bamba.BambaMixer, "__call__", give)
    with pytest.raises(Unexplained, match="is given factor"):
        measure()


def test_a_mixer_that_is_built_from_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    build, build_layer = bamba.BambaMixer.__init__, bamba.BambaDecoderLayer.__init__

    def with_name(self: Any, config: Any, layer_idx: int, name: str = "") -> None:
        build(self, config, layer_idx)

    def named(self: Any, config: Any, layer_idx: int, layer_type: str) -> None:
        build_layer(self, config, layer_idx, layer_type)
        if hasattr(self, "mamba"):
            self.mamba = bamba.BambaMixer(config, layer_idx, name="here")

    monkeypatch.setattr(bamba.BambaMixer, "__init__", with_name)
    monkeypatch.setattr(bamba.BambaDecoderLayer, "__init__", named)
    with pytest.raises(Unexplained, match="its constructor is given name, a str"):
        measure()


def test_a_mixer_that_another_module_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set from outside is lost when it is built by itself; the numbers show it."""
    build = bamba.BambaDecoderLayer.__init__

    def changed(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        if hasattr(self, "mamba"):
            self.mamba.time_step_limit = (0.5, 0.6)

    monkeypatch.setattr(bamba.BambaDecoderLayer, "__init__", changed)
    with pytest.raises(Unexplained, match="something else when it is built by itself"):
        measure()


def test_a_mixer_of_remote_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bamba.BambaMixer, "__module__", "modeling_of_their_own")
    with pytest.raises(Unexplained, match="no module of transformers"):
        measure()
