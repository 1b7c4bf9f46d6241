"""The order of a layer: each that is served in a planted and in a real model, and their near neighbours refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from onboard.reference.blocks import branches, explain_block, explain_blocks
from onboard.reference.roles import Unexplained
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from .toys import tiny, whole

A, M = "input_layernorm", "post_attention_layernorm"
PRE_MLP, POST_MLP = "pre_feedforward_layernorm", "post_feedforward_layernorm"
PLACES = ("pre_attention_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm")
Layer = Callable[[Any, Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]


def plant(monkeypatch: pytest.MonkeyPatch, order: Layer, **fields: Any) -> PreTrainedModel:
    """A Llama whose layers run in another order."""

    def forward(self: nn.Module, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("use_cache", None)
        return order(self, lambda x: self.self_attn(hidden_states=x, **kwargs)[0], hidden_states)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
    return tiny(**fields)


def explain(model: PreTrainedModel, index: int = 1) -> dict[str, Any]:
    recording, _, roles = whole(model)
    return explain_block(branches(model, roles, recording, index), roles.layer(index), model.config)


def pre(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    h = x + attend(s.input_layernorm(x))
    return h + s.mlp(s.post_attention_layernorm(h))


def pre_by_the_other_names(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    h = x + attend(s.post_attention_layernorm(x))
    return h + s.mlp(s.input_layernorm(h))


def post(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    h = x + s.input_layernorm(attend(x))
    return h + s.post_attention_layernorm(s.mlp(h))


def around_attention(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    h = x + s.post_attention_layernorm(attend(s.input_layernorm(x)))
    return h + s.mlp(h)


def around_mlp(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    h = x + attend(x)
    return h + s.post_attention_layernorm(s.mlp(s.input_layernorm(h)))


def norms_of_the_sums(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    h = s.input_layernorm(x + attend(x))
    return s.post_attention_layernorm(h + s.mlp(h))


def one_sum_is_normed(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    h = s.input_layernorm(x + attend(x))
    return h + s.mlp(s.post_attention_layernorm(h))


def parallel(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    return x + attend(s.input_layernorm(x)) + s.mlp(s.post_attention_layernorm(x))


def parallel_with_post_norms(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    return x + s.input_layernorm(attend(x)) + s.post_attention_layernorm(s.mlp(x))


@pytest.mark.parametrize(
    ("order", "served", "places", "reference"),
    [
        (pre, (False, False), (A, None, M, None), (A, M)),
        (pre_by_the_other_names, (False, False), (A, None, M, None), (M, A)),
        (post, (False, False), (None, M, None, POST_MLP), (A, M)),
        (around_attention, (False, False), (A, M, None, None), (A, M)),
        (around_mlp, (False, False), (None, None, M, POST_MLP), (A, M)),
        (norms_of_the_sums, (False, True), (None, M, None, POST_MLP), (A, M)),
        (one_sum_is_normed, (False, True), (None, M, PRE_MLP, None), (A, M)),
        (parallel, (True, False), (A, None, M, None), (A, M)),
        (parallel_with_post_norms, (True, False), (None, M, None, POST_MLP), (A, M)),
    ],
)
def test_orders(
    monkeypatch: pytest.MonkeyPatch,
    order: Layer,
    served: tuple[bool, bool],
    places: tuple[str | None, ...],
    reference: tuple[str, ...],
) -> None:
    found = explain(plant(monkeypatch, order))
    assert (found["parallel"], found["norm_after_residual"]) == served
    assert tuple(found[name] for name in PLACES) == places
    assert tuple(found["reference_norms"].values()) == reference
    assert found["multiplier"] is None
    assert found["difference"] < 1e-5


def one_norm_for_both(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    normed = s.input_layernorm(x)
    return x + attend(normed) + s.mlp(normed)


def test_one_norm_for_both_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one never runs, and is at no place."""
    found = explain(plant(monkeypatch, one_norm_for_both))
    assert (found["parallel"], tuple(found[name] for name in PLACES)) == (True, (A, None, None, None))


