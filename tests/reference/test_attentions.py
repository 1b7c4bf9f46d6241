"""Exactly one setting of attention wins; written apart from the formulas that it checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from onboard.reference.attentions import Fit, explain_attention, scale_candidates
from onboard.reference.roles import Unexplained
from torch import nn

from .toys import HEAD_DIM, HIDDEN, SEQUENCE, WINDOW, config, recorded

HEADS, KV_HEADS = 4, 2
Q, KV = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, style: str) -> torch.Tensor:
    """Rotation pair by pair, in complex numbers: ``[S, heads, D]`` by tables ``[S, rotary dims]``."""
    half = cos.shape[-1] // 2
    if style == "half":
        pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
        turned = pairs * torch.complex(cos[:, None, :half], sin[:, None, :half])
        return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), -1)
    pairs = torch.complex(x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2])
    turned = pairs * torch.complex(cos[:, None, ::2], sin[:, None, ::2])
    return torch.cat((torch.stack((turned.real, turned.imag), -1).flatten(-2), x[..., 2 * half :]), -1)


class Toy(nn.Module):
    """Attention with one property each; one sequence, one head at a time."""

    def __init__(self, **has: Any) -> None:
        super().__init__()
        self.has = {
            "names": ("q_proj", "k_proj", "v_proj"),
            "fused": None,
            "norm": None,
            "norm_names": ("q_norm", "k_norm"),
            "style": "half",
            "scale": HEAD_DIM**-0.5,
            "visible": lambda i, j: j <= i,
            "kv_heads": KV_HEADS,
            "extra": None,
        } | has
        kv = self.has["kv_heads"] * HEAD_DIM
        if self.has["fused"]:
            self.wqkv = nn.Linear(HIDDEN, Q + 2 * kv, bias=True)
        else:
            for name, width in zip(self.has["names"], (Q, kv, kv), strict=True):
                setattr(self, name, nn.Linear(HIDDEN, width, bias=True))
        if self.has["norm"]:
            widths = (HEAD_DIM, HEAD_DIM) if self.has["norm"] != "width" else (Q, kv)
            for name, width in zip(self.has["norm_names"], widths, strict=True):
                setattr(self, name, nn.RMSNorm(width, eps=1e-6))
        self.out = nn.Linear(Q, HIDDEN)

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any = None, attention_mask: Any = None) -> Any:
        has, kv_heads, length = self.has, self.has["kv_heads"], hidden_states.shape[1]
        if has["fused"]:
            q, k, v = has["fused"](self.wqkv(hidden_states)[0], kv_heads * HEAD_DIM)
        else:
            q, k, v = (getattr(self, name)(hidden_states)[0] for name in has["names"])
        norms = [getattr(self, name) for name in has["norm_names"]] if has["norm"] else []
        if has["norm"] == "width":
            q, k = norms[0](q), norms[1](k)
        q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)) for part in (q, k, v))
        if has["norm"] == "head":
            q, k = norms[0](q), norms[1](k)
        if has["style"] != "none":
            cos, sin = (part[0] for part in position_embeddings)
            q = q if has["extra"] == "only keys rotate" else turn(q, cos, sin, has["style"])
            k = turn(k, cos, sin, has["style"])
        if has["norm"] == "after rotation":
            q, k = norms[0](q), norms[1](k)
        seen = torch.tensor([[bool(has["visible"](i, j)) for j in range(length)] for i in range(length)])
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // kv_heads)
            scores = q[:, head] @ k[:, group].T * has["scale"]
            if has["extra"] == "softcap":
                scores = 5 * torch.tanh(scores / 5)
            if has["extra"] == "alibi":
                scores = scores + 0.1 * torch.arange(length)
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            if has["extra"] == "sink":
                weights = weights * 0.9
            heads.append(weights @ v[:, group])
        mixed = torch.cat(heads, -1)
        if has["extra"] == "gate":
            mixed = mixed * torch.sigmoid(mixed)
        return self.out(mixed[None]), None


def table(rotary: int, length: int, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Each frequency twice: in both halves (Llama's), or in both places of a pair (Cohere's)."""
    angles = torch.arange(length)[:, None] / 100 ** (torch.arange(0, rotary, 2) / rotary)
    angles = angles.repeat_interleave(2, -1)[None] if layout == "interleaved" else torch.cat((angles, angles), -1)[None]
    return angles.cos(), angles.sin()


def explain(
    toy: Toy,
    *,
    window: int | None = None,
    rotary: int = HEAD_DIM,
    layout: str | None = "half",
    length: int = SEQUENCE,
    **fields: Any,
) -> Fit:
    x = torch.randn(1, length, HIDDEN, generator=torch.Generator().manual_seed(3))
    tables = table(rotary, length, layout) if layout else None
    recording = recorded(toy, hidden_states=x, position_embeddings=tables)
    own = config(num_key_value_heads=toy.has["kv_heads"], **fields)
    return explain_attention(toy, "part", recording, own, HEAD_DIM, window)


def refused(toy: Toy, **options: Any) -> Unexplained:
    with pytest.raises(Unexplained) as caught:
        explain(toy, **options)
    assert caught.value.part == "attention"
    return caught.value


def test_separate_projections() -> None:
    found = explain(Toy())
    names = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "out", "fused_qkv": None}
    assert found.names == names | {"qk_norm": None, "q_norm": None, "k_norm": None}
    assert (found.style, found.scale, found.windowed) == ("half", "self.head_dim**-0.5", False)
    assert found.difference < 1e-5


