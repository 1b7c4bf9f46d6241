"""Exactly one formula of an MLP wins, whatever its projections are called and whatever module they lie in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from onboard.reference.build import randomise
from onboard.reference.mlps import explain_mlp, explain_mlps, size_expression
from onboard.reference.record import record
from onboard.reference.roles import Unexplained, find_roles
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama as llama
from transformers.pytorch_utils import Conv1D

from .toys import HIDDEN, LLAMA, config, ids, tiny

WIDTH = 72
Formula = Callable[..., torch.Tensor]
Make = Callable[[], nn.Module]


class Gated(nn.Module):
    """``down(mix(first(x), second(x)))``; which of the two is the gate is up to ``mix``."""

    def __init__(self, mix: Formula, names: tuple[str, str] = ("gate_proj", "up_proj"), biases: str = "") -> None:
        super().__init__()
        self.names, self.mix = names, mix
        for place, name in enumerate(names):
            setattr(self, name, nn.Linear(HIDDEN, WIDTH, bias=str(place) in biases))
        self.down_proj = nn.Linear(WIDTH, HIDDEN, bias="d" in biases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (getattr(self, name)(x) for name in self.names)
        return self.down_proj(self.mix(first, second))


class Fused(nn.Module):
    """``wo(mix(wi(x)))``; ``wi`` is as many times as wide as there are parts in it."""

    def __init__(self, mix: Formula, parts: int = 2, linear: Callable[..., nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.mix = mix
        self.wi = linear(HIDDEN, parts * WIDTH)
        self.wo = linear(WIDTH, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wo(self.mix(self.wi(x)))


class SubNorm(Gated):
    """BitNet's: a norm between the gate and the way down."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__(lambda gate, up: self.norm(silu(gate, up)))
        self.norm = norm


class Residual(Fused):
    """Bloom's: it adds the residual itself."""

    def __init__(self) -> None:
        super().__init__(nn.functional.silu, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x


def conv(inside: int, outside: int) -> nn.Module:
    return Conv1D(outside, inside)


def silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return nn.functional.silu(gate) * up


def planted(make: Make, **fields: Any) -> PreTrainedModel:
    """A Llama with another MLP in each of its layers."""
    model = tiny(**fields)
    for layer in model.model.layers:
        layer.mlp = make()
    randomise(model)
    return model.eval()


def explain_in(model: PreTrainedModel) -> dict[str, Any]:
    recording, _ = record(model, input_ids=ids())
    return explain_mlp(model, find_roles(model, recording), recording, 1)


def explain(make: Make, **fields: Any) -> dict[str, Any]:
    return explain_in(planted(make, **fields))


def natives(found: dict[str, Any]) -> dict[str, list[str]]:
    """Name of each projection to its native parts, both without their modules."""
    return {
        entry["reference"].removeprefix("model.layers.{layer}.mlp."): [
            name.removeprefix("model.layers.{layer}.mlp.") for name in entry["native"]
        ]
        for entry in found["modules"]
    }


@pytest.mark.parametrize("names", [("gate_proj", "up_proj"), ("up_proj", "gate_proj"), ("w1", "w3"), ("w3", "w1")])
def test_the_gate_is_found_by_what_it_does(names: tuple[str, str]) -> None:
    found = explain(lambda: Gated(silu, names))
    assert natives(found) == {names[0]: ["gate_proj"], names[1]: ["up_proj"], "down_proj": ["down_proj"]}
    assert (found["gated"], found["activation"], found["activation_key"]) == (True, "silu", "hidden_act")
    assert (found["width"], found["inner_norm"], found["activation_parameters"]) == (WIDTH, None, False)
    assert found["difference"] < 1e-5


def test_the_gate_may_be_made_second() -> None:
    found = explain(lambda: Gated(lambda first, second: silu(second, first)))
    assert (natives(found)["gate_proj"], natives(found)["up_proj"]) == (["up_proj"], ["gate_proj"])


@pytest.mark.parametrize(
    ("biases", "expected"),
    [("", (False, False)), ("01d", (True, True)), ("01", (True, False)), ("d", (False, True))],
)
def test_biases(biases: str, expected: tuple[bool, bool]) -> None:
    found = explain(lambda: Gated(silu, biases=biases))["biases"]
    assert (found["up"], found["down"]) == expected


def test_a_bias_of_the_gate_alone() -> None:
    with pytest.raises(Unexplained, match="bias"):
        explain(lambda: Gated(silu, biases="0"))


@pytest.mark.parametrize("linear", [nn.Linear, conv])
def test_fused_halves_in_both_orders(linear: Callable[..., nn.Module]) -> None:
    found = explain(lambda: Fused(lambda hidden: silu(*hidden.chunk(2, dim=-1)), linear=linear))
    assert natives(found) == {"wi": ["gate_proj", "up_proj"], "wo": ["down_proj"]}
    assert [entry["transposed"] for entry in found["modules"]] == [linear is conv] * 2
    found = explain(lambda: Fused(lambda hidden: silu(*hidden.chunk(2, dim=-1)[::-1]), linear=linear))
    assert natives(found) == {"wi": ["up_proj", "gate_proj"], "wo": ["down_proj"]}


@pytest.mark.parametrize("linear", [nn.Linear, conv])
def test_plain(linear: Callable[..., nn.Module]) -> None:
    found = explain(lambda: Fused(nn.functional.silu, 1, linear))
    assert (found["gated"], natives(found)) == (False, {"wi": ["up_proj"], "wo": ["down_proj"]})
    assert found["biases"] == {"up": True, "down": True}


def test_one_that_adds_the_residual_itself() -> None:
    assert natives(explain(Residual)) == {"wi": ["up_proj"], "wo": ["down_proj"]}


def test_a_sequential() -> None:
    found = explain(lambda: nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.ReLU(), nn.Linear(WIDTH, HIDDEN, bias=False)))
    assert natives(found) == {"0": ["up_proj"], "2": ["down_proj"]}
    assert (found["activation"], found["activation_key"]) == ("relu", None)
    assert found["biases"] == {"up": True, "down": False}


