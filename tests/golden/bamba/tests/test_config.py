"""Contract: the published config.json is read without loss, and the real-size model has the reference's parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import BambaConfig
from transformers import BambaForCausalLM as HFBambaForCausalLM

from nemo_automodel_bamba.model import BambaForCausalLM

PUBLISHED = json.loads((Path(__file__).parent / "config.json").read_text())
RESPELT = ["architectures", "transformers_version"]  # bookkeeping, or checked by a test of its own


def published_config() -> BambaConfig:
    """The real model's config, as transformers reads the published file."""
    return BambaConfig.from_dict(dict(PUBLISHED))


def test_every_published_value_survives():
    """A key that the config class knows keeps the file's value; a silent default would change the model."""
    read = json.loads(published_config().to_json_string(use_diff=False))
    changed = {
        key: read[key]
        for key, value in PUBLISHED.items()
        if key in read and value is not None and read[key] != value and key not in RESPELT
    }
    assert changed == {}


def test_rope_parameters_are_those_of_the_file():
    """Older files spell them otherwise; the config class must not fall back to a default."""
    assert published_config().rope_parameters == {
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "rope_type": "default",
    }


def test_real_size_has_the_references_parameters(as_native):
    """The reference's parameters at full size, through the adapter, built on the meta device."""
    with torch.device("meta"):
        reference = HFBambaForCausalLM(published_config())
        native = BambaForCausalLM(published_config())
    expected = as_native(native, reference, dict(reference.named_parameters()))
    shapes = {name: tuple(parameter.shape) for name, parameter in native.named_parameters()}
    assert shapes == {name: tuple(expected[name].shape) for name in shapes}
    assert set(expected) <= set(native.state_dict())


def test_layer_kinds():
    """Which layer is of which kind, expanded from the file's pattern."""
    with torch.device("meta"):
        native = BambaForCausalLM(published_config())
    kinds = [layer.attention_type for layer in native.model.layers]
    assert kinds == [
        "linear_attention",
        "linear_attention",
        "linear_attention",
        "linear_attention",
        "linear_attention",
        "linear_attention",
        "linear_attention",
        "linear_attention",
        "linear_attention",
        "full_attention",
        "linear_attention",
        "linear_attention",
        "linear_attention",
        "linear_attention",
        "linear_attention",
        "linear_attention",
        "linear_attention",
        "linear_attention",
        "full_attention",
        "linear_attention",
        "linear_attention",
        "linear_attention",
        "linear_attention",
        "linear_attention",
        "linear_attention",
        "linear_attention",
        "linear_attention",
        "full_attention",
        "linear_attention",
        "linear_attention",
        "linear_attention",
        "linear_attention",
    ]


def test_refuses_a_rotation_that_is_not_served(tiny_config):
    """An unknown scaling must not silently become the default one."""
    tiny_config.rope_parameters["rope_type"] = "unheard_of"
    with pytest.raises(NotImplementedError, match="unheard_of"):
        BambaForCausalLM(tiny_config)
