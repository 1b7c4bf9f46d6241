"""What the recording holds of one layer's attention, sorted by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from onboard.reference.attention.differential import ROLES, init
from onboard.reference.attention.projections import Linears, check_output, find_linears
from onboard.reference.attention.rotations import Table, handed_table
from onboard.reference.record import Recording, close
from onboard.reference.roles import LINEAR, Roles, Unexplained


@dataclass(frozen=True)
class NormCall:
    """A norm inside an attention.

    Args:
        name: its path there; ``{head}`` stands for the head's number where each head has a module of its own.
        modules: the module, or that of each head.
        x: what it took; the heads' inputs joined.
        y: what it gave.
    """

    name: str
    modules: tuple[nn.Module, ...]
    x: torch.Tensor
    y: torch.Tensor

    def takes(self, x: torch.Tensor, width: bool) -> bool:
        """Whether it took these queries or keys ``[B, S, heads, D]``: in this order, heads first, or joined."""
        forms = [x] if width else [x, x.transpose(1, 2)]
        return x.numel() == self.x.numel() and any(
            close(form.reshape(self.x.shape), self.x) is not None for form in forms
        )

    @property
    def has_parameters(self) -> bool:
        """Whether it has any."""
        return any(True for _ in self.modules[0].parameters())


@dataclass(frozen=True)
class Evidence:
    """One layer's attention.

    Args:
        path: of the attention in the recording.
        attention: the module.
        linears: its projections.
        transposed_out: whether the output projection is stored ``[in, out]``.
        biases: which of the linears have a bias, by path within the attention, the output projection under ``""``.
        outputs: of the projections in, ``[B, S, width]``.
        mixed: the heads' joined outputs ``[B, S, N * D]``, before a norm of them.
        output_norm: the norm of the heads' joined outputs.
        norms: the other norms.
        sinks: path and values of a parameter ``[N]`` of its own.
        table: the cosines and sines that the attention is called with.
        vectors: the four vectors of a differential attention by name, whose pairs' outputs are then ``mixed``; empty
            where it is none.
        late_bias: name of a parameter of the attention's own that is the bias of its output projection, None where
            there is none.
    """

    path: str
    attention: nn.Module
    linears: Linears
    transposed_out: bool
    biases: dict[str, bool]
    outputs: dict[str, torch.Tensor]
    mixed: torch.Tensor
    output_norm: NormCall | None
    norms: tuple[NormCall, ...]
    sinks: tuple[str, torch.Tensor] | None
    table: Table | None
    vectors: Mapping[str, torch.Tensor]
    late_bias: str | None = None

    @property
    def widths(self) -> dict[str, int]:
        """Widths of the projections in."""
        return {name: output.shape[-1] for name, output in self.outputs.items()}


def read_layer(model: PreTrainedModel, roles: Roles, recording: Recording, index: int) -> Evidence:
    """Sort what was recorded of a layer's attention.

    Raises:
        Unexplained: a projection, norm or parameter that has no part in an attention.
    """
    layer_path = roles.layer(index)
    path = f"{layer_path}.{roles.attention}"
    attention = model.get_submodule(path)
    linears = find_linears(attention, path, model.get_submodule(layer_path), layer_path, recording)
    check_output(path, linears, recording)
    out = recording[linears.out_path]
    norms = inner_norms(attention, path, recording)
    mixed, output_norm = out.x, None
    for norm in norms:
        if norm.y.shape == out.x.shape and torch.equal(norm.y, out.x):
            mixed, output_norm = norm.x, norm
    bias = late_bias(attention, model.get_submodule(linears.out_path))
    sinks, vectors = _own_parameters(attention, path, linears, norms, bias)
    if vectors:
        output_norm = _norm_of_pairs(path, norms, out.x, 1 - init(index))
        mixed = output_norm.x
    mixed = mixed.reshape(*mixed.shape[:2], -1)
    return Evidence(
        path=path,
        attention=attention,
        linears=linears,
        transposed_out=isinstance(model.get_submodule(linears.out_path), Conv1D),
        biases={
            **{name: has_bias(attention.get_submodule(name)) for name in linears.ins},
            "": has_bias(model.get_submodule(linears.out_path)) or bias is not None,
        },
        outputs={name: recording[f"{path}.{name}"].output for name in linears.ins},
        mixed=mixed,
        output_norm=output_norm,
        norms=tuple(norm for norm in norms if norm is not output_norm),
        sinks=sinks,
        table=handed_table(recording[path]),
        vectors=vectors,
        late_bias=bias,
    )


def late_bias(attention: nn.Module, out: nn.Module) -> str | None:
    """Name of a parameter of an attention that can only be the bias of its output projection, which has none.

    Whether it is added there shows where the block is explained.
    """
    if has_bias(out):
        return None
    width = next(len(value.t() if isinstance(out, Conv1D) else value) for value in out.parameters())
    found = [
        name
        for name, parameter in attention.named_parameters(recurse=False)
        if parameter.shape == (width,) and "bias" in name
    ]
    return found[0] if len(found) == 1 else None


def has_bias(module: nn.Module) -> bool:
    """Whether a linear has one."""
    return getattr(module, "bias", None) is not None


def inner_norms(attention: nn.Module, path: str, recording: Recording) -> list[NormCall]:
    """Leaves that normalise: they have parameters and are no linear, or have none and even their inputs out."""
    found = []
    for name, module in attention.named_modules():
        if isinstance(module, LINEAR) or any(True for _ in module.children()) or f"{path}.{name}" not in recording:
            continue
        call = recording[f"{path}.{name}"]
        if not any(isinstance(value, torch.Tensor) for value in call.inputs.values()):
            continue
        if any(True for _ in module.parameters()) or _evens_out(call.x, call.output):
            found.append(NormCall(name, (module,), call.x, call.output))
    return _joined(found)


def _joined(norms: list[NormCall]) -> list[NormCall]:
    """One norm for those that stand in a list, one for each head ``[B, 1, S, D]`` in order."""
    groups: dict[str, list[NormCall]] = {}
    for norm in norms:
        parent, _, last = norm.name.rpartition(".")
        alone = not last.isdigit() or norm.x.ndim != 4 or norm.x.shape[1] != 1
        groups.setdefault(norm.name if alone else f"{parent}.{{head}}", []).append(norm)
    return [
        NormCall(
            name,
            tuple(norm.modules[0] for norm in group),
            *(torch.cat([getattr(norm, side) for norm in group], dim=1) for side in ("x", "y")),
        )
        if len(group) > 1
        else group[0]
        for name, group in groups.items()
    ]


def _evens_out(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the outputs all have a mean square of one, and the inputs have not."""
    if x.shape != y.shape or not y.is_floating_point() or x.shape[-1] < 2:
        return False
    before, after = (part.pow(2).mean(-1) - 1 for part in (x, y))
    return bool(after.abs().max() < 1e-2) and bool(before.abs().max() > 1e-2)


