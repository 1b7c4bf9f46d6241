"""Hypotheses on the norms inside an attention: of queries and keys, and of the heads' joined outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import PretrainedConfig

from onboard.reference.attention.evidence import Evidence, NormCall
from onboard.reference.attention.expressions import Expression, constant, fields
from onboard.reference.attention.projections import Heads
from onboard.reference.record import close
from onboard.reference.roles import Unexplained

_EPS = ("1e-05", "1e-06", "1e-08", "1e-12", "1.1920928955078125e-07")


@dataclass(frozen=True)
class NormFit:
    """A norm's formula, and the numbers that it has in one module.

    Args:
        kind: ``rms`` or ``layer``.
        weight, bias: the module's own, None where it has none.
        offset: what is added to the weight.
        eps: expressions of equal value.
    """

    kind: Literal["rms", "layer"]
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    offset: float
    eps: tuple[Expression, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise over the last dimension."""
        if self.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps[0].value)
        if self.weight is not None:
            y = y * (self.offset + self.weight)
        return y if self.bias is None else y + self.bias

    def formula(self) -> dict[str, Any]:
        """The formula in the terms of the spec."""
        return {
            "kind": self.kind,
            "weight": self.weight is not None,
            "bias": self.bias is not None,
            "offset": self.offset,
            "eps": self.eps[0].text,
        }


@dataclass(frozen=True)
class QKNormFit:
    """Norms of queries and keys.

    Args:
        over: see :class:`onboard.spec.arch.QKNorm`.
        q, k: the formulas.
        calls: the two modules.
        after_rope: whether the rotation comes first.
    """

    over: Literal["head", "heads", "width"]
    q: NormFit
    k: NormFit
    calls: tuple[NormCall, NormCall]
    after_rope: bool

    def takes(self, part: str, x: torch.Tensor) -> bool:
        """Whether the norm of a part took these queries or keys ``[B, S, heads, D]``."""
        return self.calls[part == "k"].takes(x, self.over == "width")

    def described(self) -> str:
        """All but the numbers, as text."""
        return (
            f"{self.over} {[call.name for call in self.calls]} {self.q.formula()} {self.k.formula()} {self.after_rope}"
        )

    def __call__(self, part: str, x: torch.Tensor) -> torch.Tensor:
        """Normalise queries or keys ``[B, S, heads, D]``."""
        norm = self.q if part == "q" else self.k
        if self.over == "width":
            return norm(x.flatten(-2)).unflatten(-1, x.shape[-2:])
        return norm(x)


@torch.no_grad()
def fit_norm(module: nn.Module, shape: torch.Size, config: PretrainedConfig) -> NormFit | None:
    """The formula that reproduces a norm, tried on inputs of several sizes: epsilon shows only on small ones.

    Args:
        module: the norm.
        shape: of an input that it takes.
        config: the tiny config.
    """
    parameters = dict(module.named_parameters())
    if not parameters.keys() <= {"weight", "bias"}:
        return None
    weight, bias = (parameters[name].data if name in parameters else None for name in ("weight", "bias"))
    eps: dict[float, list[Expression]] = {}
    named = [(text, name, value) for text, name, value in fields(config) if "eps" in name and isinstance(value, float)]
    for text, name, value in named:
        eps.setdefault(value, []).append(constant(text, value, name))
    for text in _EPS:
        eps.setdefault(float(text), []).append(constant(text, float(text)))
    generator = torch.Generator().manual_seed(1)
    inputs = [size * torch.randn(shape, generator=generator) for size in (1.0, 1e-3, 1e-5)]
    expected = [module(x) for x in inputs]
    kinds: tuple[Literal["rms", "layer"], ...] = ("rms", "layer")
    fits = [
        fit
        for kind in kinds
        for offset in ((0.0, 1.0) if weight is not None else (0.0,))
        for expressions in eps.values()
        if all(
            close((fit := NormFit(kind, weight, bias, offset, tuple(expressions)))(x), y) is not None
            for x, y in zip(inputs, expected, strict=True)
        )
    ]
    return fits[0] if len(fits) == 1 else None


def qk_norm_candidates(evidence: Evidence, config: PretrainedConfig, heads: Heads) -> list[QKNormFit | None]:
    """Ways in which two norms may be those of queries and keys.

    Raises:
        Unexplained: another number of norms, or norms that no formula reproduces.
    """
    norms = evidence.norms
    if not norms:
        return [None]
    if len(norms) != 2:
        raise Unexplained("attention", f"{len(norms)} norms inside {evidence.path}")
    fits = {norm.name: fit_norm_call(evidence, norm, config) for norm in norms}
    candidates: list[QKNormFit | None] = []
    for first, second in (norms, norms[::-1]):
        over = _over(fits[first.name], first.x.shape, heads.queries, heads.dim)
        if over is None or over != _over(fits[second.name], second.x.shape, heads.keys, heads.dim):
            continue
        for after_rope in (False, True):
            candidates.append(QKNormFit(over, fits[first.name], fits[second.name], (first, second), after_rope))
    return candidates


def fit_norm_call(evidence: Evidence, norm: NormCall, config: PretrainedConfig) -> NormFit:
    """The formula of a norm inside an attention.

    Raises:
        Unexplained: none or several reproduce it.
    """
    fits = [fit_norm(module, norm.x.shape, config) for module in norm.modules]
    first: NormFit | None = fits[0]
    if first is None or any(fit is None or fit.formula() != first.formula() for fit in fits):
        raise Unexplained("attention", f"no candidate reproduces the norm {evidence.path}.{norm.name}")
    if len(fits) == 1:
        return first
    weights, biases = ([getattr(fit, name) for fit in fits] for name in ("weight", "bias"))
    return replace(
        first,
        weight=None if first.weight is None else torch.stack(weights),
        bias=None if first.bias is None else torch.stack(biases),
    )


def _over(fit: NormFit, shape: torch.Size, heads: int, dim: int) -> Literal["head", "heads", "width"] | None:
    weight = fit.weight
    if shape[-1] == dim and shape.numel() // dim % heads == 0:
        if weight is None or weight.shape == (dim,):
            return "head"
        return "heads" if weight.shape == (heads, dim) else None
    if shape[-1] == heads * dim and (weight is None or weight.shape == (heads * dim,)):
        return "width"
    return None
