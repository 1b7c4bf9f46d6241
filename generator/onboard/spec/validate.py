"""Whether the values of a config can be those of a decoder, checked before anything is built or rendered from them.

A config is a stranger's data. Each value that sizes, shapes or numbers are taken from has a range here, wide enough for
any model that anybody could train and narrow enough that no tensor, list or file grows without bound. The limits are
checked twice: on the file as it is (:func:`check_config`), and on what transformers' config class made of it
(:func:`check_read`), which knows more spellings and fills in defaults.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final, NoReturn

from onboard.errors import Unsupported, UsageError
from onboard.facts._text import shown
from onboard.spec.keys import ALIASES

MOST_LAYERS: Final = 1_000
# A decoder without attention has no heads, and a class may compute the size of its MLP in the model.
REQUIRED: Final = ("hidden_size", "num_hidden_layers", "vocab_size")

_SIZES: Final[Mapping[str, int]] = {
    "hidden_size": 2**20,
    "num_hidden_layers": MOST_LAYERS,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "intermediate_size": 2**24,
    "vocab_size": 2**26,
    "max_position_embeddings": 2**40,
}
# A tokenizer's "no limit" is 10**30.
_NOT_A_SIZE: Final = frozenset(("model_max_length",))
_LABELS: Final = 2**20
_MOST: Final = 1e18
_LONGEST_WORD: Final = 64
_TOKEN_IDS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")
_ROPE_KEYS: Final = ("rope_scaling", "rope_parameters")
_DTYPES: Final = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")


def check_config(config: Mapping[str, Any]) -> None:
    """Check the decoder's part of a config.json.

    Raises:
        UsageError: a value that no decoder has, with the key, the value and what is allowed.
    """
    if (path := _not_a_number(config)) is not None:
        _refuse(path[1:], math.nan, "it is not a number")
    for name, most in _SIZES.items():
        for key in ALIASES.get(name, (name,)):
            # Another spelling may mean another thing in a family that nobody has seen: its type is not judged here.
            if key == name or (_is_number(config.get(key)) and key not in _NOT_A_SIZE):
                for one in _each_layer(key, config.get(key)):
                    _size(key, one, most, least=1 if key == name else 0)
    _size("num_labels", config.get("num_labels"), _LABELS, least=0)
    for key, value in config.items():
        _number_by_name(key, value)
    for key in _TOKEN_IDS:
        _token_id(key, config.get(key))
    for key in ("torch_dtype", "dtype"):
        if config.get(key) is not None and config[key] not in _DTYPES:
            _refuse(key, config[key], f"the dtypes of checkpoints are {', '.join(_DTYPES)}")
    types = config.get("layer_types")
    if types is not None and not (isinstance(types, list) and all(isinstance(one, str) for one in types)):
        _refuse("layer_types", types, "it is a list with a name for every layer")
    if types is not None and len(types) > MOST_LAYERS:
        _refuse("layer_types", f"{len(types)} entries", f"at most {MOST_LAYERS} layers are served")
    for key in _ROPE_KEYS:
        _rope(key, config.get(key), None)


def check_read(
    config: Mapping[str, Any],
    *,
    activations: Mapping[str, str],
    known_activations: Collection[str],
    rope_types: Collection[str],
    required: Collection[str] = REQUIRED,
) -> None:
    """Check the config as transformers reads it.

    Args:
        config: field of the config class to value, the sizes by their canonical names.
        activations: the fields that name an activation, with their values.
        known_activations: names that transformers has a function for.
        rope_types: names that transformers has a function for.
        required: the sizes that have to be there; a part of a model may lack some.

    Raises:
        UsageError: a value that no decoder has.
        Unsupported: an activation, rope type or layer type that is not known, with those that are; or a size.
    """
    for name, most in _SIZES.items():
        for one in _each_layer(name, config.get(name)):
            _size(name, one, most, least=1)
    for name in required:
        if config.get(name) is None:
            raise Unsupported(
                f"The architecture's {name} is not known.",
                "Its config class has no such field, under none of the names that onboard knows.",
                "Report the architecture.",
                code="unsupported.size",
            )
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        _refuse("num_key_value_heads", kv_heads, f"it has to divide num_attention_heads, which is {heads}")
    head_dim = config.get("head_dim")
    if head_dim is None and heads and config.get("hidden_size"):
        if config["hidden_size"] % heads:
            _refuse(
                "hidden_size",
                config["hidden_size"],
                f"it has to be a multiple of num_attention_heads, which is {heads}",
            )
        head_dim = config["hidden_size"] // heads
    window = config.get("sliding_window")
    if window is not None:
        _size("sliding_window", window, _SIZES["max_position_embeddings"], least=1)
    pad = config.get("pad_token_id")
    if pad is not None and config.get("vocab_size") and not -1 <= pad < config["vocab_size"]:
        _refuse("pad_token_id", pad, f"it has to be a token of the vocabulary, which has {config['vocab_size']}")
    for key, name in activations.items():
        if name not in known_activations:
            _unknown(key, name, "activation", known_activations)
    _layer_types(config.get("layer_types"), config.get("num_hidden_layers"))
    parameters = config.get("rope_parameters")
    _rope("rope_parameters", parameters, head_dim)
    for key, one in _rope_sets("rope_parameters", parameters):
        name = one.get("rope_type", one.get("type", "default"))
        if name not in rope_types:
            _unknown(f"{key}.rope_type", name, "rope type", rope_types)


def _each_layer(name: str, value: Any) -> list[Any]:
    """The values of a size: some classes have an MLP of another size in each layer."""
    listed = name == "intermediate_size" and isinstance(value, list) and 0 < len(value) <= MOST_LAYERS
    return value if listed else [value]


def _layer_types(types: Any, layers: int | None) -> None:
    """Any word may name a kind of layer: what it stands for is for the measurement to find out."""
    if types is None:
        return
    for name in types:
        if not isinstance(name, str) or len(name) > _LONGEST_WORD or not name.isascii() or not name.isidentifier():
            _refuse("layer_types", name, f"a kind of layer is a word of letters, digits and _, {_LONGEST_WORD} at most")
    if layers is not None and len(types) != layers:
        _refuse("layer_types", f"{len(types)} entries", f"it has one for each of the {layers} layers")


def _size(key: str, value: Any, most: int, *, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        _refuse(key, value, f"it has to be a whole number from {least} to {most}")


def _number_by_name(key: str, value: Any) -> None:
    """Ranges that go by the words of a key."""
    if not _is_number(value):
        return
    if (key == "eps" or key.endswith(("_eps", "epsilon"))) and not 0 <= value < 1:
        _refuse(key, value, "an epsilon is from 0 to below 1")
    if ("dropout" in key or "pdrop" in key) and not 0 <= value <= 1:
        _refuse(key, value, "a probability is from 0 to 1")
    if (key in ALIASES["rope_theta"] or key == "rope_local_base_freq") and not 0 < value < _MOST:
        _refuse(key, value, "the base of rotary positions is positive and finite")
    if key.endswith(("multiplier", "scale", "scaling", "scalar", "softcap", "softcapping")) and not abs(value) < _MOST:
        _refuse(key, value, "a factor is finite")


def _token_id(key: str, value: Any) -> None:
    for one in value if isinstance(value, list) else [value]:
        if one is not None and (isinstance(one, bool) or not isinstance(one, int) or not -1 <= one < 2**31):
            _refuse(key, value, "a token id is a whole number from -1 to 2147483647, or a list of them")


def _rope(key: str, value: Any, head_dim: int | None) -> None:
    """The numbers of one ``rope_parameters``, flat or by layer type."""
    if value is not None and not isinstance(value, Mapping):
        _refuse(key, value, "it is an object, or null")
    for path, one in _rope_sets(key, value):
        kind = one.get("rope_type", one.get("type"))
        if kind is not None and not isinstance(kind, str):
            _refuse(f"{path}.rope_type", kind, "it is a name")
        for name, number in one.items():
            where = f"{path}.{name}"
            if name in ("rope_theta", "factor", "attention_factor") and number is not None:
                if not _is_number(number) or not 0 < number < _MOST:
                    _refuse(where, number, "it is a positive, finite number")
            elif name == "partial_rotary_factor" and number is not None:
                if not _is_number(number) or not 0 < number <= 1:
                    _refuse(where, number, "it is a part of the head, above 0 and at most 1")
            elif name == "original_max_position_embeddings":
                _size(where, number, _SIZES["max_position_embeddings"], least=1)
            elif isinstance(number, list):
                if len(number) > _SIZES["head_dim"] or not all(_is_number(x) and 0 < x < _MOST for x in number):
                    _refuse(where, number, "it is a list of positive, finite numbers, one for each pair of dimensions")
            elif _is_number(number) and not abs(number) < _MOST:
                _refuse(where, number, "it is a finite number")
        if head_dim is None:
            continue
        pairs = int(head_dim * (one.get("partial_rotary_factor") or 1.0)) // 2
        for name in ("long_factor", "short_factor"):
            if isinstance(one.get(name), list) and len(one[name]) != pairs:
                _refuse(
                    f"{path}.{name}",
                    f"{len(one[name])} entries",
                    f"it has one for each of the {pairs} pairs of dimensions",
                )


def _rope_sets(key: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(value, Mapping):
        return
    nested = {name: one for name, one in value.items() if isinstance(one, Mapping)}
    if nested:
        yield from ((f"{key}.{name}", one) for name, one in nested.items())
    else:
        yield key, value


def _not_a_number(value: Any) -> str | None:
    """Path of the first NaN in a JSON value, which is walked without building paths: keys may be megabytes long."""
    if isinstance(value, float):
        return "" if math.isnan(value) else None
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = enumerate(value)
    for place, inner in pairs:
        found = _not_a_number(inner)
        if found is not None:
            step = f"[{place}]" if isinstance(value, list) else f".{_cut(place)}"
            return step + found
    return None


def _cut(text: str) -> str:
    """Enough of a long text to know it by."""
    return text if len(text) <= 200 else text[:200]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refuse(key: str, value: Any, allowed: str) -> NoReturn:
    raise UsageError(
        f"config.json says {shown(_cut(key), 80)} = {shown(_cut(repr(value)), 80)}, which no decoder can have",
        allowed,
        "correct it in a copy of the config.json and give that file as the source",
        code="config.bad_value",
    )


def _unknown(key: str, name: Any, what: str, known: Collection[str]) -> NoReturn:
    raise Unsupported(
        f"The {what} {shown(_cut(repr(name)), 80)} is not known.",
        f"config.json names it in {shown(key, 80)}; known are {shown(', '.join(sorted(known)), 400)}.",
        "Correct the config.json, or report the architecture if a newer transformers has it.",
        code=f"unsupported.{what.replace(' ', '_')}",
    )
