"""Differential attention: the formula, and what nearly has it, planted in transformers' own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onboard.reference.attention.differential import difference, init, lambdas, paired
from onboard.reference.probe import probe
from onboard.reference.roles import Unexplained
from torch import nn
from transformers.models.diffllama import modeling_diffllama as diffllama

from .toys import LLAMA

RAW: dict[str, Any] = {"architectures": ["DiffLlamaForCausalLM"], "model_type": "diffllama", **LLAMA}


def measure() -> dict[str, Any]:
    return probe("DiffLlamaForCausalLM", "diffllama", RAW)


def native(found: dict[str, Any], name: str) -> str:
    entry = next(entry for entry in found["modules"] if f"model.layers.{{layer}}.self_attn.{name}" in entry["native"])
    return str(entry["reference"]).rpartition(".")[2]


def test_what_is_measured() -> None:
    found = measure()
    attention = found["attention"]
    assert attention["differential"] is True
    assert attention["output_norm"]["kind"] == "rms"
    assert attention["output_norm"]["weight"] is False
    assert attention["difference"] < 1e-5
    pairs = [{native(found, f"lambda_{part}{half}") for part in "qk"} for half in (1, 2)]
    assert pairs == [{"lambda_q1", "lambda_k1"}, {"lambda_q2", "lambda_k2"}]


def test_numbers() -> None:
    assert init(0) == pytest.approx(0.2)
    assert init(100) == pytest.approx(0.8)
    v = torch.arange(4.0).view(1, 1, 4, 1)
    assert paired(v)[0, 0].tolist() == [[0, 2], [1, 3], [0, 2], [1, 3]]
    mixed = torch.tensor([[[1.0, 2, 3, 4]]])  # two heads of two numbers
    assert difference(mixed, 2, 0.5)[0, 0].tolist() == [-0.5, 0]
    vectors = {name: torch.tensor([value]) for name, value in zip("abcd", (1.0, 2.0, 3.0, 4.0), strict=True)}
    found = {option.names: option.value for option in lambdas(vectors, 0)}
    assert len(found) == 6
    assert found["a", "b", "c", "d"] == pytest.approx(math.exp(2) - math.exp(12) + 0.2, rel=1e-5)


def test_names_may_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which vectors are multiplied is found by numbers."""
    forward = diffllama.DiffLlamaAttention.forward

    @functools.wraps(forward)
    def exchanged(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = dict(self._parameters)
        self._parameters["lambda_k1"], self._parameters["lambda_q2"] = own["lambda_q2"], own["lambda_k1"]
        try:
            return forward(self, *args, **kwargs)
        finally:
            self._parameters.update(own)

    monkeypatch.setattr(diffllama.DiffLlamaAttention, "forward", exchanged)
    found = measure()
    assert {native(found, "lambda_q1"), native(found, "lambda_k1")} == {"lambda_q1", "lambda_q2"}


def of_init(change: Callable[[float], float]) -> Callable[[Any], None]:
    def build(self: Any) -> None:
        self.lambda_init = change(self.lambda_init)

    return build


def with_layer_norm(self: Any) -> None:
    self.groupnorm = nn.LayerNorm(2 * self.head_dim, eps=self.groupnorm.eps, elementwise_affine=False)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (of_init(lambda value: value + 0.1), "not its norm"),
        (of_init(lambda value: 0.2), "not its norm"),
    ],
    ids=["another init", "the same init in every layer"],
)
def test_near_misses(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None], what: str) -> None:
    build = diffllama.DiffLlamaAttention.__init__

    def changed(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        change(self)

    monkeypatch.setattr(diffllama.DiffLlamaAttention, "__init__", changed)
    with pytest.raises(Unexplained, match=what):
        measure()


def test_a_layer_norm_of_the_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula of the norm is measured as that of any other."""
    build = diffllama.DiffLlamaAttention.__init__

    def changed(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        with_layer_norm(self)

    monkeypatch.setattr(diffllama.DiffLlamaAttention, "__init__", changed)
    assert measure()["attention"]["output_norm"]["kind"] == "layer"
