"""What a module of transformers needs to stand in a native layer, where a layer mixes tokens by no softmax attention.

State-space models, linear attention and short convolutions carry a state from token to token. Such a mixer is reused as
it is; what is measured is how it is built, what it is called with, and which config fields it reads by itself.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from onboard.reference.attention.layers import layer_choices
from onboard.reference.build import build
from onboard.reference.record import close
from onboard.reference.roles import Roles, Unexplained

HIDDEN_STATES, PADDING_MASK, CACHE = "hidden_states", "attention_mask", "past_key_values"
_LIBRARY = "transformers.models."
_PADDED = 5
"""Tokens of padding, on the left, in the run that shows which mask a mixer is given."""


@dataclass(frozen=True)
class _Built:
    """How a module was built and called.

    Args:
        arguments: names and values that its constructor was given.
        calls: inputs by name and output, of a run with padding and a cache and of a run without.
    """

    arguments: dict[str, Any]
    calls: tuple[tuple[dict[str, Any], Any], ...]


@torch.no_grad()
def explain_mixer(
    cls: type[PreTrainedModel],
    fields: Mapping[str, Any],
    model: PreTrainedModel,
    roles: Roles,
    input_ids: torch.Tensor,
) -> dict[str, Any]:
    """How to build and call the mixer of the layers without an attention.

    Args:
        cls: the reference's class.
        fields: constructor arguments of the tiny config.
        model: the tiny reference.
        roles: its parts.
        input_ids: ``[1, S]``.

    Returns:
        ``mixer``, None where every layer has an attention, and ``modules`` of the measurement.

    Raises:
        Unexplained: it is built or called in a way that generated code cannot repeat.
    """
    depth = len(model.get_submodule(roles.layers))
    indices = [index for index in range(depth) if index not in roles.attention_layers]
    if roles.mixer is None or not indices:
        return {"mixer": None, "modules": []}
    module = model.get_submodule(roles.mixes(indices[0]))
    kind = type(module)
    if not kind.__module__.startswith(_LIBRARY):
        raise Unexplained("mixer", f"{kind.__name__} is no module of transformers, which a package could import")
    if any(type(model.get_submodule(roles.mixes(index))) is not kind for index in indices):
        raise Unexplained("mixer", "layers without an attention mix tokens in modules of several classes")
    choices = layer_choices({index: index in indices for index in range(depth)}, depth, model.config)
    layers = next((one for one in choices if one.text.startswith("config.layer_types[layer_idx] == ")), None)
    if layers is None:
        raise Unexplained("mixer", f"no layer type of the config says which layers have {kind.__name__}")
    built = _watch(cls, fields, roles.mixes(indices[0]), input_ids)
    arguments = {name: _argument(name, value, indices[0]) for name, value in built.arguments.items()}
    call = _call(kind, built.calls)
    reads, difference = _rebuild(module, built, call)
    native = f"model.layers.{{layer}}.{_native(roles.mixer)}"
    prefix = f"{roles.layers}.{{layer}}.{roles.mixer}"
    family = next(one for one in cls.__mro__[1:] if issubclass(one, PreTrainedModel))
    return {
        "mixer": {
            "name": _native(roles.mixer),
            "class": kind.__name__,
            "module": kind.__module__,
            "family": family.__name__,
            "family_module": family.__module__,
            "arguments": arguments,
            "call": call,
            "returns_tuple": isinstance(built.calls[0][1], (tuple, list)),
            "layers": layers.text,
            "kind": layers.text.split('"')[1],
            "reads": sorted(reads & set(fields)),
            "difference": difference,
        },
        "modules": [
            {
                "reference": ".".join(part for part in (prefix, name) if part),
                "native": [".".join(part for part in (native, name) if part)],
                "transposed": False,
                "groups": "1",
            }
            for name, inner in module.named_modules()
            if any(True for _ in inner.parameters(recurse=False))
        ],
    }


def _native(name: str) -> str:
    """The mixer's name in the generated layer: the reference's, unless the attention has it."""
    return "mixer" if name == "self_attn" else name


def _watch(cls: type[PreTrainedModel], fields: Mapping[str, Any], path: str, input_ids: torch.Tensor) -> _Built:
    """Build the reference again and run it, looking at one of its modules."""
    kind = type(build(cls, fields).get_submodule(path))
    construct = kind.__init__
    given: dict[int, dict[str, Any]] = {}

    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(construct).bind(self, *args, **kwargs)
        given[id(self)] = dict(list(bound.arguments.items())[1:])
        construct(self, *args, **kwargs)

    kind.__init__ = watched
    try:
        model = build(cls, fields)
    finally:
        kind.__init__ = construct
    module = model.get_submodule(path)
    calls: list[tuple[dict[str, Any], Any]] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        names = list(inspect.signature(module.forward).parameters)
        calls.append((dict(zip(names, args, strict=False)) | kwargs, output))

    handle = module.register_forward_hook(keep, with_kwargs=True)
    mask = torch.ones_like(input_ids)
    mask[:, :_PADDED] = 0
    try:
        model(input_ids, attention_mask=mask, use_cache=True)
        model(input_ids, use_cache=False)
    finally:
        handle.remove()
    return _Built(given[id(module)], tuple(calls))


def _argument(name: str, value: Any, index: int) -> str:
    """A constructor argument as an expression of ``config`` and ``layer_idx``."""
    if isinstance(value, PretrainedConfig):
        return "config"
    if name.startswith("layer_") and type(value) is int and value == index:
        return "layer_idx"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    raise Unexplained("mixer", f"its constructor is given {name}, a {type(value).__name__}")


def _call(kind: type[nn.Module], calls: tuple[tuple[dict[str, Any], Any], ...]) -> dict[str, str]:
    """Name of each argument of its call to what it is: the states, the padding mask or the cache.

    Raises:
        Unexplained: it takes something else that a native layer does not have.
    """
    (padded, _), (plain, _) = calls
    found: dict[str, str] = {}
    taken = inspect.signature(kind.forward).parameters
    for name, value in padded.items():
        if isinstance(value, Cache):
            found[name] = CACHE
        elif isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim == 3:
            found[name] = HIDDEN_STATES
        elif isinstance(value, torch.Tensor) and value.ndim == 2 and plain.get(name) is None:
            found[name] = PADDING_MASK
        elif name in taken and value is not None:
            raise Unexplained("mixer", f"{kind.__name__} is given {name}, which no hypothesis is about")
    if sorted(found.values()) != sorted((HIDDEN_STATES, PADDING_MASK, CACHE)):
        raise Unexplained("mixer", f"{kind.__name__} is given {', '.join(sorted(padded))}")
    return found


def _rebuild(module: nn.Module, built: _Built, call: Mapping[str, str]) -> tuple[set[str], float]:
    """Build it alone, and call it so: the config fields that it reads, and the difference to what was recorded."""
    reads: set[str] = set()
    arguments = {
        name: _watched_config(value, reads) if isinstance(value, PretrainedConfig) else value
        for name, value in built.arguments.items()
    }
    alone = type(module)(**arguments).eval()
    alone.load_state_dict(module.state_dict())
    inputs, expected = built.calls[1]
    states = next(inputs[name] for name, what in call.items() if what == HIDDEN_STATES)
    output = alone(**{name: states if what == HIDDEN_STATES else None for name, what in call.items()})
    first, wanted = (one[0] if isinstance(one, (tuple, list)) else one for one in (output, expected))
    difference = close(first, wanted)
    if difference is None:
        raise Unexplained("mixer", f"{type(module).__name__} gives something else when it is built by itself")
    return reads, difference


def _watched_config(config: PretrainedConfig, reads: set[str]) -> PretrainedConfig:
    """A copy of the config that notes which of its attributes are read."""
    kind = type(config)

    class Watched(kind):  # type: ignore[misc,valid-type]
        def __getattribute__(self, name: str) -> Any:
            reads.add(name)
            return super().__getattribute__(name)

    watched = copy.copy(config)
    object.__setattr__(watched, "__class__", Watched)
    return watched
