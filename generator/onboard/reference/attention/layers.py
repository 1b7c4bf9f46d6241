"""Which layers have a property: expressions of ``layer_idx`` that say so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from transformers import PretrainedConfig

from onboard.reference.attention.expressions import fields, plain_name
from onboard.reference.meanings import read
from onboard.spec.keys import ALIASES

EVERY = "True"
"""The expression of a property that every layer has."""


@dataclass(frozen=True)
class LayerChoice:
    """An expression that is true in some layers.

    Args:
        text: Python of ``config`` and ``layer_idx``.
        flags: its value in each layer.
        keys: the config fields in it.
    """

    text: str
    flags: tuple[bool, ...]
    keys: tuple[str, ...]


def layer_choices(flags: Mapping[int, bool], depth: int, config: PretrainedConfig) -> list[LayerChoice]:
    """Expressions that are true in exactly these layers, from the plainest on.

    Args:
        flags: layers to the truth in them; what an expression says of others does not matter.
        depth: how many layers there are.
        config: the config.

    A list of names says it by one name, a list of flags or numbers by itself; ``layer_types`` goes before other lists.
    Any of them may hold only where a window is set. Where no list says it, it may be the first layer that differs, or
    the last one.
    """
    found = [LayerChoice(EVERY, (True,) * depth, ()), *_lists(config, depth)]
    for key in ALIASES["sliding_window"]:
        if key not in vars(config):
            continue
        unset = read(config, key) is None
        text = f"config.{key} is None or "
        found += [
            LayerChoice(text + one.text, tuple(unset or flag for flag in one.flags), (*one.keys, key))
            for one in found[1:]
        ]
        break
    last = tuple(index == depth - 1 for index in range(depth))
    by_place = [
        LayerChoice("layer_idx > 0", tuple(index > 0 for index in range(depth)), ()),
        LayerChoice("layer_idx == config.num_hidden_layers - 1", last, ("num_hidden_layers",)),
    ]
    for choices in (found, by_place):
        if fitting := [one for one in choices if all(one.flags[index] == flag for index, flag in flags.items())]:
            return fitting
    return []


def _lists(config: PretrainedConfig, depth: int) -> list[LayerChoice]:
    choices: list[LayerChoice] = []

    def add(text: str, values: list[object], test: Callable[[object], bool], key: str) -> None:
        choices.append(LayerChoice(text, tuple(test(value) for value in values), (key,)))

    found = [(text, name, value) for text, name, value in fields(config) if isinstance(value, (list, tuple))]
    computed = read(config, "layer_types")
    if isinstance(computed, list) and not any(name == "layer_types" for _, name, _ in found):
        found.append(("config.layer_types", "layer_types", computed))
    found.sort(key=lambda one: one[1] != "layer_types")
    for text, name, value in found:
        if len(value) != depth:
            continue
        if all(isinstance(item, str) for item in value):
            kinds = dict.fromkeys((*value, *("sliding_attention", "full_attention")[: 2 * (name == "layer_types")]))
            for kind in kinds:
                add(f'{text}[layer_idx] == "{plain_name(kind)}"', list(value), lambda item, k=kind: item == k, name)  # type: ignore[misc]
        elif all(isinstance(item, int) for item in value):
            add(f"bool({text}[layer_idx])", list(value), bool, name)
            add(f"not {text}[layer_idx]", list(value), lambda item: not item, name)
    return choices
