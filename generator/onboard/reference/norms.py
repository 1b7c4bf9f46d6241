"""Hypotheses on norms: root mean square, with the stored weight as a scale or as an offset from one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from onboard.reference.record import close
from onboard.reference.roles import Unexplained


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * (offset + weight)`` over the last dimension (arXiv:1910.07467)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (offset + weight)


@torch.no_grad()
def explain_norms(modules: dict[str, nn.Module], config: PretrainedConfig) -> dict[str, Any]:
    """Find the one formula that reproduces every norm.

    Small inputs tell the candidates for eps apart, which ordinary ones cannot.

    Returns:
        ``kind``, ``offset``, ``eps_key`` and the largest ``difference``.

    Raises:
        Unexplained: none or several fit.
    """
    eps_keys = [name for name, value in vars(config).items() if "eps" in name and isinstance(value, float)]
    fits: list[dict[str, Any]] = []
    nearest: list[str] = []
    for offset in (0.0, 1.0):
        for key in eps_keys:
            differences = [_difference(module, offset, getattr(config, key)) for module in modules.values()]
            if all(difference is not None for difference in differences):
                worst = max(difference for difference in differences if difference is not None)
                fits.append({"kind": "rms", "offset": offset, "eps_key": key, "difference": worst})
            else:
                missed = [name for name, difference in zip(modules, differences, strict=True) if difference is None]
                nearest.append(f"RMS norm with weight + {offset:g} and {key}: not {', '.join(missed[:3])}")
    if not fits:
        raise Unexplained("norm", "no candidate reproduces the norms", tuple(nearest))
    if len({(fit["offset"], getattr(config, fit["eps_key"])) for fit in fits}) > 1:
        raise Unexplained("norm", "several candidates fit, the input does not tell them apart")
    return fits[0]


def _difference(module: nn.Module, offset: float, eps: float) -> float | None:
    weight = module.weight
    generator = torch.Generator().manual_seed(1)
    worst = 0.0
    for size in (1.0, 1e-3):
        x = size * torch.randn((5, weight.shape[0]), generator=generator)
        bias = getattr(module, "bias", None)
        if bias is not None:
            return None
        difference = close(rms(x, weight, eps, offset), module(x))
        if difference is None:
            return None
        worst = max(worst, difference)
    return worst
