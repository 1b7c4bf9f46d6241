"""Exactly one setting of attention wins; its nearest neighbours are refused or are another setting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from onboard.reference.attention.fit import Fit
from onboard.reference.roles import Unexplained
from torch import nn

from .toy_attention import HEADS, KV_HEADS, Norm, Q, Toy, angles, explain
from .toys import HEAD_DIM, HIDDEN, SEQUENCE, WINDOW

KV = KV_HEADS * HEAD_DIM


def one(toy: nn.Module, **options: Any) -> Fit:
    (fit,) = explain(toy, **options)
    return fit


def rotating(**has: Any) -> Toy:
    return Toy(angles=angles(), **has)


def refused(*toys: nn.Module, **options: Any) -> Unexplained:
    with pytest.raises(Unexplained) as caught:
        explain(*toys, **options)
    return caught.value


def parts(fit: Fit) -> dict[str, tuple[str, ...]]:
    return dict(fit.setting.layout.parts)


def test_the_plain_one() -> None:
    fit = one(rotating())
    setting = fit.setting
    assert parts(fit) == {"q_proj": ("q",), "k_proj": ("k",), "v_proj": ("v",)}
    assert setting.layout.heads == type(setting.layout.heads)(HEADS, KV_HEADS, HEAD_DIM)
    assert (setting.scale[0].text, setting.soft_cap, setting.alibi, setting.window) == (
        "self.head_dim**-0.5",
        (),
        None,
        None,
    )
    assert setting.rotation is not None
    assert (setting.rotation.style, setting.rotation.reversed) == ("half", False)
    assert fit.difference < 1e-5


# Projections.


@pytest.mark.parametrize("names", [("q_proj", "v_proj", "k_proj"), ("v_proj", "q_proj", "k_proj"), ("a", "c", "b")])
@pytest.mark.parametrize("kv_heads", [1, KV_HEADS, HEADS])
def test_names_may_lie(names: tuple[str, str, str], kv_heads: int) -> None:
    """With as many key as query heads not even the widths help."""
    found = parts(one(rotating(names=names, kv_heads=kv_heads), num_key_value_heads=kv_heads))
    assert found == dict(zip(names, (("q",), ("k",), ("v",)), strict=True))


@pytest.mark.parametrize("biases", [(True, False, True), (False, False, True), (False, True, False)])
def test_a_bias_of_each_part(biases: tuple[bool, bool, bool]) -> None:
    fit = one(rotating(biases=biases))
    assert [fit.evidence.biases[name] for name in ("q_proj", "k_proj", "v_proj")] == list(biases)
    assert fit.evidence.biases[""] is True


def fused(order: str, groups: int) -> Callable[[torch.Tensor, int], list[torch.Tensor]]:
    """Each of so many groups holds its share of each part, head by head."""

    def split(qkv: torch.Tensor, kv: int) -> list[torch.Tensor]:
        heads = {"q": HEADS, "k": kv // HEAD_DIM, "v": kv // HEAD_DIM}
        found: dict[str, list[torch.Tensor]] = {"q": [], "k": [], "v": []}
        places = iter(qkv.split(HEAD_DIM, -1))
        for _ in range(groups):
            for part in order:
                found[part] += [next(places) for _ in range(heads[part] // groups)]
        return [torch.cat(found[part], -1) for part in "qkv"]

    return split


@pytest.mark.parametrize("order", ["qkv", "qvk", "kqv", "vqk", "kvq", "vkq"])
@pytest.mark.parametrize(("kv_heads", "groups"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_one_projection(order: str, kv_heads: int, groups: int) -> None:
    fit = one(rotating(fused=fused(order, groups), kv_heads=kv_heads), num_key_value_heads=kv_heads)
    assert parts(fit) == {"wqkv": tuple(order)}
    assert fit.setting.layout.groups == groups


def test_one_projection_that_is_stored_transposed() -> None:
    fit = one(rotating(fused=fused("qkv", 1), transposed=True))
    assert parts(fit) == {"wqkv": ("q", "k", "v")}
    assert fit.evidence.transposed_out is True


def test_dimensions_that_alternate() -> None:
    """A projection whose every third dimension is a query's is no known layout."""
    alternating = lambda qkv, kv: [qkv[:, part::3] for part in range(3)]  # noqa: E731
    assert "first position" in refused(rotating(fused=alternating, kv_heads=HEADS), num_key_value_heads=HEADS).what


