"""Python expressions of ``config`` for the numbers that an attention is made of, in order of preference.

An expression is one that generated code can hold; its value here is that of the tiny config. Where two expressions have
the same value, both are kept: :mod:`onboard.reference.attention.settle` finds a config that tells them apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from onboard.reference.meanings import read, spelling
from onboard.reference.roles import Unexplained
from onboard.spec.keys import ALIASES


@dataclass(frozen=True)
class Expression:
    """A number of the architecture.

    Args:
        text: Python of ``config``, ``self.head_dim`` and ``layer_idx``.
        of_layer: its value in a layer.
        keys: the config fields in it.
    """

    text: str
    of_layer: Callable[[int], float]
    keys: tuple[str, ...] = ()

    @property
    def value(self) -> float:
        """The value in the first layer; that of all layers where the expression does not name the layer."""
        return self.of_layer(0)


def constant(text: str, value: float, *keys: str) -> Expression:
    """An expression whose value is the same in every layer."""
    return Expression(text, lambda _: value, keys)


def fields(config: PretrainedConfig, prefix: str = "config") -> Iterator[tuple[str, str, Any]]:
    """Every field: its expression, its name, its value; those of configs nested in it as well."""
    for name in vars(config):
        if name.startswith("_"):
            continue
        value = read(config, name)
        if isinstance(value, PretrainedConfig):
            yield from fields(value, f"{prefix}.{name}")
        else:
            yield f"{prefix}.{name}", name, value


def plain_name(word: str) -> str:
    """A word of a config that is to stand in an expression.

    Raises:
        Unexplained: it is no plain word, and could change what the expression means.
    """
    if not word.replace("-", "_").replace(".", "_").isidentifier():
        raise Unexplained("attention", f"a kind of layer is no plain word: {word[:40]!r}")
    return word


def num_heads(config: PretrainedConfig) -> list[Expression]:
    """The number of query heads."""
    return _distinct(_named(config, "num_attention_heads"))


def num_key_value_heads(config: PretrainedConfig) -> list[Expression]:
    """The number of key/value heads: grouped queries, then as many as queries, then one for all."""
    return _distinct(
        [
            *_named(config, "num_key_value_heads"),
            *_named(config, "num_attention_heads"),
            constant("1", 1),
        ]
    )


def head_dim(config: PretrainedConfig) -> list[Expression]:
    """The size of a head: a field of its own, the share of the width, or the one where the other is not given."""
    found = _named(config, "head_dim")
    key = spelling(config, "head_dim")
    own = f"config.{key}" if key else 'getattr(config, "head_dim", None)'
    given = read(config, key or "head_dim")
    hidden = _named(config, "hidden_size")[:1]
    for width, heads in itertools.product(hidden, num_heads(config)):
        text, keys = f"{width.text} // {heads.text}", (*width.keys, *heads.keys)
        share = int(width.value // heads.value)
        found.append(constant(text, share, *keys))
        found.append(constant(f"{own} or {text}", given or share, key or "head_dim", *keys))
    return _distinct(found)


def scales(config: PretrainedConfig, head_dim: int) -> list[Expression]:
    """Softmax scales."""
    found = [
        constant("self.head_dim**-0.5", head_dim**-0.5),
        constant("1.0", 1.0),
        Expression("self.head_dim**-0.5 / (layer_idx + 1)", lambda layer: head_dim**-0.5 / (layer + 1)),
        Expression("1.0 / (layer_idx + 1)", lambda layer: 1.0 / (layer + 1)),
    ]
    for text, name, value in fields(config):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            continue
        if name.endswith("scalar"):
            found.append(constant(f"{text}**-0.5", value**-0.5, name))
        elif name.endswith(("multiplier", "scale")):
            found.append(constant(text, float(value), name))
    found.append(constant("1.0 / self.head_dim", 1.0 / head_dim))
    return found


def soft_caps(config: PretrainedConfig) -> list[Expression]:
    """Caps on the scores; those of the attention before others."""
    found = [
        constant(text, float(value), name)
        for text, name, value in fields(config)
        if "softcap" in name.replace("_", "") and isinstance(value, (int, float)) and not isinstance(value, bool)
        if value > 0
    ]
    return sorted(found, key=lambda one: "attn" not in one.text and "attention" not in one.text)


def by_value(
    expressions: Iterable[Expression], layers: Iterable[int] = (0,)
) -> dict[tuple[float, ...], list[Expression]]:
    """Expressions of equal values in these layers together, in order."""
    groups: dict[tuple[float, ...], list[Expression]] = {}
    for one in expressions:
        groups.setdefault(tuple(float(one.of_layer(layer)) for layer in layers), []).append(one)
    return groups


def _named(config: PretrainedConfig, canonical: str) -> list[Expression]:
    names = (canonical, *ALIASES[canonical])
    found = []
    for name in dict.fromkeys(names):
        value = read(config, name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            found.append(constant(f"config.{name}", value, config.attribute_map.get(name, name)))
    return found


def _distinct(expressions: list[Expression]) -> list[Expression]:
    """Each field once: a class that maps one name to another answers to both."""
    seen: dict[tuple[str, ...], Expression] = {}
    for one in expressions:
        seen.setdefault(one.keys if len(one.keys) == 1 else (one.text,), one)
    return list(seen.values())
