"""What transformers reads from a config.json is checked before anything is built from it."""

from __future__ import annotations

from typing import Any

import pytest
from onboard.errors import OnboardError
from onboard.reference.checks import check_values
from onboard.reference.meanings import read, size, spelling
from transformers import CONFIG_MAPPING, PretrainedConfig


def config(model_type: str, **fields: Any) -> PretrainedConfig:
    """A default config, with attributes that its class would refuse or compute."""
    made = CONFIG_MAPPING[model_type](num_hidden_layers=4)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("kind", ["linear_attention", "mamba", "conv", "recurrent", "kind_7"])
def test_any_word_may_name_a_kind_of_layer(kind: str) -> None:
    check_values(config("qwen3", layer_types=["full_attention", kind] * 2))


@pytest.mark.parametrize(
    "kind",
    ["", "a b", "a'); evil(('", "a\nb", "{{ x }}", "../a", "\uff41ttention", "a" * 65, "1a"],
)
def test_what_is_no_word_does_not(kind: str) -> None:
    with pytest.raises(OnboardError, match="layer_types"):
        check_values(config("qwen3", layer_types=["full_attention", kind] * 2))


def test_a_kind_for_each_layer() -> None:
    with pytest.raises(OnboardError, match="layer_types"):
        check_values(config("qwen3", layer_types=["full_attention"] * 3))


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("qwen3", {"num_attention_heads": 7}),
        ("mamba", {"hidden_size": 0}),
        ("gpt2", {"n_embd": 100}),
        ("gpt2", {"n_inner": -1}),
        ("gemma3n_text", {"intermediate_size": [64, 64, 64, -1]}),
        ("falcon", {"num_kv_heads": 3}),
    ],
)
def test_sizes_in_every_spelling(model_type: str, fields: dict[str, Any]) -> None:
    made = CONFIG_MAPPING[model_type]()
    check_values(made)
    for name, value in fields.items():
        setattr(made, name, value)
    with pytest.raises(OnboardError):
        check_values(made)


@pytest.mark.parametrize(
    ("model_type", "name", "key", "value"),
    [
        ("gpt2", "hidden_size", "n_embd", 768),
        ("gpt2", "intermediate_size", "n_inner", None),
        ("ctrl", "intermediate_size", "dff", 8192),
        ("xlnet", "head_dim", "d_head", 64),
        ("xlnet", "max_position_embeddings", None, None),
        ("falcon", "head_dim", None, 64),
        ("mamba", "num_attention_heads", None, None),
        ("gemma4_text", "head_dim", "head_dim", 256),
        ("recurrent_gemma", "sliding_window", "attention_window_size", 2048),
        ("gpt_neo", "sliding_window", "window_size", 256),
    ],
)
def test_what_a_field_means(model_type: str, name: str, key: str | None, value: Any) -> None:
    made = CONFIG_MAPPING[model_type]()
    assert spelling(made, name) == key
    assert size(made, name) == value


def test_a_model_of_several_stacks_has_its_sizes_in_each() -> None:
    made = CONFIG_MAPPING["blt"]()
    check_values(made)
    made.global_config.hidden_size = 0
    with pytest.raises(OnboardError, match="hidden_size"):
        check_values(made)


def test_a_stack_without_a_depth_leaves_the_size_unknown() -> None:
    made = CONFIG_MAPPING["blt"]()
    for name in ("patcher_config", "encoder_config", "decoder_config", "global_config"):
        setattr(made, name, None)
    with pytest.raises(OnboardError, match="hidden_size"):
        check_values(made)


def test_a_key_that_the_class_does_not_know_is_no_size() -> None:
    made = CONFIG_MAPPING["mamba"](num_attention_heads=3, intermediate_size=5)
    assert read(made, "num_attention_heads") == 3
    assert size(made, "num_attention_heads") is None
    assert size(made, "intermediate_size") is None
