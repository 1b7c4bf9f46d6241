"""A model without a class in transformers is recognised by its config and checkpoint, or refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from onboard.errors import Unsupported
from onboard.facts._facts import TensorHeader
from onboard.spec.layouts import layouts
from onboard.spec.recognise import Recognised, recognise

LLAMA = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 151,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e6,
    "tie_word_embeddings": False,
    "model_type": "elsewhere",
    "architectures": ["ElsewhereForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_elsewhere.ElsewhereForCausalLM"},
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "initializer_range": 0.02,
    "pad_token_id": 0,
}
WORDS = {"V": 151, "H": 64, "N": 4, "KD": 32, "ND": 64, "D": 16, "F": 96, "2F": 192, "ND+2KD": 128}


def header(
    model_type: str, more: dict[str, tuple[int, ...]] | None = None, less: tuple[str, ...] = (), layers: int = 3
):
    """A checkpoint as transformers' class of this model type would write it, for the sizes of ``LLAMA``."""
    kinds = {name: tuple(WORDS[word] for word in shape) for name, shape in layouts()[model_type]["tensors"].items()}
    kinds = {name: shape for name, shape in {**kinds, **(more or {})}.items() if name not in less}
    return [
        TensorHeader(name.replace("{layer}", str(layer)), "BF16", shape, "model.safetensors")
        for name, shape in kinds.items()
        for layer in (range(layers) if "{layer}" in name else (0,))
    ]


def found(config: dict[str, Any], tensors: list[TensorHeader] | None) -> Recognised:
    return recognise(config, config["architectures"][0], tensors, None if tensors else "there are no weights")


def refused(config: dict[str, Any], tensors: list[TensorHeader] | None) -> Unsupported:
    with pytest.raises(Unsupported) as error:
        found(config, tensors)
    assert error.value.code == "unsupported.no_reference"
    return error.value


def biases(*projections: str) -> dict[str, tuple[int, ...]]:
    sizes = {"q": 64, "k": 32, "v": 32, "o": 64}
    return {f"model.layers.{{layer}}.self_attn.{name}_proj.bias": (sizes[name],) for name in projections}


