"""Before the reference is built: which keys of a config.json reach transformers, and whether what it reads is sane."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from transformers import PretrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from onboard.errors import UsageError
from onboard.facts._text import shown
from onboard.reference.meanings import read, size
from onboard.spec.keys import ALIASES, SIZES
from onboard.spec.validate import REQUIRED, check_read

READ = (
    *SIZES,
    "sliding_window",
    "layer_types",
    "rope_parameters",
    "pad_token_id",
)


def check_keys(config_class: type[PretrainedConfig], raw: Mapping[str, Any]) -> None:
    """Refuse keys that would replace a part of transformers' config class itself.

    The class makes an attribute of every key that it does not know; a key named as one of its methods takes its place.

    Raises:
        UsageError: there is such a key.
    """
    declared = {field.name for field in dataclasses.fields(config_class)} | {"model_type"}
    for key in raw:
        if not key.isidentifier() or key in declared:
            continue
        found = getattr(config_class, key, None)
        if key.startswith("__") or (found is not None and not isinstance(found, property)):
            raise UsageError(
                f"config.json has the key {shown(repr(key), 80)}, which cannot be a field of a model",
                f"{config_class.__name__} has a method or setting of that name, which the key would replace",
                "take the key out in a copy of the config.json and give that file as the source",
                code="config.bad_key",
            )


def check_values(config: PretrainedConfig) -> None:
    """Check the real config as transformers reads it; see :func:`onboard.spec.validate.check_read`.

    A model of several stacks has its sizes in a config for each of them, all of which are checked.
    """
    stacks = [
        part for part in vars(config).values() if isinstance(part, PretrainedConfig) and size(part, "num_hidden_layers")
    ]
    if not stacks or size(config, "hidden_size") is not None:
        _check(config, REQUIRED)
        return
    _check(config, ("vocab_size",))
    for part in stacks:
        _check(part, ("hidden_size", "num_hidden_layers"))


def _check(config: PretrainedConfig, required: Collection[str]) -> None:
    check_read(
        {name: size(config, name) if name in SIZES else read(config, name) for name in READ},
        activations={
            name: read(config, name)
            for name in ALIASES["hidden_act"]
            if name in type(config).__dataclass_fields__ and isinstance(read(config, name), str)
        },
        known_activations=tuple(ACT2FN),
        rope_types=("default", *ROPE_INIT_FUNCTIONS),
        required=required,
    )
