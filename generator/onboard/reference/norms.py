"""Hypotheses on norms: root mean square or layer norm, with or without weight and bias, the weight an offset or not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from onboard.reference.build import build
from onboard.reference.record import close
from onboard.reference.roles import Unexplained

# Where no field of the config holds it, the epsilons that the field uses.
_FIXED_EPS = (1e-5, 1e-6, 1e-8, 1e-12)


def normalise(kind: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    """``rms``: ``x / sqrt(mean(x^2) + eps)`` (arXiv:1910.07467); ``layer``: centred first (arXiv:1607.06450)."""
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def eps_candidates(config: PretrainedConfig) -> dict[str, float]:
    """Python expression to epsilon: fields of the config first, equal values once."""
    named = {
        f"config.{name}": value for name, value in vars(config).items() if "eps" in name and isinstance(value, float)
    }
    named |= {repr(value): value for value in _FIXED_EPS} | {repr(torch.finfo().eps): torch.finfo().eps}
    first: dict[float, str] = {}
    for expression, value in named.items():
        first.setdefault(value, expression)
    return {expression: value for value, expression in first.items()}


@torch.no_grad()
def explain_norms(modules: dict[str, nn.Module], dim: int, config: PretrainedConfig) -> dict[str, Any]:
    """Find the one formula that reproduces every norm.

    Small inputs tell the candidates for eps apart, which ordinary ones cannot, and a mean tells the kinds apart.

    Args:
        modules: path to norm.
        dim: width of those that have no weight.
        config: the tiny config.

    Returns:
        ``kind``, ``weight``, ``bias``, ``offset``, ``eps`` and the largest ``difference``.

    Raises:
        Unexplained: none or several fit.
    """
    weighted = {name: getattr(module, "weight", None) is not None for name, module in modules.items()}
    biased = {name: getattr(module, "bias", None) is not None for name, module in modules.items()}
    if len(set(weighted.values())) > 1 or len(set(biased.values())) > 1:
        raise Unexplained("norm", f"norms differ in weights or biases: {weighted}, {biased}")
    weight, bias = all(weighted.values()), all(biased.values())
    fits: list[dict[str, Any]] = []
    nearest: list[str] = []
    epsilons = eps_candidates(config)
    for kind in ("rms", "layer"):
        for offset in (0.0, 1.0) if weight else (0.0,):
            for eps, value in epsilons.items():
                differences = [_difference(module, dim, kind, offset, value) for module in modules.values()]
                if all(difference is not None for difference in differences):
                    worst = max(difference for difference in differences if difference is not None)
                    found = {"kind": kind, "weight": weight, "bias": bias, "offset": offset, "eps": eps}
                    fits.append({**found, "difference": worst})
                else:
                    missed = [name for name, one in zip(modules, differences, strict=True) if one is None]
                    nearest.append(f"{kind} norm with weight + {offset:g} and {eps}: not {', '.join(missed[:3])}")
    if not fits:
        raise Unexplained("norm", "no candidate reproduces the norms", tuple(nearest[:4]))
    if len(fits) > 1:
        raise Unexplained("norm", "several candidates fit, the input does not tell them apart")
    return fits[0]


@torch.no_grad()
def settle_eps(
    cls: type[PreTrainedModel], fields: Mapping[str, Any], norm: dict[str, Any], paths: Iterable[str], dim: int
) -> dict[str, Any]:
    """The formula of the norms, its eps a number where not all of them follow the field that happens to be equal to it.

    Args:
        cls: the reference's class.
        fields: constructor arguments of the tiny config.
        norm: what :func:`explain_norms` found.
        paths: the norms in the model.
        dim: width of those that have no weight.
    """
    key = norm["eps"].removeprefix("config.")
    if key not in fields:
        return norm
    eps = 3 * fields[key]
    model = build(cls, {**fields, key: eps})
    modules = [model.get_submodule(path) for path in paths]
    if any(_difference(module, dim, norm["kind"], norm["offset"], eps) is None for module in modules):
        return {**norm, "eps": repr(fields[key])}
    return norm


def _difference(module: nn.Module, dim: int, kind: str, offset: float, eps: float) -> float | None:
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    generator = torch.Generator().manual_seed(1)
    width = dim if weight is None else weight.shape[0]
    worst = 0.0
    for size in (1.0, 1e-3, 1e-4):
        x = size * (torch.randn((5, width), generator=generator) + 0.3)
        expected = normalise(kind, x, eps)
        if weight is not None:
            expected = expected * (offset + weight)
        if bias is not None:
            expected = expected + bias
        difference = close(expected, module(x))
        if difference is None:
            return None
        worst = max(worst, difference)
    return worst
