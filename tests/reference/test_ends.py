"""What stands before the first layer and after the last: each alternative planted in a Llama or in a real model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from onboard.reference.build import randomise
from onboard.reference.ends import explain_embedding, explain_head, pads, rounds_scale, sinusoids
from onboard.reference.record import record
from onboard.reference.roles import Unexplained
from torch import nn
from transformers import GPT2LMHeadModel, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaModel

from .toys import HIDDEN, LLAMA, SEQUENCE, ids, tiny, whole

Change = Callable[[torch.Tensor], torch.Tensor]


def explain(model: PreTrainedModel) -> dict[str, Any]:
    recording, _, roles = whole(model)
    return explain_embedding(model, ids(), roles, recording)


def embedding(model: PreTrainedModel) -> dict[str, Any]:
    found: dict[str, Any] = explain(model)["embedding"]
    return found


def change_inputs(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    original = LlamaModel.forward

    def planted(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return original(self, **{**kwargs, "inputs_embeds": change(self, self.embed_tokens(input_ids))})

    monkeypatch.setattr(LlamaModel, "forward", planted)


@pytest.mark.parametrize(
    ("name", "fields", "expression", "inputs"),
    [
        ("LlamaForCausalLM", {}, None, False),
        ("GemmaForCausalLM", {}, "config.hidden_size**0.5", False),
        ("GraniteForCausalLM", {"embedding_multiplier": 12.0}, "config.embedding_multiplier", True),
        ("GraniteForCausalLM", {"embedding_multiplier": 1.0}, None, False),
    ],
)
def test_scale(name: str, fields: dict[str, Any], expression: str | None, inputs: bool) -> None:
    found = embedding(tiny(name, **fields))
    assert (found["scale"], found["scales_inputs"], found["positions"], found["norm"]) == (
        expression,
        inputs,
        None,
        False,
    )
    assert found["difference"] < 1e-5


@pytest.mark.parametrize("name", ["scale_emb", "embedding_multiplier", "embed_scale"])
def test_a_scale_that_a_field_gives(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    change_inputs(monkeypatch, lambda _, rows: 12 * rows)
    found = embedding(tiny(**{name: 12, "residual_multiplier": 12.0}))
    assert (found["scale"], found["scales_inputs"]) == (f"config.{name}", True)


@pytest.mark.parametrize(("flag", "expression"), [(True, "config.hidden_size**0.5"), (False, None)])
def test_a_scale_behind_a_flag(flag: bool, expression: str | None) -> None:
    found = embedding(tiny("XGLMForCausalLM", d_model=64, attention_heads=4, num_layers=3, scale_embedding=flag))
    assert found["scale"] == expression


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows * 6.0,
        lambda rows: rows + 1,
        lambda rows: rows.cumsum(1),
        lambda rows: nn.functional.normalize(rows, dim=-1),
        lambda rows: rows.roll(1, 1),
    ],
    ids=["another constant", "an offset", "sums", "unit length", "shifted"],
)
def test_embeddings_that_are_not_served(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    change_inputs(monkeypatch, lambda _, rows: change(rows))
    with pytest.raises(Unexplained) as caught:
        embedding(tiny())
    assert caught.value.part == "embedding"
    assert len(caught.value.nearest) >= 1


@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("scale", [1.0, HIDDEN**0.5])
def test_learned_positions(monkeypatch: pytest.MonkeyPatch, offset: int, scale: float) -> None:
    table = nn.Embedding(LLAMA["max_position_embeddings"] + offset, HIDDEN)
    nn.init.normal_(table.weight)
    positions = torch.arange(SEQUENCE) + offset
    change_inputs(monkeypatch, lambda self, rows: rows * scale + self.wpe(positions))
    model = tiny()
    model.model.wpe = table
    found = explain(model)
    assert found["embedding"]["positions"] == {
        "kind": "learned",
        "offset": offset,
        "size": "config.max_position_embeddings",
        "reaches_base": False,
    }
    assert found["embedding"]["scale"] == ("config.hidden_size**0.5" if scale != 1 else None)
    assert ("model.wpe", ["model.embed_positions"]) in [(row["reference"], row["native"]) for row in found["modules"]]


@pytest.mark.parametrize(
    "change",
    [
        lambda rows, table: rows + table[: rows.shape[1]].flip(0),
        lambda rows, table: rows + 2 * table[: rows.shape[1]],
        lambda rows, table: rows + table[5 : 5 + rows.shape[1]],
        lambda rows, table: rows * (1 + table[: rows.shape[1]]),
    ],
    ids=["reversed", "doubled", "from the sixth", "factors"],
)
def test_learned_positions_that_are_not_served(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    change_inputs(monkeypatch, lambda self, rows: change(rows, self.wpe.weight))
    model = tiny()
    model.model.wpe = nn.Embedding(LLAMA["max_position_embeddings"], HIDDEN)
    with pytest.raises(Unexplained) as caught:
        explain(model)
    assert caught.value.part == "embedding"


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("reaches_base", [False, True])
def test_sines(monkeypatch: pytest.MonkeyPatch, offset: int, reaches_base: bool) -> None:
    table = sinusoids(torch.arange(SEQUENCE) + offset, HIDDEN, reaches_base)
    change_inputs(monkeypatch, lambda _, rows: rows + table)
    found = embedding(tiny())["positions"]
    assert (found["kind"], found["offset"], found["reaches_base"]) == ("sinusoidal", offset, reaches_base)


def test_the_sines_of_the_paper() -> None:
    """Section 3.5 of arXiv:1706.03762, one value at a time; there the sines and cosines alternate."""
    table = sinusoids(torch.arange(5), 8, reaches_base=False)
    for position in range(5):
        for i in range(4):
            angle = torch.tensor(position / 10000 ** (2 * i / 8))
            assert torch.allclose(table[position, i], angle.sin(), atol=1e-6)
            assert torch.allclose(table[position, 4 + i], angle.cos(), atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: torch.stack(table.chunk(2, dim=-1), dim=-1).flatten(-2),
        lambda table: torch.cat(table.chunk(2, dim=-1)[::-1], dim=-1),
        lambda table: 0.5 * table,
    ],
    ids=["alternating", "cosines first", "halved"],
)
def test_sines_that_are_not_served(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    table = change(sinusoids(torch.arange(SEQUENCE), HIDDEN, False))
    change_inputs(monkeypatch, lambda _, rows: rows + table)
    with pytest.raises(Unexplained):
        embedding(tiny())


def test_a_norm_after_the_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    change_inputs(monkeypatch, lambda self, rows: self.first_norm(rows * HIDDEN**0.5))
    model = tiny()
    model.model.first_norm = nn.RMSNorm(HIDDEN, eps=1e-6)
    randomise(model)
    found = explain(model)
    assert (found["embedding"]["norm"], found["embedding"]["scale"]) == (True, "config.hidden_size**0.5")
    assert found["modules"][1]["reference"] == "model.first_norm"
    assert found["modules"][1]["native"] == ["model.embed_norm"]


def test_a_norm_that_is_the_final_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One weight for two places has no native counterpart."""
    change_inputs(monkeypatch, lambda self, rows: self.norm(rows))
    with pytest.raises(Unexplained, match="both"):
        explain(tiny())


