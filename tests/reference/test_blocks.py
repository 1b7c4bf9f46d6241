"""The order of a layer, and what stands before the first and after the last: each alternative in a real model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from onboard.reference.blocks import branches, explain_block
from onboard.reference.build import build
from onboard.reference.dropouts import explain_dropouts
from onboard.reference.ends import explain_embedding, explain_head, pads, rounds_scale
from onboard.reference.roles import Unexplained
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel

from .toys import LLAMA, ids, tiny, whole

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


PLACES = ("pre_attention_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm")


def late(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    h = s.input_layernorm(x + attend(x))
    return s.post_attention_layernorm(h + s.mlp(h))


@pytest.mark.parametrize(
    ("order", "reference"),
    [
        (pre, {"pre_attention_norm": A, "pre_mlp_norm": M}),
        (pre_by_the_other_names, {"pre_attention_norm": M, "pre_mlp_norm": A}),
        (post, {"post_attention_norm": A, "post_mlp_norm": M}),
        (around_attention, {"pre_attention_norm": A, "post_attention_norm": M}),
        (late, {"post_attention_norm": A, "post_mlp_norm": M}),
    ],
)
def test_orders(monkeypatch: pytest.MonkeyPatch, order: Layer, reference: dict[str, str]) -> None:
    found = explain(plant(monkeypatch, order))
    assert found["reference_norms"] == reference
    assert {place for place in PLACES if found[place]} == set(reference)
    assert (found["parallel"], found["norm_after_residual"]) == (False, order is late)
    assert found["multiplier"] is None
    assert found["difference"] < 1e-5


@pytest.mark.parametrize(
    ("name", "fields", "norms"),
    [
        ("Olmo2ForCausalLM", {}, (None, M, None, "post_feedforward_layernorm")),
        (
            "Gemma3ForCausalLM",
            {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 6},
            (A, M, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        ),
    ],
)
def test_real_orders(name: str, fields: dict[str, Any], norms: tuple[str | None, ...]) -> None:
    found = explain(tiny(name, **fields))
    assert tuple(found[name] for name in PLACES) == norms


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


def last_is_changed(s: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
    return pre(s, attend, x) * 1.001


@pytest.mark.parametrize("order", [parallel, one_norm_for_both])
def test_branches_side_by_side(monkeypatch: pytest.MonkeyPatch, order: Layer) -> None:
    found = explain(plant(monkeypatch, order))
    assert found["parallel"]
    assert found["pre_attention_norm"] == A
    assert found["pre_mlp_norm"] == (M if order is parallel else None)


def test_multipliers_are_read_from_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaConfig, "residual_multiplier", 0.5, raising=False)
    model = plant(monkeypatch, scaled)
    with pytest.raises(Unexplained):
        explain(model)
    model.config.residual_multiplier = 0.5
    assert explain(model)["multiplier"] == "config.residual_multiplier"
    model.config.residual_multiplier = 0.4
    model.config.scale_depth = 0.5 * model.config.num_hidden_layers**0.5
    assert explain(model)["multiplier"] == "config.scale_depth / config.num_hidden_layers**0.5"


@pytest.mark.parametrize(
    "order",
    [
        shared_norm,
        scaled,
        scaled_mlp,
        no_residual,
        residual_of_the_norm,
        residual_from_the_start,
        last_is_changed,
    ],
)
def test_orders_that_are_not_served(monkeypatch: pytest.MonkeyPatch, order: Layer) -> None:
    with pytest.raises(Unexplained) as caught:
        explain(plant(monkeypatch, order))
    assert caught.value.part in ("block", "norm")


@pytest.mark.parametrize(
    ("name", "fields", "is_parallel", "multiplier"),
    [
        ("CohereForCausalLM", {"hidden_size": 64}, True, None),
        ("PhiForCausalLM", {"hidden_size": 64}, True, None),
        ("GPTNeoXForCausalLM", {"hidden_size": 64}, True, None),
        ("GraniteForCausalLM", {"residual_multiplier": 0.22}, False, "config.residual_multiplier"),
    ],
)
def test_other_real_orders(name: str, fields: dict[str, Any], is_parallel: bool, multiplier: str | None) -> None:
    found = explain(tiny(name, **fields))
    assert (found["parallel"], found["multiplier"]) == (is_parallel, multiplier)


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
    found: dict[str, Any] = explain_embedding(model, ids(), roles, recording)["embedding"]
    return found


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


@pytest.mark.parametrize(
    ("name", "fields", "scale"),
    [
        ("GraniteForCausalLM", {"logits_scaling": 8.0}, "1 / config.logits_scaling"),
        ("CohereForCausalLM", {"hidden_size": 64, "logit_scale": 0.25}, "config.logit_scale"),
        ("LlamaForCausalLM", {}, None),
    ],
)
def test_factors_of_the_logits(name: str, fields: dict[str, Any], scale: str | None) -> None:
    assert head(tiny(name, **fields))["scale"] == scale


def test_a_bias_of_the_head() -> None:
    assert head(tiny("PhiForCausalLM", hidden_size=64))["bias"] is True


GPT2 = {"n_embd": 40, "n_layer": 3, "n_head": 4, "vocab_size": 151, "n_positions": 64}


def gpt(name: str, **fields: Any) -> PreTrainedModel:
    return build(getattr(transformers, name), fields)


@pytest.mark.parametrize(
    ("name", "fields", "kind", "offset"),
    [
        ("GPT2LMHeadModel", GPT2, "learned", 0),
        (
            "OPTForCausalLM",
            {
                "hidden_size": 40,
                "word_embed_proj_dim": 40,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "ffn_dim": 72,
                "vocab_size": 151,
                "max_position_embeddings": 64,
            },
            "learned",
            2,
        ),
        (
            "XGLMForCausalLM",
            {
                "d_model": 40,
                "num_layers": 3,
                "attention_heads": 4,
                "ffn_dim": 72,
                "vocab_size": 151,
                "max_position_embeddings": 64,
            },
            "sinusoidal",
            2,
        ),
    ],
)
def test_absolute_positions(name: str, fields: dict[str, Any], kind: str, offset: int) -> None:
    positions = embedding(gpt(name, **fields))["positions"]
    assert (positions["kind"], positions["offset"]) == (kind, offset)
    assert embedding(tiny())["positions"] is None


def test_a_norm_of_the_embeddings() -> None:
    bloom = gpt("BloomForCausalLM", hidden_size=40, n_layer=3, n_head=4, vocab_size=151)
    assert embedding(bloom)["norm"] is True
    assert embedding(tiny())["norm"] is False


@pytest.mark.parametrize(
    ("name", "fields", "on_inputs", "rounded"),
    [
        ("GemmaForCausalLM", {}, False, True),
        ("GraniteForCausalLM", {"embedding_multiplier": 12.3}, True, False),
        ("LlamaForCausalLM", {}, False, False),
    ],
)
def test_where_and_how_a_scale_acts(name: str, fields: dict[str, Any], on_inputs: bool, rounded: bool) -> None:
    model = tiny(name, **fields)
    _, _, roles = whole(model)
    found = embedding(model)
    assert found["scales_inputs"] is on_inputs
    assert rounds_scale(type(model), {**LLAMA, **fields}, found, roles, ids()) is rounded


def test_a_padding_row() -> None:
    assert pads(transformers.LlamaForCausalLM, LLAMA) is True
    assert pads(transformers.GPT2LMHeadModel, GPT2) is False


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        (
            "GPT2LMHeadModel",
            GPT2,
            {
                "embedding": "embd_pdrop",
                "attention_weights": "attn_pdrop",
                "attention_output": "resid_pdrop",
                "mlp_activation": None,
                "mlp_output": "resid_pdrop",
            },
        ),
        (
            "LlamaForCausalLM",
            LLAMA,
            {
                "embedding": None,
                "attention_weights": "attention_dropout",
                "attention_output": None,
                "mlp_activation": None,
                "mlp_output": None,
            },
        ),
        (
            "OPTForCausalLM",
            {
                "hidden_size": 40,
                "word_embed_proj_dim": 40,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "ffn_dim": 72,
                "vocab_size": 151,
                "max_position_embeddings": 64,
            },
            {
                "embedding": None,
                "attention_weights": "attention_dropout",
                "attention_output": "dropout",
                "mlp_activation": None,
                "mlp_output": "dropout",
            },
        ),
    ],
)
def test_each_dropout_is_at_its_place(name: str, fields: dict[str, Any], expected: dict[str, str | None]) -> None:
    model = gpt(name, **fields)
    _, _, roles = whole(model)
    # The probe's tiny config names every field of the class.
    named = {**fields, **{key: 0.1 for key in expected.values() if key}}
    assert explain_dropouts(type(model), named, roles, explain(model), ids()) == expected
