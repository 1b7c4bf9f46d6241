"""Hypotheses on the projections: which linear gives queries, keys and values, and how a fused one holds them.

The output of the first position tells where the values are, whatever the scores: it sees itself alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from onboard.reference.record import Recording, close
from onboard.reference.roles import LINEAR, Unexplained

PARTS = ("q", "k", "v")
GATE = "g"
GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"sigmoid": torch.sigmoid, "softplus": functional.softplus}
"""What a gate on the heads' outputs may go through."""


@dataclass(frozen=True)
class OutputGate:
    """A gate on the heads' outputs, before the output projection.

    Args:
        over: ``element``: each number of a head's output has a gate of its own; ``head``: each head has one.
        activation: a name of :data:`GATES`.
    """

    over: Literal["element", "head"]
    activation: str

    def __call__(self, mixed: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Apply gates ``[B, S, N, D]`` or ``[B, S, N, 1]`` to outputs ``[B, S, N * D]``."""
        heads = mixed.unflatten(-1, (gate.shape[-2], -1))
        return (heads * GATES[self.activation](gate)).flatten(-2)


@dataclass(frozen=True)
class Heads:
    """Numbers of query heads and key/value heads, and the size of a head."""

    queries: int
    keys: int
    dim: int

    def count(self, part: str) -> int:
        """How many heads a part has."""
        return self.queries if part in ("q", GATE) else self.keys


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
        gate: the gate on the heads' outputs, whose part is ``g``; None where there is none.
    """

    heads: Heads
    parts: tuple[tuple[str, tuple[str, ...]], ...]
    groups: int
    gate: OutputGate | None = None

    def size(self, part: str) -> int:
        """Numbers that each head of a part has."""
        return 1 if part == GATE and self.gate and self.gate.over == "head" else self.heads.dim

    def split(self, outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Queries, keys, values and gates ``[B, S, heads, D]`` from the linears' outputs ``[B, S, width]``."""
        found = {}
        for name, parts in self.parts:
            groups = self.groups if len(parts) > 1 else 1
            widths = [self.heads.count(part) // groups * self.size(part) for part in parts]
            pieces = outputs[name].unflatten(-1, (groups, -1)).split(widths, dim=-1)
            for part, piece in zip(parts, pieces, strict=True):
                found[part] = piece.flatten(-2).unflatten(-1, (-1, self.size(part)))
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
        Unexplained: not one projection out, or not one to four in.
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
    if len(outs) != 1 or not 1 <= len(ins) <= len(PARTS) + 1:
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
    """Every way to find queries, keys and values, and maybe gates, in outputs of these widths."""
    overs: tuple[Literal["element", "head"], ...] = ("element", "head")
    gates = [OutputGate(over, activation) for over in overs for activation in GATES]
    for gate in (None, *gates):
        yield from _layouts(linears, widths, heads, gate)


def _layouts(linears: Linears, widths: dict[str, int], heads: Heads, gate: OutputGate | None) -> Iterator[Layout]:
    wanted = (*PARTS, GATE) if gate else PARTS
    plain = Layout(heads, (), 1, gate)
    for order in itertools.permutations(wanted):
        for cut in itertools.combinations(range(1, len(wanted)), len(linears.ins) - 1):
            bounds = (0, *cut, len(wanted))
            pieces = [order[start:end] for start, end in itertools.pairwise(bounds)]
            parts = tuple(zip(linears.ins, pieces, strict=True))
            if any(
                widths[name] != sum(heads.count(part) * plain.size(part) for part in piece) for name, piece in parts
            ):
                continue
            several = [part for piece in pieces if len(piece) > 1 for part in piece]
            most = gcd(*(heads.count(part) for part in several)) if several else 1
            for groups in range(1, most + 1):
                if most % groups == 0:
                    yield Layout(heads, parts, groups, gate)


def first_value_fits(layout: Layout, outputs: dict[str, torch.Tensor], mixed: torch.Tensor, sinks: bool) -> bool:
    """Whether the first position's output is its own value.

    Args:
        layout: the layout to try.
        outputs: of the linears.
        mixed: the heads' joined outputs ``[B, S, N * D]``.
        sinks: whether heads may give a part of their weight to nothing, and so only the direction is known.
    """
    heads = layout.heads
    states = layout.split(outputs)
    value = states["v"][:, 0].repeat_interleave(heads.queries // heads.keys, dim=1)
    if layout.gate:
        value = layout.gate(value.flatten(-2), states[GATE][:, 0]).unflatten(-1, (-1, heads.dim))
    found = mixed[:, 0].unflatten(-1, (-1, heads.dim))
    if sinks:
        value = value * ((value * found).sum(-1, keepdim=True) / value.pow(2).sum(-1, keepdim=True))
    return close(value, found) is not None
