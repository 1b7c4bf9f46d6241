"""Exactly one formula of an MLP wins, whatever its projections are called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from onboard.reference.mlps import explain_mlp
from onboard.reference.roles import Unexplained
from torch import nn
from transformers.activations import ACT2FN

from .toys import HIDDEN, config, recorded

WIDTH = 72
Formula = Callable[..., torch.Tensor]


class Gated(nn.Module):
    """``down(mix(first(x), second(x)))``; which of the two is the gate is up to ``mix``."""

    def __init__(self, mix: Formula, names: tuple[str, str] = ("gate_proj", "up_proj"), bias: bool = False) -> None:
        super().__init__()
        self.names, self.mix = names, mix
        for name in names:
            setattr(self, name, nn.Linear(HIDDEN, WIDTH, bias=bias))
        self.down_proj = nn.Linear(WIDTH, HIDDEN, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (getattr(self, name)(x) for name in self.names)
        return self.down_proj(self.mix(first, second))


class Fused(nn.Module):
    def __init__(self, mix: Formula, bias: bool = False) -> None:
        super().__init__()
        self.mix = mix
        self.wi = nn.Linear(HIDDEN, 2 * WIDTH, bias=bias)
        self.wo = nn.Linear(WIDTH, HIDDEN, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wo(self.mix(self.wi(x)))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(ACT2FN["silu"](self.fc1(x)))


class SubNorm(Gated):
    """BitNet's: a norm between the gate and the way down."""

    def __init__(self) -> None:
        super().__init__(lambda gate, up: self.norm(ACT2FN["silu"](gate) * up))
        self.norm = nn.RMSNorm(WIDTH)


def explain(mlp: nn.Module, **fields: str):
    x = torch.randn(1, 24, HIDDEN, generator=torch.Generator().manual_seed(3))
    made = config()
    del made.hidden_act
    for name, value in ({"hidden_act": "silu"} | fields).items():
        setattr(made, name, value)
    return explain_mlp(mlp, "part", recorded(mlp, x=x), made)


def silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return nn.functional.silu(gate) * up


@pytest.mark.parametrize("names", [("gate_proj", "up_proj"), ("up_proj", "gate_proj"), ("w1", "w3"), ("w3", "w1")])
def test_the_gate_is_found_by_what_it_does(names: tuple[str, str]) -> None:
    found = explain(Gated(silu, names))
    assert (found["gate_proj"], found["up_proj"], found["down_proj"]) == (*names, "down_proj")
    assert found["fused"] is None
    assert found["bias"] is False


def test_the_gate_may_be_made_second() -> None:
    found = explain(Gated(lambda first, second: silu(second, first), ("gate_proj", "up_proj")))
    assert (found["gate_proj"], found["up_proj"]) == ("up_proj", "gate_proj")


def test_biases() -> None:
    assert explain(Gated(silu, bias=True))["bias"] is True
    mixed = Gated(silu, bias=True)
    mixed.down_proj.bias = None
    with pytest.raises(Unexplained, match="bias"):
        explain(mixed)


@pytest.mark.parametrize("bias", [False, True])
def test_fused_halves(bias: bool) -> None:
    found = explain(Fused(lambda hidden: silu(*hidden.chunk(2, dim=-1)), bias))
    assert (found["fused"], found["down_proj"], found["bias"]) == ("wi", "wo", bias)


DISTINCT = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu", "mish", "sigmoid", "tanh", "relu6")


@pytest.mark.parametrize("activation", DISTINCT)
def test_each_activation_is_told_from_each_other(activation: str) -> None:
    mlp = Gated(lambda gate, up: ACT2FN[activation](gate) * up)
    assert explain(mlp, hidden_act=activation)["activation"] == activation
    for other in DISTINCT:
        if other != activation:
            with pytest.raises(Unexplained) as caught:
                explain(mlp, hidden_act=other)
            assert caught.value.part == "mlp"
            assert caught.value.nearest == (f"gated, {other}",)


def test_the_key_of_two_activations() -> None:
    """Gemma's old configs have a hidden_act that the model does not read."""
    mlp = Gated(lambda gate, up: ACT2FN["gelu_pytorch_tanh"](gate) * up)
    found = explain(mlp, hidden_act="gelu", hidden_activation="gelu_pytorch_tanh")
    assert (found["activation_key"], found["activation"]) == ("hidden_activation", "gelu_pytorch_tanh")


def test_strings_that_are_no_activation() -> None:
    assert explain(Gated(silu), dtype="float32", note="silu-like")["activation_key"] == "hidden_act"


@pytest.mark.parametrize(
    "mlp",
    [
        SubNorm(),
        Plain(),
        Gated(lambda gate, up: gate * up),
        Gated(lambda gate, up: silu(gate, up + 1)),
        Gated(lambda gate, up: silu(gate.clamp(max=1), up)),
        Gated(lambda gate, up: 0.5 * silu(gate, up)),
        Fused(lambda hidden: silu(*hidden.chunk(2, dim=-1)[::-1])),
        Fused(lambda hidden: silu(hidden[..., ::2], hidden[..., 1::2])),
    ],
    ids=["sub-norm", "plain", "bilinear", "up + 1", "clamped", "scaled", "second half is the gate", "interleaved"],
)
def test_other_formulas(mlp: nn.Module) -> None:
    with pytest.raises(Unexplained) as caught:
        explain(mlp)
    assert caught.value.part == "mlp"


def test_two_that_fit_are_an_ambiguity() -> None:
    """Without an activation nothing tells gate from up."""
    with pytest.raises(Unexplained, match="2 candidates"):
        explain(Gated(lambda gate, up: gate * up), hidden_act="linear")


def test_no_activation_in_the_config() -> None:
    with pytest.raises(Unexplained, match="activations"):
        explain(Gated(silu), hidden_act="no_such_function")
