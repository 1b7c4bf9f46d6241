"""What is found in transformers' own decoders beside attention, at tiny size: every field that is not Llama's."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from onboard.reference.blocks import explain_blocks
from onboard.reference.build import build
from onboard.reference.dropouts import PLACES, explain_dropouts
from onboard.reference.ends import explain_embedding, explain_head
from onboard.reference.mlps import explain_mlps
from onboard.reference.norms import explain_norms, settle_eps
from onboard.reference.probe import _norms, _tiny_model, probe
from onboard.reference.record import record
from onboard.reference.roles import Unexplained, find_roles
from onboard.spec.derive import derive

from .toys import SEQUENCE

INPUT, ATTENTION = "input_layernorm", "post_attention_layernorm"
BEFORE, AFTER = "pre_feedforward_layernorm", "post_feedforward_layernorm"
ONE, SANDWICH, POST = (INPUT, None, None, None), (INPUT, ATTENTION, BEFORE, AFTER), (None, ATTENTION, None, AFTER)

PLAIN: dict[str, Any] = {
    "norm": "rms, weight, config.rms_norm_eps",
    "final_norm": True,
    "order": "sequential",
    "norms": (INPUT, None, ATTENTION, None),
    "multiplier": None,
    "mlp": "gated silu",
    "key": "hidden_act",
    "size": "config.intermediate_size",
    "biases": "",
    "inner_norm": None,
    "projections": "gate_proj: gate_proj; up_proj: up_proj; down_proj: down_proj",
    "dropouts": "-, attention_dropout, -, -, -",
    "embedding": None,
    "positions": None,
    "embedding_norm": False,
    "head_bias": False,
    "head_scale": None,
    "cap": None,
}

GPT = {
    "norm": "layer, weight, bias, config.layer_norm_epsilon",
    "mlp": "plain gelu_new",
    "key": "activation_function",
    "size": "4 * config.hidden_size",
    "biases": "up down",
    "dropouts": "embd_pdrop, attn_pdrop, resid_pdrop, -, resid_pdrop",
}
GPT2 = {
    **GPT,
    "projections": "c_fc transposed: up_proj; c_proj transposed: down_proj",
    "positions": "learned + 0, config.n_positions",
}
FALCON = {
    "norm": "layer, weight, bias, config.layer_norm_epsilon",
    "order": "parallel",
    "norms": ONE,
    "mlp": "plain gelu",
    "key": "activation",
    "size": "config.ffn_hidden_size",
    "projections": "dense_h_to_4h: up_proj; dense_4h_to_h: down_proj",
    "dropouts": "-, -, hidden_dropout, -, hidden_dropout",
}
NEOX = {
    "norm": "layer, weight, bias, config.layer_norm_eps",
    "mlp": "plain gelu",
    "biases": "up down",
    "projections": "dense_h_to_4h: up_proj; dense_4h_to_h: down_proj",
    "dropouts": "hidden_dropout, attention_dropout, hidden_dropout, -, hidden_dropout",
}
FAIRSEQ = {
    "norm": "layer, weight, bias, 1e-05",
    "mlp": "plain gelu",
    "key": "activation_function",
    "size": "config.ffn_dim",
    "biases": "up down",
    "projections": "fc1: up_proj; fc2: down_proj",
    "dropouts": "dropout, attention_dropout, dropout, activation_dropout, dropout",
}
OPT = {
    **FAIRSEQ,
    "mlp": "plain relu",
    "dropouts": "-, attention_dropout, dropout, -, dropout",
    "positions": "learned + 2, config.max_position_embeddings",
}
COHERE = {"norm": "layer, weight, config.layer_norm_eps", "order": "parallel", "norms": ONE}
GEMMA = {
    "norm": "rms, 1 + weight, config.rms_norm_eps",
    "mlp": "gated gelu_pytorch_tanh",
    "embedding": "config.hidden_size**0.5",
}
CAPPED = {**GEMMA, "key": "hidden_activation", "cap": "final_logit_softcapping"}
STARCODER = {
    "norm": "layer, weight, bias, config.norm_epsilon",
    "mlp": "plain gelu_pytorch_tanh",
    "biases": "up down",
    "projections": "c_fc: up_proj; c_proj: down_proj",
    "dropouts": "embedding_dropout, attention_dropout, residual_dropout, -, residual_dropout",
}
STABLE = {
    "norm": "layer, weight, bias, config.layer_norm_eps",
    "dropouts": "-, attention_dropout, -, -, hidden_dropout",
}
FACTORS = {"multiplier": "config.residual_multiplier", "embedding": "config.embedding_multiplier"}
UP_DOWN = "up_proj: up_proj; down_proj: down_proj"
FUSED = {"projections": "gate_up_proj: gate_proj, up_proj; down_proj: down_proj"}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name: class, fields of the config, what is found
    "llama": ("LlamaForCausalLM", {}, {}),
    "gemma": ("GemmaForCausalLM", {}, GEMMA),
    "gemma2": ("Gemma2ForCausalLM", {}, {**CAPPED, "norms": SANDWICH}),
    "gemma3_text": ("Gemma3ForCausalLM", {}, {**CAPPED, "norms": SANDWICH, "cap": None}),
    "vaultgemma": ("VaultGemmaForCausalLM", {}, CAPPED),
    "olmo": ("OlmoForCausalLM", {}, {"norm": "layer, 1e-05"}),
    "olmo2": ("Olmo2ForCausalLM", {}, {"norms": POST}),
    "olmo3": ("Olmo3ForCausalLM", {}, {"norms": POST}),
    "exaone4": ("Exaone4ForCausalLM", {}, {"norms": POST}),
    "glm": ("GlmForCausalLM", {}, FUSED),
    "glm4": ("Glm4ForCausalLM", {}, {**FUSED, "norms": SANDWICH}),
    "phi3": ("Phi3ForCausalLM", {}, {**FUSED, "dropouts": "-, attention_dropout, resid_pdrop, -, resid_pdrop"}),
    "qwen2": ("Qwen2ForCausalLM", {}, {}),
    "seed_oss": ("SeedOssForCausalLM", {}, {"dropouts": "-, attention_dropout, residual_dropout, -, residual_dropout"}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {}, {"dropouts": "-, -, -, -, -"}),
    "hunyuan_v1_dense": ("HunYuanDenseV1ForCausalLM", {}, {}),
    "cohere": ("CohereForCausalLM", {}, {**COHERE, "head_scale": "config.logit_scale"}),
    "cohere2": ("Cohere2ForCausalLM", {}, {**COHERE, "head_scale": "config.logit_scale"}),
    "cohere_compass_text": ("CohereCompassForCausalLM", {}, COHERE),
    "phi": (
        "PhiForCausalLM",
        {},
        {
            **NEOX,
            "order": "parallel",
            "norms": ONE,
            "mlp": "plain gelu_new",
            "projections": "fc1: up_proj; fc2: down_proj",
            "dropouts": "embd_pdrop, attention_dropout, resid_pdrop, -, resid_pdrop",
            "head_bias": True,
        },
    ),
    "gptj": (
        "GPTJForCausalLM",
        {},
        {
            **GPT,
            "order": "parallel",
            "norms": ONE,
            "projections": "fc_in: up_proj; fc_out: down_proj",
            "head_bias": True,
        },
    ),
    "codegen": (
        "CodeGenForCausalLM",
        {},
        {
            **GPT,
            "order": "parallel",
            "norms": ONE,
            "projections": "fc_in: up_proj; fc_out: down_proj",
            "head_bias": True,
        },
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", {}, {**NEOX, "order": "parallel"}),
    "falcon": ("FalconForCausalLM", {}, FALCON),
    "bloom": (
        "BloomForCausalLM",
        {},
        {
            **GPT,
            "mlp": "plain gelu_pytorch_tanh",
            "key": None,
            "projections": "dense_h_to_4h: up_proj; dense_4h_to_h: down_proj",
            "dropouts": "-, attention_dropout, hidden_dropout, -, hidden_dropout",
            "embedding_norm": True,
        },
    ),
    "mpt": (
        "MptForCausalLM",
        {},
        {
            **NEOX,
            "norm": "layer, weight, config.layer_norm_epsilon",
            "key": None,
            "size": "config.expansion_ratio * config.hidden_size",
            "biases": "",
            "projections": UP_DOWN,
            "dropouts": "-, -, -, -, -",
        },
    ),
    "gpt2": ("GPT2LMHeadModel", {}, GPT2),
    "gpt_bigcode": (
        "GPTBigCodeForCausalLM",
        {},
        {**GPT2, "mlp": "plain gelu_pytorch_tanh", "projections": "c_fc: up_proj; c_proj: down_proj"},
    ),
    "openai-gpt": (
        "OpenAIGPTLMHeadModel",
        {},
        {
            **GPT2,
            "final_norm": False,
            "order": "sequential, norms of the sums",
            "norms": POST,
            "mlp": "plain gelu_pytorch_tanh",
            "key": None,
        },
    ),
    "opt": ("OPTForCausalLM", {}, OPT),
    "xglm": (
        "XGLMForCausalLM",
        {},
        {
            **FAIRSEQ,
            "embedding": "config.hidden_size**0.5",
            "positions": "sinusoidal + 2, config.max_position_embeddings",
        },
    ),
    "biogpt": (
        "BioGptForCausalLM",
        {},
        {
            **OPT,
            "mlp": "plain gelu",
            "key": "hidden_act",
            "size": "config.intermediate_size",
            "dropouts": "hidden_dropout_prob, attention_probs_dropout_prob, hidden_dropout_prob, "
            "activation_dropout, hidden_dropout_prob",
            "embedding": "config.hidden_size**0.5",
        },
    ),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {},
        {
            **GPT2,
            "projections": "c_fc: up_proj; c_proj: down_proj",
            "dropouts": "embed_dropout, attention_dropout, resid_dropout, -, resid_dropout",
            "positions": "learned + 0, config.max_position_embeddings",
        },
    ),
    "ctrl": (
        "CTRLLMHeadModel",
        {},
        {
            **GPT2,
            # The final norm has the config's, which is another number only where somebody changed it.
            "norm": "layer, weight, bias, 1e-06",
            "mlp": "plain relu",
            "key": None,
            "size": "config.dff",
            "projections": "0: up_proj; 2: down_proj",
            "dropouts": "embd_pdrop, -, resid_pdrop, -, resid_pdrop",
            "embedding": "config.hidden_size**0.5",
            "positions": "sinusoidal + 0, config.n_positions",
            "head_bias": True,
        },
    ),
    "granite": ("GraniteForCausalLM", {}, {**FACTORS, "head_scale": "1 / config.logits_scaling"}),
    "hyperclovax": (
        "HyperCLOVAXForCausalLM",
        {},
        {**FACTORS, "norms": SANDWICH, "head_scale": "config.logits_scaling"},
    ),
    "minicpm3": (
        "MiniCPM3ForCausalLM",
        {},
        {
            "multiplier": "config.scale_depth / config.num_hidden_layers**0.5",
            "embedding": "config.scale_emb",
            "head_scale": "config.dim_model_base / config.hidden_size",
        },
    ),
    "starcoder2": ("Starcoder2ForCausalLM", {}, STARCODER),
    "nemotron": (
        "NemotronForCausalLM",
        {},
        {"norm": "layer, 1 + weight, bias, config.norm_eps", "mlp": "plain relu2", "projections": UP_DOWN},
    ),
    "arcee": ("ArceeForCausalLM", {}, {"mlp": "plain relu2", "projections": UP_DOWN}),
    "jais2": (
        "Jais2ForCausalLM",
        {},
        {**NEOX, "mlp": "plain relu2", "projections": UP_DOWN, "dropouts": "-, attention_dropout, -, -, -"},
    ),
    "bitnet": (
        "BitNetForCausalLM",
        {},
        {
            "mlp": "gated relu2",
            "inner_norm": "rms",
            "projections": "gate_proj: gate_proj; up_proj: up_proj; down_proj: down_proj; ffn_sub_norm: inner_norm",
        },
    ),
    "apertus": (
        "ApertusForCausalLM",
        {},
        {"mlp": "plain xielu", "projections": "up_proj: up_proj; down_proj: down_proj; act_fn: act_fn"},
    ),
    "stablelm": ("StableLmForCausalLM", {}, STABLE),
    "persimmon": (
        "PersimmonForCausalLM",
        {},
        {**NEOX, "mlp": "plain relu2", "dropouts": "-, attention_dropout, -, -, hidden_dropout"},
    ),
    "nanochat": (
        "NanoChatForCausalLM",
        {},
        {
            "norm": "rms, config.rms_norm_eps",
            "mlp": "plain relu2",
            "projections": "fc1: up_proj; fc2: down_proj",
            "embedding_norm": True,
            "cap": "final_logit_softcapping",
        },
    ),
    "helium": ("HeliumForCausalLM", {}, {}),
    "falcon, new": (
        "FalconForCausalLM",
        {"new_decoder_architecture": True, "num_kv_heads": 8},
        {**FALCON, "norms": (INPUT, None, ATTENTION, None)},
    ),
    "falcon, new with one norm": (
        "FalconForCausalLM",
        {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
        FALCON,
    ),
    "falcon, sequential": (
        "FalconForCausalLM",
        {"parallel_attn": False, "alibi": True, "bias": True},
        {
            **NEOX,
            "norm": "layer, weight, bias, config.layer_norm_epsilon",
            "key": "activation",
            "size": "config.ffn_hidden_size",
            "dropouts": "-, attention_dropout, attention_dropout, -, hidden_dropout",
        },
    ),
    "gpt_neox, sequential": ("GPTNeoXForCausalLM", {"use_parallel_residual": False}, NEOX),
    "stablelm, parallel": (
        "StableLmForCausalLM",
        {"use_parallel_residual": True},
        {**STABLE, "order": "parallel", "norms": ONE},
    ),
    "gpt2 with an inner width": ("GPT2LMHeadModel", {"n_inner": 3000}, {**GPT2, "size": "config.n_inner"}),
    "gpt2 with another activation": ("GPT2LMHeadModel", {"activation_function": "relu"}, {**GPT2, "mlp": "plain relu"}),
    "opt, norms of the sums": (
        "OPTForCausalLM",
        {"do_layer_norm_before": False},
        {**OPT, "final_norm": False, "order": "sequential, norms of the sums", "norms": POST},
    ),
    "opt without biases and weights of norms": (
        "OPTForCausalLM",
        {"enable_bias": False, "layer_norm_elementwise_affine": False},
        {**OPT, "norm": "layer, 1e-05", "biases": ""},
    ),
    "xglm without a scale": (
        "XGLMForCausalLM",
        {"scale_embedding": False},
        {**FAIRSEQ, "positions": "sinusoidal + 2, config.max_position_embeddings"},
    ),
    "starcoder2 without biases": ("Starcoder2ForCausalLM", {"use_bias": False}, {**STARCODER, "biases": ""}),
    "hyperclovax without post norms": (
        "HyperCLOVAXForCausalLM",
        {"use_post_norm": False},
        {**FACTORS, "head_scale": "config.logits_scaling"},
    ),
}


def measure(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Each part by itself, as the probe of a whole model does, in the terms of :data:`PLAIN`."""
    cls = getattr(transformers, name)
    tiny, _ = _tiny_model(cls, cls.config_class(**fields))
    model = build(cls, tiny)
    ids = torch.randint(3, model.config.vocab_size, (1, SEQUENCE), generator=torch.Generator().manual_seed(7))
    recording, logits = record(model, input_ids=ids)
    roles = find_roles(model, recording)
    blocks, ends = explain_blocks(model, roles, recording), explain_embedding(model, ids, roles, recording)
    mlps, head = explain_mlps(cls, tiny, model, roles, recording, ids), explain_head(model, logits, roles, recording)
    block, embedding, mlp = blocks["block"], ends["embedding"], mlps["mlp"]
    final = [{"reference": roles.final_norm, "native": ["model.norm"]}] if roles.final_norm else []
    norms = _norms(model, blocks["modules"] + ends["modules"] + final)
    width = model.config.hidden_size
    norm = settle_eps(cls, tiny, explain_norms(norms, width, model.config), norms, width)
    assert max(part["difference"] for part in (block, embedding, mlp, norm)) < 1e-4
    late = ", norms of the sums" if block["norm_after_residual"] else ""
    dropouts = explain_dropouts(cls, tiny, roles, {"block": block}, ids)
    positions = embedding["positions"]
    return {
        "norm": _norm(norm),
        "final_norm": roles.final_norm is not None,
        "order": ("parallel" if block["parallel"] else "sequential") + late,
        "norms": tuple(block[f"{when}_{what}_norm"] for what in ("attention", "mlp") for when in ("pre", "post")),
        "multiplier": block["multiplier"],
        "mlp": f"{'gated' if mlp['gated'] else 'plain'} {mlp['activation']}",
        "key": mlp["activation_key"],
        "size": mlp["intermediate_size"],
        "biases": " ".join(place for place, biased in mlp["biases"].items() if biased),
        "inner_norm": mlp["inner_norm"] and mlp["inner_norm"]["kind"],
        "projections": "; ".join(map(_projection, mlps["modules"])),
        "dropouts": ", ".join(dropouts[place] or "-" for place in PLACES),
        "embedding": embedding["scale"],
        "positions": positions and f"{positions['kind']} + {positions['offset']}, {positions['size']}",
        "embedding_norm": embedding["norm"],
        "head_bias": head["bias"],
        "head_scale": head["scale"],
        "cap": head["softcap_key"],
    }


