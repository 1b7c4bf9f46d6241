"""Every decoder-only class of transformers can be built at tiny size, and its tiny config tells its sizes apart."""

from __future__ import annotations

import itertools
import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from onboard.reference.build import build, find_class, read_config
from onboard.reference.checks import check_keys, check_values
from onboard.reference.meanings import read, size, spelling
from onboard.reference.probe import _tiny_model
from onboard.reference.tiny import SEQUENCE, left_dense
from onboard.spec.kind import classify
from onboard.spec.validate import check_config
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

# What a default config leaves open and published ones say.
FIELDS: dict[str, dict[str, Any]] = {
    # Layers without experts, which the class can have and its defaults have not.
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"] * 6},
    # The defaults have no attention at all, and transformers cannot count the tokens of such a cache.
    "bamba": {"attn_layer_indices": [9, 18, 27]},
}
NO_DECODER = {"trocr": "the decoder of an image-to-text model"}
NO_CACHE = {"blt": "transformers' own generate reads a field that the config has in its parts only"}

# Sizes that cannot differ.
AS_MANY_KEYS_AS_QUERIES = {
    "minicpm3": "latent attention has keys for every head",
    "youtu": "latent attention has keys for every head",
}
HEADS_ARE_THE_HIDDEN_SIZE = {
    "helium": "its output projection is square",
    "xlnet": "its config class insists",
}


def decoders() -> dict[str, PretrainedConfig]:
    """The real config of every decoder-only class without experts: not of classes that fill masks."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for model_type, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
            if model_type in {*MODEL_FOR_MASKED_LM_MAPPING_NAMES, *NO_DECODER}:
                continue
            try:
                config = CONFIG_MAPPING[model_type](**FIELDS.get(model_type, {}))
                raw = json.loads(config.to_json_string(use_diff=False))
            except Exception:  # a config of several parts without a default
                continue
            if model_type in FIELDS or classify({**raw, "architectures": [architecture]}).kind == "dense":
                found[model_type] = config
    return found


DECODERS = decoders()


@cache
def tiny(model_type: str) -> tuple[dict[str, Any], PreTrainedModel]:
    cls = find_class(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type], model_type)
    return _tiny_model(cls, DECODERS[model_type])


def tokens(model: PreTrainedModel) -> torch.Tensor:
    return torch.randint(3, model.config.vocab_size, (2, SEQUENCE), generator=torch.Generator().manual_seed(7))


def test_there_are_many() -> None:
    assert len(DECODERS) >= 81


@pytest.fixture(params=sorted(DECODERS))
def model_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_real_config_is_read(model_type: str) -> None:
    """Also what transformers writes that JSON has not: an infinite limit."""
    real = DECODERS[model_type]
    raw = json.loads(real.to_json_string(use_diff=False))
    check_config(raw)
    cls = find_class(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type], model_type)
    check_keys(cls.config_class, raw)
    again = read_config(cls, raw)
    if size(real, "hidden_size") is not None:  # else it has parts with a size each
        check_values(again)
    assert list(getattr(again, "time_step_limit", ())) == list(getattr(real, "time_step_limit", ()))


@torch.no_grad()
def test_builds_and_runs(model_type: str, tmp_path: Path) -> None:
    fields, model = tiny(model_type)
    json.dumps(fields, allow_nan=False)
    assert sum(parameter.numel() for parameter in model.parameters()) <= 1_000_000
    input_ids = tokens(model)
    logits = model(input_ids, use_cache=False).logits
    assert logits.isfinite().all()
    assert logits.std() > 0.05
    assert logits.abs().max() < 100
    # No two places of a sequence, and no two tokens, look the same.
    assert (logits[0, 1:] - logits[0, :-1]).abs().amax(dim=-1).min() > 1e-3
    mask = torch.ones_like(input_ids)
    mask[0, :5] = 0
    assert model(input_ids, attention_mask=mask, use_cache=False).logits.isfinite().all()
    if model_type not in NO_CACHE:
        kwargs: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "use_cache": True, "eos_token_id": None}
        assert model.generate(input_ids[:, :5], pad_token_id=0, **kwargs).shape == (2, 8)
    again = build(type(model), fields)
    again.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(
        loaded(input_ids, use_cache=False).logits, again(input_ids, use_cache=False).logits, rtol=0, atol=1e-5
    )


SIZE_WORDS = {"d", "dim", "dims", "embd", "head", "heads", "hidden", "inner", "rank", "size", "state", "width"}
NOT_OF_TENSORS = {"chunk", "distance", "window", "buckets"}


def sizes_of(fields: dict[str, Any]) -> dict[str, int]:
    """The fields that give a tensor's size."""
    words = {name: set(name.split("_")) for name, value in fields.items() if type(value) is int and value > 4}
    return {
        name: fields[name] for name, own in words.items() if own & (SIZE_WORDS | {"vocab"}) and not own & NOT_OF_TENSORS
    }


def test_sizes_differ_where_they_do_in_the_real_model(model_type: str) -> None:
    real, (fields, _) = DECODERS[model_type], tiny(model_type)
    equal = [
        (a, b)
        for (a, x), (b, y) in itertools.combinations(sizes_of(fields).items(), 2)
        if x == y and read(real, a) != read(real, b)
    ]
    assert not equal


