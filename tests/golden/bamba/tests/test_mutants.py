"""Contract: the comparison with the reference catches mistakes. Each mutant plants one; the unchanged model passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch


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


def edit(path: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    """Replace a tensor by a function of itself."""

    def change(model: Any) -> None:
        tensor = model.get_parameter(path)
        tensor.data.copy_(how(tensor.data.clone()))

    return change


def exchange(first: str, second: str) -> Callable[[Any], None]:
    """Load two tensors under each other's name, as two exchanged rows of ``KEY_MAP`` would."""

    def change(model: Any) -> None:
        one, other = model.get_parameter(first), model.get_parameter(second)
        held = one.data.clone()
        one.data.copy_(other.data)
        other.data.copy_(held)

    return change


def exchange_layers(first: int, second: int) -> Callable[[Any], None]:
    """Put one layer's weights into another and the other way round."""

    def change(model: Any) -> None:
        layers = model.get_submodule("model.layers")
        held = {name: tensor.clone() for name, tensor in layers[first].state_dict().items()}
        layers[first].load_state_dict(layers[second].state_dict())
        layers[second].load_state_dict(held)

    return change


def transposed(weight: torch.Tensor) -> torch.Tensor:
    """A matrix as a wrong layout on disk would give it."""
    return weight.t().reshape(weight.shape)


def reversed_rows(weight: torch.Tensor) -> torch.Tensor:
    """The first dimension in reverse order."""
    return weight.flip(0)


def shifted_rows(weight: torch.Tensor) -> torch.Tensor:
    """Every row one place too far."""
    return weight.roll(1, 0)


def tie_head(model: Any) -> None:
    """Use the embedding as the head although the checkpoint has a head of its own."""
    model.get_output_embeddings().weight = model.get_input_embeddings().weight


MUTANTS = [
    Mutant("layers 0 and 1 exchanged", exchange_layers(0, 1)),
    Mutant("model.embed_tokens.weight one row off", edit("model.embed_tokens.weight", shifted_rows)),
    Mutant(
        "model.layers.0.feed_forward.gate_proj.weight transposed",
        edit("model.layers.0.feed_forward.gate_proj.weight", transposed),
    ),
    Mutant(
        "model.layers.0.feed_forward.gate_proj.weight and up_proj.weight exchanged",
        exchange("model.layers.0.feed_forward.gate_proj.weight", "model.layers.0.feed_forward.up_proj.weight"),
    ),
    Mutant(
        "model.layers.0.feed_forward.up_proj.weight transposed",
        edit("model.layers.0.feed_forward.up_proj.weight", transposed),
    ),
    Mutant(
        "model.layers.0.feed_forward.down_proj.weight transposed",
        edit("model.layers.0.feed_forward.down_proj.weight", transposed),
    ),
    Mutant(
        "model.layers.0.input_layernorm.weight forgotten",
        edit("model.layers.0.input_layernorm.weight", torch.ones_like),
    ),
    Mutant(
        "model.layers.0.pre_ff_layernorm.weight forgotten",
        edit("model.layers.0.pre_ff_layernorm.weight", torch.ones_like),
    ),
    Mutant("model.layers.0.mamba.dt_bias in reverse order", edit("model.layers.0.mamba.dt_bias", reversed_rows)),
    Mutant("model.layers.0.mamba.A_log in reverse order", edit("model.layers.0.mamba.A_log", reversed_rows)),
    Mutant("model.layers.0.mamba.D in reverse order", edit("model.layers.0.mamba.D", reversed_rows)),
    Mutant(
        "model.layers.0.mamba.conv1d.weight in reverse order", edit("model.layers.0.mamba.conv1d.weight", reversed_rows)
    ),
    Mutant("model.layers.0.mamba.conv1d.bias dropped", edit("model.layers.0.mamba.conv1d.bias", torch.zeros_like)),
    Mutant("model.layers.0.mamba.in_proj.weight transposed", edit("model.layers.0.mamba.in_proj.weight", transposed)),
    Mutant("model.layers.0.mamba.norm.weight forgotten", edit("model.layers.0.mamba.norm.weight", torch.ones_like)),
    Mutant(
        "model.layers.1.feed_forward.gate_proj.weight and up_proj.weight exchanged",
        exchange("model.layers.1.feed_forward.gate_proj.weight", "model.layers.1.feed_forward.up_proj.weight"),
    ),
    Mutant("model.layers.1.mamba.conv1d.bias dropped", edit("model.layers.1.mamba.conv1d.bias", torch.zeros_like)),
    Mutant(
        "model.layers.2.feed_forward.gate_proj.weight and up_proj.weight exchanged",
        exchange("model.layers.2.feed_forward.gate_proj.weight", "model.layers.2.feed_forward.up_proj.weight"),
    ),
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
