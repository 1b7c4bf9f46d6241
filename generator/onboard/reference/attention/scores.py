"""Hypotheses on what happens between queries, keys and values: scale, cap, positions by bias, window, sinks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from onboard.reference.attention.expressions import Expression, constant, fields
from onboard.reference.meanings import read


@dataclass(frozen=True)
class AlibiFit:
    """A bias that grows with the distance (arXiv:2108.12409).

    Args:
        bias_max: expressions of equal value; see :class:`onboard.spec.arch.Alibi`.
        scaled: whether it is multiplied by the softmax scale as the scores are.
    """

    bias_max: tuple[Expression, ...]
    scaled: bool

    def bias(self, heads: int, length: int) -> torch.Tensor:
        """The bias ``[N, S, S]``, unscaled."""
        distance = torch.arange(length)[:, None] - torch.arange(length)
        return -slopes(heads, self.bias_max[0].value)[:, None, None] * distance


def slopes(heads: int, bias_max: float) -> torch.Tensor:
    """The slope of each head.

    Heads beyond the largest power of two take every second slope of the next one.
    """
    power = 1 << (heads.bit_length() - 1)
    first = [2 ** (-bias_max * (head + 1) / power) for head in range(power)]
    rest = [2 ** (-bias_max * (2 * head + 1) / (2 * power)) for head in range(heads - power)]
    return torch.tensor(first + rest)


def alibi_candidates(config: PretrainedConfig) -> list[AlibiFit]:
    """Biases to try."""
    maxima: dict[float, list[Expression]] = {}
    for text, name, value in fields(config):
        if "alibi" in name and isinstance(value, (int, float)) and not isinstance(value, bool):
            maxima.setdefault(float(value), []).append(constant(text, float(value), name))
    maxima.setdefault(8.0, []).append(constant("8", 8.0))
    return [AlibiFit(tuple(found), scaled) for found in maxima.values() for scaled in (False, True)]


@dataclass(frozen=True)
class QueryScale:
    """Queries grow with their position: ``q * (1 + beta * log(1 + floor(position / length)))`` (Llama 4).

    Args:
        beta: expression of the factor.
        length: expression of the length of a step.
        names: the keys of ``rope_parameters`` in them.
    """

    beta: Expression
    length: Expression
    names: tuple[str, str]

    @property
    def text(self) -> str:
        """Both expressions."""
        return f"{self.beta.text} {self.length.text}"

    def described(self) -> dict[str, str]:
        """In the terms of the spec."""
        return {"beta": self.beta.text, "length": self.length.text}

    def factors(self, length: int) -> torch.Tensor:
        """The factor of each position, ``[S]``."""
        steps = torch.floor(torch.arange(length).float() / self.length.value)
        return 1 + self.beta.value * torch.log(1 + steps)


def query_scale_candidates(config: PretrainedConfig) -> list[QueryScale]:
    """Scales of queries by position that ``rope_parameters`` may mean."""
    parameters = read(config, "rope_parameters")
    if not isinstance(parameters, Mapping):
        return []
    values = {
        name: constant(f'config.rope_parameters["{name}"]', float(value), "rope_parameters")
        for name, value in parameters.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    }
    betas = [name for name in values if name.endswith("scaling_beta")]
    lengths = [name for name in values if name.endswith("max_position_embeddings")]
    return [QueryScale(values[beta], values[length], (beta, length)) for beta in betas for length in lengths]


@dataclass(frozen=True)
class Window:
    """A sliding window: the config field that says how many tokens a position sees, its own counted."""

    key: str
    tokens: int


def window_candidates(config: PretrainedConfig) -> list[Window]:
    """Fields that may hold a window; ``sliding_window`` first."""
    found = {
        name: value
        for _, name, value in fields(config)
        if "window" in name.split("_") and "layers" not in name.split("_") and type(value) is int and value > 0
    }
    names = sorted(found, key=lambda name: name != "sliding_window")
    return [Window(name, found[name]) for name in names]


def mask(length: int, window: Window | None) -> torch.Tensor:
    """Which keys ``[S, S]`` a query sees: itself and those before it, in the window."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window.tokens)


def products(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scores ``[B, N, S, S]`` of ``[B, S, N, D]`` and ``[B, S, K, D]``."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    return q.transpose(1, 2) @ k.permute(0, 2, 3, 1)


def mix(scores: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax attention ``[B, S, N * D]``.

    Args:
        scores: ``[B, N, S, S]``.
        v: ``[B, S, K, D]``.
        visible: ``[S, S]``.
        sinks: ``[N]``, a logit of each head that takes part in the softmax and has no value.
    """
    v = v.repeat_interleave(scores.shape[1] // v.shape[2], dim=2).transpose(1, 2)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        extra = sinks[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, extra), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(-2)
