"""The tables of rotary positions, by formulas of the papers, and what the recorded ones must not be."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onboard.reference.roles import Unexplained
from onboard.reference.ropes import explain_tables, rotate

from .toys import HEAD_DIM, SEQUENCE, config, tiny, whole

THETA = 500.0
PAIRS = HEAD_DIM // 2
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
LONG = {
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0 + pair / 10 for pair in range(PAIRS)],
    "long_factor": [2.0 + pair for pair in range(PAIRS)],
}


def default(pair: int) -> float:
    return THETA ** (-2 * pair / HEAD_DIM)


def linear(pair: int) -> float:
    return default(pair) / 4.0


def llama3(pair: int) -> float:
    """Long waves are stretched, short ones are not, those between are blended."""
    wave = 2 * math.pi / default(pair)
    if wave > 16 / 1.0:
        return default(pair) / 8.0
    if wave < 16 / 4.0:
        return default(pair)
    smooth = (16 / wave - 1.0) / (4.0 - 1.0)
    return (1 - smooth) * default(pair) / 8.0 + smooth * default(pair)


def yarn(pair: int) -> float:
    """arXiv:2309.00071 with beta 32 and 1."""

    def place(turns: float) -> float:
        return HEAD_DIM * math.log(16 / (turns * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = max(math.floor(place(32)), 0), min(math.ceil(place(1)), HEAD_DIM - 1)
    ramp = min(max((pair - low) / (high - low), 0.0), 1.0)
    return default(pair) * (1 - ramp) + default(pair) / 4.0 * ramp


def longrope(pair: int) -> float:
    """arXiv:2402.13753; the sequence is longer than the original length."""
    return default(pair) / LONG["long_factor"][pair]


TYPES: dict[str, tuple[dict[str, Any], Callable[[int], float], float]] = {
    "default": ({}, default, 1.0),
    "linear": ({"factor": 4.0}, linear, 1.0),
    "llama3": (LLAMA3, llama3, 1.0),
    "yarn": ({"factor": 4.0, "original_max_position_embeddings": 16}, yarn, 0.1 * math.log(4.0) + 1.0),
    "longrope": (LONG, longrope, math.sqrt(1 + math.log(4.0) / math.log(16))),
}


def tables(
    frequency: Callable[[int], float], factor: float = 1.0, pairs: int = PAIRS
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.tensor([[position * frequency(pair) for pair in range(pairs)] for position in range(SEQUENCE)])
    angles = torch.cat((angles, angles), -1)[None]
    return angles.cos() * factor, angles.sin() * factor


def parameters(rope_type: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": THETA, **copy.deepcopy(TYPES[rope_type][0]), **more}


def explain(rope: dict[str, Any], found: Any) -> dict[str, Any]:
    return explain_tables(config(rope_parameters=rope), {"full_attention": found}, HEAD_DIM)


def refused(rope: dict[str, Any], found: Any) -> str:
    with pytest.raises(Unexplained) as caught:
        explain(rope, found)
    assert caught.value.part == "rope"
    return caught.value.what


@pytest.mark.parametrize("rope_type", TYPES)
def test_each_type_by_the_formula_of_its_paper(rope_type: str) -> None:
    _, frequency, factor = TYPES[rope_type]
    found = explain(parameters(rope_type), tables(frequency, factor))
    assert (found["types"], found["per_layer_type"], found["partial"]) == ([rope_type], False, False)


@pytest.mark.parametrize("rope_type", TYPES)
@pytest.mark.parametrize("other", TYPES)
def test_no_type_passes_for_another(rope_type: str, other: str) -> None:
    if rope_type != other:
        _, frequency, factor = TYPES[other]
        refused(parameters(rope_type), tables(frequency, factor))


@pytest.mark.parametrize("rope_type", TYPES)
def test_another_theta(rope_type: str) -> None:
    _, frequency, factor = TYPES[rope_type]
    refused(parameters(rope_type, rope_theta=THETA * 1.01), tables(frequency, factor))


@pytest.mark.parametrize("rope_type", ["yarn", "longrope"])
def test_the_attention_factor_counts(rope_type: str) -> None:
    _, frequency, factor = TYPES[rope_type]
    refused(parameters(rope_type), tables(frequency, 1.0))
    explain(parameters(rope_type, attention_factor=1.5), tables(frequency, 1.5))
    refused(parameters(rope_type, attention_factor=1.5), tables(frequency, factor))


def test_only_the_cosines_are_right() -> None:
    cos, sin = tables(default)
    refused(parameters("default"), (cos, -sin))


def test_right_at_the_first_position_only() -> None:
    refused(parameters("default"), tables(lambda pair: default(pair) * (1 + 1e-3)))


def test_a_part_of_the_head() -> None:
    def frequency(pair: int) -> float:
        return THETA ** (-2 * pair / (HEAD_DIM // 2))

    part = parameters("default", partial_rotary_factor=0.5)
    assert explain(part, tables(frequency, pairs=PAIRS // 2))["partial"] is True
    refused(part, tables(default, pairs=PAIRS // 2))
    refused(part, tables(default))
    refused(parameters("default"), tables(frequency, pairs=PAIRS // 2))


def test_parameters_by_layer_type() -> None:
    rope = {"full_attention": parameters("linear"), "sliding_attention": parameters("default", rope_theta=10.0)}
    local = tables(lambda pair: 10.0 ** (-2 * pair / HEAD_DIM))
    found = {"full_attention": tables(linear), "sliding_attention": local}
    answer = explain_tables(config(rope_parameters=rope), found, HEAD_DIM)
    assert (answer["types"], answer["per_layer_type"]) == (["default", "linear"], True)
    swapped = {"full_attention": local, "sliding_attention": tables(linear)}
    with pytest.raises(Unexplained):
        explain_tables(config(rope_parameters=rope), swapped, HEAD_DIM)


def test_an_unknown_type() -> None:
    what = refused({"rope_type": "spiral", "rope_theta": THETA}, tables(default))
    assert "spiral" in what


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_rotation_keeps_lengths_and_relative_positions(style: str) -> None:
    """The two properties of any rotary embedding: norms stay, and a score depends on the distance only."""
    cos, sin = tables(default)
    if style == "interleaved":
        cos, sin = (part[..., :PAIRS].repeat_interleave(2, -1) for part in (cos, sin))
    x = torch.randn(HEAD_DIM).expand(1, 1, SEQUENCE, HEAD_DIM)
    y = rotate(x, (cos, sin), style)
    assert torch.allclose(y.norm(dim=-1), x.norm(dim=-1), atol=1e-4)
    scores = (y @ y.transpose(-1, -2))[0, 0]
    for distance in (1, 5):
        along = scores.diagonal(distance)
        assert torch.allclose(along, along[:1].expand_as(along), atol=1e-3)
    assert torch.equal(rotate(x, (cos, sin), "none"), x)


def test_rotation_of_a_part_leaves_the_rest() -> None:
    x = torch.randn(1, 2, SEQUENCE, HEAD_DIM)
    y = rotate(x, tables(default, pairs=PAIRS // 2), "half")
    assert torch.equal(y[..., HEAD_DIM // 2 :], x[..., HEAD_DIM // 2 :])
    assert not torch.allclose(y[:, :, 1:, : HEAD_DIM // 2], x[:, :, 1:, : HEAD_DIM // 2])


@pytest.mark.parametrize("rope_type", [name for name in TYPES if name != "longrope"])
def test_a_real_model(rope_type: str) -> None:
    model = tiny(rope_parameters=parameters(rope_type))
    recording, _, _ = whole(model)
    found = recording["model.layers.0.self_attn"].inputs["position_embeddings"]
    assert explain_tables(model.config, {"full_attention": found}, HEAD_DIM)["types"] == [rope_type]


def test_a_table_rounded_to_bf16() -> None:
    """What a cast of the frequencies to the checkpoint's dtype does."""

    def rounded(pair: int) -> float:
        return torch.tensor(default(pair)).bfloat16().item()

    refused(parameters("default"), tables(rounded))
