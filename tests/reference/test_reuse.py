"""What a package needs to know that reuses transformers' modules: measured, with alternatives planted in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onboard.reference.build import build
from onboard.reference.explained import explain_each
from onboard.reference.layout import Layout, aliases, layout, pattern_of, real_names, tabulate
from onboard.reference.mistakes import find_mistakes
from onboard.reference.probe import answer
from onboard.reference.reuse import measure_reuse
from onboard.reference.roles import Unexplained
from onboard.reference.support import left_alone, measure_support
from transformers import (
    ApertusForCausalLM,
    BltConfig,
    BltForCausalLM,
    CohereForCausalLM,
    DiffLlamaForCausalLM,
    Gemma2ForCausalLM,
    HrmTextForCausalLM,
    HunYuanMoEV1ForCausalLM,
    LlamaForCausalLM,
    MambaForCausalLM,
)
from transformers.models.llama import modeling_llama as llama

from .toys import LLAMA, ids

PROBLEM = {"part": "attention", "what": "no candidate reproduces it", "nearest": ["one", "two"]}
MAMBA: dict[str, Any] = {
    "vocab_size": 151,
    "hidden_size": 40,
    "state_size": 6,
    "num_hidden_layers": 3,
    "time_step_rank": 5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

STACK = {
    "vocab_size": 151,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
HRM = {"vocab_size": 151, "hidden_size": 80, "intermediate_size": 72, "num_attention_heads": 8, "head_dim": 16}


def waves(self: Any, x: torch.Tensor) -> Any:
    """An MLP that nobody has thought of."""
    return self.down_proj(self.gate_proj(x).sin() * self.up_proj(x).cos())


def measure(cls: Any, fields: dict[str, Any], problem: Any = PROBLEM) -> dict[str, Any]:
    return measure_reuse(cls, cls.config_class(**fields), fields, problem)


ODD = {**LLAMA, "intermediate_size": 71}


def test_a_plain_decoder() -> None:
    found = measure(LlamaForCausalLM, {**LLAMA, "attention_bias": False, "tie_word_embeddings": False})
    assert json.loads(json.dumps(found)) == found
    assert (found["level"], found["why_whole"], found["postprocess"]) == ("decoder", None, None)
    assert (found["attribute"], found["base_class"], found["head"]) == ("model", "LlamaModel", "lm_head")
    assert found["family"] == [llama.__name__, "LlamaPreTrainedModel"]
    assert found["head_width"] == "config.hidden_size"
    assert (found["layers"], found["tie_support"]) == ("model.layers", "BOTH")
    assert found["variants"] == {"attention_bias": {"attention_bias": True}}
    assert found["supports"]["padding"] is found["supports"]["generation"] is found["supports"]["block_mask"] is True
    biases = {row["native"] for row in found["rows"] if row["only_if"] == "attention_bias"}
    assert biases == {f"model.layers.{{layer}}.self_attn.{name}_proj.bias" for name in "qkvo"}
    assert len(found["real_names"]) == 3 * 9 + 3
    assert found["left_alone"] == []


def test_each_field_decides_on_its_own_tensors() -> None:
    """Of a field that brings biases and one that takes others away, neither is said to decide on the other's."""
    found = measure(LlamaForCausalLM, {**LLAMA, "attention_bias": False, "mlp_bias": True})
    decides = {row["native"]: row["only_if"] for row in found["rows"] if row["native"].endswith(".bias")}
    attention = {f"model.layers.{{layer}}.self_attn.{name}_proj.bias": "attention_bias" for name in "qkvo"}
    mlp = {f"model.layers.{{layer}}.mlp.{name}_proj.bias": "mlp_bias" for name in ("gate", "up", "down")}
    assert decides == attention | mlp


@pytest.mark.parametrize(
    ("cls", "key", "operation"),
    [(CohereForCausalLM, "logit_scale", "multiply"), (Gemma2ForCausalLM, "final_logit_softcapping", "cap")],
)
def test_what_happens_to_the_logits(cls: Any, key: str, operation: str) -> None:
    """Found beside a field that caps the scores of the attention, which has `logit` in its name too."""
    found = measure(cls, {**LLAMA, key: 3.0} | ({"attn_logit_softcapping": 5.0} if operation == "cap" else {}))
    assert found["postprocess"] == {"operation": operation, "key": key}
    assert found["level"] == "decoder"


