"""Which module of the reference plays which part.

Decided by what the modules are and do, not by their names: the list whose members run one after the other, the module
that takes the last layer's output, the child that is handed a mask, a cache or positions.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.pytorch_utils import Conv1D

from onboard.reference.record import Recording

LINEAR = (nn.Linear, Conv1D)
_ATTENTION_ARGUMENTS = frozenset(
    (
        "attention_mask",
        "position_embeddings",
        "past_key_values",
        "past_key_value",
        "layer_past",
        "alibi",
        "cache_params",
    )
)


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
    """Paths of the decoder's parts; those of a layer are relative to it.

    Args:
        final_norm: None where the head takes the last layer's output.
        attention: the module that mixes tokens by softmax attention.
        attention_layers: the layers that have it.
        mixer: the module that carries a state from token to token in all other layers; None where there are none.
        mlp: the module that holds the feed-forward projections, None where they are children of the layer.
        mlp_linears: the feed-forward projections, in the order in which they run.
    """

    embedding: str
    layers: str
    final_norm: str | None
    head: str
    attention: str
    mlp: str | None
    mlp_linears: tuple[str, ...]
    attention_layers: tuple[int, ...]
    mixer: str | None = None

    def layer(self, index: int) -> str:
        """Path of one decoder layer."""
        return f"{self.layers}.{index}"

    @property
    def first_attention_layer(self) -> str:
        """Path of the first layer with an attention."""
        return self.layer(self.attention_layers[0])

    def mixes(self, index: int) -> str:
        """Path of the module that mixes tokens in a layer."""
        name = self.attention if index in self.attention_layers or self.mixer is None else self.mixer
        return f"{self.layer(index)}.{name}"


def find_roles(model: PreTrainedModel, recording: Recording) -> Roles:
    """Find the decoder's parts.

    Raises:
        Unexplained: a part that is not there, or there twice.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    layers = find_layers(model, recording)
    head = model.get_output_embeddings()
    if head is None:
        raise Unexplained("head", f"{type(model).__name__} has no language-modelling head")
    with_attention = attention_layers(model.config, len(model.get_submodule(layers)))
    layer_path = f"{layers}.{with_attention[0]}"
    attention = _token_mixer(model.get_submodule(layer_path))
    ran = [path for path in recording if path.startswith(f"{layer_path}.")]
    linears = tuple(
        path.removeprefix(f"{layer_path}.")
        for path in ran
        if isinstance(model.get_submodule(path), LINEAR) and not _inside(path, f"{layer_path}.{attention}")
    )
    if not linears:
        raise Unexplained("mlp", f"{layer_path} has no projections outside of {attention}")
    owners = {name.split(".")[0] if "." in name else None for name in linears}
    if len(owners) > 1:
        raise Unexplained("block", f"projections of {layer_path} outside of {attention} lie in {len(owners)} modules")
    return Roles(
        embedding=paths[id(model.get_input_embeddings())],
        layers=layers,
        final_norm=_final_norm(model, recording, layers),
        head=paths[id(head)],
        attention=attention,
        mlp=owners.pop(),
        mlp_linears=linears,
        attention_layers=with_attention,
        mixer=_mixer(model.get_submodule(layers), with_attention),
    )


def attention_layers(config: PretrainedConfig, depth: int) -> tuple[int, ...]:
    """The layers for which transformers' cache keeps keys and values, and no recurrent or convolutional state.

    Raises:
        Unexplained: no layer is of this kind, or some keep both.
    """
    kept = DynamicCache(config=config).layers
    if len(kept) != depth:
        return tuple(range(depth))
    recurrent = [isinstance(layer, LinearAttentionCacheLayerMixin) for layer in kept]
    if all(recurrent):
        raise Unexplained("block", "no layer has keys and values of its own alone")
    return tuple(index for index, carries in enumerate(recurrent) if not carries)


def find_layers(model: PreTrainedModel, recording: Recording) -> str:
    """Path of the list of decoder layers.

    The members of other lists as long (a norm or an activation for each layer) have no projections of their own.

    Raises:
        Unexplained: there is none.
    """
    depth = getattr(model.config, "num_hidden_layers", None)
    lists = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == depth
        and f"{path}.0" in recording
        and sum(isinstance(inner, LINEAR) for inner in module[0].modules()) > 1
    ]
    if not lists:
        raise Unexplained("layers", f"no list of {depth} layers in {type(model).__name__}")
    return str(lists[0])


def _mixer(layers: nn.ModuleList, with_attention: tuple[int, ...]) -> str | None:
    """The child that mixes tokens in the layers without an attention."""
    names = {_token_mixer(layer) for index, layer in enumerate(layers) if index not in with_attention}
    if len(names) > 1:
        raise Unexplained("block", f"layers mix tokens in modules of several names: {', '.join(sorted(names))}")
    return names.pop() if names else None


def _token_mixer(layer: nn.Module) -> str:
    """The child that takes what only a module needs that looks at other tokens."""
    found = [
        name
        for name, child in layer.named_children()
        if any(isinstance(module, LINEAR) for module in child.modules())
        and _ATTENTION_ARGUMENTS & set(inspect.signature(child.forward).parameters)
    ]
    if len(found) != 1:
        raise Unexplained("block", f"a layer has {len(found)} modules that mix tokens, expected one")
    return str(found[0])


def _final_norm(model: PreTrainedModel, recording: Recording, layers: str) -> str | None:
    last = recording[f"{layers}.{len(model.get_submodule(layers)) - 1}"].output
    outside = [path for path in recording if not path.startswith(f"{layers}.")]
    calls = {path: recording.last(path) for path in outside}
    found = [
        path
        for path, call in calls.items()
        if call.x.shape == last.shape
        and torch.equal(call.x, last)
        and is_norm(model.get_submodule(path), call.x, call.output)
    ]
    if len(found) > 1:
        raise Unexplained("norm", f"{len(found)} modules take the last layer's output, expected one final norm")
    return str(found[0]) if found else None


def _inside(path: str, parent: str) -> bool:
    return path == parent or path.startswith(f"{parent}.")


def is_norm(module: nn.Module, x: torch.Tensor | None = None, output: torch.Tensor | None = None) -> bool:
    """Whether a leaf is a norm: its only parameters are a weight, and maybe a bias, along the last dimension.

    A leaf without parameters is one where its recorded output ``[..., dim]`` has unit mean square and is its input
    scaled, or centred and scaled.
    """
    parameters = dict(module.named_parameters(recurse=False))
    if any(True for _ in module.children()):
        return False
    if parameters:
        return "weight" in parameters and all(parameter.ndim == 1 for parameter in parameters.values())
    if x is None or output is None or x.shape != output.shape or not x.is_floating_point() or torch.equal(x, output):
        return False
    squares = output.float().pow(2).mean(-1)
    if not torch.allclose(squares, torch.ones_like(squares), atol=1e-2):
        return False
    for centred in (x, x - x.mean(-1, keepdim=True)):
        unit = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-12)
        if torch.allclose(unit, output, atol=1e-2):
            return True
    return False
