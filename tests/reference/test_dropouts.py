"""Each place of a dropout, planted in a Llama; a dropout that is at another place, too, is at none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onboard.reference.blocks import explain_blocks
from onboard.reference.build import build
from onboard.reference.dropouts import Caught, explain_dropouts
from onboard.reference.record import record
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama as llama

from .toys import LLAMA, ids, tiny, whole

NOWHERE = dict.fromkeys(("embedding", "attention_weights", "attention_output", "mlp_activation", "mlp_output"))


def explain(name: str = "LlamaForCausalLM", **fields: Any) -> dict[str, str | None]:
    fields = {**LLAMA, **fields}
    model = tiny(name, **fields)
    recording, _, roles = whole(model)
    block = explain_blocks(model, roles, recording)["block"]
    return explain_dropouts(type(model), fields, roles, {"block": block}, ids())


def drop(module: Any, x: torch.Tensor, key: str = "my_dropout") -> torch.Tensor:
    return nn.functional.dropout(x, getattr(module.config, key), module.training)


def after(monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], change: Callable[..., Any]) -> None:
    """Put a dropout after what a kind of module gives."""
    forward = kind.forward

    @functools.wraps(forward)
    def planted(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        return (change(self, out[0]), *out[1:]) if isinstance(out, tuple) else change(self, out)

    monkeypatch.setattr(kind, "forward", planted)


def on_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = llama.LlamaModel.forward

    def planted(self: Any, input_ids: torch.Tensor, inputs_embeds: None = None, **kwargs: Any) -> Any:
        return forward(self, inputs_embeds=drop(self, self.embed_tokens(input_ids)), **kwargs)

    monkeypatch.setattr(llama.LlamaModel, "forward", planted)


def on_attention_output(monkeypatch: pytest.MonkeyPatch) -> None:
    after(monkeypatch, llama.LlamaAttention, drop)


def on_mlp_output(monkeypatch: pytest.MonkeyPatch) -> None:
    after(monkeypatch, llama.LlamaMLP, drop)


def mlp(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    """An MLP of which the activations are changed."""

    def planted(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(change(self, self.act_fn(self.gate_proj(x)) * self.up_proj(x)))

    monkeypatch.setattr(llama.LlamaMLP, "forward", planted)


def on_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp(monkeypatch, drop)


def on_activations_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp(monkeypatch, lambda self, x: drop(self, drop(self, x)))


def on_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(drop(self, self.act_fn(self.gate_proj(x))) * self.up_proj(x))

    monkeypatch.setattr(llama.LlamaMLP, "forward", planted)


def on_the_mlps_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a probability of one the activations are zero, and the branch is, too."""
    forward = llama.LlamaMLP.forward
    monkeypatch.setattr(llama.LlamaMLP, "forward", lambda self, x: forward(self, drop(self, x)))


def on_the_layers_output(monkeypatch: pytest.MonkeyPatch) -> None:
    after(monkeypatch, llama.LlamaDecoderLayer, lambda self, x: drop(self.mlp, x))


@pytest.mark.parametrize(
    ("plants", "places"),
    [
        ((on_embeddings,), {"embedding"}),
        ((on_attention_output,), {"attention_output"}),
        ((on_mlp_output,), {"mlp_output"}),
        ((on_activations,), {"mlp_activation"}),
        ((on_embeddings, on_attention_output, on_mlp_output), {"embedding", "attention_output", "mlp_output"}),
        ((on_activations, on_mlp_output), {"mlp_activation", "mlp_output"}),
        ((on_the_mlps_input,), set()),
        ((on_the_gate,), set()),
        ((on_activations_twice,), set()),
        ((on_the_layers_output,), set()),
        ((on_the_mlps_input, on_embeddings), set()),
    ],
    ids=lambda value: "+".join(one.__name__ for one in value) if isinstance(value, tuple) else None,
)
def test_places(monkeypatch: pytest.MonkeyPatch, plants: tuple[Callable[..., None], ...], places: set[str]) -> None:
    for plant in plants:
        plant(monkeypatch)
    expected = {**NOWHERE, "attention_weights": "attention_dropout", **dict.fromkeys(places, "my_dropout")}
    assert explain(my_dropout=0.0, attention_dropout=0.0) == expected


def test_a_dropout_in_one_layer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(self: Any, x: torch.Tensor) -> torch.Tensor:
        return drop(self, x) if self.layer_idx == 0 else x

    after(monkeypatch, llama.LlamaAttention, first)
    assert explain(my_dropout=0.0) == NOWHERE


