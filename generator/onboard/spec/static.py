"""What a config.json says by itself, with the reference's class defaults, where the reference itself is not asked.

``onboard inspect`` reads these; ``onboard new`` takes the values from transformers' own config class instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

from onboard.errors import Unsupported
from onboard.spec.keys import ALIASES, SIZES

FOLDER = Path(__file__).parent / "measured"
# Sizes that a config class computes from others where they are not given.
_DERIVED = ("num_key_value_heads", "head_dim")
# Scalings whose parameters name the length that the model was trained at.
_STRETCHED = ("llama3", "yarn", "longrope")
_OLD_NAMES = {"su": "longrope"}


@cache
def measured_types() -> tuple[str, ...]:
    """Model types whose architecture has been measured at its defaults."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


@cache
def measured_architecture(model_type: str) -> Mapping[str, Any] | None:
    """What was measured on an architecture's default config, or None."""
    if model_type not in measured_types():
        return None
    found: dict[str, Any] = json.loads((FOLDER / f"{model_type}.json").read_text(encoding="utf-8"))
    found["origin"] = f"defaults of {found['reference_class']} of transformers {found['transformers']}"
    return found


def fill_in(raw: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """The measurement of an architecture, with the values of one config in place of its defaults.

    Args:
        raw: the parsed config.json (the decoder's level).
        measured: of the architecture's default config.

    Returns:
        A measurement as the probe would give it, as far as the file goes.

    Raises:
        Unsupported: an activation or a rope type that the reference does not know.
    """
    default, declared = measured["real"], measured["declared"]
    real = dict(default)
    renamed, values_known = default.get("attribute_map", {}), default["values"]
    for name in SIZES:
        # Other spellings than the class's own would be ignored by the reference too.
        # A spelling of old files that the class still takes stands above its own.
        taken = [key for key in ALIASES.get(name, ()) if key in default["fields"]]
        old = [key for key in taken if key not in values_known and key not in renamed]
        # Of a name and what the class keeps it as, the name is set last, and stays.
        keys = (*old, name, renamed.get(name, name))
        value = next((raw[key] for key in keys if raw.get(key) is not None), declared.get(name))
        real[name] = value if _is_int(value) else None if name in _DERIVED else default[name]
    if real["num_key_value_heads"] is None and default["num_key_value_heads"] is not None:
        real["num_key_value_heads"] = real["num_attention_heads"]
    if real["head_dim"] is None and default["head_dim"] is not None:
        real["head_dim"] = real["hidden_size"] // max(1, real["num_attention_heads"])
    values = {**default["values"], **{key: raw[key] for key in default["values"] if key in raw}}
    values |= {own: raw[key] for key, own in renamed.items() if key in raw and own in values}
    real["tie_word_embeddings"] = bool(raw.get("tie_word_embeddings", default["tie_word_embeddings"]))
    real["sliding_window"] = _window(raw, values, default, declared)
    real["layer_types"] = _layer_types(raw, values, real, default)
    if default["rope_parameters"] is not None:
        real["rope_parameters"] = _rope(raw, values, real, default["rope_parameters"])
    real["values"] = values | {key: real[key] for key in values if key in real}
    real["normalised"] = {}
    key = measured["mlp"]["activation_key"]
    activation = values[key] if key else measured["mlp"]["activation"]
    rope = measured["rope"]
    rope_types = _rope_types(real["rope_parameters"])
    _check_known("activation", [activation], known_names()["activations"])
    _check_known("rope type", rope_types, known_names()["rope_types"])
    return {
        **measured,
        "real": real,
        "mlp": {**measured["mlp"], "activation": activation},
        "rope": rope
        and {
            **rope,
            "types": rope_types,
            "served": {name: None for name in rope["served"] if name not in rope_types},
        },
    }


@cache
def known_names() -> Mapping[str, list[str]]:
    """Names that the reference knows: ``activations`` and ``rope_types``."""
    names: dict[str, list[str]] = json.loads((Path(__file__).parent / "known_names.json").read_text(encoding="utf-8"))
    return names


def _check_known(what: str, used: Iterable[Any], known: Sequence[str]) -> None:
    for name in used:
        if name not in known:
            near = get_close_matches(str(name), known, n=3)
            raise Unsupported(
                f"The {what} {str(name)[:60]!r} is not known.",
                f"transformers has {', '.join(near) if near else f'{len(known)} others'}; "
                "a default in its place would be a guess.",
                "Correct it in a copy of config.json, or upgrade transformers if a newer one has it.",
                code=f"unsupported.{what.replace(' ', '_')}",
            )


def _rope_types(parameters: Any) -> list[str]:
    if not isinstance(parameters, Mapping):
        return []
    sets = [value for value in parameters.values() if isinstance(value, Mapping)] or [parameters]
    return sorted({str(one.get("rope_type", "default")) for one in sets})


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _window(
    raw: Mapping[str, Any], values: Mapping[str, Any], default: Mapping[str, Any], declared: Mapping[str, Any]
) -> int | None:
    value = raw.get("sliding_window", declared.get("sliding_window"))
    # Qwen's classes take the window away where the switch is off; others keep a number that no layer reads.
    taken_away = default["sliding_window"] is None and declared.get("sliding_window") is not None
    if taken_away and not values.get("use_sliding_window"):
        return None
    return value if _is_int(value) else None


def _layer_types(
    raw: Mapping[str, Any], values: Mapping[str, Any], real: Mapping[str, Any], default: Mapping[str, Any]
) -> list[str] | None:
    """The kind of each layer: as listed, by a switch and what it depends on, or by a pattern that repeats."""
    depth = real["num_hidden_layers"]
    if default["layer_types"] is None:
        return None
    listed = raw.get("layer_types")
    if isinstance(listed, list) and all(isinstance(item, str) for item in listed):
        return listed
    kinds = ("sliding_attention", "full_attention")
    if "use_sliding_window" in values:
        if not values["use_sliding_window"] or real["sliding_window"] is None:
            return ["full_attention"] * depth
        if _is_int(first := values.get("max_window_layers")):
            return [kinds[index < first] for index in range(depth)]
        if _is_int(interval := values.get("no_rope_layer_interval")) and interval > 0:
            rotates = raw.get("no_rope_layers")
            if not isinstance(rotates, list) or len(rotates) != depth:
                rotates = [(index + 1) % interval != 0 for index in range(depth)]
            return [kinds[bool(rotates[index])] for index in range(depth)]
    period = raw.get("sliding_window_pattern")
    if _is_int(period) and period > 0:
        return [kinds[(index + 1) % period == 0] for index in range(depth)]
    pattern = _one_period(default["layer_types"])
    return [pattern[index % len(pattern)] for index in range(depth)]


def _one_period(pattern: Sequence[str]) -> Sequence[str]:
    """The shortest prefix that, repeated, gives the pattern: a default's depth need not be a multiple of it."""
    for period in range(1, len(pattern)):
        if all(item == pattern[index % period] for index, item in enumerate(pattern)):
            return pattern[:period]
    return pattern


def _rope(
    raw: Mapping[str, Any], values: Mapping[str, Any], real: Mapping[str, Any], default: Mapping[str, Any]
) -> dict[str, Any]:
    """``rope_parameters``, also where the file has the older ``rope_theta`` and ``rope_scaling``."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters")
    own: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
    if not isinstance(default.get("full_attention"), Mapping):
        if not own and default.get("rope_type") != "default":
            return dict(default)  # the class brings a scaling of its own
        return _rope_set(own, raw, values, real, default)
    nested = any(isinstance(value, Mapping) for value in own.values())
    sets = {name: one for name, one in own.items() if isinstance(one, Mapping)} if nested else {"full_attention": own}
    local = raw.get("rope_local_base_freq")
    plain = {key: value for key, value in raw.items() if key != "rope_theta"}
    return {
        "full_attention": _rope_set(sets.get("full_attention") or {}, raw, values, real, default["full_attention"]),
        "sliding_attention": _rope_set(
            sets.get("sliding_attention") or {},
            plain | ({"rope_theta": local} if local is not None else {}),
            values,
            real,
            default.get("sliding_attention") or {},
        ),
    }


def _rope_set(
    own: Mapping[str, Any],
    raw: Mapping[str, Any],
    values: Mapping[str, Any],
    real: Mapping[str, Any],
    default: Mapping[str, Any],
) -> dict[str, Any]:
    """One set of parameters, completed as transformers' ``standardize_rope_params`` does."""
    one = {name: value for name, value in own.items() if name != "type"}
    one.setdefault("rope_type", own.get("type", "default"))
    if isinstance(one["rope_type"], str):
        one["rope_type"] = _OLD_NAMES.get(one["rope_type"], one["rope_type"])
    theta, part = raw.get("rope_theta"), raw.get("partial_rotary_factor")
    one.setdefault("rope_theta", default.get("rope_theta") if theta is None else theta)
    part = default.get("partial_rotary_factor") if part is None else part
    if part is not None:
        one.setdefault("partial_rotary_factor", part)
    if one["rope_type"] in _STRETCHED:
        # Phi3 keeps the length beside the parameters, and that one counts.
        outside = values.get("original_max_position_embeddings")
        if outside is not None:
            one["original_max_position_embeddings"] = outside
        one.setdefault("original_max_position_embeddings", real["max_position_embeddings"])
    return one
