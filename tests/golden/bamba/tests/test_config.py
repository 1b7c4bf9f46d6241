"""Contract: the published config.json is read without loss, and the real-size model has the reference's parameters."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import BambaConfig
from transformers import BambaForCausalLM as HFBambaForCausalLM

from nemo_automodel_bamba.model import BambaForCausalLM
from nemo_automodel_bamba.state_dict_adapter import KEY_MAP

PUBLISHED = json.loads((Path(__file__).parent / "config.json").read_text())
RESPELT = ["architectures", "transformers_version"]  # bookkeeping


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


def test_real_size_has_the_references_tensors(to_native_name):
    """Same names and shapes as the reference at full size, built on the meta device."""
    with torch.device("meta"):
        reference = HFBambaForCausalLM(published_config())
        native = BambaForCausalLM(published_config())
    expected = {to_native_name(name): tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
    assert {name: tuple(tensor.shape) for name, tensor in native.state_dict().items()} == expected


def test_real_size_is_covered_by_the_key_map():
    """A row for every tensor of the full-size model, and no two of them with one name on disk."""
    with torch.device("meta"):
        native = BambaForCausalLM(published_config())
    adapter = native.state_dict_adapter
    exported = adapter.to_hf(native.state_dict())
    assert len(exported) == len(native.state_dict().keys() - adapter.shared.keys())
    shapes = {f"[{', '.join(map(str, tensor.shape))}]" for tensor in exported.values()}
    assert {row.shape for row in KEY_MAP if row.shape} <= shapes
