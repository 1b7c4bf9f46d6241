"""Contract: the comparison with the reference catches mistakes. Each mutant plants one; the unchanged model passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn


@dataclass(frozen=True)
class Mutant:
    """One planted mistake.

    Attributes:
        name: What is wrong.
        change: Plants it in the loaded model.
        variant: The setting in which it shows.
    """

    name: str
    change: Callable[[Any], None] = field(repr=False)
    variant: str = "base"


def layers_with(model: Any, path: str) -> list[Any]:
    """The layers that have a parameter or a module: an attention, or a mixer in its place."""

    def has(layer: Any) -> bool:
        modules, parameters = dict(layer.named_modules()), dict(layer.named_parameters())
        return path in modules or path in parameters

    return [layer for layer in model.model.layers if has(layer)]


def swap(*paths: str) -> Callable[[Any], None]:
    """Exchange two tensors in every layer that has them."""

    def change(model: Any) -> None:
        for owner in layers_with(model, paths[0]):
            first, second = (owner.get_parameter(path) for path in paths)
            held = first.data.clone()
            first.data.copy_(second.data)
            second.data.copy_(held)

    return change


def edit(path: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    """Replace a tensor in every layer that has it by a function of itself."""

    def change(model: Any) -> None:
        for layer in layers_with(model, path):
            parameter = layer.get_parameter(path)
            parameter.data.copy_(how(parameter.data.clone()))

    return change


def set_attribute(path: str, name: str, value: Callable[[Any, int], Any]) -> Callable[[Any], None]:
    """Set an attribute of a submodule of every layer to a function of the submodule and the layer's index."""

    def change(model: Any) -> None:
        modules = [layer.get_submodule(path) for layer in layers_with(model, path)]
        values = [value(module, index) for index, module in enumerate(modules)]
        for module, new in zip(modules, values, strict=True):
            setattr(module, name, new)

    return change


def swap_layers(model: Any) -> None:
    """Put the weights of the first layer of a kind into the second and the other way round."""
    kinds = [layer.attention_type for layer in model.model.layers]
    twice = next(kind for kind in kinds if kinds.count(kind) > 1)
    first, second = [layer for layer in model.model.layers if layer.attention_type == twice][:2]
    held = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    first.load_state_dict(second.state_dict())
    second.load_state_dict(held)


def reverse_q_heads(model: Any) -> None:
    """Reverse the order of the query heads: each then meets the wrong key/value group."""
    for layer in layers_with(model, "self_attn"):
        attention = layer.self_attn
        weight = attention.q_proj.weight.data
        weight.copy_(weight.unflatten(0, (-1, attention.head_dim)).flip(0).flatten(0, 1))


def larger_eps(model: Any) -> None:
    """Use an eps of 0.05 in every norm."""
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.eps = 0.05


def no_mixers(model: Any) -> None:
    """Let only attention mix tokens."""
    for layer in layers_with(model, "mamba"):
        layer.mamba.register_forward_hook(lambda _module, _args, output: torch.zeros_like(output))


def mixers_look_ahead(model: Any) -> None:
    """Give each token the mixers' output of the next one."""
    for layer in layers_with(model, "mamba"):
        layer.mamba.register_forward_hook(lambda _module, _args, output: output.roll(-1, dims=1))


def other_theta(model: Any) -> None:
    """Rotate with a tenth of the base."""
    parameters = model.config.rope_parameters
    for one in [parameters]:
        one["rope_theta"] = one["rope_theta"] / 10


def rotate_the_end(model: Any) -> None:
    """Rotate the last dimensions of the head instead of the first: roll the rows of q and k."""
    for layer in layers_with(model, "self_attn"):
        attention = layer.self_attn
        for weight in (attention.q_proj.weight.data, attention.k_proj.weight.data):
            weight.copy_(weight.unflatten(0, (-1, attention.head_dim)).roll(4, dims=1).flatten(0, 1))


def other_pairs(model: Any) -> None:
    """Permute q and k as for a kernel that rotates neighbouring dimensions."""
    for layer in layers_with(model, "self_attn"):
        attention = layer.self_attn
        half = attention.head_dim // 2
        order = torch.arange(attention.head_dim).view(2, half).t().flatten()
        for weight in (attention.q_proj.weight.data, attention.k_proj.weight.data):
            weight.copy_(weight.unflatten(0, (-1, attention.head_dim))[:, order].flatten(0, 1))


def plain_final_norm(model: Any) -> None:
    """Forget the final norm's weight."""
    model.model.norm.reset_parameters()


def tie_head(model: Any) -> None:
    """Use the embedding as the head although the checkpoint has a head of its own."""
    model.lm_head.weight = model.model.embed_tokens.weight


MUTANTS = [
    Mutant("k and v projections swapped", swap("self_attn.k_proj.weight", "self_attn.v_proj.weight")),
    Mutant("q heads in reverse order", reverse_q_heads),
    Mutant("softmax scale off", set_attribute("self_attn", "scaling", lambda module, _: module.scaling * 1.5)),
    Mutant("output projection transposed", edit("self_attn.o_proj.weight", lambda w: w.t().reshape(w.shape))),
    Mutant(
        "input_layernorm and post_attention_layernorm swapped",
        swap("input_layernorm.weight", "post_attention_layernorm.weight"),
    ),
    Mutant("norm eps off", larger_eps),
    Mutant("norm weight with an offset", edit("input_layernorm.weight", lambda w: w + 1)),
    Mutant("gate and up swapped", swap("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    Mutant("another activation", set_attribute("mlp", "act_fn", lambda *_: nn.GELU())),
    Mutant("mixers left out", no_mixers),
    Mutant("mixers see the next token", mixers_look_ahead),
    Mutant("two layers swapped", swap_layers),
    Mutant("rope theta off", other_theta),
    Mutant("rotary part at the end of the head", rotate_the_end),
    Mutant("interleaved rotation", other_pairs),
    Mutant("q bias dropped", edit("self_attn.q_proj.bias", torch.zeros_like), variant="attention_bias"),
    Mutant("v bias dropped", edit("self_attn.v_proj.bias", torch.zeros_like), variant="attention_bias"),
    Mutant("attention output bias dropped", edit("self_attn.o_proj.bias", torch.zeros_like), variant="attention_bias"),
    Mutant("MLP input bias dropped", edit("mlp.up_proj.bias", torch.zeros_like), variant="mlp_bias"),
    Mutant("MLP output bias dropped", edit("mlp.down_proj.bias", torch.zeros_like), variant="mlp_bias"),
    Mutant("final norm without its weight", plain_final_norm),
    Mutant("head tied where it is its own", tie_head),
]


@torch.no_grad()
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(make_pair, difference, mutant):
    """The logits of the mutant are not the reference's, those of the unchanged model are."""
    pair = make_pair(mutant.variant)
    ids = pair.inputs()
    expected = pair.reference(ids).logits
    assert difference(pair.native(ids).logits, expected) < 1e-4, "the unchanged model must pass"
    mutant.change(pair.native)
    same = difference(pair.native(ids).logits, expected) < 1e-4
    assert not same, f"survived: {mutant.name}"