@pytest.mark.parametrize("names", [("q_proj", "v_proj", "k_proj"), ("v_proj", "q_proj", "k_proj"), ("a", "c", "b")])
@pytest.mark.parametrize("kv_heads", [KV_HEADS, HEADS])
def test_names_may_lie(names: tuple[str, str, str], kv_heads: int) -> None:
    """With as many key as query heads not even the widths help."""
    found = explain(Toy(names=names, kv_heads=kv_heads))
    assert tuple(found.names[part] for part in ("q_proj", "k_proj", "v_proj")) == names


def split(order: tuple[int, int, int]):
    def parts(qkv: torch.Tensor, kv: int) -> list[torch.Tensor]:
        widths = (Q, kv, kv)
        pieces = dict(zip(order, qkv.split([widths[place] for place in order], -1), strict=True))
        return [pieces[0], pieces[1], pieces[2]]

    return parts


def grouped(qkv: torch.Tensor, kv: int) -> list[torch.Tensor]:
    """Falcon's: each group's queries, its key, its value."""
    per_group = qkv.unflatten(-1, (kv // HEAD_DIM, -1, HEAD_DIM))
    return [part.flatten(-3) for part in (per_group[..., :-2, :], per_group[..., -2:-1, :], per_group[..., -1:, :])]


def test_one_projection() -> None:
    found = explain(Toy(fused=split((0, 1, 2))))
    assert found.names["fused_qkv"] == "wqkv"


@pytest.mark.parametrize("fused", [split((0, 2, 1)), split((1, 0, 2)), split((2, 1, 0)), grouped])
def test_one_projection_of_another_order(fused: Any) -> None:
    refused(Toy(fused=fused))


@pytest.mark.parametrize("kind", ["head", "width"])
@pytest.mark.parametrize("names", [("q_norm", "k_norm"), ("k_norm", "q_norm")])
def test_norms_of_q_and_k(kind: str, names: tuple[str, str]) -> None:
    found = explain(Toy(norm=kind, norm_names=names))
    assert (found.names["qk_norm"], found.names["q_norm"], found.names["k_norm"]) == (kind, *names)


def test_norms_after_the_rotation() -> None:
    refused(Toy(norm="after rotation"))


@pytest.mark.parametrize("style", ["half", "interleaved", "none"])
@pytest.mark.parametrize("rotary", [HEAD_DIM, HEAD_DIM // 2])
def test_rotation(style: str, rotary: int) -> None:
    layout = "interleaved" if style == "interleaved" else "half"
    assert explain(Toy(style=style), rotary=rotary, layout=layout).style == style


def test_a_rotation_that_the_table_is_not_made_for() -> None:
    refused(Toy(style="half"), layout="interleaved")
    refused(Toy(style="interleaved"), layout="half")


def test_no_tables() -> None:
    assert explain(Toy(style="none"), layout=None).style == "none"


@pytest.mark.parametrize(
    ("scale", "fields", "expression"),
    [
        (HEAD_DIM**-0.5, {}, "self.head_dim**-0.5"),
        (1.0, {}, "1.0"),
        (24**-0.5, {"query_pre_attn_scalar": 24}, "config.query_pre_attn_scalar**-0.5"),
        (0.3, {"attention_multiplier": 0.3}, "config.attention_multiplier"),
        (0.3, {"attention_multiplier": 0.3, "residual_multiplier": 0.7}, "config.attention_multiplier"),
    ],
)
def test_scale(scale: float, fields: dict[str, float], expression: str) -> None:
    assert explain(Toy(scale=scale), **fields).scale == expression


def test_a_scale_that_no_field_gives() -> None:
    refused(Toy(scale=0.3))


def test_scale_candidates_of_equal_value_are_one() -> None:
    found = scale_candidates(config(attention_multiplier=0.25, query_pre_attn_scalar=16, logit_scale=True), 16)
    assert found == {"self.head_dim**-0.5": 0.25, "1.0": 1.0}


def window_of(tokens: int):
    return lambda i, j: i - tokens < j <= i


def test_a_window_counts_the_token_itself() -> None:
    assert explain(Toy(visible=window_of(WINDOW)), window=WINDOW).windowed is True
    assert explain(Toy(), window=WINDOW).windowed is False


@pytest.mark.parametrize(
    "visible",
    [
        window_of(WINDOW - 1),
        window_of(WINDOW + 1),
        lambda i, j: j <= i and i // WINDOW == j // WINDOW,
        lambda i, j: True,
        lambda i, j: j < i or i == 0,
        lambda i, j: abs(i - j) < WINDOW,
    ],
    ids=["one short", "one long", "chunks", "both ways", "not itself", "a window both ways"],
)
def test_other_masks(visible: Any) -> None:
    refused(Toy(visible=visible), window=WINDOW)


def test_a_window_that_the_config_does_not_give() -> None:
    refused(Toy(visible=window_of(WINDOW)))


def test_a_sequence_too_short_to_show_the_window() -> None:
    assert "tell them apart" in refused(Toy(), window=SEQUENCE).what


def test_one_token_shows_nothing() -> None:
    assert "tell them apart" in refused(Toy(), length=1).what


@pytest.mark.parametrize("extra", ["softcap", "alibi", "sink", "gate", "only keys rotate"])
def test_what_is_not_served(extra: str) -> None:
    refused(Toy(extra=extra))


def test_a_third_norm() -> None:
    class Third(Toy):
        def __init__(self) -> None:
            super().__init__(norm="head")
            self.v_norm = nn.RMSNorm(HIDDEN)

        def forward(self, hidden_states: torch.Tensor, **rest: Any) -> Any:
            return super().forward(hidden_states + 0 * self.v_norm(hidden_states), **rest)

    assert "3 norms" in refused(Third()).what


def test_two_projections_out() -> None:
    class Two(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, hidden_states: torch.Tensor, **rest: Any) -> Any:
            out, weights = super().forward(hidden_states, **rest)
            return self.more(out), weights

    assert "2 out" in refused(Two()).what
