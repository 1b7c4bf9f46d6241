"""Exactly one formula of a norm wins, and one that is not known is refused."""

from __future__ import annotations

import pytest
import torch
from onboard.reference.norms import explain_norms
from onboard.reference.roles import Unexplained
from torch import nn

from .toys import config, tiny


def explained(modules, config):
    return explain_norms(modules, 40, config)


class Rms(nn.Module):
    def __init__(self, offset: float = 0.0, eps: float = 1e-6, width: int = 40, bias: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(width)
        self.weight = nn.Parameter(1 + 0.4 * torch.randn(width, generator=generator))
        self.bias = nn.Parameter(torch.full((width,), 0.3)) if bias else None
        self.offset, self.eps = offset, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = nn.functional.rms_norm(x, (x.shape[-1],), eps=self.eps) * (self.offset + self.weight)
        return normed if self.bias is None else normed + self.bias


class Function(Rms):
    """Another formula over the same weight."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_offset_is_told_apart(offset: float) -> None:
    norms = {"a": Rms(offset), "b": Rms(offset, width=16)}
    found = explained(norms, config(rms_norm_eps=1e-6))
    assert (found["kind"], found["offset"], found["eps"]) == ("rms", offset, "config.rms_norm_eps")
    assert found["difference"] < 1e-5


@pytest.mark.parametrize("key", ["rms_norm_eps", "layer_norm_eps", "qk_norm_eps", "block_epsilon"])
def test_the_eps_of_several_is_told_apart(key: str) -> None:
    """With inputs of ordinary size all of these agree to 1e-5."""
    values = {"rms_norm_eps": 1e-5, "layer_norm_eps": 1e-6, "qk_norm_eps": 1e-7, "block_epsilon": 1e-9}
    modules = {"a": Rms(eps=values[key])}
    found = explained(modules, config(**values))
    assert found["eps"] == f"config.{key}"
    x = torch.randn(5, 40)
    assert torch.allclose(Rms(eps=1e-9)(x), Rms(eps=1e-6)(x), atol=1e-5), "or the test would prove nothing"


def test_an_eps_that_no_field_gives() -> None:
    with pytest.raises(Unexplained) as caught:
        explained({"a": Rms(eps=3e-4)}, config(rms_norm_eps=1e-6))
    assert caught.value.part == "norm"
    assert "rms_norm_eps" in caught.value.nearest[0]


def test_numbers_that_are_no_eps_are_no_candidates() -> None:
    with pytest.raises(Unexplained):
        explained({"a": Rms(eps=0.02)}, config(rms_norm_eps=1e-6, initializer_range=0.02))


def test_an_eps_that_the_architecture_fixes() -> None:
    assert explained({"a": Rms(eps=1e-5)}, config(rms_norm_eps=1e-6))["eps"] == "1e-05"


def test_a_bias() -> None:
    found = explained({"a": Rms(bias=True)}, config(rms_norm_eps=1e-6))
    assert (found["weight"], found["bias"]) == (True, True)
    with pytest.raises(Unexplained, match="differ in weights or biases"):
        explained({"a": Rms(bias=True), "b": Rms()}, config(rms_norm_eps=1e-6))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("bias", [False, True])
def test_layer_norms_are_told_from_rms(offset: float, bias: bool) -> None:
    class Layer(Rms):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.layer_norm(x, x.shape[-1:], offset + self.weight, self.bias, eps=1e-6)

    found = explained({"a": Layer(bias=bias)}, config(rms_norm_eps=1e-6))
    assert (found["kind"], found["offset"], found["bias"]) == ("layer", offset, bias)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_without_a_weight(kind: str) -> None:
    class Bare(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            norm = nn.functional.rms_norm if kind == "rms" else nn.functional.layer_norm
            return norm(x, x.shape[-1:], eps=1e-5)

    found = explained({"a": Bare()}, config(rms_norm_eps=1e-6))
    assert (found["kind"], found["weight"], found["eps"]) == (kind, False, "1e-05")


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6) * w,
        lambda x, w: x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6) * w,
        lambda x, w: nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6) * w.exp(),
        lambda x, w: nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6).clamp(-2, 2) * w,
        lambda x, w: x * w,
    ],
    ids=["eps outside the root", "l2 norm", "exponential weight", "clamped", "no norm"],
)
def test_other_formulas(function) -> None:
    with pytest.raises(Unexplained) as caught:
        explained({"a": Function(function)}, config(rms_norm_eps=1e-6))
    assert caught.value.part == "norm"
    assert len(caught.value.nearest) >= 2


def test_one_norm_that_differs_is_named() -> None:
    with pytest.raises(Unexplained) as caught:
        explained({"model.norm": Rms(), "model.layers.2.odd": Rms(offset=1.0)}, config(rms_norm_eps=1e-6))
    assert any("model.layers.2.odd" in line for line in caught.value.nearest)


def test_equal_eps_fields_are_one_answer() -> None:
    found = explained({"a": Rms()}, config(rms_norm_eps=1e-6, layer_norm_eps=1e-6))
    assert found["offset"] == 0.0


@pytest.mark.parametrize(
    ("name", "kind", "offset", "eps"),
    [
        ("LlamaForCausalLM", "rms", 0.0, "config.rms_norm_eps"),
        ("GemmaForCausalLM", "rms", 1.0, "config.rms_norm_eps"),
        ("NemotronForCausalLM", "layer", 1.0, "config.norm_eps"),
        ("OlmoForCausalLM", "layer", 0.0, "1e-05"),
        ("CohereForCausalLM", "layer", 0.0, "config.layer_norm_eps"),
    ],
)
def test_real_norms(name: str, kind: str, offset: float, eps: str) -> None:
    model = tiny(name, **({"hidden_size": 64} if name != "LlamaForCausalLM" else {}))
    modules = {"n": model.model.norm, "i": model.model.layers[1].input_layernorm}
    found = explain_norms(modules, model.config.hidden_size, model.config)
    assert (found["kind"], found["offset"], found["eps"]) == (kind, offset, eps)