def test_two_fields_at_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula has one: the other field stays unplaced, and is served at zero alone."""
    after(monkeypatch, llama.LlamaMLP, lambda self, x: drop(self, drop(self, x), "other_dropout"))
    assert explain(my_dropout=0.0, other_dropout=0.0) == {**NOWHERE, "mlp_output": "my_dropout"}


def test_a_field_that_nothing_reads() -> None:
    assert explain(my_dropout=0.0) == NOWHERE


def test_a_probability_that_the_class_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are placed all the same."""
    on_mlp_output(monkeypatch)
    init = llama.LlamaModel.__init__

    def refuses(self: Any, config: Any) -> None:
        if config.odd_dropout:
            raise ValueError("not implemented")
        init(self, config)

    monkeypatch.setattr(llama.LlamaModel, "__init__", refuses)
    assert explain(my_dropout=0.0, odd_dropout=0.0) == {**NOWHERE, "mlp_output": "my_dropout"}


@pytest.mark.parametrize(
    ("name", "fields", "places"),
    [
        (
            "Phi3ForCausalLM",
            {"pad_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
            {"attention_output": "resid_pdrop", "mlp_output": "resid_pdrop"},
        ),
        (
            "PhiForCausalLM",
            {"hidden_size": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
            {"embedding": "embd_pdrop", "attention_output": "resid_pdrop", "mlp_output": "resid_pdrop"},
        ),
        (
            "GPTNeoXForCausalLM",
            {"hidden_size": 64, "hidden_dropout": 0.0, "attention_dropout": 0.0},
            {
                "embedding": "hidden_dropout",
                "attention_output": "hidden_dropout",
                "mlp_output": "hidden_dropout",
                "attention_weights": "attention_dropout",
            },
        ),
        (
            "OPTForCausalLM",
            {
                "hidden_size": 64,
                "ffn_dim": 72,
                "word_embed_proj_dim": 64,
                "do_layer_norm_before": False,
                "dropout": 0.1,
                "layerdrop": 0.0,
            },
            {"attention_output": "dropout", "mlp_output": "dropout"},
        ),
        (
            "BioGptForCausalLM",
            {
                "hidden_size": 64,
                "hidden_dropout_prob": 0.1,
                "attention_probs_dropout_prob": 0.1,
                "activation_dropout": 0.0,
            },
            {
                "embedding": "hidden_dropout_prob",
                "attention_weights": "attention_probs_dropout_prob",
                "attention_output": "hidden_dropout_prob",
                "mlp_activation": "activation_dropout",
                "mlp_output": "hidden_dropout_prob",
            },
        ),
        ("StableLmForCausalLM", {"hidden_size": 64, "hidden_dropout": 0.0}, {"mlp_output": "hidden_dropout"}),
    ],
)
def test_real_places(name: str, fields: dict[str, Any], places: dict[str, str]) -> None:
    assert explain(name, **fields) == {**NOWHERE, **places}


def caught(model: PreTrainedModel) -> tuple[list[float], torch.Tensor]:
    with Caught() as calls:
        _, logits = record(model, input_ids=ids())
    return [probability for probability, _ in calls.calls], logits


def test_nothing_is_dropped_while_dropouts_are_caught() -> None:
    """So that everything else is what it is without dropout."""
    fields = {**LLAMA, "attention_dropout": 0.5}
    plain = build(llama.LlamaForCausalLM, fields)
    probabilities, logits = caught(plain.train())
    assert probabilities == [0.5] * 3
    assert torch.equal(logits, record(plain.eval(), input_ids=ids())[1])
    assert caught(plain.eval())[0] == []
    assert caught(build(llama.LlamaForCausalLM, {**LLAMA, "attention_dropout": 0.0}).train())[0] == []


def test_dropout_of_a_fused_attention_is_caught() -> None:
    model = build(llama.LlamaForCausalLM, {**LLAMA, "attention_dropout": 0.5}, attention="sdpa")
    plain = record(model, input_ids=ids())[1]
    probabilities, logits = caught(model.train())
    assert probabilities == [0.5] * 3
    assert torch.equal(logits, plain)


@pytest.mark.parametrize("function", [nn.functional.dropout, torch.dropout])
def test_every_way_to_call_a_dropout(function: Callable[..., torch.Tensor]) -> None:
    x = torch.randn(3, 4)
    with Caught() as calls:
        assert torch.equal(function(x, 0.5, True), x)
        assert torch.equal(function(x, 0.5, False), x)
        assert torch.equal(nn.Dropout(0.25)(x), x)
    assert [probability for probability, _ in calls.calls] == [0.5, 0.25]