def _norm_of_pairs(path: str, norms: list[NormCall], projected: torch.Tensor, factor: float) -> NormCall:
    """The norm whose output, times a factor, the output projection takes."""
    for norm in norms:
        if (
            norm.y.numel() == projected.numel()
            and close(factor * norm.y.reshape(projected.shape), projected) is not None
        ):
            return norm
    raise Unexplained("attention", f"{path} has the vectors of a differential attention, and not its norm")


def _own_parameters(
    attention: nn.Module, path: str, linears: Linears, norms: list[NormCall], bias: str | None
) -> tuple[tuple[str, torch.Tensor] | None, dict[str, torch.Tensor]]:
    """Parameters that belong neither to a projection nor to a norm: one of sinks, or four vectors."""
    inside = [attention.get_submodule(name) for name in linears.ins]
    known = {id(parameter) for norm in norms for module in norm.modules for parameter in module.parameters()}
    known |= {id(parameter) for module in inside for parameter in module.parameters()}
    left = {
        name: parameter
        for name, parameter in attention.named_parameters()
        if f"{path}.{name}".rpartition(".")[0] != linears.out_path and id(parameter) not in known and name != bias
    }
    if not left:
        return None, {}
    shapes = {parameter.shape for parameter in left.values()}
    if len(left) == len(ROLES) and len(shapes) == 1 and all(parameter.ndim == 1 for parameter in left.values()):
        return None, {name: parameter.data for name, parameter in left.items()}
    if len(left) > 1 or any("." in name for name in left):
        raise Unexplained("attention", f"parameters of {path} that play no known part: {', '.join(sorted(left)[:4])}")
    name, parameter = next(iter(left.items()))
    if parameter.ndim == 0:
        raise Unexplained("attention", f"a parameter of {path} that plays no known part: {name}")
    return (name, parameter.data.flatten()), {}
