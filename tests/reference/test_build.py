"""Which class is the reference, and what its checkpoint looks like on disk."""

from __future__ import annotations

import pytest
import torch
import transformers
from onboard.reference.build import NoReference, build, disk_tensors, find_class, randomise, read_config
from safetensors import safe_open

from .toys import LLAMA, tiny


@pytest.mark.parametrize(
    ("architecture", "model_type", "name"),
    [
        ("LlamaForCausalLM", "llama", "LlamaForCausalLM"),
        ("LLaMAForCausalLM", "llama", "LlamaForCausalLM"),
        ("MyOwnForCausalLM", "qwen3", "Qwen3ForCausalLM"),
        ("Qwen3ForCausalLM", None, "Qwen3ForCausalLM"),
        ("Qwen3ForCausalLM", "unheard_of", "Qwen3ForCausalLM"),
    ],
)
def test_by_name_then_by_model_type(architecture: str, model_type: str | None, name: str) -> None:
    assert find_class(architecture, model_type) is getattr(transformers, name)


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [
        ("NoSuchForCausalLM", None),
        ("NoSuchForCausalLM", "no_such"),
        ("AutoModelForCausalLM", None),
        ("PreTrainedModel", None),
        ("LlamaConfig", None),
        ("logging", None),
        ("__version__", None),
        ("", ""),
    ],
)
def test_nothing_else_is_a_reference(architecture: str, model_type: str | None) -> None:
    with pytest.raises(NoReference, match=transformers.__version__):
        find_class(architecture, model_type)


def test_a_config_that_the_class_refuses() -> None:
    with pytest.raises(NoReference, match="LlamaConfig refuses"):
        read_config(transformers.LlamaForCausalLM, {"hidden_size": "forty", "num_attention_heads": []})


def test_keys_that_are_no_data_do_not_reach_the_class() -> None:
    raw = {
        "hidden_size": 64,
        "auto_map": {"AutoConfig": "x.Y"},
        "attn_implementation": "other/kernel",
        "_name_or_path": "a",
    }
    config = read_config(transformers.LlamaForCausalLM, {**raw, "quantization_config": {"quant_method": "fp8"}})
    assert config.hidden_size == 64
    assert not {"auto_map", "quantization_config"} & set(vars(config))


def test_weights_are_random_everywhere() -> None:
    model = tiny(attention_bias=True, mlp_bias=True)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.std() > 0.1, name
        assert not (parameter == 0).any(), name
        assert not (parameter == 1).any(), name
    assert not model.training


def test_same_names_same_weights() -> None:
    first, second = tiny(), tiny()
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    randomise(second, seed=1)
    assert not torch.equal(first.lm_head.weight, second.lm_head.weight)


@pytest.mark.parametrize("tied", [False, True])
def test_names_and_shapes_on_disk(tied: bool, tmp_path) -> None:
    model = build(transformers.Phi3ForCausalLM, {**LLAMA, "pad_token_id": 0, "tie_word_embeddings": tied})
    tensors = disk_tensors(model, tmp_path)
    assert ("lm_head.weight" in tensors) is not tied
    assert tensors["model.layers.2.self_attn.qkv_proj.weight"] == [128, 40]
    assert tensors["model.layers.0.mlp.gate_up_proj.weight"] == [144, 40]
    assert tensors["model.norm.weight"] == [40]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(tensors)
