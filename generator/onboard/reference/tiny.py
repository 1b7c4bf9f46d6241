"""A tiny config that keeps every feature of the real one.

Rules: all sizes differ from each other wherever the architecture allows it (equal sizes hide transposed and swapped
tensors); fewer key/value heads than query heads; one full period of the layer pattern and one layer more; a window
and a
RoPE scaling range shorter than :data:`SEQUENCE`; at most a million parameters.

A field is shrunk by what it means: by its canonical name where it has one (:mod:`onboard.reference.meanings`), as a
pattern of layers (:mod:`onboard.reference.patterns`), else by the words of its name and its relation to other sizes
(:mod:`onboard.reference.sizes`).
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from onboard.reference.meanings import read, size, spelling
from onboard.reference.patterns import layer_count, layer_patterns, overrides_by_layer, period, resized
from onboard.reference.sizes import shrink
from onboard.spec.keys import ALIASES, SIZES

SEQUENCE = 24
"""Tokens in a test sequence: longer than the tiny window and than the tiny original length of a RoPE scaling."""
WINDOW = 6
ORIGINAL_LENGTH = 16
HEAD_DIM = 16
LEAST_ROTARY = 4
"""Dimensions that rotate at least: two pairs, of different frequency."""

_HIDDEN_PER_HEAD = 10
_SIZES = {
    "intermediate_size": 72,
    "num_key_value_heads": 2,
    "vocab_size": 151,
    "max_position_embeddings": 64,
}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Not part of the forward pass, or set by the tests themselves.
_LEFT_OUT = frozenset(
    ("architectures", "dtype", "initializer_range", "model_type", "transformers_version", "use_cache", "_name_or_path")
)
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Shares of a head's pairs for the positions in time, height and width.
_SECTIONS = (3, 3, 2)


@dataclass(frozen=True)
class _Choice:
    """What an architecture may not allow; the first values tell most.

    Args:
        multiplied: ``hidden_size`` is the heads times :data:`HEAD_DIM`, for classes without a head size of their own.
        equal: as many key/value heads as query heads, for classes without groups.
        given: ``head_dim`` is given where the real config leaves it empty and the class then cannot be built.
        completed: rotary parameters where the real config leaves some out and the class cannot be built without.
        dense: every layer is dense where the config says no number of experts and the class cannot be built without.
    """

    multiplied: bool = False
    equal: bool = False
    given: bool = False
    completed: bool = False
    dense: bool = False


def tiny_fields(real: PretrainedConfig) -> dict[str, Any]:
    """Constructor arguments of the tiny config, first choice of sizes.

    Args:
        real: the real model's config, as transformers reads it.

    Returns:
        Field name to value, JSON types only. See :func:`candidates` for sizes that suit stricter architectures.
    """
    return _tiny(real, _Choice())


def _telling_multipliers(fields: Mapping[str, Any]) -> dict[str, float]:
    """Other values for factors of one, which would hide whether and where they are used."""
    neutral = [
        name
        for name, value in fields.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value == 1
        if name.endswith(("_multiplier", "_scaling", "logit_scale", "scale_emb", "residual_scale"))
        and "dim" not in name
    ]
    return {name: 0.5 + 0.25 * (3 + place) for place, name in enumerate(sorted(neutral))}


def candidates(real: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """Tiny configs from the most telling sizes to the most permissive ones.

    Those whose heads are too small to rotate the real part of them are left out where others are not.
    """
    switches = itertools.product((False, True), repeat=5)
    choices = [
        _Choice(multiplied, equal, given, completed, dense) for dense, completed, given, equal, multiplied in switches
    ]
    found: dict[str, dict[str, Any]] = {}
    for choice in choices:
        fields = _tiny(real, choice)
        found.setdefault(json.dumps(fields, default=str), fields)
    rotating = [fields for fields in found.values() if _rotates(real, fields)]
    yield from rotating or found.values()


def _tiny(real: PretrainedConfig, choice: _Choice, hidden_sizes: Mapping[int, int] | None = None) -> dict[str, Any]:
    """Tiny fields of a config, or of one nested in it.

    Args:
        real: the real config.
        choice: what to give up.
        hidden_sizes: real to tiny hidden size, where several nested configs depend on each other.
    """
    fields = _real_fields(real)
    total, layers = size(real, "num_hidden_layers"), layer_count(real)
    stacks = _layers_per_stack(fields, total)
    for name, value in fields.items():
        fields[name] = resized(name, value, total, layers)
    for name, stack in stacks.items():
        fields[name], layers = layers, layers * (total // stack)
    known = _set_sizes(fields, real, layers, choice, hidden_sizes)
    _set_tokens(fields, known)
    unknown = {name: value for name, value in fields.items() if type(value) is int and not _is_token(name)}
    meant = {spelling(real, canonical) for canonical in (*SIZES, "sliding_window")}
    for key in {*meant, *stacks, _rotary_key(real, fields)}:
        unknown.pop(key or "", None)
    fields |= shrink(unknown, known, WINDOW)
    fields |= _telling_multipliers(fields)
    if "query_pre_attn_scalar" in fields:
        fields["query_pre_attn_scalar"] = 24
    _set_counts_of_layers(fields, real, layers, stacks)
    if choice.dense and _lacks_experts(real):
        fields |= dict.fromkeys(_dense_counts(fields), layers)
    _set_head_dim(fields, real, choice)
    _set_rope(fields, real, choice)
    inner = {name: value for name, value in fields.items() if isinstance(value, PretrainedConfig)}
    fields |= _nested(inner, choice)
    return _as_read(real, fields)


def _real_fields(real: PretrainedConfig) -> dict[str, Any]:
    """The fields that the class declares, with their real values."""
    base = set(PretrainedConfig.__dataclass_fields__)
    fields = {}
    for name, field in type(real).__dataclass_fields__.items():
        if (
            name.startswith("_")
            or name in _LEFT_OUT
            or (name in base and name not in ("tie_word_embeddings", *_TOKENS))
        ):
            continue
        if name not in vars(real) and not hasattr(real, name):
            continue
        value = copy.deepcopy(read(real, name))
        value = list(value) if isinstance(value, tuple) else value
        if isinstance(value, list) and math.inf in value and value == list(field.default or ()):
            continue  # JSON has no infinity, and the class has the same value of its own
        fields[name] = value
    return fields


def _layers_per_stack(fields: Mapping[str, Any], total: int | None) -> dict[str, int]:
    """Fields that say how many layers run again and again, ``num_hidden_layers`` times in all."""
    return {
        name: value
        for name, value in fields.items()
        if {"layers", "per"} <= set(name.split("_")) and type(value) is int and total and 1 < value < total
        if total % value == 0
    }


def _set_sizes(
    fields: dict[str, Any],
    real: PretrainedConfig,
    layers: int,
    choice: _Choice,
    hidden_sizes: Mapping[int, int] | None,
) -> dict[str, tuple[int, int]]:
    """Set the sizes that have a canonical name, and say their real and tiny values by that name."""
    grouped = spelling(real, "num_key_value_heads") is not None
    # Without groups of their own, heads may be grouped in a fused projection: eight heads show what four would hide.
    heads = 4 if grouped or spelling(real, "num_attention_heads") is None else 8
    tiny = {
        "hidden_size": heads * (HEAD_DIM if choice.multiplied else _HIDDEN_PER_HEAD),
        "num_attention_heads": heads,
        **_SIZES,
        "num_hidden_layers": layers,
    }
    if choice.equal:
        tiny["num_key_value_heads"] = heads
    if hidden_sizes and size(real, "hidden_size") in hidden_sizes:
        tiny["hidden_size"] = hidden_sizes[size(real, "hidden_size")]
    # A part of a model may have neither; what depends on them then has the tiny values all the same.
    known = {"vocab_size": (0, _SIZES["vocab_size"]), "num_hidden_layers": (0, layers)}
    for name, value in tiny.items():
        key = spelling(real, name)
        if key is None or key not in fields:
            continue
        was = fields[key]
        if isinstance(was, list):  # one for each layer
            distinct = list(dict.fromkeys(was))
            fields[key] = [value + 16 * distinct.index(one) for one in was]
            continue
        if was is None and name == "intermediate_size":
            continue  # the class computes it; what it does then is a feature
        fields[key] = value
        for other in ALIASES.get(name, ()):
            if was is not None and fields.get(other) == was:
                fields[other] = value
        known[name] = (size(real, name), value)
    window = size(real, "sliding_window")
    if window is not None:
        known["sliding_window"] = (window, WINDOW)
        key = spelling(real, "sliding_window")
        if key is not None:
            fields[key] = WINDOW
    return known


def _is_token(name: str) -> bool:
    return name.endswith(("token_id", "token_ids"))


def _set_tokens(fields: dict[str, Any], known: Mapping[str, tuple[int, int]]) -> None:
    """Tokens of the tiny vocabulary, each its own."""
    for name, value in _TOKENS.items():
        if fields.get(name) is not None:
            fields[name] = value
    free = itertools.count(len(_TOKENS))
    for name, value in fields.items():
        if _is_token(name) and type(value) is int and value >= known["vocab_size"][1]:
            fields[name] = next(free)


def _set_counts_of_layers(
    fields: dict[str, Any], real: PretrainedConfig, layers: int, stacks: Mapping[str, int]
) -> None:
    """How many layers have something in common: at most those after one full period."""
    total = size(real, "num_hidden_layers") or 0
    most = layers - max((period(pattern) for pattern in layer_patterns(real)), default=1)
    depth = {spelling(real, "num_hidden_layers"), *stacks}
    for name, value in fields.items():
        if name == "max_window_layers":
            fields[name] = min(value, layers - 1)
        elif type(value) is int and 0 < value < total and "layers" in name.split("_") and name not in depth:
            fields[name] = max(1, min(value, most))


def left_dense(real: PretrainedConfig, fields: Mapping[str, Any]) -> list[str]:
    """Counts of experts that the config leaves empty, where the tiny model's layers are dense for that reason alone."""
    dense = [name for name in _dense_counts(fields) if (read(real, name) or 0) < (size(real, "num_hidden_layers") or 0)]
    every = [name for name in dense if fields[name] == fields.get(spelling(real, "num_hidden_layers") or "")]
    return _experts(real) if every and _lacks_experts(real) else []


