"""Mistakes that a proof of a reused decoder must catch: those that change the tiny reference's logits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from onboard.reference.roles import is_norm

# A change of the logits that the generated comparison, at 1e-4 of the largest, cannot miss.
_SHOWS = 1e-2

Change = Callable[[nn.Module], None]
_HOW: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "torch.ones_like": torch.ones_like,
    "torch.zeros_like": torch.zeros_like,
    "transposed": lambda w: w.t().reshape(w.shape),
    "reversed_rows": lambda w: w.flip(0),
    "shifted_rows": lambda w: w.roll(1, 0),
}


def find_mistakes(
    model: PreTrainedModel, input_ids: torch.Tensor, layers: str | None, head: str | None
) -> list[dict[str, str]]:
    """Mistakes that show.

    Args:
        model: the tiny reference.
        input_ids: ``[1, S]``.
        layers: path of the list of decoder layers.
        head: path of the language-modelling head.

    Returns:
        ``name`` and ``change``: a call of a function that the generated test_mutants.py defines.
    """
    found = []
    counts: dict[str, int] = {}
    truth = _logits(model, input_ids)
    for kind, limit, name, change, plant in _candidates(model, layers, head):
        if counts.get(kind, 0) >= limit:
            continue
        planted = copy.deepcopy(model)
        try:
            plant(planted)
            logits = _logits(planted, input_ids)
        except Exception:  # shapes that do not allow it
            continue
        moved = (logits - truth).abs().max() / truth.abs().max().clamp(min=1.0)
        if torch.isfinite(moved) and moved > _SHOWS:
            counts[kind] = counts.get(kind, 0) + 1
            found.append({"name": name, "change": change})
    return found


@torch.no_grad()
def _logits(model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids).logits
    return logits


def _candidates(
    model: PreTrainedModel, layers: str | None, head: str | None
) -> Iterator[tuple[str, int, str, str, Change]]:
    """Kind, how many of it are enough, name, call in the generated test, and what it does."""
    stack = list(model.get_submodule(layers)) if layers else []
    for first in range(len(stack)):
        for second in range(first + 1, len(stack)):
            if _shapes(stack[first]) == _shapes(stack[second]):
                yield (
                    "layers",
                    1,
                    f"layers {first} and {second} exchanged",
                    f"exchange_layers({first}, {second})",
                    _exchange(f"{layers}.{first}", f"{layers}.{second}"),
                )
    tensors: dict[str, nn.Parameter] = dict(model.named_parameters())
    owners = dict(model.named_modules())
    shapes: dict[tuple[str, torch.Size], str] = {}
    for path, tensor in tensors.items():
        owner_path, _, leaf = path.rpartition(".")
        owner = owners[owner_path]
        if head and owner_path == head:
            continue
        group = path.split(".")[: len(layers.split(".")) + 1] if layers and path.startswith(f"{layers}.") else ["top"]
        same = (".".join(group), tensor.shape)
        if same in shapes and tensor.ndim > 1:
            other = shapes[same]
            yield (
                "exchanged",
                3,
                f"{other} and {_from_where_they_part(other, path)} exchanged",
                f'exchange("{other}", "{path}")',
                _exchange(other, path),
            )
        shapes[same] = path
        if is_norm(owner):
            kind, how, what = ("norm", "torch.ones_like", "forgotten")
            if leaf == "bias":
                kind, how = "norm bias", "torch.zeros_like"
        elif isinstance(owner, nn.Embedding):
            kind, how, what = "embedding", "shifted_rows", "one row off"
        elif leaf == "bias":
            kind, how, what = "bias", "torch.zeros_like", "dropped"
        elif isinstance(owner, (nn.Linear, Conv1D)) and tensor.ndim == 2:
            kind, how, what = "transposed", "transposed", "transposed"
        else:
            kind, how, what = f"other {leaf}", "reversed_rows", "in reverse order"
        limit = {"norm": 3, "norm bias": 1, "embedding": 3, "bias": 2, "transposed": 4}.get(kind, 1)
        yield kind, limit, f"{path} {what}", f'edit("{path}", {how})', _edit(path, _HOW[how])


def _from_where_they_part(first: str, second: str) -> str:
    """The second path without the modules that it has in common with the first."""
    shared = 0
    pairs = list(zip(first.split("."), second.split("."), strict=False))
    while shared < len(pairs) - 1 and pairs[shared][0] == pairs[shared][1]:
        shared += 1
    return ".".join(second.split(".")[shared:])


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in module.state_dict().items()}


def _edit(path: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(model: nn.Module) -> None:
        tensor = model.get_parameter(path)
        tensor.data.copy_(how(tensor.data.clone()))

    return change


def _exchange(first: str, second: str) -> Change:
    """Exchange two tensors, or all tensors of two modules."""

    def change(model: nn.Module) -> None:
        state: dict[str, Any] = model.state_dict()
        for name, tensor in state.items():
            if name == first or name.startswith(f"{first}."):
                other = state[second + name[len(first) :]]
                held = tensor.clone()
                tensor.copy_(other)
                other.copy_(held)

    return change
