"""Tensors of which the checkpoint holds the parts and memory the whole, or the other way round.

Measured by the values, as :mod:`onboard.reference.layout` does: every parameter is random, so that only the true parts
in their true order make up a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from onboard.reference.roles import LINEAR


@dataclass(frozen=True)
class Join:
    """One tensor and its parts, one after the other.

    Args:
        disk: names in the checkpoint.
        native: names in memory.
        operation: ``join``: memory has the whole, ``split``: the checkpoint has it.
        dim: dimension of the whole along which the parts follow each other.
        leading: dimensions of size one that the whole begins with and its parts do not have.
        rows_of: names in memory of the projections whose outputs the parts are applied to, which have as many rows;
            empty where the parts are equal in size.
    """

    disk: tuple[str, ...]
    native: tuple[str, ...]
    operation: str
    dim: int
    leading: int
    rows_of: tuple[str, ...] = ()


def find_joins(disk: Mapping[str, torch.Tensor], memory: Mapping[str, torch.Tensor]) -> list[Join]:
    """Explain what has no counterpart of its own.

    Args:
        disk: name to tensor of the checkpoint, without those that memory has as they are.
        memory: name to tensor of the model, without those that the checkpoint has as they are.

    Returns:
        What was found; tensors that are no whole and no part are in none of it.
    """
    joins = []
    left_on_disk, left = dict(disk), dict(memory)
    for wholes, parts, operation in ((left, left_on_disk, "join"), (left_on_disk, left, "split")):
        for name, whole in list(wholes.items()):
            found = _parts(whole, parts)
            if found is None:
                continue
            names, dim, leading = found
            del wholes[name]
            for part in names:
                del parts[part]
            on_disk, native = (names, (name,)) if operation == "join" else ((name,), names)
            joins.append(Join(on_disk, native, operation, dim, leading))
    return joins


def _parts(whole: torch.Tensor, candidates: Mapping[str, torch.Tensor]) -> tuple[tuple[str, ...], int, int] | None:
    """Names of the parts in order, the dimension, and how many leading dimensions of one they lack."""
    for leading in range(whole.ndim):
        if any(size != 1 for size in whole.shape[:leading]):
            break
        same = {name: one for name, one in candidates.items() if one.ndim + leading == whole.ndim}
        same = {name: one[(None,) * leading] for name, one in same.items() if one.dtype == whole.dtype}
        for dim in range(leading, whole.ndim):
            names = _in_order(whole, dim, same)
            if names:
                return names, dim, leading
    return None


def _in_order(whole: torch.Tensor, dim: int, candidates: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Names of tensors that make up the whole one after the other; empty where they do not."""
    names: list[str] = []
    place = 0
    while place < whole.shape[dim]:
        for name, part in candidates.items():
            length = part.shape[dim]
            fits = 0 < length <= whole.shape[dim] - place and name not in names
            if fits and torch.equal(whole.narrow(dim, place, length), part):
                names.append(name)
                place += length
                break
        else:
            return ()
    return tuple(names)


def rows_of(model: PreTrainedModel, join: Join, input_ids: torch.Tensor) -> tuple[str, ...]:
    """Projections whose outputs lie side by side in what a joined tensor is applied to.

    transformers cuts a joined tensor into parts of one size when it saves it, and joins parts of any size when it
    loads them. Which sizes the parts of a published checkpoint have shows in what they are applied to: of a kernel for
    the channels ``[q, k, v]`` each part belongs to the channels of one projection.

    Args:
        model: the tiny reference.
        join: tensors of the checkpoint that are joined along their rows.
        input_ids: ``[1, S]``.

    Returns:
        Names of the projections' weights, one a part; empty where what the tensor is applied to is nothing like that.
    """
    (name,) = join.native if join.operation == "join" else ("",)
    if not name or join.dim or len(join.disk) < 2:
        return ()
    whole, owner = model.state_dict()[name], name.split(".")[:-2]
    outputs: dict[str, torch.Tensor] = {}
    hooks = [
        module.register_forward_hook(lambda _, __, output, path=path: outputs.setdefault(path, output.detach()))
        for path, module in model.named_modules()
        if isinstance(module, LINEAR) and path.split(".")[:-1] == owner
    ]
    with torch.no_grad(), _AppliedTo(whole) as applied:
        model(input_ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    for tensor in applied.inputs:
        paths = _side_by_side(tensor, outputs, len(whole))
        if len(paths) == len(join.disk):
            return tuple(f"{path}.weight" for path in paths)
    return ()


def _side_by_side(tensor: torch.Tensor, outputs: Mapping[str, torch.Tensor], channels: int) -> Sequence[str]:
    """Paths of the modules whose outputs ``[B, S, C_i]`` are the channels of ``[B, C, S]`` or ``[B, S, C]``."""
    for dim in range(1, tensor.ndim):
        if tensor.shape[dim] == channels:
            whole = tensor.movedim(dim, -1)
            fitting = {path: output for path, output in outputs.items() if output.shape[:-1] == whole.shape[:-1]}
            if paths := _in_order(whole, whole.ndim - 1, fitting):
                return paths
    return ()


class _AppliedTo(TorchFunctionMode):  # type: ignore[misc]
    """Keeps the first argument of every function that is also given a certain parameter."""

    def __init__(self, parameter: torch.Tensor) -> None:
        super().__init__()
        self.inputs: list[torch.Tensor] = []
        self._where = parameter.data_ptr()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See :class:`torch.overrides.TorchFunctionMode`."""
        kwargs = kwargs or {}
        given = [*args, *kwargs.values()]
        first = next((one for one in given if isinstance(one, torch.Tensor)), None)
        others = [one for one in given if isinstance(one, torch.Tensor) and one is not first]
        if first is not None and any(self._is_it(one) for one in others):
            self.inputs.append(first.detach().clone())
        return func(*args, **kwargs)

    def _is_it(self, tensor: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return bool(tensor.data_ptr() == self._where)
