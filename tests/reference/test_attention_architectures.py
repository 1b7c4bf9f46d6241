"""What is found in transformers' own attentions at tiny size: for each, every field that is not the plainest one."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import transformers
from onboard.reference.attention.explain import explain_attentions
from onboard.reference.build import build
from onboard.reference.record import record
from onboard.reference.roles import Roles
from onboard.reference.tiny import candidates
from torch import nn
from transformers import PreTrainedModel

from .toys import ids

SLIDES = 'config.layer_types[layer_idx] == "sliding_attention"'
SHARE = "config.hidden_size // config.num_attention_heads"
OR_SHARE = f'getattr(config, "head_dim", None) or {SHARE}'
HEADS, KV_HEADS = "config.num_attention_heads", "config.num_key_value_heads"
PLAIN: dict[str, Any] = {
    "num_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": OR_SHARE,
    "biases": "",
    "qk_norm": None,
    "output_norm": None,
    "rotary": "half",
    "rope_layers": None,
    "scale": "self.head_dim**-0.5",
    "softcap": None,
    "sinks": False,
    "alibi": None,
    "query_scale": None,
    "window_key": None,
    "window_layers": None,
    "implementation": "eager",
}
ROPE: dict[str, Any] = {
    "types": ["default"],
    "per_layer_type": False,
    "partial": False,
    "dim": None,
    "theta": None,
    "reversed": False,
}


def norm(kind: str, eps: str, bias: bool = False, offset: float = 0.0, weight: bool = True) -> dict[str, Any]:
    return {"kind": kind, "weight": weight, "bias": bias, "offset": offset, "eps": f"config.{eps}"}


def qk(over: str, formula: dict[str, Any], after_rope: bool = False) -> dict[str, Any]:
    return {"over": over, "after_rope": after_rope, "norm": formula}


RMS, LAYER = norm("rms", "rms_norm_eps"), norm("layer", "layer_norm_eps")
MULTI = {"num_key_value_heads": HEADS, "head_dim": SHARE}
NO_ROPE = {**MULTI, "rotary": None}
OWN_DIM = {"head_dim": "config.head_dim"}
SLIDING = {"window_key": "sliding_window", "window_layers": SLIDES}
LOCAL = 'config.attention_layers[layer_idx] == "local"'
BY_HEAD, BY_KV_HEAD = f"qkv by {HEADS}", f"qkv by {KV_HEADS}"

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    # name: class, fields of the config, attention, rope, the fused projection
    "gpt2": ("GPT2LMHeadModel", {}, {**NO_ROPE, "biases": "qkvo"}, {}, "qkv by 1, transposed"),
    "gpt2 with a scale by layer": (
        "GPT2LMHeadModel",
        {"scale_attn_by_inverse_layer_idx": True},
        {**NO_ROPE, "biases": "qkvo", "scale": "self.head_dim**-0.5 / (layer_idx + 1)"},
        {},
        "qkv by 1, transposed",
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", {}, {**MULTI, "biases": "qkvo"}, {"partial": True}, BY_HEAD),
    "falcon": (
        "FalconForCausalLM",
        {},
        {"num_key_value_heads": "1", "head_dim": "config.head_dim"},
        {},
        "qkv by 1",
    ),
    "falcon, new": (
        "FalconForCausalLM",
        {"new_decoder_architecture": True, "num_kv_heads": 8},
        {"num_key_value_heads": "config.num_kv_heads", "head_dim": "config.head_dim"},
        {},
        "qkv by config.num_kv_heads",
    ),
    "falcon with alibi": (
        "FalconForCausalLM",
        {"alibi": True},
        {
            "num_key_value_heads": "1",
            "head_dim": "config.head_dim",
            "rotary": None,
            "alibi": {"bias_max": "8", "scaled": True},
            "implementation": "sdpa",
        },
        {},
        "qkv by 1",
    ),
    "bloom": (
        "BloomForCausalLM",
        {},
        {**NO_ROPE, "biases": "qkvo", "alibi": {"bias_max": "8", "scaled": False}},
        {},
        BY_HEAD,
    ),
    "mpt": (
        "MptForCausalLM",
        {},
        {**NO_ROPE, "alibi": {"bias_max": "config.attn_config.alibi_bias_max", "scaled": False}},
        {},
        "qkv by 1",
    ),
    "gptj": (
        "GPTJForCausalLM",
        {},
        {**MULTI, "rotary": "interleaved"},
        {"partial": True, "dim": "config.rotary_dim", "theta": 10000.0},
        "",
    ),
    "codegen": (
        "CodeGenForCausalLM",
        {},
        {**MULTI, "rotary": "interleaved"},
        {"partial": True, "dim": "config.rotary_dim", "theta": 10000.0},
        "qvk by 4",
    ),
    "phi": ("PhiForCausalLM", {}, {"biases": "qkvo"}, {"partial": True}, ""),
    "phi with norms": (
        "PhiForCausalLM",
        {"qk_layernorm": True},
        {"biases": "qkvo", "head_dim": SHARE, "qk_norm": qk("head", norm("layer", "layer_norm_eps", bias=True))},
        {"partial": True},
        "",
    ),
    "phi3": ("Phi3ForCausalLM", {}, {"window_key": "sliding_window", "window_layers": "True"}, {}, "qkv by 1"),
    "cohere": ("CohereForCausalLM", {}, {"rotary": "interleaved"}, {}, ""),
    "cohere with norms": (
        "CohereForCausalLM",
        {"use_qk_norm": True},
        {"rotary": "interleaved", "qk_norm": qk("heads", LAYER)},
        {},
        "",
    ),
    "cohere2": (
        "Cohere2ForCausalLM",
        {},
        {**OWN_DIM, **SLIDING, "rotary": "interleaved", "rope_layers": SLIDES},
        {},
        "",
    ),
    "glm": ("GlmForCausalLM", {}, {**OWN_DIM, "biases": "qkv", "rotary": "interleaved"}, {"partial": True}, ""),
    "olmo2": ("Olmo2ForCausalLM", {}, {"qk_norm": qk("width", RMS)}, {}, ""),
    "qwen2": ("Qwen2ForCausalLM", {}, {**SLIDING, "biases": "qkv"}, {}, ""),
    "qwen3": ("Qwen3ForCausalLM", {}, {**OWN_DIM, **SLIDING, "qk_norm": qk("head", RMS)}, {}, ""),
    "gemma2": (
        "Gemma2ForCausalLM",
        {},
        {
            **OWN_DIM,
            **SLIDING,
            "scale": "config.query_pre_attn_scalar**-0.5",
            "softcap": "config.attn_logit_softcapping",
        },
        {},
        "",
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {},
        {
            **OWN_DIM,
            **SLIDING,
            "scale": "config.query_pre_attn_scalar**-0.5",
            "qk_norm": qk("head", norm("rms", "rms_norm_eps", offset=1.0)),
        },
        {"per_layer_type": True},
        "",
    ),
    "granite": ("GraniteForCausalLM", {}, {"scale": "config.attention_multiplier"}, {}, ""),
    "granite_swa": (
        "GraniteSWAForCausalLM",
        {},
        {**SLIDING, "scale": "config.attention_multiplier", "sinks": True},
        {},
        "",
    ),
    "nanochat": (
        "NanoChatForCausalLM",
        {},
        {"qk_norm": qk("head", norm("rms", "rms_norm_eps", weight=False), after_rope=True)},
        {"reversed": True},
        "",
    ),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1ForCausalLM",
        {},
        {**OWN_DIM, "qk_norm": qk("head", RMS, after_rope=True)},
        {},
        "",
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        {},
        {**SLIDING, "rope_layers": "bool(config.no_rope_layers[layer_idx])"},
        {},
        "",
    ),
    "exaone4": (
        "Exaone4ForCausalLM",
        {},
        {**SLIDING, "qk_norm": qk("head", RMS), "rope_layers": f"config.sliding_window is None or {SLIDES}"},
        {},
        "",
    ),
    "stablelm": ("StableLmForCausalLM", {}, {"head_dim": SHARE}, {"partial": True}, ""),
    "stablelm with norms": (
        "StableLmForCausalLM",
        {"qk_layernorm": True},
        {"head_dim": SHARE, "qk_norm": qk("heads", LAYER)},
        {"partial": True},
        "",
    ),
    "persimmon": (
        "PersimmonForCausalLM",
        {},
        {**MULTI, "biases": "qkvo", "qk_norm": qk("head", norm("layer", "layer_norm_eps", bias=True))},
        {"partial": True},
        BY_HEAD,
    ),
    "opt": ("OPTForCausalLM", {}, {**NO_ROPE, "biases": "qkvo"}, {}, ""),
    "xglm": ("XGLMForCausalLM", {}, {**NO_ROPE, "biases": "qkvo"}, {}, ""),
    "biogpt": ("BioGptForCausalLM", {}, {**NO_ROPE, "biases": "qkvo"}, {}, ""),
    "whisper": (
        "WhisperForCausalLM",
        {},
        {
            "num_heads": "config.decoder_attention_heads",
            "num_key_value_heads": "config.decoder_attention_heads",
            "head_dim": "config.hidden_size // config.decoder_attention_heads",
            "rotary": None,
            "biases": "qvo",
        },
        {},
        "",
    ),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {},
        {**NO_ROPE, "biases": "o", "scale": "1.0", "window_key": "window_size", "window_layers": LOCAL},
        {},
        "",
    ),
    "gpt_bigcode": (
        "GPTBigCodeForCausalLM",
        {},
        {**NO_ROPE, "num_key_value_heads": "1", "biases": "qkvo"},
        {},
        "qkv by 1",
    ),
    "gpt_bigcode, multi-head": (
        "GPTBigCodeForCausalLM",
        {"multi_query": False},
        {**NO_ROPE, "biases": "qkvo"},
        {},
        BY_HEAD,
    ),
    "starcoder2": (
        "Starcoder2ForCausalLM",
        {"sliding_window": 4096},
        {"biases": "qkvo", "window_key": "sliding_window", "window_layers": "True"},
        {},
        "",
    ),
    "bitnet": ("BitNetForCausalLM", {}, {"head_dim": SHARE, "output_norm": RMS}, {}, ""),
    "modernbert-decoder": (
        "ModernBertDecoderForCausalLM",
        {},
        {**MULTI, **SLIDING},
        {"per_layer_type": True},
        "",
    ),
    "helium": ("HeliumForCausalLM", {}, {**OWN_DIM, "rotary": "interleaved"}, {}, ""),
    "ernie4_5": ("Ernie4_5ForCausalLM", {}, {**OWN_DIM, "rotary": "interleaved"}, {}, ""),
    "ministral3": (
        "Ministral3ForCausalLM",
        {},
        {
            **OWN_DIM,
            "window_key": "sliding_window",
            "window_layers": "True",
            "query_scale": {
                "beta": 'config.rope_parameters["llama_4_scaling_beta"]',
                "length": 'config.rope_parameters["original_max_position_embeddings"]',
            },
        },
        {"types": ["yarn"]},
        "",
    ),
    "apertus": ("ApertusForCausalLM", {}, {"qk_norm": qk("head", RMS)}, {"types": ["llama3"]}, ""),
    "llama": ("LlamaForCausalLM", {}, {**OWN_DIM}, {}, ""),
    "llama with dynamic rotation": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
        {**OWN_DIM},
        {"types": ["dynamic"]},
        "",
    ),
    "phi3 with long rotation": (
        "Phi3ForCausalLM",
        {
            "original_max_position_embeddings": 4096,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + pair / 10 for pair in range(48)],
                "long_factor": [2.0 + pair for pair in range(48)],
            },
        },
        # Its factors are as many as the head has pairs, so no other size of a head runs.
        {"head_dim": SHARE, "window_key": "sliding_window", "window_layers": "True"},
        {"types": ["longrope"]},
        "qkv by 1",
    ),
}


def tiny(cls: type[PreTrainedModel], given: dict[str, Any]) -> tuple[dict[str, Any], PreTrainedModel]:
    """The first tiny config of a class that runs."""
    for fields in candidates(cls.config_class(**given)):
        try:
            model = build(cls, fields)
            model(ids(4), use_cache=False)
        except Exception:
            continue
        return fields, model
    raise AssertionError(f"{cls.__name__} cannot be built")


def where(model: PreTrainedModel) -> Any:
    """The layers and their attention, in any order of blocks."""
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and path.endswith(("layers", ".h", "blocks")):
            (name,) = (
                name
                for name, child in module[0].named_children()
                if {"attention_mask", "layer_past"} & set(inspect.signature(child.forward).parameters)
                if not name.startswith("encoder") and any(isinstance(leaf, nn.Module) for leaf in child.children())
            )
            return Roles("", path, None, "", name, None, (), tuple(range(len(model.get_submodule(path)))))
    raise AssertionError("no layers")


@functools.cache
def explained(name: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    architecture, given = CASES[name][:2]
    fields, model = tiny(getattr(transformers, architecture), given)
    recording, _ = record(model, input_ids=ids())
    return model, explain_attentions(type(model), fields, model, where(model), recording, ids())


@pytest.mark.parametrize("name", CASES)
def test_what_is_found(name: str) -> None:
    _, _, attention, rope, fused = CASES[name]
    _, found = explained(name)
    got = found["attention"]
    biases = "".join(part for part in "qkvo" if got["biases"][part])
    assert {key: got[key] for key in PLAIN} | {"biases": biases} == PLAIN | attention
    assert got["difference"] < 1e-5
    if got["rotary"] is None:
        assert found["rope"] is None
    else:
        assert {key: found["rope"][key] for key in ROPE} == ROPE | rope
    assert said(found["modules"]) == fused
    every = [native.rpartition(".")[2] for row in found["modules"] for native in row["native"]]
    assert sorted(every) == sorted({*every})
    assert {"q_proj", "k_proj", "v_proj", "o_proj"} <= {*every}


def said(rows: list[dict[str, Any]]) -> str:
    """The fused projection in words."""
    for row in rows:
        if len(row["native"]) > 1:
            order = "".join(native.rpartition(".")[2][0] for native in row["native"])
            return f"{order} by {row['groups']}{', transposed' if row['transposed'] else ''}"
    return ""


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_of_the_attention_has_a_row(name: str) -> None:
    model, found = explained(name)
    roles = where(model)
    prefix = f"{roles.layer(1)}.{roles.attention}."
    references = [row["reference"].replace("{layer}", "1").replace(".{head}", ".") for row in found["modules"]]
    for parameter in dict(model.named_parameters()):
        if parameter.startswith(prefix):
            assert any(parameter.startswith(reference) for reference in references), parameter


def test_norms_of_heads_are_stacked() -> None:
    _, found = explained("stablelm with norms")
    stacked = {row["reference"].split("self_attn.")[1]: row["stacked"] for row in found["modules"] if "stacked" in row}
    assert stacked == {"q_layernorm.norms.{head}": HEADS, "k_layernorm.norms.{head}": KV_HEADS}


def test_scalings_that_are_served() -> None:
    _, found = explained("llama")
    served = found["rope"]["served"]
    assert set(served) == {"linear", "llama3", "yarn"}
    assert {name: parameters["rope_type"] for name, parameters in served.items()} == {name: name for name in served}


def test_tables_that_are_handed_and_not_used() -> None:
    model, found = explained("falcon with alibi")
    recording, _ = record(model, input_ids=ids())
    assert "position_embeddings" in recording["transformer.h.0.self_attention"].inputs
    assert found["rope"] is None