def test_heads(model_type: str) -> None:
    real, (fields, model) = DECODERS[model_type], tiny(model_type)
    heads, kv_heads, head_dim = (
        fields.get(spelling(real, name) or "") for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if kv_heads is not None:
        assert (kv_heads < heads) == (model_type not in AS_MANY_KEYS_AS_QUERIES)
        assert heads % kv_heads == 0
    elif heads is not None:
        assert heads == 8  # enough for a fused projection to show how it groups them
    if head_dim is not None and kv_heads is not None and model_type not in AS_MANY_KEYS_AS_QUERIES:
        assert (heads * head_dim == size(model.config, "hidden_size")) == (model_type in HEADS_ARE_THE_HIDDEN_SIZE)


def test_what_depends_on_length_shows(model_type: str) -> None:
    real, (_, model) = DECODERS[model_type], tiny(model_type)
    if (size(real, "sliding_window") or -1) > 0:
        assert size(model.config, "sliding_window") < SEQUENCE
    for name, value in tiny(model_type)[0].items():
        if "chunk" in name.split("_"):
            assert value < SEQUENCE


def test_every_size_is_small(model_type: str) -> None:
    fields, _ = tiny(model_type)
    assert max(sizes_of(fields).values()) <= 160


LINEAR = ["linear_attention"] * 4
ROPE = {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("gpt_neo", {}, {"attention_types": [[["global", "local", "global"], 1]], "num_layers": 3}),
        ("bamba", {"attn_layer_indices": [3, 7, 11]}, {"attn_layer_indices": [3, 7], "num_hidden_layers": 8}),
        (
            "bamba",
            {"attn_layer_indices": [3, 7, 11], "num_hidden_layers": 12},
            {"attn_layer_indices": [3], "num_hidden_layers": 5},
        ),
        ("lfm2", {"full_attn_idxs": [2, 5, 8], "num_hidden_layers": 9}, {"full_attn_idxs": [2]}),
        ("recurrent_gemma", {}, {"block_types": ["recurrent", "recurrent", "attention"], "num_hidden_layers": 4}),
        ("hrm_text", {}, {"num_layers_per_stack": 3, "num_hidden_layers": 24}),
        (
            "zamba",
            {},
            {"layers_block_type": ["linear_attention"] * 2 + ["hybrid"] + ["linear_attention"] * 4 + ["hybrid"]},
        ),
        ("gemma3n_text", {}, {"num_kv_shared_layers": 1, "intermediate_size": [72] * 12}),
        ("gemma4_text", {}, {"head_dim": 16, "per_layer_config": {"5": {"head_dim": 32}, "6": {"head_dim": 32}}}),
        ("codegen", {}, {"n_embd": 80, "n_head": 8, "rotary_dim": 4, "n_inner": None, "n_ctx": 64}),
        ("gpt2", {"n_inner": 1024}, {"n_inner": 72, "n_positions": 64}),
        ("opt", {}, {"hidden_size": 80, "word_embed_proj_dim": 80, "ffn_dim": 72}),
        ("opt", {"word_embed_proj_dim": 512}, {"hidden_size": 80, "word_embed_proj_dim": 12}),
        ("modernbert-decoder", {}, {"local_attention": 12}),
        ("mamba2", {}, {"num_heads": 8, "head_dim": 20, "hidden_size": 80, "n_groups": 2}),
        ("falcon_h1", {}, {"mamba_n_heads": 6, "mamba_d_head": 8, "mamba_d_ssm": 48}),
        ("minicpm3", {}, {"head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20}),
        ("qwen3_5_text", {}, {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12}),
        (
            "qwen3_5_text",
            {"rope_parameters": {**ROPE, "mrope_section": [11, 11, 10]}},
            {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.25, "mrope_section": [1, 0, 1]}},
        ),
        ("modernbert-decoder", {}, {"cls_token_id": 3, "sep_token_id": 4, "pad_token_id": 0}),
        ("ministral", {}, {"head_dim": 16}),
    ],
)
def test_what_fields_become(model_type: str, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    cls = find_class(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type], model_type)
    found, _ = _tiny_model(cls, CONFIG_MAPPING[model_type](**fields))
    assert {name: found[name] for name in expected} == expected


def test_a_mixture_of_experts_whose_config_counts_none() -> None:
    """The class cannot be built so; without experts all of its layers are dense, and a count of them is refused."""
    cls = find_class(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["dots1"], "dots1")
    real = CONFIG_MAPPING["dots1"]()
    found, _ = _tiny_model(cls, real)
    assert found["first_k_dense_replace"] == found["num_hidden_layers"] == 3
    assert left_dense(real, found) == ["n_routed_experts"]


@pytest.mark.parametrize("counts", [{"n_routed_experts": 8}, {"first_k_dense_replace": 62}])
def test_dense_layers_are_not_made_up(counts: dict[str, int]) -> None:
    real = CONFIG_MAPPING["dots1"](num_experts_per_tok=2, n_shared_experts=1, **counts)
    cls = find_class(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["dots1"], "dots1")
    found, _ = _tiny_model(cls, real)
    assert left_dense(real, found) == []
    assert (found["first_k_dense_replace"] == 0) is ("n_routed_experts" in counts)


@pytest.mark.parametrize("lengths", [(32768, 32768), (32768, 8192)])
def test_a_factor_that_a_class_reads_and_a_file_leaves_out(lengths: tuple[int, int]) -> None:
    """MiniCPM3-4B's published file; the rotation itself takes it from the two lengths."""
    longest, original = lengths
    factors = [1.0 + 0.1 * place for place in range(16)]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": factors,
        "short_factor": factors,
        "original_max_position_embeddings": original,
    }
    cls = find_class(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["minicpm3"], "minicpm3")
    real = CONFIG_MAPPING["minicpm3"](rope_parameters=rope, max_position_embeddings=longest)
    found, _ = _tiny_model(cls, real)
    small = found["rope_parameters"]
    assert "factor" not in real.rope_parameters
    assert small["factor"] == longest / original
    assert found["max_position_embeddings"] == small["original_max_position_embeddings"] * small["factor"]