DISTINCT = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu", "mish", "sigmoid", "tanh", "relu6")


@pytest.mark.parametrize("kind", ["gated", "plain"])
@pytest.mark.parametrize("activation", DISTINCT)
def test_each_activation_is_told_from_each_other(activation: str, kind: str) -> None:
    """Also from all those that transformers has: the config names another one, and is not believed."""
    act = ACT2FN[activation]

    def make() -> nn.Module:
        return Gated(lambda gate, up: act(gate) * up) if kind == "gated" else Fused(act, 1)

    named = explain(make, hidden_act=activation)
    assert (named["activation"], named["activation_key"]) == (activation, "hidden_act")
    other = explain(make, hidden_act="gelu_fast" if activation != "gelu_pytorch_tanh" else "silu")
    assert (other["activation"], other["activation_key"]) == (activation, None)


@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_accurate"])
def test_one_function_under_several_names_is_called_as_the_config_calls_it(name: str) -> None:
    def make() -> nn.Module:
        return Gated(lambda gate, up: nn.functional.gelu(gate, approximate="tanh") * up)

    assert explain(make, hidden_act=name)["activation"] == name
    assert explain(make, hidden_act="silu")["activation"] == "gelu_pytorch_tanh"


def test_the_key_of_two_activations() -> None:
    """Gemma's old configs have a hidden_act that the model does not read."""
    model = planted(lambda: Gated(lambda gate, up: ACT2FN["gelu_pytorch_tanh"](gate) * up), hidden_act="gelu")
    model.config.hidden_activation = "gelu_pytorch_tanh"
    found = explain_in(model)
    assert (found["activation_key"], found["activation"]) == ("hidden_activation", "gelu_pytorch_tanh")


