"""A tiny config that keeps every feature of the real one.

Rules: all sizes differ from each other wherever the architecture allows it (equal sizes hide transposed and swapped
tensors); fewer key/value heads than query heads; one full period of the layer pattern and one layer more; a window
and a
RoPE scaling range shorter than :data:`SEQUENCE`; at most a million parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PretrainedConfig

from onboard.reference.roles import Unexplained

SEQUENCE = 24
"""Tokens in a test sequence: longer than the tiny window and than the tiny original length of a RoPE scaling."""
WINDOW = 6
ORIGINAL_LENGTH = 16
HEAD_DIM = 16
MOST_LAYERS = 128
"""A pattern that needs more layers than this to be shown would make no tiny model."""

_SIZES = {
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 151,
    "max_position_embeddings": 64,
}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Not part of the forward pass, or set by the tests themselves.
_LEFT_OUT = frozenset(
    ("architectures", "dtype", "initializer_range", "model_type", "transformers_version", "use_cache", "_name_or_path")
)


def tiny_fields(real: PretrainedConfig) -> dict[str, Any]:
    """Constructor arguments of the tiny config, first choice of sizes.

    Args:
        real: the real model's config, as transformers reads it.

    Returns:
        Field name to value, JSON types only. See :func:`candidates` for sizes that suit stricter architectures.
    """
    base = set(PretrainedConfig.__dataclass_fields__)
    fields = {
        name: copy.deepcopy(getattr(real, name))
        for name in type(real).__dataclass_fields__
        if (name not in base or name in ("tie_word_embeddings", *_TOKENS)) and name not in _LEFT_OUT
        if hasattr(real, name) and not name.startswith("_")
    }
    real_layers = real.num_hidden_layers
    layers = _layer_count(real)
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == real_layers:
            # A model of fewer layers than the tiny one repeats its last kind.
            fields[name] = (value + value[-1:] * layers)[:layers]
    for name, value in _SIZES.items():
        if name in fields:
            fields[name] = value
    for name, value in _TOKENS.items():
        if fields.get(name) is not None:
            fields[name] = value
    fields["num_hidden_layers"] = layers
    if fields.get("sliding_window") is not None:
        fields["sliding_window"] = WINDOW
    if "query_pre_attn_scalar" in fields:
        fields["query_pre_attn_scalar"] = 24
    if "max_window_layers" in fields:
        fields["max_window_layers"] = min(fields["max_window_layers"], layers - 1)
    if getattr(real, "head_dim", None) is not None:
        fields["head_dim"] = HEAD_DIM
    rope = fields.get("rope_parameters")
    if isinstance(rope, dict):
        fields["rope_parameters"] = _tiny_rope(rope)
        length = max((_original(one) or 0) for one in _rope_sets(fields["rope_parameters"]))
        if length:
            factor = max(_stretch(one, real) for one in _rope_sets(rope))
            fields["max_position_embeddings"] = int(length * factor)
            if "original_max_position_embeddings" in fields:
                fields["original_max_position_embeddings"] = length
        if any(one.get("rope_type") == "dynamic" for one in _rope_sets(rope)):
            # Its frequencies begin to change past the maximum itself.
            fields["max_position_embeddings"] = ORIGINAL_LENGTH
    return fields


def candidates(real: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """Tiny configs from the most telling sizes to the most permissive ones."""
    fields = tiny_fields(real)
    yield fields
    # Architectures without a head size of their own need hidden_size = heads * head_dim.
    yield {**fields, "hidden_size": _SIZES["num_attention_heads"] * HEAD_DIM}


def _layer_count(real: PretrainedConfig) -> int:
    """One period of the layer pattern and one layer more, at least three."""
    total = real.num_hidden_layers
    patterns = [
        list(map(str, value))
        for name in type(real).__dataclass_fields__
        if isinstance(value := getattr(real, name, None), list) and len(value) == total
    ]
    count = max([3, *(_period(pattern) + 1 for pattern in patterns)])
    if count > MOST_LAYERS:
        raise Unexplained(
            "layer pattern", f"it repeats only after {count - 1} layers, at most {MOST_LAYERS - 1} are served"
        )
    return count


def _period(pattern: Sequence[str]) -> int:
    """Length of the shortest prefix that, repeated, gives the pattern; else of the shortest with every kind in it."""
    for period in range(1, len(pattern) // 2 + 1):
        if all(item == pattern[index % period] for index, item in enumerate(pattern)):
            return period
    return max(map(pattern.index, set(pattern)), default=0) + 1


def _rope_sets(rope: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parameter sets in ``rope_parameters``: one, or one per layer type."""
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return nested or [rope]


def _original(rope: Mapping[str, Any]) -> int | None:
    value = rope.get("original_max_position_embeddings")
    return int(value) if value else None


def _stretch(rope: Mapping[str, Any], real: PretrainedConfig) -> float:
    """How many times longer than its original length the real model's context is."""
    original = _original(rope)
    return real.max_position_embeddings / original if original else 1.0


def _tiny_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    if any(isinstance(value, Mapping) for value in rope.values()):
        return {name: _tiny_rope(value) if isinstance(value, Mapping) else value for name, value in rope.items()}
    small = dict(rope)
    if _original(rope):
        small["original_max_position_embeddings"] = ORIGINAL_LENGTH
    pairs = int(HEAD_DIM * (rope.get("partial_rotary_factor") or 1.0)) // 2
    for name, value in rope.items():
        if isinstance(value, list) and len(value) >= pairs:
            # One factor per frequency pair: keep the lowest, the highest and an even spread between them.
            small[name] = [value[round(index * (len(value) - 1) / max(1, pairs - 1))] for index in range(pairs)]
    return small
