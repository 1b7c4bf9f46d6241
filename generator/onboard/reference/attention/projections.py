"""Hypotheses on the projections: which linear gives queries, keys and values, and how a fused one holds them.

The output of the first position tells where the values are, whatever the scores: it sees itself alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import torch
from torch import nn

from onboard.reference.record import Recording, close
from onboard.reference.roles import LINEAR, Unexplained

PARTS = ("q", "k", "v")


@dataclass(frozen=True)
class Heads:
    """Numbers of query heads and key/value heads, and the size of a head."""

    queries: int
    keys: int
    dim: int

    def count(self, part: str) -> int:
        """How many heads a part has."""
        return self.queries if part == "q" else self.keys


@dataclass(frozen=True)
class Linears:
    """The linears of one attention, by path within it.

    Args:
        ins: those that take what the attention takes.
        out: the one that takes the heads' joined outputs.
        out_path: its path in the recording; it may stand outside the attention.
    """

    ins: tuple[str, ...]
    out_path: str


@dataclass(frozen=True)
class Layout:
    """Where queries, keys and values are.

    Args:
        heads: the numbers of heads.
        parts: for each linear, the parts that its output holds, in order.
        groups: how many times that order repeats in a linear that holds several parts.
    """

    heads: Heads
    parts: tuple[tuple[str, tuple[str, ...]], ...]
    groups: int

    def split(self, outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Queries, keys and values ``[B, S, heads, D]`` from the linears' outputs ``[B, S, width]``."""
        found = {}
        for name, parts in self.parts:
            groups = self.groups if len(parts) > 1 else 1
            widths = [self.heads.count(part) // groups * self.heads.dim for part in parts]
            pieces = outputs[name].unflatten(-1, (groups, -1)).split(widths, dim=-1)
            for part, piece in zip(parts, pieces, strict=True):
                found[part] = piece.flatten(-2).unflatten(-1, (-1, self.heads.dim))
        return found


def find_linears(attention: nn.Module, path: str, layer: nn.Module, layer_path: str, recording: Recording) -> Linears:
    """The linears that play a part in an attention.

    Args:
        attention: the attention module.
        path: its path in the recording.
        layer: the decoder layer that it is in.
        layer_path: the layer's path.
        recording: of a run.

    Raises:
        Unexplained: not one projection out, or not one to three in.
    """
    call = recording[path]
    given = [value for value in call.inputs.values() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    names = [
        name
        for name, module in attention.named_modules()
        if isinstance(module, LINEAR) and f"{path}.{name}" in recording
    ]
    ins = [name for name in names if any(torch.equal(recording[f"{path}.{name}"].x, value) for value in given)]
    outs = [f"{path}.{name}" for name in names if name not in ins]
    if not outs:
        outs = [
            f"{layer_path}.{name}"
            for name, module in layer.named_children()
            if isinstance(module, LINEAR) and torch.equal(recording[f"{layer_path}.{name}"].x, call.output)
        ]
    if len(outs) != 1 or not 1 <= len(ins) <= 3:
        raise Unexplained("attention", f"{path} has {len(ins)} projections in and {len(outs)} out")
    return Linears(tuple(ins), outs[0])


def check_output(path: str, linears: Linears, recording: Recording) -> None:
    """The attention's output is that of its output projection, maybe with the residual added.

    Raises:
        Unexplained: something else happens to it.
    """
    if not linears.out_path.startswith(f"{path}."):
        return
    call, projected = recording[path], recording[linears.out_path].output
    residuals = [
        value
        for value in call.inputs.values()
        if isinstance(value, torch.Tensor) and value.shape == projected.shape and value.is_floating_point()
    ]
    if not any(close(projected + residual, call.output) is not None for residual in (0, *residuals)):
        raise Unexplained("attention", f"the output of {path} is not that of {linears.out_path}")


def layouts(linears: Linears, widths: dict[str, int], heads: Heads) -> Iterator[Layout]:
    """Every way to find queries, keys and values in outputs of these widths."""
    for order in itertools.permutations(PARTS):
        for cut in itertools.combinations(range(1, 3), len(linears.ins) - 1):
            bounds = (0, *cut, 3)
            pieces = [order[start:end] for start, end in itertools.pairwise(bounds)]
            parts = tuple(zip(linears.ins, pieces, strict=True))
            if any(widths[name] != sum(map(heads.count, piece)) * heads.dim for name, piece in parts):
                continue
            several = [part for piece in pieces if len(piece) > 1 for part in piece]
            most = gcd(*(heads.count(part) for part in several)) if several else 1
            for groups in range(1, most + 1):
                if most % groups == 0:
                    yield Layout(heads, parts, groups)


def first_value_fits(layout: Layout, outputs: dict[str, torch.Tensor], mixed: torch.Tensor, sinks: bool) -> bool:
    """Whether the first position's output is its own value.

    Args:
        layout: the layout to try.
        outputs: of the linears.
        mixed: the heads' joined outputs ``[B, S, N * D]``.
        sinks: whether heads may give a part of their weight to nothing, and so only the direction is known.
    """
    heads = layout.heads
    value = layout.split(outputs)["v"][:, 0].repeat_interleave(heads.queries // heads.keys, dim=1)
    found = mixed[:, 0].unflatten(-1, (-1, heads.dim))
    if sinks:
        value = value * ((value * found).sum(-1, keepdim=True) / value.pow(2).sum(-1, keepdim=True))
    return close(value, found) is not None