def scaled(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    h = x + 0.22 * attend(s.input_layernorm(x))
    return h + 0.22 * s.mlp(s.post_attention_layernorm(h))


def scaled_parallel(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    return x + 0.22 * attend(s.input_layernorm(x)) + 0.22 * s.mlp(s.post_attention_layernorm(x))


def scaled_post(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    h = x + 0.22 * s.input_layernorm(attend(x))
    return h + 0.22 * s.post_attention_layernorm(s.mlp(h))


@pytest.mark.parametrize("order", [scaled, scaled_parallel, scaled_post])
@pytest.mark.parametrize(
    ("fields", "expression"),
    [
        ({"residual_multiplier": 0.22}, "config.residual_multiplier"),
        ({"scale_depth": 0.22 * 3**0.5}, "config.scale_depth / config.num_hidden_layers**0.5"),
    ],
)
def test_multipliers(monkeypatch: pytest.MonkeyPatch, order: Layer, fields: dict[str, float], expression: str) -> None:
    assert explain(plant(monkeypatch, order, **fields))["multiplier"] == expression


def shared_norm(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    h = x + attend(s.input_layernorm(x))
    return h + s.mlp(s.input_layernorm(h))


def scaled_mlp(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    h = x + attend(s.input_layernorm(x))
    return h + 1.01 * s.mlp(s.post_attention_layernorm(h))


def no_residual(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    h = attend(s.input_layernorm(x))
    return h + s.mlp(s.post_attention_layernorm(h))


def residual_of_the_norm(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    x = s.input_layernorm(x)
    h = x + attend(x)
    return h + s.mlp(s.post_attention_layernorm(h))


def residual_from_the_start(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    h = x + attend(s.input_layernorm(x))
    return x + s.mlp(s.post_attention_layernorm(h))


def mlp_before_attention(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    h = x + s.mlp(s.input_layernorm(x))
    return h + attend(s.post_attention_layernorm(h))


def gated_residual(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    h = 0.9 * x + attend(s.input_layernorm(x))
    return 0.9 * h + s.mlp(s.post_attention_layernorm(h))


def last_is_changed(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    return pre(s, attend, x) * 1.001


@pytest.mark.parametrize(
    "order",
    [
        shared_norm,
        scaled_mlp,
        no_residual,
        residual_of_the_norm,
        residual_from_the_start,
        mlp_before_attention,
        gated_residual,
        last_is_changed,
    ],
)
def test_orders_that_are_not_served(monkeypatch: pytest.MonkeyPatch, order: Layer) -> None:
    with pytest.raises(Unexplained) as caught:
        explain(plant(monkeypatch, order))
    assert caught.value.part == "block"
    assert len(caught.value.nearest) >= 1


def test_a_multiplier_on_one_branch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The field that holds the factor is there, but the formula has one for both."""
    with pytest.raises(Unexplained, match="none of the orders") as caught:
        explain(plant(monkeypatch, scaled_mlp, residual_multiplier=1.01))
    assert caught.value.nearest[0].startswith("sequential, branches times 1.0: 0.")


def test_a_multiplier_that_no_field_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unexplained):
        explain(plant(monkeypatch, scaled, initializer_range=0.22))


def test_norms_at_no_place_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unexplained) as caught:
        explain(plant(monkeypatch, mlp_before_attention))
    assert "do not all stand at known places" in caught.value.what
    assert any(f"{M} is at no place" in line for line in caught.value.nearest)


def test_a_layer_that_differs() -> None:
    """Each layer is explained by its own calls."""
    model = tiny()
    first = model.model.layers[0]
    assert explain(model, 2)["pre_attention_norm"] == A
    first.forward = lambda hidden_states, **kwargs: scaled(
        first, lambda x: first.self_attn(hidden_states=x, **kwargs)[0], hidden_states
    )
    assert explain(model, 2)["pre_attention_norm"] == A
    with pytest.raises(Unexplained):
        explain(model, 0)


def test_layers_of_two_orders() -> None:
    model = tiny()
    last = model.model.layers[2]
    last.forward = lambda hidden_states, **kwargs: post(
        last, lambda x: last.self_attn(hidden_states=x, **kwargs)[0], hidden_states
    )
    recording, _, roles = whole(model)
    with pytest.raises(Unexplained, match="layers differ"):
        explain_blocks(model, roles, recording)


def test_a_layer_without_attention() -> None:
    """Hybrids: the parts that the first layer has are not those of a later one."""
    model = tiny()
    layer = model.model.layers[1]
    layer.forward = lambda hidden_states, **_: hidden_states + layer.mlp(layer.input_layernorm(hidden_states))
    recording, _, roles = whole(model)
    with pytest.raises(Unexplained) as caught:
        explain_blocks(model, roles, recording)
    assert caught.value.part == "block"
    assert "model.layers.1" in caught.value.what


def test_the_modules_of_a_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = plant(monkeypatch, pre_by_the_other_names)
    recording, _, roles = whole(model)
    found = explain_blocks(model, roles, recording)
    assert [(entry["reference"], entry["native"]) for entry in found["modules"]] == [
        ("model.layers.{layer}.post_attention_layernorm", ["model.layers.{layer}.input_layernorm"]),
        ("model.layers.{layer}.input_layernorm", ["model.layers.{layer}.post_attention_layernorm"]),
    ]
    assert "reference_norms" not in found["block"]