def test_a_projection_of_the_embedding() -> None:
    model = tiny("OPTForCausalLM", hidden_size=64, ffn_dim=72, word_embed_proj_dim=24)
    with pytest.raises(Unexplained, match="rows"):
        explain(model)
    assert embedding(tiny("OPTForCausalLM", hidden_size=64, ffn_dim=72, word_embed_proj_dim=64))["scale"] is None


@pytest.mark.parametrize(("name", "rounds"), [("LlamaForCausalLM", False), ("GemmaForCausalLM", True)])
def test_rounding_of_the_scale(name: str, rounds: bool) -> None:
    """Gemma keeps its scale in the dtype of the embeddings."""
    model = tiny(name)
    _, _, roles = whole(model)
    found = embedding(model)
    assert rounds_scale(type(model), LLAMA, found, roles, ids()) is rounds


def test_a_scale_that_is_not_rounded() -> None:
    fields = {**LLAMA, "embedding_multiplier": 12.3}
    model = tiny("GraniteForCausalLM", **fields)
    _, _, roles = whole(model)
    assert rounds_scale(type(model), fields, embedding(model), roles, ids()) is False


def test_a_row_of_padding() -> None:
    assert pads(LlamaForCausalLM, LLAMA) is True
    assert pads(GPT2LMHeadModel, {"n_embd": 40, "n_layer": 3, "n_head": 4, "vocab_size": 151}) is False


def head(model: PreTrainedModel) -> dict[str, Any]:
    recording, logits, roles = whole(model)
    return explain_head(model, logits, roles, recording)