def test_logits_that_no_formula_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = llama.LlamaForCausalLM.forward

    def squared(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = output.logits * output.logits.abs()
        return output

    monkeypatch.setattr(llama.LlamaForCausalLM, "forward", squared)
    found = measure(LlamaForCausalLM, dict(LLAMA))
    assert found["level"] == "model"
    assert "not the head's product" in found["why_whole"]


def test_a_loss_that_is_not_that_of_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = llama.LlamaForCausalLM.forward

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.loss = None if output.loss is None else 2 * output.loss
        return output

    monkeypatch.setattr(llama.LlamaForCausalLM, "forward", doubled)
    assert "cross entropy" in measure(LlamaForCausalLM, dict(LLAMA))["why_whole"]


def test_a_class_with_a_method_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.LlamaForCausalLM, "prepare_more", lambda self: None, raising=False)
    assert "prepare_more" in measure(LlamaForCausalLM, dict(LLAMA))["why_whole"]


def test_a_state_space_model() -> None:
    found = measure(MambaForCausalLM, MAMBA)
    assert (found["level"], found["layers"], found["embedding"]) == ("model", "backbone.layers", "backbone.embeddings")
    assert found["supports"]["state_argument"] == "cache_params"
    assert isinstance(found["supports"]["block_mask"], str)
    assert {module["path"]: module["origin"] for module in found["modules"]} == {
        "backbone.embeddings": "reused",
        "backbone.layers.*.norm": "reused",
        "backbone.layers.*.mixer": "novel",
        "backbone.norm_f": "reused",
    }


def test_parts_are_explained_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.LlamaMLP, "forward", waves)
    model = build(LlamaForCausalLM, LLAMA)
    found = {module["path"]: module for module in explain_each(model, LLAMA, ids(), "model.layers", PROBLEM)}
    assert found["model.layers.*.mlp"]["origin"] == "novel"
    assert found["model.layers.*.self_attn"]["origin"] == "reused"
    assert "explained as softmax attention" in found["model.layers.*.self_attn"]["why"]
    assert found["model.norm"]["why"].startswith("LlamaRMSNorm: explained as RMS norm")
    assert found["model.rotary_emb"]["origin"] == "reused"