def _norm(norm: dict[str, Any]) -> str:
    weight = ["weight" if not norm["offset"] else f"{norm['offset']:g} + weight"] if norm["weight"] else []
    return ", ".join((norm["kind"], *weight, *(["bias"] if norm["bias"] else []), norm["eps"]))


def _projection(entry: dict[str, Any]) -> str:
    """Name in the reference and native parts of one module, both without what they lie in."""
    name = entry["reference"].rpartition(".")[2]
    parts = ", ".join(native.rpartition(".")[2] for native in entry["native"])
    return f"{name}{' transposed' if entry['transposed'] else ''}: {parts}"


@pytest.mark.parametrize(("name", "fields", "expected"), CASES.values(), ids=CASES)
def test_architectures(name: str, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert measure(name, fields) == {**PLAIN, **expected}


UNEXPLAINED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    # name: class, fields of the config, the part, what is said of it
    "bloom, residual of the norm": (
        "BloomForCausalLM",
        {"apply_residual_connection_post_layernorm": True},
        "block",
        "do not all stand at known places",
    ),
    "opt with projected embeddings": ("OPTForCausalLM", {"word_embed_proj_dim": 512}, "embedding", "become"),
    "doge: learned factors on the residual": ("DogeForCausalLM", {}, "block", "do not all stand at known places"),
    "hunyuan_v1_moe: experts": ("HunYuanMoEV1ForCausalLM", {}, "block", "the branches of"),
    "falcon_h1: two mixers in each layer": ("FalconH1ForCausalLM", {}, "block", "keys and values of its own alone"),
    "mamba2: mixers alone": ("Mamba2ForCausalLM", {}, "block", "keys and values of its own alone"),
    "gemma3n_text: more projections in a layer": ("Gemma3nForCausalLM", {}, "block", "lie in 4 modules"),
    "rwkv: no attention": ("RwkvForCausalLM", {}, "block", "0 modules that mix tokens"),
}


