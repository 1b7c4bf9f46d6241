"""The tiny config keeps every feature of the real one, for each config class that transformers has for a decoder."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from onboard.reference.patterns import MOST_LAYERS, period
from onboard.reference.probe import _real_error
from onboard.reference.roles import Unexplained
from onboard.reference.tiny import HEAD_DIM, SEQUENCE, WINDOW, candidates, tiny_fields
from onboard.spec.kind import classify
from onboard.spec.static import measured_types
from transformers import CONFIG_MAPPING, LlamaConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

EXAMPLES = Path(__file__).parents[2] / "examples"


def defaults() -> dict[str, PretrainedConfig]:
    """Every dense decoder's default config that has Llama's names of the sizes."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for model_type, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
            try:
                config = CONFIG_MAPPING[model_type]()
                own = {name for name in type(config).__dataclass_fields__ if hasattr(config, name)}
                raw = json.loads(config.to_json_string(use_diff=False))
            except Exception:  # needs a package that is not installed
                continue
            dense = classify({**raw, "architectures": [architecture]}).kind == "dense"
            if dense and {"num_hidden_layers", "hidden_size", "num_attention_heads"} <= own:
                found[model_type] = config
    return found


CONFIGS = defaults()
EXAMPLE_CONFIGS = {
    file.parent.name: CONFIG_MAPPING[json.loads(file.read_text())["model_type"]].from_dict(json.loads(file.read_text()))
    for file in sorted(EXAMPLES.glob("*/config.json"))
}
ALL = {**CONFIGS, **EXAMPLE_CONFIGS}


def test_there_are_many() -> None:
    assert len(CONFIGS) > 40
    assert len(EXAMPLE_CONFIGS) >= 9


# Classes that spell their sizes otherwise are test_tiny_breadth's.
CANONICAL = {name for name, real in ALL.items() if "num_hidden_layers" in type(real).__dataclass_fields__}


@pytest.fixture(params=sorted(CANONICAL))
def real(request: pytest.FixtureRequest) -> PretrainedConfig:
    return copy.deepcopy(ALL[request.param])


def test_json_only_and_the_real_config_untouched(real: PretrainedConfig) -> None:
    before = copy.deepcopy(real.__dict__)
    fields = tiny_fields(real)
    again = json.loads(json.dumps(fields))
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()} == again
    fields.setdefault("rope_parameters", {})
    for value in fields.values():
        if isinstance(value, dict | list):
            value.clear()
    assert real.__dict__ == before


def test_sizes_differ_from_each_other(real: PretrainedConfig) -> None:
    fields = tiny_fields(real)
    heads, kv_heads = fields["num_attention_heads"], fields.get("num_key_value_heads") or 1
    assert kv_heads < heads
    assert heads % kv_heads == 0
    mlp = fields.get("intermediate_size") or 1
    mlp = mlp[0] if isinstance(mlp, list) else mlp
    sizes = {
        "hidden": fields["hidden_size"],
        "mlp": mlp,
        "two mlps": 2 * mlp,
        "vocabulary": fields["vocab_size"],
        "layers": fields["num_hidden_layers"],
    }
    if (head_dim := fields.get("head_dim")) is not None:
        assert head_dim != fields["hidden_size"] / heads
        sizes |= {"head": head_dim, "q": heads * head_dim, "qkv": (heads + 2 * kv_heads) * head_dim}
        if kv_heads > 1:
            sizes["kv"] = kv_heads * head_dim
    assert len(set(sizes.values())) == len(sizes), sizes


def test_layers_show_one_period_and_one_more(real: PretrainedConfig) -> None:
    fields = tiny_fields(real)
    layers = fields["num_hidden_layers"]
    assert 3 <= layers <= MOST_LAYERS
    for name, value in fields.items():
        pattern = getattr(real, name)
        if isinstance(pattern, list) and {type(item) for item in pattern} == {int} and max(pattern) > 1:
            continue  # sizes, or numbers of layers
        if isinstance(value, list) and isinstance(pattern, list) and len(pattern) == real.num_hidden_layers:
            assert len(value) == layers, name
            assert value[: len(pattern)] == pattern[:layers], name
            assert {str(item) for item in value} == {str(item) for item in pattern}, f"{name}: a kind of layer is lost"


def test_what_depends_on_length_shows(real: PretrainedConfig) -> None:
    fields = tiny_fields(real)
    if "sliding_window" in fields and real.sliding_window is not None:
        assert fields["sliding_window"] == WINDOW < SEQUENCE
    else:
        assert fields.get("sliding_window") is None
    rope = fields.get("rope_parameters")
    for one in [one for one in (rope or {}).values() if isinstance(one, dict)] or [rope or {}]:
        assert (one.get("original_max_position_embeddings") or 1) < SEQUENCE