@pytest.mark.parametrize(
    ("norm", "kind", "bias"),
    [(lambda: nn.RMSNorm(WIDTH, eps=1e-6), "rms", False), (lambda: nn.LayerNorm(WIDTH), "layer", True)],
)
def test_an_inner_norm(norm: Make, kind: str, bias: bool) -> None:
    found = explain(lambda: SubNorm(norm()))
    assert (found["inner_norm"]["kind"], found["inner_norm"]["bias"], found["inner_norm"]["weight"]) == (
        kind,
        bias,
        True,
    )
    assert natives(found)["norm"] == ["inner_norm"]
    assert "difference" not in found["inner_norm"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Gated(lambda gate, up: silu(gate, up + 1)),
        lambda: Gated(lambda gate, up: 0.5 * silu(gate, up)),
        lambda: Gated(lambda gate, up: silu(1.702 * gate, up)),
        lambda: Gated(lambda gate, up: silu(gate, up).roll(1, -1)),
        lambda: Gated(lambda gate, up: gate.exp() * up),
        lambda: Gated(lambda gate, up: nn.functional.silu(gate) + up),
        lambda: Fused(lambda hidden: silu(hidden[..., ::2], hidden[..., 1::2])),
        lambda: Fused(lambda hidden: nn.functional.silu(hidden).roll(1, -1), 1),
        lambda: Fused(lambda hidden: silu(*hidden.chunk(3, dim=-1)[:2]), 3),
        lambda: nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))),
    ],
    ids=[
        "up + 1",
        "scaled",
        "slope",
        "rolled",
        "another function",
        "sum",
        "interleaved",
        "plain, rolled",
        "of three",
        "three steps",
    ],
)
def test_other_formulas(make: Make) -> None:
    with pytest.raises(Unexplained) as caught:
        explain(make)
    assert caught.value.part == "mlp"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Gated(lambda gate, up: silu(gate.clamp(max=30), up)),
        lambda: Gated(lambda gate, up: silu(gate, up.clamp(-30, 30))),
        lambda: Fused(lambda hidden: nn.functional.silu(hidden.clamp(max=30)), 1),
    ],
    ids=["gate", "up", "plain"],
)
def test_a_clamp_shows_on_large_values_alone(make: Make) -> None:
    model = planted(make)
    recording, _ = record(model, input_ids=ids())
    first = next(path for path in recording if path.startswith("model.layers.1.mlp."))
    assert recording[first].output.abs().max() < 30, "or the recorded values would show it"
    with pytest.raises(Unexplained) as caught:
        explain_in(model)
    assert caught.value.part == "mlp"
    assert "silu: 0, of large values" in caught.value.nearest[0].replace("e-07", "").replace("0.0", "0")


def test_nearest_candidates_are_named_with_their_differences() -> None:
    with pytest.raises(Unexplained) as caught:
        explain(lambda: Gated(lambda gate, up: silu(gate, up) + 0.01))
    assert len(caught.value.nearest) == 3
    assert caught.value.nearest[0].startswith("gated silu: 0.01,")


def test_two_that_fit_are_an_ambiguity() -> None:
    """Without an activation nothing tells gate from up."""
    with pytest.raises(Unexplained, match="not told apart"):
        explain(lambda: Gated(lambda gate, up: gate * up), hidden_act="linear")


def test_layers_that_differ() -> None:
    model = planted(lambda: Gated(silu))
    model.model.layers[2].mlp.mix = lambda gate, up: nn.functional.gelu(gate) * up
    recording, _ = record(model, input_ids=ids())
    with pytest.raises(Unexplained, match="layers differ"):
        explain_mlps(type(model), dict(LLAMA), model, find_roles(model, recording), recording, ids())


def whole_mlp(name: str = "LlamaForCausalLM", **fields: Any) -> dict[str, Any]:
    model = tiny(name, **fields)
    recording, _ = record(model, input_ids=ids())
    roles = find_roles(model, recording)
    found: dict[str, Any] = explain_mlps(type(model), {**LLAMA, **fields}, model, roles, recording, ids())["mlp"]
    return found


def test_a_whole_model() -> None:
    found = whole_mlp(hidden_act="gelu")
    assert list(found)[:2] == ["gated", "intermediate_size"]
    assert (found["intermediate_size"], found["activation"], found["activation_key"]) == (
        "config.intermediate_size",
        "gelu",
        "hidden_act",
    )


def test_a_key_that_the_model_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The config names what the architecture fixes: generated code must not read it."""

    def fixed(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu(self.gate_proj(x), self.up_proj(x)))

    monkeypatch.setattr(llama.LlamaMLP, "forward", fixed)
    found = whole_mlp(hidden_act="silu")
    assert (found["activation"], found["activation_key"]) == ("silu", None)


@pytest.mark.parametrize(
    ("fields", "width", "expression"),
    [
        ({}, 72, "config.intermediate_size"),
        ({}, 160, "4 * config.hidden_size"),
        ({"expansion_ratio": 3}, 120, "config.expansion_ratio * config.hidden_size"),
        ({"ffn_dim": 56}, 56, "config.ffn_dim"),
        ({"n_inner": 56}, 56, "config.n_inner"),
    ],
)
def test_expressions_of_the_width(fields: dict[str, int], width: int, expression: str) -> None:
    assert size_expression(config(**fields), width) == expression


def test_a_width_that_no_field_gives() -> None:
    with pytest.raises(Unexplained, match="its width 73"):
        size_expression(config(), 73)
