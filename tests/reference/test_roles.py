"""Parts are found by what they do."""

from __future__ import annotations

import pytest
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
    assert (roles.attention, roles.mlp, roles.dropouts) == ("self_attn", "mlp", ())
    assert set(roles.norms) == {"input_layernorm", "post_attention_layernorm"}
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
    with pytest.raises(Unexplained) as caught:
        whole(model)
    assert caught.value.part == "norm"


def test_no_head() -> None:
    model = tiny()
    recording, _ = record(model, input_ids=ids())
    model.get_output_embeddings = lambda: None
    with pytest.raises(Unexplained) as caught:
        find_roles(model, recording)
    assert caught.value.part == "head"


def test_two_mlps() -> None:
    model = tiny()
    model.model.layers[0].more = nn.Linear(40, 40)
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