def test_features_stay(real: PretrainedConfig) -> None:
    """Flags, names and small numbers are the real ones: only sizes, tokens and lengths are made small."""
    fields = tiny_fields(real)
    for name, value in fields.items():
        if isinstance(value, bool | str | float) and getattr(real, name) != 1:
            assert value == getattr(real, name), name


def test_factors_of_one_get_values_that_show() -> None:
    fields = tiny_fields(CONFIGS["granite"])
    factors = {fields[name] for name in ("embedding_multiplier", "logits_scaling", "residual_multiplier")}
    assert len(factors) == 3
    assert 1.0 not in factors


def test_special_tokens_are_in_the_vocabulary(real: PretrainedConfig) -> None:
    for fields in candidates(real):
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            assert fields.get(name) is None or 0 <= fields[name] < fields["vocab_size"]


@pytest.mark.parametrize("name", sorted({*measured_types(), *EXAMPLE_CONFIGS} & CANONICAL))
def test_at_most_a_million_parameters(name: str) -> None:
    real = ALL[name]
    cls = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[real.model_type])
    built = 0
    for fields in candidates(real):
        config = cls.config_class(**fields)
        error = _real_error(cls, config)
        if error is not None:
            # What one candidate leaves open, as the real config does, a later one fills in.
            assert error == _real_error(cls, real)
            continue
        with torch.device("meta"):
            model = cls(config)
        built += 1
        assert sum(parameter.numel() for parameter in model.parameters()) <= 1_000_000
    assert built


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [
        (["s", "s", "f"] * 9, 4),
        ((["s"] * 5 + ["f"]) * 5, 7),
        (["f"] * 28, 3),
        (["f"] * 10 + ["s"] * 10, 12),
        (["a", "a", "b", "a", "a", "a", "c", "a"], 8),
    ],
)
def test_layer_patterns(pattern: list[str], layers: int) -> None:
    real = LlamaConfig(num_hidden_layers=len(pattern))
    real.__class__ = type("Patterned", (LlamaConfig,), {})
    real.__class__.__dataclass_fields__ = {**LlamaConfig.__dataclass_fields__, "kinds": None}
    real.kinds = pattern
    fields = tiny_fields(real)
    assert fields["num_hidden_layers"] == layers
    assert set(fields["kinds"]) == set(pattern)


def test_a_pattern_that_needs_too_many_layers() -> None:
    real = CONFIG_MAPPING["qwen3"](
        num_hidden_layers=400, layer_types=["full_attention"] * 300 + ["sliding_attention"] * 100
    )
    with pytest.raises(Unexplained) as caught:
        tiny_fields(real)
    assert caught.value.part == "layer pattern"


def test_fewer_layers_than_the_tiny_model() -> None:
    real = CONFIG_MAPPING["qwen3"](num_hidden_layers=1)
    assert tiny_fields(real)["layer_types"] == ["full_attention"] * 3


def test_factors_of_frequencies_keep_both_ends() -> None:
    fields = tiny_fields(EXAMPLE_CONFIGS["phi-4-mini"])
    rope, real = fields["rope_parameters"], EXAMPLE_CONFIGS["phi-4-mini"].rope_parameters
    pairs = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
    for name in ("long_factor", "short_factor"):
        assert len(rope[name]) == pairs
        assert (rope[name][0], rope[name][-1]) == (real[name][0], real[name][-1])


kinds = st.sampled_from(["a", "b", "c"])


@given(st.lists(kinds, min_size=1, max_size=5), st.integers(2, 6), st.integers(0, 4))
def test_the_period_of_a_repeated_prefix(prefix: list[str], times: int, more: int) -> None:
    pattern = prefix * times + prefix[: more % len(prefix)]
    found = period(pattern)
    assert 1 <= found <= len(prefix)
    assert all(item == pattern[index % found] for index, item in enumerate(pattern))
    for shorter in range(1, found):
        assert any(item != pattern[index % shorter] for index, item in enumerate(pattern))


@given(st.lists(kinds, min_size=1, max_size=40))
def test_a_period_and_one_more_layer_show_every_kind(pattern: list[str]) -> None:
    found = period(pattern)
    assert 1 <= found <= len(pattern)
    assert set(pattern[: found + 1]) == set(pattern)


def test_every_field_reaches_the_config_class() -> None:
    for name, real in EXAMPLE_CONFIGS.items():
        fields: dict[str, Any] = list(candidates(real))[name == "phi-4-mini"]
        made = type(real)(**copy.deepcopy(fields))
        assert {name: getattr(made, name) for name in fields} == fields