class FusedPair(Toy):
    """One projection of queries, one of keys and values."""

    def __init__(self, order: str) -> None:
        super().__init__(angles=angles())
        del self.k_proj, self.v_proj
        self.kv, self.order = nn.Linear(HIDDEN, 2 * KV), order
        self.has["names"] = ("q_proj", "k", "v")

    def k(self, x: torch.Tensor) -> torch.Tensor:
        return self.kv(x).chunk(2, -1)[self.order.index("k")]

    def v(self, x: torch.Tensor) -> torch.Tensor:
        return self.kv(x).chunk(2, -1)[self.order.index("v")]


@pytest.mark.parametrize("order", ["kv", "vk"])
def test_keys_and_values_in_one_projection(order: str) -> None:
    fit = one(FusedPair(order))
    assert parts(fit) == {"q_proj": ("q",), "kv": tuple(order)}
    assert fit.setting.layout.groups == 1


def test_two_projections_out() -> None:
    class Two(Toy):
        def __init__(self) -> None:
            super().__init__(angles=angles())
            self.more = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, hidden_states: torch.Tensor, **rest: Any) -> Any:
            out, weights = super().forward(hidden_states, **rest)
            return self.more(out), weights

    assert "2 out" in refused(Two()).what


def test_the_residual_may_be_in_the_output() -> None:
    assert parts(one(rotating(extra="residual"))) == parts(one(rotating()))
    assert "is not that of" in refused(rotating(extra="scaled output")).what


def test_a_parameter_without_a_part() -> None:
    class More(Toy):
        def __init__(self) -> None:
            super().__init__(angles=angles())
            self.a, self.b = nn.Parameter(torch.ones(HEADS)), nn.Parameter(torch.ones(HEADS))

    assert "a, b" in refused(More()).what


def test_grouped_heads_taken_in_turn() -> None:
    assert "first position" in refused(rotating(extra="heads in turn")).what


# Norms.

FORMULAS = {
    "rms": {},
    "layer": {"centred": True},
    "offset": {"offset": 1.0},
}


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize(
    ("norm", "shapes", "over"),
    [
        ("width", ((Q,), (KV,)), "width"),
        ("head", ((HEAD_DIM,), (HEAD_DIM,)), "head"),
        ("head", ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM)), "heads"),
        ("after rotation", ((HEAD_DIM,), (HEAD_DIM,)), "head"),
        ("after rotation", ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM)), "heads"),
    ],
)
@pytest.mark.parametrize("names", [("q_norm", "k_norm"), ("k_norm", "q_norm")])
def test_norms_of_q_and_k(norm: str, shapes: Any, over: str, names: tuple[str, str], formula: str) -> None:
    norms = [Norm(*shape, **FORMULAS[formula]) for shape in shapes]
    found = one(rotating(norm=norm, norms=norms, norm_names=names)).setting.qk_norm
    assert found is not None
    assert (found.over, found.after_rope) == (over, norm == "after rotation")
    assert tuple(call.name for call in found.calls) == names
    assert found.q.formula()["kind"] == ("layer" if formula == "layer" else "rms")
    assert (found.q.formula()["offset"], found.q.formula()["weight"]) == (FORMULAS[formula].get("offset", 0.0), True)


@pytest.mark.parametrize("norm", ["width", "head", "after rotation"])
def test_norms_without_weights(norm: str) -> None:
    found = one(rotating(norm=norm, norms=[Norm(), Norm()])).setting.qk_norm
    assert found is not None
    assert (found.over, found.after_rope) == ("width" if norm == "width" else "head", norm == "after rotation")
    assert found.q.formula()["weight"] is False


