"""Switches for biases: those of projections are tensors, which a header shows; ALiBi and position biases are none."""

from __future__ import annotations

import pytest
from onboard.errors import Unsupported
from onboard.facts._facts import TensorHeader
from onboard.spec.recognise import recognise

CONFIG = {
    "architectures": ["CloneForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 640,
}
LLAMA = {
    "model.embed_tokens": (640, 64),
    "model.norm": (64,),
    "lm_head": (640, 64),
    "model.layers.0.input_layernorm": (64,),
    "model.layers.0.post_attention_layernorm": (64,),
    "model.layers.0.self_attn.q_proj": (64, 64),
    "model.layers.0.self_attn.k_proj": (32, 64),
    "model.layers.0.self_attn.v_proj": (32, 64),
    "model.layers.0.self_attn.o_proj": (64, 64),
    "model.layers.0.mlp.gate_proj": (96, 64),
    "model.layers.0.mlp.up_proj": (96, 64),
    "model.layers.0.mlp.down_proj": (64, 96),
}


def header(biases=""):
    """A llama's tensors, with biases of these projections."""
    shapes = {f"{name}.weight": shape for name, shape in LLAMA.items()}
    shapes |= {
        f"model.layers.0.self_attn.{p}_proj.bias": LLAMA[f"model.layers.0.self_attn.{p}_proj"][:1] for p in biases
    }
    return [TensorHeader(name, "BF16", shape, "model.safetensors") for name, shape in shapes.items()]


def taken_for(tensors, **keys):
    return recognise({**CONFIG, **keys}, "CloneForCausalLM", tensors, None if tensors else "none given").architecture


@pytest.mark.parametrize("seen", [True, False], ids=["header", "config alone"])
@pytest.mark.parametrize(
    "key", ["alibi_bias", "use_alibi_bias", "position_bias", "relative_attention_bias", "logit_bias"]
)
def test_a_bias_without_a_tensor_is_no_projections(key, seen):
    """No tensor shows it, and it changes every logit."""
    with pytest.raises(Unsupported) as refusal:
        taken_for(header() if seen else None, **{key: True})
    assert refusal.value.code == "unsupported.no_reference"
    if seen:
        assert key in refusal.value.why


def test_such_a_bias_that_is_off_is_listed():
    found = recognise({**CONFIG, "alibi_bias": False}, "CloneForCausalLM", header(), None)
    assert found.architecture == "LlamaForCausalLM"
    assert any("alibi_bias=False" in item.what for item in found.unproven)


@pytest.mark.parametrize("key", ["bias", "use_bias", "qkv_bias", "attn_out_bias", "add_bias_linear"])
def test_biases_that_the_file_has_and_the_checkpoint_has_not(key):
    with pytest.raises(Unsupported) as refusal:
        taken_for(header(), **{key: True})
    assert key in refusal.value.why


@pytest.mark.parametrize(
    ("biases", "keys", "expected"),
    [
        ("", {}, "LlamaForCausalLM"),
        ("", {"bias": False}, "LlamaForCausalLM"),
        ("", {"no_bias": True}, "LlamaForCausalLM"),
        ("qkv", {}, "Qwen2ForCausalLM"),
        ("qkv", {"qkv_bias": True}, "Qwen2ForCausalLM"),
        ("qkv", {"no_bias": True}, "Qwen2ForCausalLM"),  # Qwen's first: none but those of q, k and v
        ("qkvo", {"bias": True}, "LlamaForCausalLM"),  # InternLM's first
    ],
)
def test_otherwise_the_tensors_decide(biases, keys, expected):
    assert taken_for(header(biases), **keys) == expected


@pytest.mark.parametrize(
    ("keys", "expected"), [({"bias": False}, "LlamaForCausalLM"), ({"no_bias": True}, "LlamaForCausalLM")]
)
def test_without_a_checkpoint_the_file_decides(keys, expected):
    assert taken_for(None, **keys) == expected


def test_without_a_checkpoint_bias_alone_does_not_say_which():
    with pytest.raises(Unsupported):
        taken_for(None, bias=True)
