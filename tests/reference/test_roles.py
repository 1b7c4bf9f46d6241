"""Parts are found by what they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from onboard.reference.record import record
from onboard.reference.roles import Unexplained, find_roles, is_norm
from torch import nn
from transformers import PreTrainedModel

from .toys import ids, recorded, tiny, whole

GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def test_a_llama() -> None:
    _, _, roles = whole(tiny())
    assert (roles.embedding, roles.layers, roles.final_norm, roles.head) == (
        "model.embed_tokens",
        "model.layers",
        "model.norm",
        "lm_head",
    )
    assert (roles.attention, roles.mlp, roles.mlp_linears) == ("self_attn", "mlp", GATED)
    assert roles.layer(2) == "model.layers.2"


@pytest.mark.parametrize(
    ("name", "fields", "layers", "final_norm", "attention", "mlp", "linears"),
    [
        (
            "GPTNeoXForCausalLM",
            {},
            "gpt_neox.layers",
            "gpt_neox.final_layer_norm",
            "attention",
            "mlp",
            ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        ),
        (
            "GPT2LMHeadModel",
            {"n_head": 4, "n_layer": 3, "n_embd": 64, "num_attention_heads": 4},
            "transformer.h",
            "transformer.ln_f",
            "attn",
            "mlp",
            ("mlp.c_fc", "mlp.c_proj"),
        ),
        (
            "OPTForCausalLM",
            {"ffn_dim": 72, "word_embed_proj_dim": 64},
            "model.decoder.layers",
            "model.decoder.final_layer_norm",
            "self_attn",
            None,
            ("fc1", "fc2"),
        ),
        (
            "OPTForCausalLM",
            {"ffn_dim": 72, "word_embed_proj_dim": 64, "do_layer_norm_before": False},
            "model.decoder.layers",
            None,
            "self_attn",
            None,
            ("fc1", "fc2"),
        ),
        ("OlmoForCausalLM", {}, "model.layers", "model.norm", "self_attn", "mlp", GATED),
    ],
)
def test_other_names_and_places(
    name: str,
    fields: dict[str, Any],
    layers: str,
    final_norm: str | None,
    attention: str,
    mlp: str | None,
    linears: tuple[str, ...],
) -> None:
    _, _, roles = whole(tiny(name, **{"hidden_size": 64, **fields}))
    assert (roles.layers, roles.final_norm, roles.attention, roles.mlp, roles.mlp_linears) == (
        layers,
        final_norm,
        attention,
        mlp,
        linears,
    )


def test_a_final_norm_is_no_identity() -> None:
    model = tiny()
    model.model.norm = nn.Identity()
    assert whole(model)[2].final_norm is None


def test_a_final_norm_without_a_weight_that_was_called_before() -> None:
    """NanoChat's: the same norm stands behind the embedding."""
    assert whole(tiny("NanoChatForCausalLM"))[2].final_norm == "model.norm"


def test_two_modules_at_the_end() -> None:
    """A second norm of the last hidden states: which one the head takes is no guess."""
    model = tiny()
    model.model.also = nn.RMSNorm(40)
    model.model.norm.register_forward_pre_hook(lambda _, args: model.model.also(args[0]) * 0 + args[0])
    with pytest.raises(Unexplained) as caught:
        whole(model)
    assert caught.value.part == "norm"


def test_other_lists_of_that_length() -> None:
    """Of lists as long as the model is deep the decoder's is the one whose members have projections and run."""
    model = tiny()
    model.model.scales = nn.ModuleList(nn.RMSNorm(40) for _ in range(3))
    model.model.idle = nn.ModuleList(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)) for _ in range(3))
    layers = model.model._modules.pop("layers")
    model.model.layers = layers
    assert [name for name, _ in model.model.named_children()][-1] == "layers", "or the first list would be right"
    assert whole(model)[2].layers == "model.layers"


def test_no_head() -> None:
    model = tiny()
    recording, _ = record(model, input_ids=ids())
    model.get_output_embeddings = lambda: None
    with pytest.raises(Unexplained) as caught:
        find_roles(model, recording)
    assert caught.value.part == "head"


def change_layers(model: PreTrainedModel, change: Callable[[nn.Module], Any]) -> PreTrainedModel:
    for layer in model.model.layers:
        change(layer)
    return model


def test_a_projection_that_never_runs_is_no_part_of_the_mlp() -> None:
    model = change_layers(tiny(), lambda layer: layer.add_module("idle", nn.Linear(40, 40)))
    assert whole(model)[2].mlp_linears == GATED


def test_a_second_module_with_projections() -> None:
    def add(layer: Any) -> None:
        layer.adapter = nn.Linear(40, 40)
        layer.mlp.register_forward_hook(lambda _, __, output: layer.adapter(output))

    with pytest.raises(Unexplained) as caught:
        whole(change_layers(tiny(), add))
    assert caught.value.part == "block"
    assert "2 modules" in caught.value.what


def test_a_second_module_that_mixes_tokens() -> None:
    def add(layer: Any) -> None:
        layer.cross_attn = type(layer.self_attn)(layer.self_attn.config, 0)

    with pytest.raises(Unexplained, match="2 modules that mix tokens"):
        whole(change_layers(tiny(), add))


def test_no_mlp() -> None:
    def without(layer: Any) -> None:
        layer.mlp = nn.Identity()

    with pytest.raises(Unexplained) as caught:
        whole(change_layers(tiny(), without))
    assert caught.value.part == "mlp"


def test_no_list_of_that_depth() -> None:
    model = tiny()
    recording, _ = record(model, input_ids=ids())
    model.config.num_hidden_layers = 7
    with pytest.raises(Unexplained) as caught:
        find_roles(model, recording)
    assert caught.value.part == "layers"


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.RMSNorm(8), True),
        (nn.LayerNorm(8), True),
        (nn.LayerNorm(8, elementwise_affine=False), False),
        (nn.Linear(8, 8), False),
        (nn.Identity(), False),
        (nn.Sequential(nn.RMSNorm(8)), False),
    ],
)
def test_what_a_norm_with_a_weight_is(module: nn.Module, expected: bool) -> None:
    assert is_norm(module) is expected


class Weightless(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: nn.functional.layer_norm(x, x.shape[-1:]), True),
        (lambda x: nn.functional.rms_norm(x, x.shape[-1:]), True),
        (lambda x: x, False),
        (lambda x: nn.functional.normalize(x, dim=-1), False),
        (lambda x: torch.ones_like(x), False),
        (lambda x: nn.functional.rms_norm(x, x.shape[-1:]).roll(1, -1), False),
        (lambda x: 2 * nn.functional.rms_norm(x, x.shape[-1:]), False),
        (torch.tanh, False),
        (nn.functional.silu, False),
        (lambda x: x.softmax(-1), False),
    ],
    ids=["layer norm", "rms norm", "identity", "l2 norm", "ones", "rolled", "doubled", "tanh", "silu", "softmax"],
)
def test_what_a_norm_without_a_weight_is(function: Callable[[torch.Tensor], torch.Tensor], expected: bool) -> None:
    """Only what it does tells it from an activation."""
    module = Weightless(function)
    call = recorded(module, x=3 * torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(1)) + 1)["part"]
    assert is_norm(module, call.x, call.output) is expected
    assert not is_norm(module)