def _lacks_experts(real: PretrainedConfig) -> bool:
    return bool(_experts(real)) and all(read(real, name) is None for name in _experts(real))


def _experts(real: PretrainedConfig) -> list[str]:
    return [name for name in ALIASES["num_experts"] if name in type(real).__dataclass_fields__]


def _dense_counts(fields: Mapping[str, Any]) -> list[str]:
    """Fields that say how many of the first layers are dense."""
    return [name for name, value in fields.items() if type(value) is int and {"first", "dense"} <= set(name.split("_"))]


def _set_head_dim(fields: dict[str, Any], real: PretrainedConfig, choice: _Choice) -> None:
    """The size of a head, and the part of it that rotates."""
    key, width = spelling(real, "head_dim"), size(real, "hidden_size")
    if key is not None and (fields[key] is not None or choice.given):
        was, heads = fields[key], size(real, "num_attention_heads")
        fields[key] = HEAD_DIM
        for name, value in fields.items():
            words = set(name.split("_"))
            if "expand" in words and was and width and was * heads == value * width:
                # The heads share what a state-space layer expands the hidden size to.
                fields[key] = value * fields[spelling(real, "hidden_size") or ""] // fields[_heads_key(real)]
            elif {"rope", "dim"} <= words and read(real, name) == was:
                fields[key] = value  # of such heads only this part is said to be the head
    key = _rotary_key(real, fields)
    if key is not None:
        part = fields[key] / (size(real, "head_dim") or width / size(real, "num_attention_heads"))
        fields[key] = max(LEAST_ROTARY, 2 * round(part * _head_dim(fields, real) / 2))


