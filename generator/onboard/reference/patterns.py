"""Patterns of layers: how many layers show one, and the same pattern for so many layers.

A config says the kind of each layer in one of four ways: a list with an entry for each layer, a list of the layers'
numbers, kinds with the times that they repeat (``[[["global", "local"], 12]]``), or a property that the class computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

from onboard.reference.meanings import read, size
from onboard.reference.roles import Unexplained

MOST_LAYERS = 128
"""A pattern that needs more layers than this to be shown would make no tiny model."""
FEWEST_LAYERS = 3
_NUMBERS = frozenset(("ids", "idx", "idxs", "indexes", "indices"))


def layer_count(real: PretrainedConfig) -> int:
    """One period of the layer pattern and one layer more, at least three.

    Where nothing repeats exactly, each kind is seen twice where the real model has it twice: layers may share weights.

    Raises:
        Unexplained: the pattern needs too many layers.
    """
    count = FEWEST_LAYERS
    for pattern in layer_patterns(real):
        length = period(pattern)
        count = max(count, length + 1)
        if not _repeats(pattern, length):
            count = max(count, *(_second(pattern, kind) + 1 for kind in set(pattern)))
    if count > MOST_LAYERS:
        raise Unexplained(
            "layer pattern", f"it repeats only after {count - 1} layers, at most {MOST_LAYERS - 1} are served"
        )
    return count


def layer_patterns(real: PretrainedConfig) -> list[list[str]]:
    """Every list with one entry for each layer, also those that the class computes."""
    total = size(real, "num_hidden_layers")
    names = [*type(real).__dataclass_fields__, *(name for name in vars(real) if not name.startswith("_"))]
    for base in type(real).__mro__[: type(real).__mro__.index(PretrainedConfig)]:
        names += [name for name, member in vars(base).items() if isinstance(member, property) and name[0] != "_"]
    patterns = []
    for name in dict.fromkeys(names):
        value = read(real, name)
        if isinstance(value, list) and len(value) == total and not _are_numbers(name, value):
            patterns.append([str(item) for item in value])
    if hasattr(real, "_heterogeneity_spec"):
        overrides = overrides_by_layer(real)
        patterns.append([str(overrides.get(index)) for index in range(total)])
    return patterns


def period(pattern: Sequence[str]) -> int:
    """Length of the shortest prefix that, repeated, gives the pattern; else of the shortest with every kind in it."""
    for length in range(1, len(pattern) // 2 + 1):
        if _repeats(pattern, length):
            return length
    return max(map(pattern.index, set(pattern)), default=0) + 1


def resized(name: str, value: Any, total: int, layers: int) -> Any:
    """A field that says something of each layer, for fewer or more layers; any other value as it is.

    Args:
        name: the field.
        value: its real value.
        total: layers of the real model.
        layers: layers of the tiny model.
    """
    if not isinstance(value, list):
        return value
    if _are_numbers(name, value):
        flags = _stretched([index in value for index in range(total)], layers)
        return [index for index, flag in enumerate(flags) if flag]
    if len(value) == total:
        return _stretched(value, layers)
    if (kinds := _unrolled(value)) is not None and len(kinds) == total:
        return [[_stretched(kinds, layers), 1]]
    return value


def overrides_by_layer(real: PretrainedConfig) -> dict[int, dict[str, Any]]:
    """Fields that some layers have values of their own for, by the layer's number."""
    written = real.to_dict().get("per_layer_config") or {}
    return {int(index): fields for index, fields in written.items()}


def _are_numbers(name: str, value: Any) -> bool:
    """Whether a list holds the numbers of layers, as ``attn_layer_indices`` does."""
    if not isinstance(value, list) or _NUMBERS.isdisjoint(name.split("_")):
        return False
    return all(type(item) is int for item in value) and value == sorted(set(value))


def _stretched(items: list[Any], layers: int) -> list[Any]:
    """A model of fewer layers than the tiny one repeats its last kind."""
    return (items + items[-1:] * layers)[:layers]


def _unrolled(value: list[Any]) -> list[Any] | None:
    """The layers of ``[[kinds, times], ...]``."""
    kinds: list[Any] = []
    for item in value:
        if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], list) and type(item[1]) is int):
            return None
        kinds += item[0] * item[1]
    return kinds


def _repeats(pattern: Sequence[str], length: int) -> bool:
    return 2 * length <= len(pattern) and all(item == pattern[index % length] for index, item in enumerate(pattern))


def _second(pattern: Sequence[str], kind: str) -> int:
    """Where a kind of layer is seen for the second time, or for the only one."""
    places = [index for index, item in enumerate(pattern) if item == kind]
    return places[min(1, len(places) - 1)]
