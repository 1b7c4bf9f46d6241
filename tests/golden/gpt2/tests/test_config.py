"""Contract: the published config.json is read without loss, and the real-size model has the reference's parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config
from transformers import GPT2LMHeadModel as HFGPT2LMHeadModel

from nemo_automodel_gpt2.model import GPT2ForCausalLM

PUBLISHED = json.loads((Path(__file__).parent / "config.json").read_text())
RESPELT = ["architectures"]  # bookkeeping, or checked by a test of its own


def published_config() -> GPT2Config:
    """The real model's config, as transformers reads the published file."""
    return GPT2Config.from_dict(dict(PUBLISHED))


def test_every_published_value_survives():
    """A key that the config class knows keeps the file's value; a silent default would change the model."""
    read = json.loads(published_config().to_json_string(use_diff=False))
    changed = {
        key: read[key]
        for key, value in PUBLISHED.items()
        if key in read and value is not None and read[key] != value and key not in RESPELT
    }
    assert changed == {}


def test_real_size_has_the_references_parameters(as_native):
    """The reference's parameters at full size, through the adapter, built on the meta device."""
    with torch.device("meta"):
        reference = HFGPT2LMHeadModel(published_config())
        native = GPT2ForCausalLM(published_config())
    expected = as_native(native, reference, dict(reference.named_parameters()))
    shapes = {name: tuple(parameter.shape) for name, parameter in native.named_parameters()}
    assert shapes == {name: tuple(expected[name].shape) for name in shapes}
    assert set(expected) <= set(native.state_dict())


def test_layer_kinds():
    """Which layer is of which kind, expanded from the file's pattern."""
    with torch.device("meta"):
        native = GPT2ForCausalLM(published_config())
    kinds = [layer.attention_type for layer in native.model.layers]
    assert kinds == ["full_attention"] * 12


def test_refuses_another_add_cross_attention(tiny_config):
    """The reference honours it; this class serves one value of it and must not ignore another."""
    tiny_config.add_cross_attention = True
    with pytest.raises(NotImplementedError, match="add_cross_attention"):
        GPT2ForCausalLM(tiny_config)


def test_refuses_another_n_inner(tiny_config):
    """The reference honours it; this class serves one value of it and must not ignore another."""
    tiny_config.n_inner = 3
    with pytest.raises(NotImplementedError, match="n_inner"):
        GPT2ForCausalLM(tiny_config)


def test_refuses_another_reorder_and_upcast_attn(tiny_config):
    """The reference honours it; this class serves one value of it and must not ignore another."""
    tiny_config.reorder_and_upcast_attn = True
    with pytest.raises(NotImplementedError, match="reorder_and_upcast_attn"):
        GPT2ForCausalLM(tiny_config)


def test_refuses_another_scale_attn_by_inverse_layer_idx(tiny_config):
    """The reference honours it; this class serves one value of it and must not ignore another."""
    tiny_config.scale_attn_by_inverse_layer_idx = True
    with pytest.raises(NotImplementedError, match="scale_attn_by_inverse_layer_idx"):
        GPT2ForCausalLM(tiny_config)


def test_refuses_another_scale_attn_weights(tiny_config):
    """The reference honours it; this class serves one value of it and must not ignore another."""
    tiny_config.scale_attn_weights = False
    with pytest.raises(NotImplementedError, match="scale_attn_weights"):
        GPT2ForCausalLM(tiny_config)
