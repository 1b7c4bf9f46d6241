"""Which layers have a property: the config field that says so, as an expression of ``layer_idx``."""

from __future__ import annotations

from transformers import PretrainedConfig

from onboard.reference.attention.expressions import fields


def expression_of_layers(flags: list[bool], config: PretrainedConfig) -> str | None:
    """An expression that is true in exactly these layers, None where no field has one entry for each layer that fits.

    ``layer_types`` goes before other fields. A list of names says by one name, a list of flags or numbers by itself.
    """
    lists = [
        (text, value)
        for text, _, value in fields(config)
        if isinstance(value, (list, tuple)) and len(value) == len(flags)
    ]
    for text, value in sorted(lists, key=lambda one: one[0] != "config.layer_types"):
        if all(isinstance(item, str) for item in value):
            for kind in dict.fromkeys(value):
                if flags == [item == kind for item in value]:
                    return f'{text}[layer_idx] == "{kind}"'
        elif all(isinstance(item, int) for item in value):
            if flags == [bool(item) for item in value]:
                return f"bool({text}[layer_idx])"
            if flags == [not item for item in value]:
                return f"not {text}[layer_idx]"
    return None
