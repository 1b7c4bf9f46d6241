"""Latent attention, each of its orders on a toy, and those of transformers at tiny size."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from onboard.reference.attention.explain import explain_attentions
from onboard.reference.attention.latent import explain_latents, find_latents
from onboard.reference.build import randomise
from onboard.reference.record import record
from onboard.reference.roles import Unexplained
from torch import nn

from .test_attention_architectures import tiny, where
from .toy_attention import ROLES, Decoder, Norm, Toy, angles, turn
from .toys import HIDDEN, SEQUENCE, config, ids

HEADS, NOPE, ROPE, VALUE, RANK, Q_RANK = 4, 12, 8, 20, 28, 36
FIELDS = {
    "head_dim": None,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
    "kv_lora_rank": RANK,
    "q_lora_rank": Q_RANK,
}


class Latent(nn.Module):
    """Latent attention, one head at a time."""

    def __init__(self, **has: Any) -> None:
        super().__init__()
        self.has = {
            "rotary_first": False,
            "value_first": False,
            "latent_first": True,
            "style": "interleaved",
            "q_latent": True,
            "scale": (NOPE + ROPE) ** -0.5,
            "extra": None,
        } | has
        if self.has["q_latent"]:
            self.a, self.a_norm, self.b = (
                nn.Linear(HIDDEN, Q_RANK),
                Norm(Q_RANK),
                nn.Linear(Q_RANK, HEADS * (NOPE + ROPE)),
            )
        else:
            self.a = nn.Linear(HIDDEN, HEADS * (NOPE + ROPE))
        self.c, self.c_norm = nn.Linear(HIDDEN, RANK + ROPE), Norm(RANK)
        self.d, self.e = nn.Linear(RANK, HEADS * (NOPE + VALUE)), nn.Linear(HEADS * VALUE, HIDDEN)

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any = None, attention_mask: Any = None) -> Any:
        has, length = self.has, hidden_states.shape[1]
        q = self.b(self.a_norm(self.a(hidden_states))) if has["q_latent"] else self.a(hidden_states)
        wide = self.c(hidden_states)
        latent, k_rope = (
            (wide[..., :RANK], wide[..., RANK:]) if has["latent_first"] else (wide[..., ROPE:], wide[..., :ROPE])
        )
        up = self.d(self.c_norm(latent))[0].unflatten(-1, (HEADS, -1))
        q, k_rope = q[0].unflatten(-1, (HEADS, -1)), k_rope[0][:, None]
        turns = angles(ROPE // 2, length)
        k_rope = turn(k_rope, turns, has["style"])
        rotary, rest = (q[..., :ROPE], q[..., ROPE:]) if has["rotary_first"] else (q[..., NOPE:], q[..., :NOPE])
        rotary = turn(rotary, turns, has["style"]) if has["extra"] != "only keys rotate" else rotary
        v, k = (up[..., :VALUE], up[..., VALUE:]) if has["value_first"] else (up[..., NOPE:], up[..., :NOPE])
        out = []
        for head in range(HEADS):
            shared = k_rope[:, 0] * (1 + head * (has["extra"] == "a rotated key for each head"))
            scores = (rest[:, head] @ k[:, head].T + rotary[:, head] @ shared.T) * has["scale"]
            seen = torch.ones(length, length).tril().bool()
            out.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[:, head])
        return self.e(torch.cat(out, -1)[None]), None


def explain(*toys: nn.Module, **fields: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 100.0}
    own = config(**{"rope_parameters": rope, "num_hidden_layers": len(toys)} | FIELDS | fields)
    model = Decoder(list(toys), own).eval()
    randomise(model)
    x = torch.randn(1, SEQUENCE, HIDDEN, generator=torch.Generator().manual_seed(3))
    recording, _ = record(model, x=x, table=None)
    return explain_latents(model, ROLES, recording)


def test_the_plain_one() -> None:
    found = explain(Latent(), Latent())
    expected = {
        "num_heads": "config.num_attention_heads",
        "qk_nope_head_dim": "config.qk_nope_head_dim",
        "qk_rope_head_dim": "config.qk_rope_head_dim",
        "v_head_dim": "config.v_head_dim",
        "kv_lora_rank": "config.kv_lora_rank",
        "q_lora_rank": "config.q_lora_rank",
        "names": {"q": "a", "q_up": "b", "kv": "c", "kv_up": "d", "o": "e"},
        "rotary": "interleaved",
        "reversed": False,
        "mscale": False,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["kv_norm"]["eps"] == "config.rms_norm_eps"
    assert found["biases"] == dict.fromkeys("abcde", True)
    assert found["difference"] < 1e-5


@pytest.mark.parametrize("rotary_first", [False, True])
@pytest.mark.parametrize("value_first", [False, True])
@pytest.mark.parametrize("latent_first", [False, True])
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("q_latent", [False, True])
def test_orders(rotary_first: bool, value_first: bool, latent_first: bool, style: str, q_latent: bool) -> None:
    order = {"rotary_first": rotary_first, "value_first": value_first, "latent_first": latent_first}
    found = explain(Latent(**order, style=style, q_latent=q_latent))
    assert {name: found[name] for name in order} == order
    assert found["rotary"] == style
    assert (found["q_lora_rank"] is None) is not q_latent


@pytest.mark.parametrize("extra", ["only keys rotate", "a rotated key for each head"])
def test_neighbours(extra: str) -> None:
    with pytest.raises(Unexplained):
        explain(Latent(extra=extra))


@pytest.mark.parametrize("scale", [NOPE**-0.5, 1.0])
def test_other_scales(scale: float) -> None:
    with pytest.raises(Unexplained):
        explain(Latent(scale=scale))


def test_layers_that_differ() -> None:
    with pytest.raises(Unexplained, match="layers differ"):
        explain(Latent(), Latent(style="half"))


def test_the_scale_that_grows_with_yarn() -> None:
    rope = {
        "rope_type": "default",
        "rope_theta": 100.0,
        "factor": 4.0,
        "mscale_all_dim": 1.0,
    }
    factor = (0.1 * math.log(4.0) + 1) ** 2
    assert explain(Latent(scale=factor * (NOPE + ROPE) ** -0.5), rope_parameters=rope)["mscale"] is True
    assert explain(Latent(), rope_parameters=rope)["mscale"] is False


def test_plain_attention_has_no_latents() -> None:
    model = Decoder([Toy(angles=angles())], config(num_hidden_layers=1)).eval()
    recording, _ = record(model, x=torch.randn(1, SEQUENCE, HIDDEN), table=None)
    assert find_latents(model.layers[0].mixer, "layers.0.mixer", recording) is None


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
}


@pytest.mark.parametrize(
    ("architecture", "given", "expected"),
    [
        ("YoutuForCausalLM", {}, {"rotary": "interleaved", "mscale": False}),
        ("YoutuForCausalLM", {"rope_interleave": False}, {"rotary": "half"}),
        ("YoutuForCausalLM", {"q_lora_rank": None}, {"q_lora_rank": None}),
        ("MiniCPM3ForCausalLM", {}, {"rotary": "half", "q_lora_rank": "config.q_lora_rank"}),
        ("DeepseekV3ForCausalLM", {}, {"rotary": "interleaved", "rope_type": "default"}),
        ("DeepseekV3ForCausalLM", {"rope_parameters": YARN}, {"rope_type": "yarn", "mscale": True}),
    ],
)
def test_architectures(architecture: str, given: dict[str, Any], expected: dict[str, Any]) -> None:
    fields, model = tiny(getattr(transformers, architecture), given)
    recording, _ = record(model, input_ids=ids())
    roles = where(model)
    found = explain_latents(model, roles, recording)
    assert {name: found[name] for name in expected} == expected
    assert (found["rotary_first"], found["value_first"], found["latent_first"]) == (False, False, True)
    attention = explain_attentions(type(model), fields, model, roles, recording, ids())
    natives = {name.rpartition(".")[2] for row in attention["modules"] for name in row["native"]}
    queries = {"q_a_proj", "q_a_layernorm", "q_b_proj"} if found["q_lora_rank"] else {"q_proj"}
    assert natives == queries | {"kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
    # These classes build the latents' norms with an epsilon of their own.
    assert attention["attention"]["latent"]["kv_norm"]["eps"] == "1e-06"
    assert attention["attention"]["latent"]["mscale"] is True
