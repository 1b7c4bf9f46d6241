"""Exactly one formula of an MLP wins, whatever its projections are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from onboard.reference.build import randomise
from onboard.reference.mlps import explain_mlp
from onboard.reference.roles import Unexplained
from torch import nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from .toys import HIDDEN, tiny, whole

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
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)


class Transposed(nn.Module):
    """GPT-2's, with weights ``[in, out]``."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(WIDTH, HIDDEN), Conv1D(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(ACT2FN["silu"](self.c_fc(x)))


class Residual(Plain):
    """Bloom's: it adds the residual itself; the layer gives it none here."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.0 * x + 1.0


def explain(make: Callable[[], nn.Module], **fields: str) -> dict[str, Any]:
    """What a Llama's MLP is taken for after it was replaced by another."""
    model = tiny()
    for layer in model.model.layers:
        layer.mlp = make()
    for name, value in ({"hidden_act": "silu"} | fields).items():
        setattr(model.config, name, value)
    randomise(model)
    recording, _, roles = whole(model)
    return explain_mlp(model, roles, recording, 1)


def parts(found: dict[str, Any]) -> dict[str, list[str]]:
    """Reference module, below the MLP, to the native ones."""
    names = {entry["reference"].split(".mlp.")[1]: entry["native"] for entry in found["modules"]}
    return {name: [native.split(".")[-1] for native in natives] for name, natives in names.items()}


def silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return nn.functional.silu(gate) * up


@pytest.mark.parametrize("names", [("gate_proj", "up_proj"), ("up_proj", "gate_proj"), ("w1", "w3"), ("w3", "w1")])
def test_the_gate_is_found_by_what_it_does(names: tuple[str, str]) -> None:
    found = explain(lambda: Gated(silu, names))
    assert parts(found) == {names[0]: ["gate_proj"], names[1]: ["up_proj"], "down_proj": ["down_proj"]}
    assert found["gated"]
    assert found["biases"] == {"up": False, "down": False}
    assert found["intermediate_size"] == "config.intermediate_size"


def test_the_gate_may_be_made_second() -> None:
    found = explain(lambda: Gated(lambda first, second: silu(second, first), ("gate_proj", "up_proj")))
    assert parts(found)["gate_proj"] == ["up_proj"]


def test_each_bias_by_itself() -> None:
    def only_up() -> nn.Module:
        mlp = Gated(silu, bias=True)
        mlp.down_proj.bias = None
        return mlp

    def only_gate() -> nn.Module:
        mlp = Gated(silu, bias=True)
        mlp.up_proj.bias = None
        return mlp

    assert explain(lambda: Gated(silu, bias=True))["biases"] == {"up": True, "down": True}
    assert explain(only_up)["biases"] == {"up": True, "down": False}
    with pytest.raises(Unexplained, match="bias"):
        explain(only_gate)


@pytest.mark.parametrize("gate_first", [True, False])
def test_fused_halves_in_both_orders(gate_first: bool) -> None:
    def mix(hidden: torch.Tensor) -> torch.Tensor:
        first, second = hidden.chunk(2, dim=-1)
        return silu(first, second) if gate_first else silu(second, first)

    found = parts(explain(lambda: Fused(mix)))
    assert found["wi"] == (["gate_proj", "up_proj"] if gate_first else ["up_proj", "gate_proj"])


def test_plain_ones() -> None:
    found = explain(Plain)
    assert (found["gated"], parts(found)) == (False, {"fc1": ["up_proj"], "fc2": ["down_proj"]})
    assert parts(explain(Residual)) == parts(found)


def test_transposed_weights_are_said() -> None:
    assert [entry["transposed"] for entry in explain(Transposed)["modules"]] == [True, True]
    assert not any(entry["transposed"] for entry in explain(Plain)["modules"])


def test_a_norm_inside() -> None:
    found = explain(SubNorm)
    assert found["inner_norm"]["kind"] == "rms"
    assert parts(found)["norm"] == ["inner_norm"]
    assert explain(lambda: Gated(silu))["inner_norm"] is None


DISTINCT = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu", "mish", "sigmoid", "tanh", "relu6")


@pytest.mark.parametrize("activation", DISTINCT)
def test_each_activation_is_told_from_each_other(activation: str) -> None:
    found = explain(lambda: Gated(lambda gate, up: ACT2FN[activation](gate) * up), hidden_act=activation)
    assert (found["activation"], found["activation_key"]) == (activation, "hidden_act")
    other = "silu" if activation != "silu" else "gelu"
    fixed = explain(lambda: Gated(lambda gate, up: ACT2FN[activation](gate) * up), hidden_act=other)
    assert (fixed["activation"], fixed["activation_key"]) == (activation, None)


def test_the_key_of_two_activations() -> None:
    """Gemma's old configs have a hidden_act that the model does not read."""
    found = explain(
        lambda: Gated(lambda gate, up: ACT2FN["gelu_pytorch_tanh"](gate) * up),
        hidden_act="gelu",
        hidden_activation="gelu_pytorch_tanh",
    )
    assert (found["activation_key"], found["activation"]) == ("hidden_activation", "gelu_pytorch_tanh")


@pytest.mark.parametrize(
    "mix",
    [
        lambda gate, up: silu(gate, up + 1),
        lambda gate, up: silu(gate.clamp(max=1), up),
        lambda gate, up: 0.5 * silu(gate, up),
        lambda gate, up: gate.exp() * up,
    ],
    ids=["up + 1", "clamped", "scaled", "another function"],
)
def test_other_formulas(mix: Formula) -> None:
    with pytest.raises(Unexplained) as caught:
        explain(lambda: Gated(mix))
    assert caught.value.part == "mlp"
    assert caught.value.nearest


def test_interleaved_halves_are_not_taken_for_halves() -> None:
    with pytest.raises(Unexplained):
        explain(lambda: Fused(lambda hidden: silu(hidden[..., ::2], hidden[..., 1::2])))


def test_two_that_fit_are_an_ambiguity() -> None:
    """Without an activation nothing tells gate from up."""
    with pytest.raises(Unexplained, match="not told apart"):
        explain(lambda: Gated(lambda gate, up: gate * up), hidden_act="linear")
