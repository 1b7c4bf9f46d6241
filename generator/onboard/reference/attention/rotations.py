"""Hypotheses on rotary positions (arXiv:2104.09864): the frequencies that a config gives, and how pairs are turned.

A rotation is compared by what it does to queries and keys. Where the model hands its tables of cosines and sines to the
layers, they are compared as well, in whichever order they hold the frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from onboard.reference.attention import expressions
from onboard.reference.attention.expressions import Expression, constant, fields
from onboard.reference.meanings import read
from onboard.reference.record import Call, close
from onboard.reference.roles import Unexplained
from onboard.spec.keys import ALIASES

# Scalings whose frequencies depend on the config alone, with parameters of a size that shows at tiny length.
STATIC_SCALINGS: dict[str, dict[str, float]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
}

BASE = 10000.0
"""The base of architectures that have no field for it."""

Style = Literal["half", "interleaved"]
Table = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Frequencies:
    """The angles of a rotation.

    Args:
        rope_type: its name among transformers' scalings.
        inv_freq: ``[R / 2]``, the angle from one position to the next of each pair.
        factor: on cosines and sines.
        partial: whether only a part of the head is rotated.
        dim: expressions of R where ``rope_parameters`` does not give it.
        theta: the base, where ``rope_parameters`` does not give it.
        sections_apart: whether the frequencies of height and width, which alternate, stand apart; see
            :class:`onboard.spec.arch.Rope`.
    """

    rope_type: str
    inv_freq: torch.Tensor
    factor: float
    partial: bool
    dim: tuple[Expression, ...] = ()
    theta: float | None = None
    sections_apart: bool = False

    def table(self, length: int) -> Table:
        """Cosines and sines ``[S, R / 2]``."""
        angles = torch.arange(length).float()[:, None] * self.inv_freq
        return angles.cos() * self.factor, angles.sin() * self.factor


@dataclass(frozen=True)
class Rotation:
    """How pairs of dimensions are turned.

    Args:
        style: ``half``: dimension i with i + R / 2 (transformers' Llama); ``interleaved``: with i + 1.
        reversed: whether they turn the other way round.
    """

    style: Style
    reversed: bool

    def __call__(self, x: torch.Tensor, table: Table) -> torch.Tensor:
        """Rotate the first R dimensions of ``[B, S, heads, D]`` by a table ``[S, R / 2]``."""
        cos, sin = (part[:, None] for part in table)
        if self.reversed:
            sin = -sin
        width = 2 * cos.shape[-1]
        rotary, rest = x[..., :width], x[..., width:]
        if self.style == "half":
            a, b = rotary.chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
        a, b = rotary[..., ::2], rotary[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        return torch.cat((turned, rest), dim=-1)


ROTATIONS = (
    Rotation("half", False),
    Rotation("interleaved", False),
    Rotation("half", True),
    Rotation("interleaved", True),
)


def frequencies(config: PretrainedConfig, head_dim: int, length: int, layer_type: str | None) -> list[Frequencies]:
    """The angles that a config may mean.

    Args:
        config: the tiny config.
        head_dim: head size.
        length: tokens of the sequence; some scalings depend on it.
        layer_type: kind of the layer, where the parameters differ between kinds.

    Raises:
        Unexplained: a rope type that transformers does not know.
    """
    parameters = read(config, "rope_parameters")
    if isinstance(parameters, Mapping) and parameters:
        nested = is_nested(parameters)
        own = parameters.get(layer_type) if nested else parameters
        if not own or own.get("rope_theta") is None:
            return []
        plain = _from_parameters(config, own, head_dim, length, layer_type if nested else None)
        sections = own.get("mrope_section")
        if plain.rope_type != "default" or not sections or sum(sections) != len(plain.inv_freq):
            return [plain]
        return [plain, replace(plain, inv_freq=_apart(plain.inv_freq, sections), sections_apart=True)]
    found: dict[int, list[Expression]] = {}
    for text, name, value in fields(config):
        words = name.split("_")
        if "rotary" in words and type(value) is int and 0 < value <= head_dim and value % 2 == 0:
            found.setdefault(value, []).append(constant(text, value, name))
    # Code from before there were rotary parameters turns whole heads, with the base in a field of its own or in none.
    found.setdefault(head_dim, []).extend(one for one in expressions.head_dim(config) if one.value == head_dim)
    bases = (read(config, key) for key in ALIASES["rope_theta"])
    base = next((float(value) for value in bases if type(value) in (int, float) and value > 0), BASE)
    return [
        Frequencies("default", _default(dim, base), 1.0, dim != head_dim, tuple(texts), base)
        for dim, texts in found.items()
        if texts
    ]


def _apart(inv_freq: torch.Tensor, sections: Sequence[int]) -> torch.Tensor:
    """Frequencies ``[R / 2]`` of height, then of width, which alternate before those of time."""
    alternating, rest = inv_freq[: sections[0] + sections[1]], inv_freq[sections[0] + sections[1] :]
    return torch.cat((alternating[::2], alternating[1::2], rest))


def is_nested(parameters: Mapping[str, Any]) -> bool:
    """Whether ``rope_parameters`` holds one set for each kind of layer."""
    return any(isinstance(value, Mapping) for value in parameters.values())


def _from_parameters(
    config: PretrainedConfig, own: Mapping[str, Any], head_dim: int, length: int, layer_type: str | None
) -> Frequencies:
    rope_type = own.get("rope_type", "default")
    if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
        raise Unexplained("rope", f"unknown rope type {rope_type!r}", tuple(sorted(ROPE_INIT_FUNCTIONS)))
    rotary = int(head_dim * (own.get("partial_rotary_factor") or 1.0))
    if rope_type == "default":
        return Frequencies(rope_type, _default(rotary, own["rope_theta"]), 1.0, rotary != head_dim)
    kwargs = {"layer_type": layer_type} if layer_type else {}
    inv_freq, factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=length, **kwargs)
    return Frequencies(rope_type, inv_freq, factor, 2 * len(inv_freq) != head_dim)


def _default(rotary: int, theta: float) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, rotary, 2).float() / rotary)


def handed_table(call: Call) -> Table | None:
    """The cosines and sines ``[S, ...]`` that an attention is called with, None where there are none."""
    for value in call.inputs.values():
        if isinstance(value, torch.Tensor) and value.is_complex():
            value = (value.real, value.imag)
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            continue
        if all(isinstance(part, torch.Tensor) and part.is_floating_point() and part.ndim >= 2 for part in value):
            cos, sin = (part.reshape(-1, part.shape[-1]) for part in value)
            if cos.shape == sin.shape:
                return cos, sin
    return None


def table_difference(found: Frequencies, handed: Table) -> float | None:
    """Largest difference of the table that the layers get, None where it is another one.

    Frequencies may stand there once, twice one after the other, or twice beside each other.
    """
    table = found.table(handed[0].shape[0])
    best = None
    for spread in (_once, _halves, _pairs):
        differences = [close(spread(mine), theirs) for mine, theirs in zip(table, handed, strict=True)]
        known = [difference for difference in differences if difference is not None]
        if len(known) == 2:
            best = max(known)
    return best


def _once(x: torch.Tensor) -> torch.Tensor:
    return x


def _halves(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x, x), dim=-1)


def _pairs(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(2, dim=-1)
