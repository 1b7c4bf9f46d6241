"""Records what goes into and comes out of the reference's submodules."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass
class Call:
    """One call of a submodule.

    Attributes:
        inputs: the tensors that it was called with, by parameter name.
        output: its output; the first one where it returns several.
    """

    inputs: dict[str, Any]
    output: torch.Tensor
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def x(self) -> torch.Tensor:
        """The first tensor argument."""
        return next(value for value in self.inputs.values() if isinstance(value, torch.Tensor))


class Recording(dict[str, Call]):
    """Module path to its first call; the last one, of modules that are called again, is kept beside it."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, Call] = {}

    def add(self, path: str, call: Call) -> None:
        """Keep a call."""
        self.setdefault(path, call)
        self._last[path] = call

    def last(self, path: str) -> Call:
        """The last call of a module."""
        return self._last[path]


@torch.no_grad()
def record(model: nn.Module, **inputs: Any) -> tuple[Recording, torch.Tensor]:
    """Run the model once and keep every submodule's first call.

    Returns:
        The recording, and the logits ``[B, S, V]``.
    """
    recording = Recording()
    handles = [
        module.register_forward_hook(_hook(recording, path), with_kwargs=True)
        for path, module in model.named_modules()
        if path
    ]
    try:
        logits = model(**inputs, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    return recording, logits


def _hook(recording: Recording, path: str) -> Callable[..., None]:
    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) else output
        if not isinstance(first, torch.Tensor):
            return
        names = list(inspect.signature(module.forward).parameters)
        bound = dict(zip(names, args, strict=False)) | kwargs
        copied = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in bound.items()}
        recording.add(path, Call(copied, first.clone(), kwargs))

    return keep


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-5) -> float | None:
    """Largest absolute difference where two tensors agree, else None.

    The tolerance is relative to the largest value where that is above one.
    """
    if a.shape != b.shape:
        return None
    difference = (a - b).abs().max().item()
    # Against an infinite value any difference would be small.
    fits = math.isfinite(difference) and difference <= tolerance * max(1.0, b.abs().max().item())
    return difference if fits else None
