"""What a field of a config class means: its canonical name, whatever the class spells it.

A class tells some of its spellings itself (``attribute_map``); the others are in :data:`onboard.spec.keys.ALIASES`.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from onboard.spec.keys import ALIASES

_DECLARED = frozenset(("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"))


def read(config: PretrainedConfig, name: str) -> Any:
    """A field's value, None where the config has no such field; where layers differ, the value of most layers."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # the class refuses to give one value for a field that differs between layers
        return vars(config).get(config.attribute_map.get(name, name))


def spelling(config: PretrainedConfig, name: str) -> str | None:
    """The field of the config's class that holds a size.

    Args:
        config: a config.
        name: the size's canonical name, as in :data:`onboard.spec.keys.SIZES`.
    """
    own = type(config).__dataclass_fields__
    spellings = (config.attribute_map.get(name, name), *ALIASES.get(name, ()))
    return next((key for key in spellings if key in own), None)


def size(config: PretrainedConfig, name: str) -> Any:
    """The value of a size under its canonical name; None where the class has none, or computes it in the model.

    What the class computes and keeps as an attribute (``head_dim``) counts. Sizes that no class computes count only
    where it declares them: a class makes an attribute of every key of a config.json that it does not know.
    """
    key = spelling(config, name)
    if key is None and name in _DECLARED and not isinstance(getattr(type(config), name, None), property):
        return None
    value = read(config, key or name)
    # A property of classes whose positions have no limit.
    return None if value == -1 and key is None else value