@pytest.mark.parametrize(("name", "fields", "part", "what"), UNEXPLAINED.values(), ids=UNEXPLAINED)
def test_what_is_not_explained_is_named(name: str, fields: dict[str, Any], part: str, what: str) -> None:
    with pytest.raises(Unexplained, match=what) as caught:
        measure(name, fields)
    assert caught.value.part == part


def test_a_bias_that_the_last_layer_adds_to_the_residual() -> None:
    """GPT-NeoX Japanese: a parameter of the attention's own, in one layer, is the bias of its output projection."""
    cls = transformers.GPTNeoXJapaneseForCausalLM
    config = cls.config_class(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, vocab_size=300)
    raw = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [cls.__name__]}
    found = probe(cls.__name__, "gpt_neox_japanese", raw)
    assert found["attention"]["o_bias_layers"] == "layer_idx == config.num_hidden_layers - 1"
    spec = derive(raw, cls.__name__, "gpt_neox_japanese", {**found, "origin": "tiny reference"})
    rows = {row.native[0]: (row.disk.rpartition(".")[2], row.layers) for row in spec.checkpoint.rows}
    assert rows["model.layers.{layer}.self_attn.o_proj.bias"] == ("dense_bias", found["attention"]["o_bias_layers"])


def test_a_norm_that_the_first_layer_lacks_and_a_head_with_a_layer_of_its_own() -> None:
    """ModernBERT's decoder: the embedding is normalised already, and BERT's head stands before the vocabulary."""
    cls = transformers.ModernBertDecoderForCausalLM
    config = cls.config_class(num_hidden_layers=6, global_attn_every_n_layers=3)
    raw = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [cls.__name__]}
    found = probe(cls.__name__, "modernbert-decoder", raw)
    assert found["block"]["pre_attention_layers"] == "layer_idx > 0"
    assert found["embedding"]["norm"] is True
    transform = found["head"]["transform"]
    # Both fields say gelu; only one of them is about the head.
    assert transform["activation_key"] == "classifier_activation"
    assert found["mlp"]["activation_key"] == "hidden_activation"
    spec = derive(raw, cls.__name__, "modernbert-decoder", {**found, "origin": "tiny reference"})
    assert spec.head.transform is not None
    assert spec.head.transform.bias.key == "classifier_bias"
    assert spec.head.bias_key == "decoder_bias"
    rows = {row.native[0]: row.layers for row in spec.checkpoint.rows}
    assert rows["model.layers.{layer}.input_layernorm.weight"] == "layer_idx > 0"
    assert rows["model.layers.{layer}.post_attention_layernorm.weight"] == ""


def test_a_width_that_is_computed() -> None:
    """LFM2: two thirds, times a factor, rounded up."""
    cls = transformers.Lfm2ForCausalLM
    config = cls.config_class(num_hidden_layers=4, full_attn_idxs=[0, 1, 2, 3])
    raw = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [cls.__name__]}
    found = probe(cls.__name__, "lfm2", raw)
    rounded = "int(config.block_ffn_dim_multiplier * int(2 * config.intermediate_size / 3))"
    text = f"config.block_multiple_of * (({rounded} + config.block_multiple_of - 1) // config.block_multiple_of)"
    assert found["mlp"]["intermediate_size"] == text
    spec = derive(raw, cls.__name__, "lfm2", {**found, "origin": "tiny reference"})
    assert spec.dimensions.intermediate_size == 8192
    assert [field.key for field in spec.fixed] == ["block_auto_adjust_ff_dim"]
