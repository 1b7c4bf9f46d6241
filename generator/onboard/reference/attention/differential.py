"""Hypothesis on differential attention (arXiv:2410.05258): half of the heads is subtracted from the other half.

Heads ``n`` and ``n + N / 2`` make a pair. Each attends to pairs of values ``[v_j, v_(j + K / 2)]`` of twice the size,
and ``lambda * second`` is taken from the first; then the pairs' outputs are normalised and multiplied by ``1 - init``.
``lambda = exp(q1 . k1) - exp(q2 . k2) + init`` with four learned vectors, ``init = 0.8 - 0.6 exp(-0.3 * layer)``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

ROLES = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


@dataclass(frozen=True)
class Lambdas:
    """The four vectors of one attention.

    Args:
        names: their names in the attention, in the order of :data:`ROLES`; the two of a product may be exchanged.
        value: the lambda that they give with the layer's ``init``.
    """

    names: tuple[str, ...]
    value: float


def init(layer: int) -> float:
    """What lambda starts from in a layer, and what the outputs' factor ``1 - init`` comes from."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


def lambdas(vectors: Mapping[str, torch.Tensor], layer: int) -> list[Lambdas]:
    """Every way to take four vectors for those of the formula."""
    found = []
    for first in itertools.combinations(vectors, 2):
        second = tuple(name for name in vectors if name not in first)
        products = [(vectors[a] * vectors[b]).sum().exp().item() for a, b in (first, second)]
        found.append(Lambdas((*first, *second), products[0] - products[1] + init(layer)))
    return found


def paired(v: torch.Tensor) -> torch.Tensor:
    """Values ``[B, S, K, D]`` in pairs ``[B, S, K, 2D]``."""
    first, second = v.chunk(2, dim=2)
    pairs = torch.cat((first, second), dim=-1)
    return torch.cat((pairs, pairs), dim=2)


def difference(mixed: torch.Tensor, heads: int, factor: float) -> torch.Tensor:
    """``first - factor * second`` of the pairs ``[B, S, N * D]``, from the outputs of all heads ``[B, S, N * 2D]``."""
    first, second = mixed.unflatten(-1, (heads, -1)).chunk(2, dim=2)
    return (first - factor * second).flatten(-2)