def test_a_norm_for_each_head() -> None:
    class PerHead(nn.Module):
        def __init__(self, heads: int) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(HEAD_DIM, bias=False) for _ in range(heads))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([norm(part) for norm, part in zip(self.norms, x.split(1, 1), strict=True)], 1)

    found = one(rotating(norm="each head", norms=[PerHead(HEADS), PerHead(KV_HEADS)])).setting.qk_norm
    assert found is not None
    assert [call.name for call in found.calls] == ["q_norm.norms.{head}", "k_norm.norms.{head}"]
    assert found.over == "heads"
    assert found.q.weight is not None
    assert found.q.weight.shape == (HEADS, HEAD_DIM)


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-8])
def test_epsilon(eps: float) -> None:
    """``rms_norm_eps`` of the config is 1e-6."""
    found = one(rotating(norm="head", norms=[Norm(HEAD_DIM, eps=eps), Norm(HEAD_DIM, eps=eps)])).setting.qk_norm
    assert found is not None
    assert found.q.formula()["eps"] == {1e-5: "1e-05", 1e-6: "config.rms_norm_eps", 1e-8: "1e-08"}[eps]


def test_another_function_in_the_place_of_a_norm() -> None:
    class Cubed(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) ** 3

    assert "norm" in refused(rotating(norm="head", norms=[Cubed(HEAD_DIM), Cubed(HEAD_DIM)])).what


def test_a_third_norm() -> None:
    class Third(Toy):
        def __init__(self) -> None:
            super().__init__(norm="head", norms=[Norm(HEAD_DIM), Norm(HEAD_DIM)], angles=angles())
            self.v_norm = nn.RMSNorm(HIDDEN)

        def forward(self, hidden_states: torch.Tensor, **rest: Any) -> Any:
            return super().forward(hidden_states + 0 * self.v_norm(hidden_states), **rest)

    assert "3 norms" in refused(Third()).what


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_norm_of_the_joined_outputs(formula: str) -> None:
    fit = one(rotating(output_norm=Norm(Q, **FORMULAS[formula])))
    assert fit.evidence.output_norm is not None
    assert fit.evidence.output_norm.name == "sub_norm"
    assert fit.setting.qk_norm is None


# Rotation.


