"""Exactly one formula of a norm wins, and one that is not known is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from onboard.reference.norms import explain_norms, settle_eps
from onboard.reference.roles import Unexplained
from torch import nn
from transformers.models.llama import modeling_llama as llama

from .toys import HIDDEN, LLAMA, config, tiny


class Norm(nn.Module):
    """Any of the formulas that are known."""

    def __init__(
        self,
        kind: str = "rms",
        *,
        weight: bool = True,
        bias: bool = False,
        offset: float = 0.0,
        eps: float = 1e-6,
        width: int = HIDDEN,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(width)
        self.weight = nn.Parameter(1 + 0.4 * torch.randn(width, generator=generator)) if weight else None
        self.bias = nn.Parameter(0.3 * torch.randn(width, generator=generator)) if bias else None
        self.offset, self.eps = offset, eps
        self.function = nn.functional.rms_norm if kind == "rms" else nn.functional.layer_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.function(x, (x.shape[-1],), eps=self.eps)
        if self.weight is not None:
            normed = normed * (self.offset + self.weight)
        return normed if self.bias is None else normed + self.bias


class Function(Norm):
    """Another formula over the same weight."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.formula = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight is not None
        return self.formula(x, self.weight)


def explain(*modules: nn.Module, **fields: Any) -> dict[str, Any]:
    made = config(rms_norm_eps=1e-6, **fields)
    return explain_norms({str(index): module for index, module in enumerate(modules)}, HIDDEN, made)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(
    ("weight", "bias", "offset"),
    [(True, False, 0.0), (True, False, 1.0), (True, True, 0.0), (True, True, 1.0), (False, False, 0.0)],
)
def test_each_formula_is_told_from_each_other(kind: str, weight: bool, bias: bool, offset: float) -> None:
    found = explain(Norm(kind, weight=weight, bias=bias, offset=offset))
    assert found.pop("difference") < 1e-5
    assert found == {"kind": kind, "weight": weight, "bias": bias, "offset": offset, "eps": "config.rms_norm_eps"}


def test_widths_may_differ() -> None:
    assert explain(Norm(offset=1.0), Norm(offset=1.0, width=16))["offset"] == 1.0


@pytest.mark.parametrize("key", ["rms_norm_eps", "layer_norm_eps", "qk_norm_eps", "block_epsilon"])
def test_the_eps_of_several_is_told_apart(key: str) -> None:
    """With inputs of ordinary size all of these agree to 1e-5."""
    values = {"rms_norm_eps": 1e-5, "layer_norm_eps": 1e-6, "qk_norm_eps": 1e-8, "block_epsilon": 1e-12}
    found = explain_norms({"a": Norm(eps=values[key])}, HIDDEN, config(**values))
    assert found["eps"] == f"config.{key}"
    x = torch.randn(5, HIDDEN)
    assert torch.allclose(Norm(eps=1e-12)(x), Norm(eps=1e-6)(x), atol=1e-5), "or the test would prove nothing"


@pytest.mark.parametrize(("eps", "text"), [(1e-5, "1e-05"), (1e-8, "1e-08"), (1e-12, "1e-12")])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_an_eps_that_the_architecture_fixes(kind: str, eps: float, text: str) -> None:
    assert explain(Norm(kind, eps=eps))["eps"] == text


def test_a_field_of_the_config_goes_before_a_number() -> None:
    assert explain(Norm(eps=1e-6))["eps"] == "config.rms_norm_eps"
    assert explain(Norm(eps=1e-5), norm_epsilon=1e-5)["eps"] == "config.norm_epsilon"


def test_an_eps_that_is_not_known() -> None:
    with pytest.raises(Unexplained) as caught:
        explain(Norm(eps=3e-4))
    assert caught.value.part == "norm"
    assert "rms_norm_eps" in caught.value.nearest[0]