def scaled_output(self: Any, x: torch.Tensor) -> torch.Tensor:
    return 0.5 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def with_residual(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize(("forward", "origin"), [(scaled_output, "novel"), (with_residual, "reused")])
def test_what_an_mlp_does_after_its_last_projection(
    monkeypatch: pytest.MonkeyPatch, forward: Callable[..., torch.Tensor], origin: str
) -> None:
    monkeypatch.setattr(llama.LlamaMLP, "forward", forward)
    model = build(LlamaForCausalLM, LLAMA)
    found = {module["path"]: module for module in explain_each(model, LLAMA, ids(), "model.layers", None)}
    assert found["model.layers.*.mlp"]["origin"] == origin
    assert ("with or without a residual" in found["model.layers.*.mlp"]["why"]) is (origin == "novel")


def test_a_width_that_no_field_gives_makes_no_mlp_novel(monkeypatch: pytest.MonkeyPatch) -> None:
    init = llama.LlamaMLP.__init__
    monkeypatch.setattr(llama.LlamaMLP, "__init__", lambda self, config: init(self, config.__class__(**ODD)))
    model = build(LlamaForCausalLM, LLAMA)
    found = {module["path"]: module for module in explain_each(model, LLAMA, ids(), "model.layers", None)}
    assert "explained as gated MLP" in found["model.layers.*.mlp"]["why"]


def test_something_is_novel_where_there_is_a_problem() -> None:
    model = build(LlamaForCausalLM, LLAMA)
    modules = explain_each(model, LLAMA, ids(), "model.layers", PROBLEM)
    assert [module["path"] for module in modules if module["origin"] == "novel"] == ["model.layers.*"]
    assert "attention: no candidate reproduces it; tried: one, two" in modules[-1]["why"]
    assert not any(module["origin"] == "novel" for module in explain_each(model, LLAMA, ids(), "model.layers", None))


def test_every_stack_of_layers_is_reported() -> None:
    """Also those beside the longest, and layers that are a mixer themselves."""
    config = BltConfig(
        vocab_size=151,
        encoder_hash_byte_group_vocab=20,
        patcher_config=STACK,
        encoder_config={**STACK, "hidden_size_global": 64},
        decoder_config={**STACK, "hidden_size_global": 64},
        global_config={**STACK, "hidden_size": 64},
    )
    fields = {**config.to_dict(), "use_cache": False}
    found = measure(BltForCausalLM, fields, None)
    novel = {module["path"] for module in found["modules"] if module["origin"] == "novel"}
    stacks = ("local_encoder", "global_transformer", "local_decoder", "patcher")
    assert novel >= {f"model.{stack}.layers.*.self_attn" for stack in stacks}
    assert "model.local_decoder.cross_attn_layers.*" in novel
    assert "keeps no state" in found["why_whole"]
    assert found["head_stored"]
    assert not measure(LlamaForCausalLM, dict(LLAMA))["head_stored"]


def test_a_rate_with_which_it_learns() -> None:
    """Layers that run again and again: the usual rate makes no progress in ten steps."""
    usual, other = {**LLAMA, "num_hidden_layers": 2}, {**HRM, "num_hidden_layers": 3}
    assert measure_support(LlamaForCausalLM, usual, {}, ids())["learning_rate"] == 3e-3
    assert measure_support(HrmTextForCausalLM, other, {}, ids())["learning_rate"] != 3e-3


def test_experts_that_can_be_computed_in_several_ways() -> None:
    one = {**LLAMA, "num_experts": 1, "head_dim": 16}
    assert measure_support(HunYuanMoEV1ForCausalLM, one, {}, ids())["experts_implementation"] is True
    assert measure_support(LlamaForCausalLM, dict(LLAMA), {}, ids())["experts_implementation"] is False


def test_parameters_that_transformers_leaves_alone() -> None:
    found = left_alone(ApertusForCausalLM, {**LLAMA, "hidden_act": "xielu"})
    assert {one["ending"]: one["value"] is None for one in found} == {
        "mlp.act_fn.alpha_p": False,
        "mlp.act_fn.alpha_n": False,
    }


# Support


def test_what_a_reference_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(self: Any, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no\ntime")

    monkeypatch.setattr(llama.LlamaForCausalLM, "generate", generate)
    monkeypatch.setattr(llama.LlamaForCausalLM, "supports_gradient_checkpointing", False)
    found = measure_support(LlamaForCausalLM, LLAMA, {}, ids())
    assert found["generation"] == "RuntimeError: no time"
    assert found["gradient_checkpointing"] == "the class does not support it"
    assert found["hidden_states"] is found["inputs_embeds"] is found["logits_to_keep"] is found["bf16"] is True
    assert measure_support(LlamaForCausalLM, {**LLAMA, "attention_dropout": 0.0}, {}, ids())["dropouts"] == [
        "attention_dropout"
    ]


def test_a_mask_of_documents_under_a_window() -> None:
    """A layer with a window takes the mask as it is: the documents' own windows are lost."""
    fields = {**LLAMA, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    assert isinstance(measure_support(Gemma2ForCausalLM, fields, {}, ids())["block_mask"], str)


# Mistakes


def test_every_mistake_shows_and_they_are_of_many_kinds() -> None:
    model = build(DiffLlamaForCausalLM, LLAMA)
    found = find_mistakes(model, ids(), "model.layers", "lm_head")
    changes = [mistake["change"] for mistake in found]
    assert len(changes) == len(set(changes)) >= 10
    assert "exchange_layers(0, 1)" in changes
    assert 'edit("model.embed_tokens.weight", shifted_rows)' in changes
    assert sum("transposed" in change for change in changes) >= 2
    assert any("lambda_q1" in change for change in changes)


def test_a_mistake_that_does_not_show_is_not_listed() -> None:
    model = build(LlamaForCausalLM, LLAMA)
    with torch.no_grad():
        model.model.norm.weight.fill_(1)
        for layer in model.model.layers:
            layer.load_state_dict(model.model.layers[0].state_dict())
    changes = " ".join(mistake["change"] for mistake in find_mistakes(model, ids(), "model.layers", "lm_head"))
    assert "model.norm.weight" not in changes
    assert "exchange_layers" not in changes


# Layout


def test_names_on_disk_are_matched_by_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """However a class renames its tensors on saving."""
    save = llama.LlamaForCausalLM.save_pretrained

    def renamed(self: Any, folder: Any, **_: Any) -> None:
        state = {name.replace("model.", "decoder."): tensor for name, tensor in self.state_dict().items()}
        save(self, folder, state_dict=state, save_original_format=False)

    monkeypatch.setattr(llama.LlamaForCausalLM, "save_pretrained", renamed)
    found = layout(LlamaForCausalLM, {**LLAMA, "tie_word_embeddings": False})
    assert found.joins == []
    assert found.names["decoder.layers.1.mlp.up_proj.weight"] == "model.layers.1.mlp.up_proj.weight"
    table = {row["native"]: row["disk"] for row in tabulate(found, "model.layers", {}, None).rows}
    assert table["model.layers.{layer}.mlp.up_proj.weight"] == "decoder.layers.{layer}.mlp.up_proj.weight"


def test_tensors_in_another_form_are_not_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    save = llama.LlamaForCausalLM.save_pretrained

    def halved(self: Any, folder: Any, **_: Any) -> None:
        state = {name: tensor[: len(tensor) // 2].clone() for name, tensor in self.state_dict().items()}
        save(self, folder, state_dict=state)

    monkeypatch.setattr(llama.LlamaForCausalLM, "save_pretrained", halved)
    with pytest.raises(Unexplained, match="another form"):
        layout(LlamaForCausalLM, LLAMA)


def test_aliases() -> None:
    tied = build(LlamaForCausalLM, {**LLAMA, "tie_word_embeddings": True})
    assert aliases(tied) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert aliases(build(LlamaForCausalLM, {**LLAMA, "tie_word_embeddings": False})) == {}


def test_patterns() -> None:
    assert pattern_of("model.layers.12.mlp.experts.3.weight", "model.layers") == (
        12,
        "model.layers.{layer}.mlp.experts.3.weight",
    )
    assert pattern_of("model.layers.weight", "model.layers") == (None, "model.layers.weight")
    assert pattern_of("model.norm.weight", None) == (None, "model.norm.weight")


def test_lists_that_grow_with_the_model() -> None:
    """The tiny model has fewer of them, so that the row may not name their indices."""
    pairs = {f"a.layers.0.list.{index}.weight": f"m.layers.0.list.{index}.weight" for index in (0, 1)}
    real = {f"m.layers.{layer}.list.{index}.weight": [8, 4] for layer in (0, 1) for index in (0, 1, 2)}
    table = tabulate(Layout(pairs, []), "m.layers", {}, real)
    assert [(row["disk"], row["native"], row["shape"]) for row in table.rows] == [
        ("a.layers.{layer}.list.{index}.weight", "m.layers.{layer}.list.{index}.weight", [8, 4])
    ]
    assert real_names(table, "m.layers", real)[-1] == "a.layers.1.list.2.weight"


def test_a_kind_of_tensor_that_only_the_real_model_has() -> None:
    with pytest.raises(Unexplained, match=r"m\.extra\.weight"):
        tabulate(Layout({"m.norm.weight": "m.norm.weight"}, []), "m.layers", {}, {"m.extra.weight": [3]})


def test_layers_that_are_renamed_in_different_ways() -> None:
    pairs = {"m.layers.0.a.weight": "m.layers.0.w.weight", "m.layers.1.b.weight": "m.layers.1.w.weight"}
    with pytest.raises(Unexplained, match="in one layer"):
        tabulate(Layout(pairs, []), "m.layers", {}, None)


# The probe's answer


def asked(style: str, **keys: Any) -> dict[str, Any]:
    raw = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **LLAMA, **keys}
    request = {"architecture": "LlamaForCausalLM", "model_type": "llama", "config": raw, "style": style}
    found: dict[str, Any] = json.loads(answer(request))
    return found


def test_styles(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "attention" in asked("auto")
    assert asked("reuse")["reuse"]["level"] == "decoder"
    assert not any(module["origin"] == "novel" for module in asked("reuse")["reuse"]["modules"])

    monkeypatch.setattr(llama.LlamaMLP, "forward", waves)
    assert asked("native")["error"] == "unexplained"
    fallen_back = asked("auto")
    assert fallen_back["problem"]["part"] == "mlp"
    novel = [module["path"] for module in fallen_back["reuse"]["modules"] if module["origin"] == "novel"]
    assert novel == ["model.layers.*.mlp"]


def test_the_first_reason_counts_where_neither_works(monkeypatch: pytest.MonkeyPatch) -> None:
    from onboard.reference import probe

    def refuse(*_: Any) -> Any:
        raise Unexplained("layout", "another form")

    monkeypatch.setattr(probe, "measure_reuse", refuse)
    monkeypatch.setattr(llama.LlamaMLP, "forward", waves)
    assert asked("auto")["part"] == "mlp"
