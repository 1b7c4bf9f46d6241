"""The order of a layer, and what stands before the first and after the last: each alternative in a real model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from onboard.reference.blocks import explain_block, explain_dropout, explain_embedding, explain_head
from onboard.reference.roles import Unexplained
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel

from .toys import ids, tiny, whole

A, M = "input_layernorm", "post_attention_layernorm"
Layer = Callable[[Any, Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]


def plant(monkeypatch: pytest.MonkeyPatch, order: Layer) -> PreTrainedModel:
    """A Llama whose layers run in another order."""

    def forward(self: nn.Module, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("use_cache", None)
        return order(self, lambda x: self.self_attn(hidden_states=x, **kwargs)[0], hidden_states)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
    return tiny()


def explain(model: PreTrainedModel, index: int = 1) -> dict[str, Any]:
    recording, _, roles = whole(model)
    return explain_block(model.get_submodule(roles.layer(index)), index, roles, recording)


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


@pytest.mark.parametrize(
    ("order", "places"),
    [
        (pre, (A, None, M, None)),
        (pre_by_the_other_names, (M, None, A, None)),
        (post, (None, A, None, M)),
        (around_attention, (A, M, None, None)),
    ],
)
def test_orders(monkeypatch: pytest.MonkeyPatch, order: Layer, places: tuple[str | None, ...]) -> None:
    found = explain(plant(monkeypatch, order))
    names = ("pre_attention_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm")
    assert tuple(found[name] for name in names) == places
    assert found["difference"] < 1e-5


@pytest.mark.parametrize(
    ("name", "fields", "places"),
    [
        ("Olmo2ForCausalLM", {}, (None, M, None, "post_feedforward_layernorm")),
        (
            "Gemma3ForCausalLM",
            {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 6},
            (A, M, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        ),
    ],
)
def test_real_orders(name: str, fields: dict[str, Any], places: tuple[str | None, ...]) -> None:
    found = explain(tiny(name, **fields))
    names = ("pre_attention_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm")
    assert tuple(found[name] for name in names) == places


def parallel(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    return x + attend(s.input_layernorm(x)) + s.mlp(s.post_attention_layernorm(x))


def one_norm_for_both(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    normed = s.input_layernorm(x)
    return x + attend(normed) + s.mlp(normed)


def shared_norm(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    h = x + attend(s.input_layernorm(x))
    return h + s.mlp(s.input_layernorm(h))


def scaled(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    h = x + 0.5 * attend(s.input_layernorm(x))
    return h + 0.5 * s.mlp(s.post_attention_layernorm(h))


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


def norm_of_the_sum(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    h = s.input_layernorm(x + attend(x))
    return s.post_attention_layernorm(h + s.mlp(h))


def last_is_changed(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    return pre(s, attend, x) * 1.001


@pytest.mark.parametrize(
    "order",
    [
        parallel,
        one_norm_for_both,
        shared_norm,
        scaled,
        scaled_mlp,
        no_residual,
        residual_of_the_norm,
        residual_from_the_start,
        norm_of_the_sum,
        last_is_changed,
    ],
)
def test_orders_that_are_not_served(monkeypatch: pytest.MonkeyPatch, order: Layer) -> None:
    with pytest.raises(Unexplained) as caught:
        explain(plant(monkeypatch, order))
    assert caught.value.part in ("block", "norm")


@pytest.mark.parametrize("name", ["CohereForCausalLM", "PhiForCausalLM", "GPTNeoXForCausalLM", "GraniteForCausalLM"])
def test_real_orders_that_are_not_served(name: str) -> None:
    fields = {"residual_multiplier": 0.22} if name.startswith("Granite") else {"hidden_size": 64}
    with pytest.raises(Unexplained) as caught:
        explain(tiny(name, **fields))
    assert caught.value.part in ("block", "norm")


def test_a_layer_that_differs() -> None:
    """Each layer is explained by its own calls."""
    model = tiny()
    first = model.model.layers[0]
    assert explain(model, 2)["pre_attention_norm"] == A
    first.forward = lambda hidden_states, **kwargs: scaled(  # type: ignore[method-assign]
        first, lambda x: first.self_attn(hidden_states=x, **kwargs)[0], hidden_states
    )
    assert explain(model, 2)["pre_attention_norm"] == A
    with pytest.raises(Unexplained):
        explain(model, 0)


def embedding(model: PreTrainedModel) -> dict[str, Any]:
    recording, _, roles = whole(model)
    return explain_embedding(model, ids(), roles, recording)


def scale_inputs(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    original = LlamaModel.forward

    def planted(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return original(self, **{**kwargs, "inputs_embeds": change(self.embed_tokens(input_ids))})

    monkeypatch.setattr(LlamaModel, "forward", planted)


@pytest.mark.parametrize(
    ("name", "fields", "expression"),
    [
        ("LlamaForCausalLM", {}, None),
        ("GemmaForCausalLM", {}, "config.hidden_size**0.5"),
        ("GraniteForCausalLM", {"embedding_multiplier": 12.0}, "config.embedding_multiplier"),
        ("GraniteForCausalLM", {"embedding_multiplier": 1.0}, None),
    ],
)
def test_scale_of_the_embedding(name: str, fields: dict[str, Any], expression: str | None) -> None:
    assert embedding(tiny(name, **fields))["scale"] == expression


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows * 6.0,
        lambda rows: rows + 1,
        lambda rows: nn.functional.normalize(rows, dim=-1),
        lambda rows: rows.roll(1, 1),
    ],
    ids=["another constant", "an offset", "normalised", "shifted"],
)
def test_embeddings_that_are_not_served(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    scale_inputs(monkeypatch, change)
    with pytest.raises(Unexplained) as caught:
        embedding(tiny())
    assert caught.value.part == "embedding"


def head(model: PreTrainedModel) -> dict[str, Any]:
    recording, logits, roles = whole(model)
    return explain_head(model, logits, roles, recording)


@pytest.mark.parametrize(("cap", "key"), [(None, None), (2.0, "final_logit_softcapping")], ids=["without", "with"])
def test_cap_of_the_logits(cap: float | None, key: str | None) -> None:
    found = head(tiny("Gemma3ForCausalLM", final_logit_softcapping=cap, layer_types=["full_attention"] * 3))
    assert (found["softcap_key"], found["bias"]) == (key, False)


def after_head(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> PreTrainedModel:
    original = LlamaForCausalLM.forward

    def planted(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        out.logits = change(out.logits)
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", planted)
    return tiny()


@pytest.mark.parametrize("change", [lambda x: x / 8, lambda x: 30 * torch.tanh(x / 30), lambda x: x + 1e-3])
def test_logits_that_are_not_served(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    with pytest.raises(Unexplained) as caught:
        head(after_head(monkeypatch, change))
    assert caught.value.part == "head"


def test_a_real_scale_of_the_logits() -> None:
    with pytest.raises(Unexplained) as caught:
        head(tiny("GraniteForCausalLM", logits_scaling=8.0))
    assert caught.value.part == "head"


def test_dropouts() -> None:
    model = tiny("Phi3ForCausalLM", pad_token_id=0)
    _, _, roles = whole(model)
    found = explain_dropout(model.model.layers[0], roles, model.config)
    assert found == {
        "dropout_key": "resid_pdrop",
        "attention_dropout": "resid_attn_dropout",
        "mlp_dropout": "resid_mlp_dropout",
    }
    model = tiny()
    _, _, roles = whole(model)
    assert set(explain_dropout(model.model.layers[0], roles, model.config).values()) == {None}


def test_a_dropout_without_a_key() -> None:
    model = tiny("Phi3ForCausalLM", pad_token_id=0)
    _, _, roles = whole(model)
    del model.config.resid_pdrop
    with pytest.raises(Unexplained) as caught:
        explain_dropout(model.model.layers[0], roles, model.config)
    assert caught.value.part == "block"
