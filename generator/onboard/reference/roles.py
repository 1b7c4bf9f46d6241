"""Which module of the reference plays which part.

Decided by what the modules are and do, not by their names: the list that is as long as the model is deep, the module
    that
gets the last layer's output, the child that takes an attention mask.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from onboard.reference.record import Recording

LINEAR = (nn.Linear, Conv1D)


class Unexplained(Exception):
    """A part of the reference that no hypothesis explains.

    Args:
        part: ``attention``, ``norm``, ``mlp`` ...
        what: one line, what was found.
        nearest: the candidates that came nearest, with their differences.
    """

    def __init__(self, part: str, what: str, nearest: tuple[str, ...] = ()) -> None:
        super().__init__(f"{part}: {what}")
        self.part = part
        self.what = what
        self.nearest = nearest


@dataclass(frozen=True)
class Roles:
    """Paths of the decoder's parts; those of a layer are relative to it."""

    embedding: str
    layers: str
    final_norm: str
    head: str
    attention: str
    mlp: str
    norms: tuple[str, ...]
    dropouts: tuple[str, ...]

    def layer(self, index: int) -> str:
        """Path of one decoder layer."""
        return f"{self.layers}.{index}"


def find_roles(model: PreTrainedModel, recording: Recording) -> Roles:
    """Find the decoder's parts.

    Raises:
        Unexplained: a part that is not there, or there twice.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    depth = model.config.num_hidden_layers
    lists = [
        path for path, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    if not lists:
        raise Unexplained("layers", f"no list of {depth} layers in {type(model).__name__}")
    layers = lists[0]
    head = model.get_output_embeddings()
    if head is None:
        raise Unexplained("head", f"{type(model).__name__} has no language-modelling head")
    last = recording[f"{layers}.{depth - 1}"].output
    finals = [
        path
        for path, call in recording.items()
        if not path.startswith(f"{layers}.") and is_norm(model.get_submodule(path)) and torch.equal(call.x, last)
    ]
    if len(finals) != 1:
        raise Unexplained("norm", f"{len(finals)} modules take the last layer's output, expected one final norm")
    layer = model.get_submodule(f"{layers}.0")
    mixers: list[str] = []
    mlps: list[str] = []
    for name, child in layer.named_children():
        if any(isinstance(module, LINEAR) for module in child.modules()):
            takes_mask = "attention_mask" in inspect.signature(child.forward).parameters
            (mixers if takes_mask else mlps).append(name)
    if len(mixers) != 1 or len(mlps) != 1:
        raise Unexplained(
            "block", f"a layer has {len(mixers)} attention modules and {len(mlps)} MLPs, expected one each"
        )
    norms = [name for name, child in layer.named_children() if is_norm(child)]
    return Roles(
        embedding=paths[id(model.get_input_embeddings())],
        layers=layers,
        final_norm=finals[0],
        head=paths[id(head)],
        attention=mixers[0],
        mlp=mlps[0],
        norms=tuple(norms),
        dropouts=tuple(name for name, child in layer.named_children() if isinstance(child, nn.Dropout)),
    )


def is_norm(module: nn.Module) -> bool:
    """A leaf whose only parameters are a weight, and maybe a bias, along the last dimension."""
    parameters = dict(module.named_parameters(recurse=False))
    leaf = not any(True for _ in module.children())
    return leaf and "weight" in parameters and all(parameter.ndim == 1 for parameter in parameters.values())
