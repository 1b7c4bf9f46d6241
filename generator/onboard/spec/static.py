"""What a config.json says by itself, with the reference's class defaults, where the reference itself is not asked.

``onboard inspect`` reads these; ``onboard new`` takes the values from transformers' own config class instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from onboard.errors import Unsupported
from onboard.spec.keys import find

FOLDER = Path(__file__).parent / "measured"
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


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
    default = measured["real"]
    real = dict(default)
    for name in _SIZES:
        found = find(raw, name)
        if found is not None and isinstance(found.value, int) and not isinstance(found.value, bool):
            real[name] = found.value
    if find(raw, "num_key_value_heads") is None:
        # Every config class of the field falls back to multi-head attention, unless its default says otherwise.
        same = default["num_key_value_heads"] == default["num_attention_heads"]
        real["num_key_value_heads"] = real["num_attention_heads"] if same else default["num_key_value_heads"]
    if find(raw, "head_dim") is None and default["head_dim"] is not None:
        derived = default["head_dim"] * default["num_attention_heads"] == default["hidden_size"]
        if derived:
            real["head_dim"] = real["hidden_size"] // max(1, real["num_attention_heads"])
    values = {**default["values"], **{key: raw[key] for key in default["values"] if key in raw}}
    real["values"] = values
    real["tie_word_embeddings"] = bool(raw.get("tie_word_embeddings", default["tie_word_embeddings"]))
    real["sliding_window"] = _window(raw, values, default)
    real["layer_types"] = _layer_types(raw, real, default)
    real["rope_parameters"] = _rope(raw, default["rope_parameters"])
    real["normalised"] = {}
    key = measured["mlp"]["activation_key"]
    activation = values[key]
    rope_types = _rope_types(real["rope_parameters"])
    _check_known("activation", [activation], known_names()["activations"])
    _check_known("rope type", rope_types, known_names()["rope_types"])
    return {
        **measured,
        "real": real,
        "mlp": {**measured["mlp"], "activation": activation},
        "rope": {
            **measured["rope"],
            "types": rope_types,
            "served": {name: None for name in measured["rope"]["served"] if name not in rope_types},
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
                f"transformers has {', '.join(near) if near else f'{len(known)} others'}; a default in its place would be a guess.",
                "Correct it in a copy of config.json, or upgrade transformers if a newer one has it.",
                code=f"unsupported.{what.replace(' ', '_')}",
            )


def _rope_types(parameters: Any) -> list[str]:
    if not isinstance(parameters, Mapping):
        return []
    sets = [value for value in parameters.values() if isinstance(value, Mapping)] or [parameters]
    return sorted({str(one.get("rope_type", "default")) for one in sets})


def _window(raw: Mapping[str, Any], values: Mapping[str, Any], default: Mapping[str, Any]) -> int | None:
    if values.get("use_sliding_window") is False:
        return None
    value = raw.get("sliding_window", default["sliding_window"])
    return value if isinstance(value, int) else None


def _layer_types(raw: Mapping[str, Any], real: Mapping[str, Any], default: Mapping[str, Any]) -> list[str] | None:
    """The kind of each layer: as listed, by a pattern's period, by the first layer with a window, or all alike."""
    depth = real["num_hidden_layers"]
    if default["layer_types"] is None:
        return None
    listed = raw.get("layer_types")
    if isinstance(listed, list) and all(isinstance(item, str) for item in listed):
        return listed
    kinds = ("sliding_attention", "full_attention")
    if real["sliding_window"] is None:
        return ["full_attention"] * depth
    period = raw.get("sliding_window_pattern")
    if isinstance(period, int) and period > 0:
        return [kinds[(index + 1) % period == 0] for index in range(depth)]
    first = raw.get("max_window_layers")
    if isinstance(first, int):
        return [kinds[index < first] for index in range(depth)]
    pattern = default["layer_types"]
    return [pattern[index % len(pattern)] for index in range(depth)]


def _rope(raw: Mapping[str, Any], default: Mapping[str, Any]) -> Any:
    """``rope_parameters``, also where the file has the older ``rope_theta`` and ``rope_scaling``."""
    if isinstance(raw.get("rope_parameters"), dict):
        return raw["rope_parameters"]
    theta = find(raw, "rope_theta")
    scaling = raw.get("rope_scaling")
    own: dict[str, Any] = dict(scaling) if isinstance(scaling, dict) else {}
    rope_type = own.pop("rope_type", own.pop("type", "default"))
    nested = isinstance(default.get("full_attention"), dict)
    base = default["full_attention"] if nested else default
    full = {"rope_type": rope_type, "rope_theta": theta.value if theta else base.get("rope_theta"), **own}
    if not nested:
        return full
    local = raw.get("rope_local_base_freq")
    sliding = dict(default.get("sliding_attention") or {"rope_type": "default"})
    return {"full_attention": full, "sliding_attention": {**sliding, **({"rope_theta": local} if local else {})}}
