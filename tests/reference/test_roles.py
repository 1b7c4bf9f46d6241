"""Parts are found by what they do."""

from __future__ import annotations

import pytest
import torch
from onboard.reference.record import record
from onboard.reference.roles import Unexplained, find_roles, is_norm
from torch import nn

from .toys import ids, tiny, whole


def test_a_llama() -> None:
    _, _, roles = whole(tiny())
    assert (roles.embedding, roles.layers, roles.final_norm, roles.head) == (
        "model.embed_tokens",
        "model.layers",
        "model.norm",
        "lm_head",
    )
    assert (roles.attention, roles.mlp) == ("self_attn", "mlp")
    assert roles.mlp_linears == ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert roles.layer(2) == "model.layers.2"


def test_other_names() -> None:
    _, _, roles = whole(tiny("GPTNeoXForCausalLM", hidden_size=64))
    assert (roles.layers, roles.attention, roles.final_norm, roles.head) == (
        "gpt_neox.layers",
        "attention",
        "gpt_neox.final_layer_norm",
        "lm_head",
    )


def test_no_final_norm() -> None:
    model = tiny()
    model.model.norm = nn.Identity()
    assert whole(model)[2].final_norm is None


def test_a_final_norm_without_a_weight_that_was_called_before() -> None:
    """NanoChat's: the same norm stands behind the embedding."""
    model = tiny("NanoChatForCausalLM")
    assert whole(model)[2].final_norm == "model.norm"


def test_an_mlp_of_the_layer_itself() -> None:
    fields = {"word_embed_proj_dim": 40, "ffn_dim": 72}
    _, _, roles = whole(tiny("OPTForCausalLM", **fields))
    assert (roles.mlp, roles.mlp_linears) == (None, ("fc1", "fc2"))


def test_no_head() -> None:
    model = tiny()
    recording, _ = record(model, input_ids=ids())
    model.get_output_embeddings = lambda: None
    with pytest.raises(Unexplained) as caught:
        find_roles(model, recording)
    assert caught.value.part == "head"


def test_two_mlps() -> None:
    model = tiny()
    layer = model.model.layers[0]
    layer.more = nn.Linear(40, 40)
    whole_forward = layer.mlp.forward
    layer.mlp.forward = lambda x: layer.more(whole_forward(x))
    with pytest.raises(Unexplained) as caught:
        whole(model)
    assert caught.value.part == "block"


def test_two_that_mix_tokens() -> None:
    model = tiny()
    model.model.layers[0].second = model.model.layers[1].self_attn
    with pytest.raises(Unexplained) as caught:
        whole(model)
    assert caught.value.part == "block"


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
def test_what_a_norm_is(module: nn.Module, expected: bool) -> None:
    assert is_norm(module) is expected


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: nn.functional.rms_norm(x, x.shape[-1:]), True),
        (lambda x: nn.functional.layer_norm(x, x.shape[-1:]), True),
        (lambda x: x.softmax(-1), False),
        (lambda x: nn.functional.silu(x), False),
        (lambda x: x, False),
    ],
    ids=["rms", "layer", "softmax", "silu", "nothing"],
)
def test_a_norm_without_a_weight_is_known_by_what_it_does(function, expected: bool) -> None:
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)) + 0.5
    assert is_norm(nn.Identity(), x, function(x)) is expected