@pytest.mark.parametrize("hand", [True, False])
@pytest.mark.parametrize("style", ["half", "interleaved", None])
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("rotary", [HEAD_DIM, HEAD_DIM // 2])
def test_rotation(style: str | None, backwards: bool, rotary: int, hand: bool) -> None:
    turns = angles(rotary // 2)
    rotation = one(Toy(style=style, angles=-turns if backwards else turns), rotary=rotary, hand=hand).setting.rotation
    if style is None:
        assert rotation is None
    else:
        assert rotation is not None
        assert (rotation.style, rotation.reversed) == (style, backwards)


def test_rotary_dimensions_that_only_a_field_says() -> None:
    turns = angles(3, theta=10000.0)
    fit = one(Toy(style="interleaved", angles=turns), hand=False, rope_parameters=None, rotary_dim=6)
    assert fit.setting.angles is not None
    assert (fit.setting.angles.dim[0].text, fit.setting.angles.theta) == ("config.rotary_dim", 10000.0)
    refused(Toy(style="interleaved", angles=turns), hand=False, rope_parameters=None, rotary_dim=8)
    refused(Toy(style="interleaved", angles=angles(3, theta=9000.0)), hand=False, rope_parameters=None, rotary_dim=6)


def test_another_base_than_the_config_says() -> None:
    assert refused(Toy(angles=angles(theta=101.0)), hand=False).part == "attention"
    wrong = {"rope_type": "default", "rope_theta": 101.0}
    assert refused(rotating(), rope_parameters=wrong).part == "rope"


def test_some_layers_rotate() -> None:
    fits = explain(rotating(), Toy(layer=1), rotating(layer=2))
    assert [fit.setting.rotation is not None for fit in fits] == [True, False, True]


def test_a_norm_where_nothing_rotates_stands_before() -> None:
    norms = [Norm(HEAD_DIM), Norm(HEAD_DIM)]
    found = one(Toy(norm="head", norms=norms)).setting.qk_norm
    assert found is not None
    assert found.after_rope is False


def test_a_layer_that_does_not_rotate_says_nothing_of_the_order() -> None:
    def norms() -> list[Norm]:
        return [Norm(HEAD_DIM), Norm(HEAD_DIM)]

    fits = explain(Toy(norm="head", norms=norms()), rotating(layer=1, norm="after rotation", norms=norms()))
    assert [fit.setting.qk_norm and fit.setting.qk_norm.after_rope for fit in fits] == [True, True]


def test_queries_that_grow_with_their_position() -> None:
    rope = {
        "rope_type": "default",
        "rope_theta": 100.0,
        "llama_4_scaling_beta": 0.4,
        "original_max_position_embeddings": 8,
    }
    found = one(rotating(extra="growing queries"), rope_parameters=rope).setting.query_scale
    assert found is not None
    assert found.described() == {
        "beta": 'config.rope_parameters["llama_4_scaling_beta"]',
        "length": 'config.rope_parameters["original_max_position_embeddings"]',
    }
    assert one(rotating(), rope_parameters=rope).setting.query_scale is None
    refused(rotating(extra="growing queries"), rope_parameters={**rope, "llama_4_scaling_beta": 0.5})


# Scores.


@pytest.mark.parametrize(
    ("scale", "fields", "expression"),
    [
        (HEAD_DIM**-0.5, {}, "self.head_dim**-0.5"),
        (1.0, {}, "1.0"),
        (1 / HEAD_DIM, {}, "1.0 / self.head_dim"),
        (24**-0.5, {"query_pre_attn_scalar": 24}, "config.query_pre_attn_scalar**-0.5"),
        (0.3, {"attention_multiplier": 0.3}, "config.attention_multiplier"),
        (0.3, {"attention_multiplier": 0.3, "residual_multiplier": 0.7}, "config.attention_multiplier"),
    ],
)
def test_scale(scale: float, fields: dict[str, float], expression: str) -> None:
    assert one(rotating(scale=scale), **fields).setting.scale[0].text == expression


def test_a_scale_that_no_field_gives() -> None:
    what = refused(rotating(scale=0.3))
    assert what.part == "attention"
    assert what.nearest


def test_a_scale_that_falls_from_layer_to_layer() -> None:
    def falling(layer: int) -> float:
        return HEAD_DIM**-0.5 / (layer + 1)

    fits = explain(*(rotating(layer=layer, scale=falling) for layer in range(3)))
    assert {fit.setting.scale[0].text for fit in fits} == {"self.head_dim**-0.5 / (layer_idx + 1)"}
    refused(rotating(), rotating(layer=1, scale=falling), rotating(layer=2))


def test_a_cap() -> None:
    found = one(rotating(extra="softcap"), final_logit_softcapping=7.0, attn_logit_softcapping=5.0).setting
    assert found.soft_cap[0].text == "config.attn_logit_softcapping"
    refused(rotating(extra="softcap"), attn_logit_softcapping=6.0)
    assert one(rotating(), attn_logit_softcapping=5.0).setting.soft_cap == ()


def test_sinks() -> None:
    fit = one(rotating(sinks=True))
    assert fit.evidence.sinks is not None
    assert fit.evidence.sinks[0] == "sinks"
    assert one(rotating()).evidence.sinks is None


def slope(head: int) -> float:
    """Four heads: 1/4, 1/16, 1/64, 1/256 (arXiv:2108.12409, section 3)."""
    return 4.0 ** -(head + 1)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_linear_bias(scaled: bool) -> None:
    factor = HEAD_DIM**-0.5 if scaled else 1.0
    alibi = one(Toy(bias=lambda head, i, j: -factor * slope(head) * (i - j))).setting.alibi
    assert alibi is not None
    assert (alibi.bias_max[0].text, alibi.scaled) == ("8", scaled)


def test_a_linear_bias_of_positions_instead_of_distances() -> None:
    """The same but for a constant in each row, which the softmax does not see."""
    assert one(Toy(bias=lambda head, i, j: slope(head) * j)).setting.alibi is not None


def test_a_linear_bias_with_a_largest_exponent_of_its_own() -> None:
    toy = Toy(bias=lambda head, i, j: -(2.0 ** -(head + 1)) * (i - j))
    alibi = one(toy, alibi_bias_max=4).setting.alibi
    assert alibi is not None
    assert alibi.bias_max[0].text == "config.alibi_bias_max"
    refused(toy)


@pytest.mark.parametrize(
    "bias",
    [
        lambda head, i, j: 0.1 * j,
        lambda head, i, j: -2 * slope(head) * (i - j),
        lambda head, i, j: slope(head) * (i - j),
        lambda head, i, j: -slope(HEADS - 1 - head) * (i - j),
        lambda head, i, j: -slope(head) * (i - j) ** 2,
    ],
    ids=["no slope by head", "twice", "towards the far", "heads reversed", "squared"],
)
def test_other_biases(bias: Any) -> None:
    refused(Toy(bias=bias))


# Masks.


def window_of(tokens: int) -> Callable[[int, int], bool]:
    return lambda i, j: i - tokens < j <= i


def test_a_window_counts_the_token_itself() -> None:
    window = one(rotating(visible=window_of(WINDOW)), sliding_window=WINDOW).setting.window
    assert window is not None
    assert (window.key, window.tokens) == ("sliding_window", WINDOW)
    assert one(rotating(), sliding_window=WINDOW).setting.window is None


def test_a_window_of_another_name() -> None:
    window = one(rotating(visible=window_of(5)), sliding_window=WINDOW, local_window_size=5).setting.window
    assert window is not None
    assert window.key == "local_window_size"


def test_windows_of_some_layers() -> None:
    local = {"visible": window_of(WINDOW)}
    fits = explain(rotating(**local), rotating(layer=1), rotating(layer=2, **local), sliding_window=WINDOW)
    assert [fit.setting.window is not None for fit in fits] == [True, False, True]


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
    refused(rotating(visible=visible), sliding_window=WINDOW)


def test_a_window_that_the_config_does_not_give() -> None:
    refused(rotating(visible=window_of(WINDOW)))


def test_a_sequence_too_short_to_show_the_window() -> None:
    assert "tell them apart" in refused(rotating(), sliding_window=SEQUENCE).what


def test_one_token_shows_nothing() -> None:
    assert "tell them apart" in refused(Toy(), length=1).what


@pytest.mark.parametrize("extra", ["softcap", "gate", "only keys rotate", "growing queries"])
def test_what_no_field_says(extra: str) -> None:
    refused(rotating(extra=extra))


def test_layers_that_differ() -> None:
    assert "layers before" in refused(rotating(), rotating(layer=1, scale=1.0)).what
    assert (
        "layers before"
        in refused(rotating(), rotating(layer=1, norm="head", norms=[Norm(HEAD_DIM), Norm(HEAD_DIM)])).what
    )


# Gates on the outputs.


@pytest.mark.parametrize("over", ["element", "head"])
@pytest.mark.parametrize("activation", ["sigmoid", "softplus"])
def test_an_output_gate(over: str, activation: str) -> None:
    act = {"sigmoid": torch.sigmoid, "softplus": nn.functional.softplus}[activation]
    fit = one(rotating(gate=(Q if over == "element" else HEADS, act)))
    gate = fit.setting.layout.gate
    assert gate is not None
    assert (gate.over, gate.activation) == (over, activation)
    assert parts(fit)["side"] == ("g",)
    assert one(rotating()).setting.layout.gate is None


@pytest.mark.parametrize("act", [torch.tanh, nn.functional.silu, lambda x: 2 * torch.sigmoid(x)])
def test_a_gate_of_another_kind(act: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert "first position" in refused(rotating(gate=(Q, act))).what


def test_a_gate_that_takes_the_output() -> None:
    """Not what the attention takes: no projection gives it."""
    assert "first position" in refused(rotating(extra="gate")).what