@pytest.mark.parametrize(
    ("made_as", "expected"),
    [("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("olmo2", "Olmo2ForCausalLM")],
)
def test_the_header_decides(made_as: str, expected: str) -> None:
    got = found(LLAMA, header(made_as))
    assert got.architecture == expected
    assert not got.overrides
    assert "exactly the" in got.why
    assert got.unproven[0].what == f"That ElsewhereForCausalLM computes what {expected} computes."


def test_norms_of_queries_and_keys_are_seen() -> None:
    norms = {f"model.layers.{{layer}}.self_attn.{name}_norm.weight": (16,) for name in "qk"}
    got = found(LLAMA | {"head_dim": 16}, header("llama", norms))
    assert got.architecture == "Qwen3ForCausalLM"


def test_other_classes_with_the_same_tensors_are_named() -> None:
    got = found(LLAMA | {"head_dim": 16}, header("llama"))
    ambiguous = [item for item in got.unproven if item.what.startswith("Which of the classes")]
    assert len(ambiguous) == 1
    assert "HeliumForCausalLM" in ambiguous[0].what  # the same tensors, and other rotary pairs


@pytest.mark.parametrize(("projections", "named"), [("qk", "v_proj.bias"), ("v", "v_proj.bias"), ("qkv o", "")])
def test_a_bias_that_llama_has_not(projections: str, named: str) -> None:
    mlp = {"model.layers.{layer}.mlp.down_proj.bias": (64,)} if " " in projections else {}
    error = refused(LLAMA, header("llama", biases(*projections.replace(" ", "")) | mlp))
    assert (named or "down_proj.bias") in error.why


def test_a_bias_of_the_output_alone_is_another_class() -> None:
    got = found(LLAMA | {"head_dim": 16}, header("llama", biases("o")))
    assert got.architecture == "SeedOssForCausalLM"
    assert got.overrides == {"attention_bias": False, "attention_out_bias": True}


def test_biases_that_a_switch_of_llama_brings() -> None:
    config = LLAMA | {"bias": True}
    got = found(config, header("llama", biases(*"qkvo")))
    assert got.architecture == "LlamaForCausalLM"
    assert got.overrides == {"attention_bias": True}
    assert any("attention_bias=True" in item.what for item in got.unproven)


def test_a_config_that_contradicts_the_header() -> None:
    error = refused(LLAMA | {"attention_bias": False}, header("llama", biases(*"qkvo")))
    assert "attention_bias: true" in error.do


def test_a_fused_projection_is_refused_by_name() -> None:
    projections = tuple(f"model.layers.{{layer}}.self_attn.{name}_proj.weight" for name in "qkv")
    packed = {"model.layers.{layer}.self_attn.W_pack.weight": (128, 64)}
    error = refused(LLAMA, header("llama", packed, projections))
    assert "W_pack" in error.why
    assert "--trust-remote-code" in error.do


def test_shapes_count() -> None:
    error = refused(LLAMA, header("llama", {"model.layers.{layer}.self_attn.k_proj.weight": (16, 64)}))
    assert "k_proj.weight has the shape [16, 64]" in error.why


def test_layers_count() -> None:
    error = refused(LLAMA, header("llama", layers=2))
    assert "2 layers, and config.json has 3" in error.why


def test_a_depth_that_no_memory_holds() -> None:
    refused(LLAMA | {"num_hidden_layers": 10**15}, header("llama"))


@pytest.mark.parametrize("tensors", [None, header("llama")], ids=["config alone", "with the checkpoint"])
def test_a_key_that_may_matter_is_refused(tensors: list[TensorHeader] | None) -> None:
    error = refused(LLAMA | {"scale_emb": 12}, tensors)
    assert "scale_emb=12" in error.why


def test_a_switch_that_is_off_is_listed() -> None:
    got = found(LLAMA | {"z_loss_weight": 0}, header("llama"))
    assert any("z_loss_weight=0" in item.what for item in got.unproven)


def test_other_spellings_need_the_checkpoint() -> None:
    config = {key: value for key, value in LLAMA.items() if key not in ("num_hidden_layers", "rms_norm_eps")}
    config |= {"num_layers": 3, "layer_norm_epsilon": 1e-5}
    got = found(config, header("llama"))
    assert got.overrides == {"num_hidden_layers": 3, "rms_norm_eps": 1e-5}
    assert set(got.respelt) == {"num_layers", "layer_norm_epsilon"}
    error = refused(config, None)
    assert "num_layers as num_hidden_layers" in error.do


def test_a_head_that_the_checkpoint_shows_to_be_tied() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    got = found(config, header("llama", less=("lm_head.weight",)))
    assert got.overrides == {"tie_word_embeddings": True}


def test_layers_that_predict_more_tokens_are_left_out() -> None:
    config = LLAMA | {"num_nextn_predict_layers": 1}
    got = found(config, header("qwen2", {"model.mtp_layers.0.hidden_layernorm.weight": (64,)}))
    assert got.architecture == "Qwen2ForCausalLM"
    assert [item.disk for item in got.ignored] == ["model.mtp_layers.{layer}.hidden_layernorm.weight"]
    refused(LLAMA, header("qwen2", {"model.mtp_layers.0.hidden_layernorm.weight": (64,)}))


def test_old_buffers_do_not_count() -> None:
    buffers = {"model.layers.{layer}.self_attn.rotary_emb.inv_freq": (8,)}
    assert found(LLAMA, header("llama", buffers)).architecture == "LlamaForCausalLM"


def test_a_config_alone_is_the_plainest_class() -> None:
    got = found(LLAMA, None)
    assert got.architecture == "LlamaForCausalLM"
    assert "no checkpoint was seen" in got.why
    assert any("there are no weights" in item.why for item in got.unproven)


def test_a_size_that_the_class_would_invent_is_refused() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "intermediate_size"}
    assert "intermediate_size" in refused(config, None).why


def test_a_class_spelled_in_another_case() -> None:
    config = LLAMA | {"architectures": ["HELIUMForCausalLM"], "head_dim": 16}
    assert found(config, None).architecture == "HeliumForCausalLM"


@pytest.mark.parametrize("value", [[], {}, "x", None, [[1]], {"a": {}}, 1e308, -1])
@pytest.mark.parametrize("key", ["head_dim", "num_attention_heads", "hidden_size", "bias", "rope_pct", "auto_map"])
def test_values_of_any_type(key: str, value: object) -> None:
    """Whatever a config holds, the answer is a class or a refusal."""
    for tensors in (None, header("llama")):
        try:
            found(LLAMA | {key: value}, tensors)
        except Unsupported as error:
            assert error.do  # noqa: PT017


def test_the_table_knows_the_plain_classes() -> None:
    assert {"llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma", "phi", "stablelm"} <= layouts().keys()
    assert not {"bert", "roberta"} & layouts().keys()
    llama, mistral = layouts()["llama"], layouts()["mistral"]
    assert llama["formula"] == mistral["formula"] != layouts()["helium"]["formula"]
    assert json.loads((Path(__file__).parents[2] / "generator/onboard/spec/layouts.json").read_text())["made_from"]