def test_numbers_that_are_no_eps_are_no_candidates() -> None:
    with pytest.raises(Unexplained):
        explain(Norm(eps=0.02), initializer_range=0.02)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6) * w,
        lambda x, w: x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6) * w,
        lambda x, w: nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6) * w.exp(),
        lambda x, w: nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6).clamp(-2, 2) * w,
        lambda x, w: nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6) * w.mean(),
        lambda x, w: nn.functional.layer_norm(x, x.shape[-1:], eps=1e-6) * x.std(-1, keepdim=True) * w,
        lambda x, w: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) * w,
        lambda x, w: x * w,
    ],
    ids=[
        "eps outside",
        "l2",
        "exponential weight",
        "clamped",
        "mean weight",
        "centred",
        "unbiased variance",
        "no norm",
    ],
)
def test_other_formulas(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(Unexplained) as caught:
        explain(Function(function))
    assert caught.value.part == "norm"
    assert len(caught.value.nearest) >= 2


@pytest.mark.parametrize("odd", [{"offset": 1.0}, {"eps": 1e-5}, {"kind": "layer"}])
def test_one_norm_that_differs_is_named(odd: dict[str, Any]) -> None:
    with pytest.raises(Unexplained) as caught:
        explain_norms({"model.norm": Norm(), "model.layers.2.odd": Norm(**odd)}, HIDDEN, config(rms_norm_eps=1e-6))
    assert any("model.layers.2.odd" in line for line in caught.value.nearest)


@pytest.mark.parametrize("odd", [{"bias": True}, {"weight": False}])
def test_one_norm_with_other_parameters(odd: dict[str, Any]) -> None:
    with pytest.raises(Unexplained, match="differ in weights or biases"):
        explain(Norm(), Norm(**odd))


def test_equal_eps_fields_are_one_answer() -> None:
    assert explain(Norm(), layer_norm_eps=1e-6)["eps"] == "config.rms_norm_eps"


def test_values_of_eps_that_no_input_tells_apart() -> None:
    """Two that both fit are an ambiguity, not a choice."""
    with pytest.raises(Unexplained, match="several candidates"):
        explain(Norm(eps=1e-14), layer_norm_eps=1e-14, qk_norm_eps=1e-15)


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("LlamaForCausalLM", {}, ("rms", True, False, 0.0, "config.rms_norm_eps")),
        ("GemmaForCausalLM", {}, ("rms", True, False, 1.0, "config.rms_norm_eps")),
        ("OlmoForCausalLM", {}, ("layer", False, False, 0.0, "1e-05")),
        ("NemotronForCausalLM", {"hidden_size": 64}, ("layer", True, True, 1.0, "config.norm_eps")),
        ("CohereForCausalLM", {"hidden_size": 64}, ("layer", True, False, 0.0, "config.layer_norm_eps")),
        ("StableLmForCausalLM", {"hidden_size": 64}, ("layer", True, True, 0.0, "config.layer_norm_eps")),
    ],
)
def test_real_norms(name: str, fields: dict[str, Any], expected: tuple[Any, ...]) -> None:
    model = tiny(name, **fields)
    modules = {"n": model.model.norm, "i": model.model.layers[1].input_layernorm}
    found = explain_norms(modules, model.config.hidden_size, model.config)
    assert tuple(found[key] for key in ("kind", "weight", "bias", "offset", "eps")) == expected


def test_an_eps_that_follows_its_field() -> None:
    assert settled({}) == "config.rms_norm_eps"


def test_an_eps_that_only_happens_to_be_equal_to_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers' norms fix what the final norm reads: with another value of the field no formula holds for all."""
    init = llama.LlamaDecoderLayer.__init__

    def fixed(self: Any, config: Any, layer_idx: int) -> None:
        init(self, config, layer_idx)
        self.input_layernorm.variance_epsilon = 1e-5

    monkeypatch.setattr(llama.LlamaDecoderLayer, "__init__", fixed)
    assert settled({"rms_norm_eps": 1e-5}) == "1e-05"


def settled(fields: dict[str, Any]) -> str:
    fields = {**LLAMA, "rms_norm_eps": 1e-6, **fields}
    model = tiny(**fields)
    modules = {name: module for name, module in model.named_modules() if name.endswith("norm")}
    assert len(modules) == 7
    found = explain_norms(modules, HIDDEN, model.config)
    return str(settle_eps(type(model), fields, found, modules, HIDDEN)["eps"])