def _heads_key(real: PretrainedConfig) -> str:
    return spelling(real, "num_attention_heads") or ""


def _rotary_key(real: PretrainedConfig, fields: Mapping[str, Any]) -> str | None:
    """The field that says how many dimensions of a head rotate, where they are not a projection of their own."""
    key = spelling(real, "rotary_dim")
    return key if key and "rope" not in key.split("_") and fields[key] is not None else None


def _head_dim(fields: Mapping[str, Any], real: PretrainedConfig) -> int:
    """The tiny head size: the class's own field, or the hidden size divided by the heads."""
    own = fields.get(spelling(real, "head_dim") or "")
    heads, hidden = fields.get(_heads_key(real)), fields.get(spelling(real, "hidden_size") or "")
    return int(own or (hidden // heads if heads and hidden else HEAD_DIM))


def _set_rope(fields: dict[str, Any], real: PretrainedConfig, choice: _Choice) -> None:
    rope = fields.get("rope_parameters")
    if not isinstance(rope, dict):
        return
    if choice.completed:
        rope = _completed(rope, real, fields)
    own = fields.get(spelling(real, "head_dim") or "") or HEAD_DIM
    small = fields["rope_parameters"] = _tiny_rope(rope, own, _head_dim(fields, real))
    key = spelling(real, "max_position_embeddings")
    length = max((_original(one) or 0) for one in _rope_sets(small))
    if length and key:
        factor = max(_stretch(one, real) for one in _rope_sets(rope))
        fields[key] = int(length * factor)
        if "original_max_position_embeddings" in fields:
            fields["original_max_position_embeddings"] = length
    if key and any(one.get("rope_type") == "dynamic" for one in _rope_sets(rope)):
        # Its frequencies begin to change past the maximum itself.
        fields[key] = ORIGINAL_LENGTH


def _completed(rope: Mapping[str, Any], real: PretrainedConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters with what the class reads and the real config does not say."""
    if not rope:
        kinds = dict.fromkeys(fields.get("layer_types") or ())
        rope = {kind: dict(_PLAIN_ROPE) for kind in kinds} or dict(_PLAIN_ROPE)
    if any(isinstance(value, Mapping) for value in rope.values()):
        return {
            name: _completed(value, real, fields) if isinstance(value, Mapping) else value
            for name, value in rope.items()
        }
    if _original(rope) and rope.get("factor") is None:
        # transformers' own rotations take it from the two lengths where it is not given; a class may read it itself.
        rope = {**rope, "factor": _stretch(rope, real)}
    # The class names sections among the keys of rotary parameters that it knows; its own default fits real heads only.
    sections = [key for key in getattr(real, "ignore_keys_at_rope_validation", ()) if key.endswith("section")]
    return {key: list(_SECTIONS) for key in sections} | dict(rope)


def _rotates(real: PretrainedConfig, fields: Mapping[str, Any]) -> bool:
    """Whether what rotates of a head is an even number of dimensions, and no smaller than two pairs."""
    head_dim = _head_dim(fields, real)
    key = _rotary_key(real, fields)
    if key is not None and fields[key] >= head_dim:
        return False
    rope = fields.get("rope_parameters")
    parts = [one.get("partial_rotary_factor") or 1.0 for one in _rope_sets(rope)] if isinstance(rope, dict) else []
    return all(int(head_dim * part) % 2 == 0 and int(head_dim * part) >= LEAST_ROTARY for part in parts)


def _rope_sets(rope: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parameter sets in ``rope_parameters``: one, or one per layer type."""
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return nested or [rope]


def _original(rope: Mapping[str, Any]) -> int | None:
    value = rope.get("original_max_position_embeddings")
    return int(value) if value else None


def _stretch(rope: Mapping[str, Any], real: PretrainedConfig) -> float:
    """How many times longer than its original length the real model's context is."""
    original, longest = _original(rope), size(real, "max_position_embeddings")
    return longest / original if original and longest else 1.0


def _tiny_rope(rope: Mapping[str, Any], own: int, head_dim: int) -> dict[str, Any]:
    """Rotary parameters of the tiny size.

    Args:
        rope: the real ones.
        own: the tiny head size of a class that has one of its own; what permissive candidates have in other classes.
        head_dim: the tiny head size of this candidate.
    """
    if any(isinstance(value, Mapping) for value in rope.values()):
        return {
            name: _tiny_rope(value, own, head_dim) if isinstance(value, Mapping) else value
            for name, value in rope.items()
        }
    small = dict(rope)
    if _original(rope):
        small["original_max_position_embeddings"] = ORIGINAL_LENGTH
    part = rope.get("partial_rotary_factor") or 1.0
    pairs = int(own * part) // 2
    for name, value in rope.items():
        if not isinstance(value, list):
            continue
        if name.endswith("section") and sum(value):
            # Sections of the pairs, one after the other: keep their shares.
            ends = [round(end * (int(head_dim * part) // 2) / sum(value)) for end in itertools.accumulate(value)]
            small[name] = [end - start for start, end in itertools.pairwise([0, *ends])]
        elif len(value) >= pairs:
            # One factor per frequency pair: keep the lowest, the highest and an even spread between them.
            small[name] = [value[round(index * (len(value) - 1) / max(1, pairs - 1))] for index in range(pairs)]
    return small


def _nested(configs: Mapping[str, PretrainedConfig], choice: _Choice) -> dict[str, dict[str, Any]]:
    """Tiny fields of configs inside a config; a hidden size that is a multiple of another one stays it."""
    tiny: dict[int, int] = {}
    bases = (4 * step * (HEAD_DIM if choice.multiplied else _HIDDEN_PER_HEAD) // 10 for step in itertools.count(10, 4))
    for value in sorted({size(config, "hidden_size") or 0 for config in configs.values()} - {0}):
        smaller = next((other for other in tiny if value % other == 0), None)
        tiny[value] = tiny[smaller] * (value // smaller) if smaller else next(bases)
    return {
        name: _tiny(config, choice, tiny) if size(config, "num_hidden_layers") else _real_fields(config)
        for name, config in configs.items()
    }


def _as_read(real: PretrainedConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields as the class itself gives them back, where it insists on a kind for some layer.

    Fields that some layers have values of their own for follow the kinds of the layers.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = type(real)(**copy.deepcopy(fields))
    except Exception:  # left to whoever builds it, who names the error
        return fields
    layers = size(real, "num_hidden_layers")
    for name, value in fields.items():
        whole, other = read(real, name), read(made, name)
        listed = isinstance(value, list) and isinstance(other, list) and isinstance(whole, list)
        if listed and len(whole) == layers and len(other) == len(value):
            fields[name] = other
    overrides = overrides_by_layer(real)
    if overrides:
        fields["per_layer_config"] = _tiny_overrides(real, fields, overrides)
    return fields


def _tiny_overrides(
    real: PretrainedConfig, fields: Mapping[str, Any], overrides: Mapping[int, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """What layers have of their own, larger or smaller than the tiny value of all as it is in the real model."""
    key = spelling(real, "layer_types")
    tiny: dict[str, dict[str, Any]] = {}
    for index in range(fields[spelling(real, "num_hidden_layers") or "num_hidden_layers"]):
        like = read(real, key).index(fields[key][index]) if key else index
        own = {}
        for name, value in overrides.get(like, {}).items():
            usual, small = read(real, name), fields.get(name)
            if type(value) is int and type(usual) is int and type(small) is int:
                value = small * 2 if value > usual else small // 2
            own[name] = value
        if own:
            tiny[str(index)] = own
    return tiny