def after_head(monkeypatch: pytest.MonkeyPatch, change: Change, **fields: Any) -> PreTrainedModel:
    original = LlamaForCausalLM.forward

    def planted(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        out.logits = change(out.logits)
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", planted)
    return tiny(**fields)


@pytest.mark.parametrize(
    ("change", "fields", "scale", "cap"),
    [
        (lambda x: x, {}, None, None),
        (lambda x: x / 8, {"logits_scaling": 8.0}, "1 / config.logits_scaling", None),
        (lambda x: 0.0625 * x, {"logit_scale": 0.0625}, "config.logit_scale", None),
        (lambda x: 3.5 * x, {"lm_head_multiplier": 3.5}, "config.lm_head_multiplier", None),
        (lambda x: 2 * torch.tanh(x / 2), {"final_logit_softcapping": 2.0}, None, "final_logit_softcapping"),
        (lambda x: 2 * torch.tanh(x / 2), {"logits_soft_cap": 2.0}, None, "logits_soft_cap"),
        (
            lambda x: 2 * torch.tanh(x / 16),
            {"logits_scaling": 8.0, "final_logit_softcapping": 2.0},
            "1 / config.logits_scaling",
            "final_logit_softcapping",
        ),
    ],
)
def test_what_is_made_of_the_logits(
    monkeypatch: pytest.MonkeyPatch, change: Change, fields: dict[str, float], scale: str | None, cap: str | None
) -> None:
    found = head(after_head(monkeypatch, change, **fields))
    assert (found["scale"], found["softcap_key"], found["bias"]) == (scale, cap, False)
    assert found["difference"] < 1e-4


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (lambda x: x / 8, {}),
        (lambda x: x / 8, {"attention_multiplier": 0.125}),
        (lambda x: 30 * torch.tanh(x / 30), {}),
        (lambda x: x.clamp(-2, 2), {"final_logit_softcapping": 2.0}),
        (lambda x: 2 * torch.tanh(x / 2) / 8, {"logits_scaling": 8.0, "final_logit_softcapping": 2.0}),
        (lambda x: x + 1e-3, {}),
        (lambda x: x.log_softmax(-1), {}),
    ],
    ids=[
        "no field",
        "a field of another part",
        "no cap",
        "a clamp",
        "scaled after the cap",
        "an offset",
        "log_softmax",
    ],
)
def test_logits_that_are_not_served(monkeypatch: pytest.MonkeyPatch, change: Change, fields: dict[str, float]) -> None:
    with pytest.raises(Unexplained) as caught:
        head(after_head(monkeypatch, change, **fields))
    assert caught.value.part == "head"
    assert len(caught.value.nearest) >= 1


def before_head(model: PreTrainedModel, change: Change) -> PreTrainedModel:
    model.lm_head.register_forward_pre_hook(lambda _, args: change(args[0]))
    return model


def recorded_head(model: PreTrainedModel, change: Change) -> dict[str, Any]:
    """What the head takes is recorded after hooks of its own."""
    recording, logits, roles = whole(before_head(model, change))
    return explain_head(model, logits, roles, recording)


def test_a_base_width_before_the_head() -> None:
    """muP: hidden states are divided by how many times wider the model is than its base."""
    model = tiny(dim_model_base=8)
    found = recorded_head(model, lambda x: x / (HIDDEN / 8))
    assert (found["scale"], found["softcap_key"]) == ("config.dim_model_base / config.hidden_size", None)


def test_a_factor_before_a_head_with_a_bias() -> None:
    """It does not act on the bias, as one on the logits would."""
    model = tiny(dim_model_base=8)
    model.lm_head.bias = nn.Parameter(torch.randn(LLAMA["vocab_size"]))
    with pytest.raises(Unexplained, match="does not take"):
        recorded_head(model, lambda x: x / (HIDDEN / 8))


def test_hidden_states_that_are_changed() -> None:
    with pytest.raises(Unexplained, match="does not take"):
        recorded_head(tiny(), lambda x: x.roll(1, -1))


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("PhiForCausalLM", {}, (True, None, None)),
        ("CohereForCausalLM", {"logit_scale": 0.25}, (False, "config.logit_scale", None)),
        ("GraniteForCausalLM", {"logits_scaling": 8.0}, (False, "1 / config.logits_scaling", None)),
        ("Gemma2ForCausalLM", {"final_logit_softcapping": 2.0}, (False, None, "final_logit_softcapping")),
        ("OPTForCausalLM", {"ffn_dim": 72, "word_embed_proj_dim": 64}, (False, None, None)),
        (
            "OPTForCausalLM",
            {"ffn_dim": 72, "word_embed_proj_dim": 64, "do_layer_norm_before": False},
            (False, None, None),
        ),
    ],
)
def test_real_heads(name: str, fields: dict[str, Any], expected: tuple[Any, ...]) -> None:
    """The last one has no final norm."""
    found = head(tiny(name, hidden_size=64, **fields))
    assert (found["bias"], found["scale"], found["softcap_key"]) == expected


def test_the_last_call_of_a_norm_counts() -> None:
    """A norm without a weight may stand in several places as one module."""
    model = tiny("NanoChatForCausalLM", hidden_size=64, final_logit_softcapping=2.0)
    recording, _ = record(model, input_ids=ids())
    assert recording["model.norm"] is not recording.last("model.norm"), "or the test would prove nothing"
    assert head(model)["softcap_key"] == "final_logit_softcapping"
