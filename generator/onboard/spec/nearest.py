"""Which architectures that the framework has come nearest to one, and in what they differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onboard.spec.static import measured_architecture, measured_types

# What a reader would have to change by hand: (section, field, how a difference is worded).
_TRAITS = (
    ("norm", "kind", "norm"),
    ("norm", "offset", "norm offset"),
    ("norm", "weight", "norm weights"),
    ("norm", "bias", "norm biases"),
    ("mlp", "gated", "gated MLP"),
    ("mlp", "activation", "activation"),
    ("attention", "rotary", "rotary pairs"),
    ("attention", "biases", "projection biases"),
    ("attention", "softcap", "cap on the scores"),
    ("attention", "sinks", "sinks"),
    ("attention", "alibi", "position bias"),
    ("attention", "qk_norm", "q/k norm"),
    ("attention", "scale", "softmax scale"),
    ("attention", "window_layers", "sliding window"),
    ("attention", "rope_layers", "layers without rotation"),
    ("rope", "per_layer_type", "rotation by layer type"),
    ("rope", "partial", "partial rotation"),
    ("block", "pre_attention_norm", "norm before attention"),
    ("block", "post_attention_norm", "norm after attention"),
    ("block", "parallel", "parallel attention and MLP"),
    ("block", "multiplier", "residual multiplier"),
    ("embedding", "positions", "absolute positions"),
    ("embedding", "scale", "embedding scale"),
    ("head", "scale", "logit scale"),
    ("head", "softcap_key", "logit cap"),
)


def nearest(measured: Mapping[str, Any], model_type: str, count: int = 3) -> list[tuple[str, str]]:
    """The framework's architectures that differ in the fewest traits.

    Args:
        measured: of the architecture in question.
        model_type: its model type.
        count: how many to name.

    Returns:
        Architecture name and the traits in which it differs, nearest first.
    """
    ranked = []
    for other_type in measured_types():
        other = measured_architecture(other_type)
        if other is None or not other["builtin"]:
            continue
        differing = [
            words
            for section, field, words in _TRAITS
            if _norm(section, field, measured) != _norm(section, field, other)
        ]
        own = other_type == model_type
        ranked.append((not own, len(differing), other["architecture"], differing))
    return [
        (
            name,
            "the same architecture"
            if not other
            else f"differs in {', '.join(differing)}"
            if differing
            else "no difference",
        )
        for other, _, name, differing in sorted(ranked)[:count]
    ]


def _norm(section: str, field: str, measured: Mapping[str, Any]) -> Any:
    """A trait without its names: whether a norm stands there matters, not what it is called."""
    value = (measured[section] or {}).get(field)
    return value is not None if field.endswith(("_norm", "_key")) and field != "qk_norm" else value
