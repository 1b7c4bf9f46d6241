"""The tables of rotary positions, by formulas of the papers, and what the recorded ones must not be."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onboard.reference.attention.rotations import ROTATIONS, Frequencies, Rotation, frequencies, table_difference
from onboard.reference.roles import Unexplained

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


def angles(rope: dict[str, Any], layer_type: str | None = None) -> Frequencies:
    (found,) = frequencies(config(rope_parameters=rope), HEAD_DIM, SEQUENCE, layer_type)
    return found


def fits(rope: dict[str, Any], found: tuple[torch.Tensor, torch.Tensor], layer_type: str | None = None) -> bool:
    cos, sin = found
    return table_difference(angles(rope, layer_type), (cos[0], sin[0])) is not None


@pytest.mark.parametrize("rope_type", TYPES)
def test_each_type_by_the_formula_of_its_paper(rope_type: str) -> None:
    _, frequency, factor = TYPES[rope_type]
    assert fits(parameters(rope_type), tables(frequency, factor))
    found = angles(parameters(rope_type))
    assert (found.rope_type, found.partial, found.dim, found.theta) == (rope_type, False, (), None)


@pytest.mark.parametrize("rope_type", TYPES)
@pytest.mark.parametrize("other", TYPES)
def test_no_type_passes_for_another(rope_type: str, other: str) -> None:
    _, frequency, factor = TYPES[other]
    assert fits(parameters(rope_type), tables(frequency, factor)) is (rope_type == other)


@pytest.mark.parametrize("rope_type", TYPES)
def test_another_theta(rope_type: str) -> None:
    _, frequency, factor = TYPES[rope_type]
    assert not fits(parameters(rope_type, rope_theta=THETA * 1.01), tables(frequency, factor))


@pytest.mark.parametrize("rope_type", ["yarn", "longrope"])
def test_the_attention_factor_counts(rope_type: str) -> None:
    _, frequency, factor = TYPES[rope_type]
    assert not fits(parameters(rope_type), tables(frequency, 1.0))
    assert fits(parameters(rope_type, attention_factor=1.5), tables(frequency, 1.5))
    assert not fits(parameters(rope_type, attention_factor=1.5), tables(frequency, factor))


def test_only_the_cosines_are_right() -> None:
    cos, sin = tables(default)
    assert not fits(parameters("default"), (cos, -sin))


def test_right_at_the_first_position_only() -> None:
    assert not fits(parameters("default"), tables(lambda pair: default(pair) * (1 + 1e-3)))


@pytest.mark.parametrize("order", ["once", "halves", "pairs"])
def test_a_table_in_any_order(order: str) -> None:
    halves = tables(default)
    once = [part[..., :PAIRS] for part in halves]
    cos, sin = {"once": once, "halves": halves, "pairs": [part.repeat_interleave(2, -1) for part in once]}[order]
    assert fits(parameters("default"), (cos, sin))
    assert not fits(parameters("default"), (cos.flip(-1), sin.flip(-1)))


def test_a_part_of_the_head() -> None:
    def frequency(pair: int) -> float:
        return THETA ** (-2 * pair / (HEAD_DIM // 2))

    part = parameters("default", partial_rotary_factor=0.5)
    assert fits(part, tables(frequency, pairs=PAIRS // 2))
    assert angles(part).partial is True
    assert not fits(part, tables(default, pairs=PAIRS // 2))
    assert not fits(part, tables(default))
    assert not fits(parameters("default"), tables(frequency, pairs=PAIRS // 2))


def test_parameters_by_layer_type() -> None:
    rope = {"full_attention": parameters("linear"), "sliding_attention": parameters("default", rope_theta=10.0)}
    local = tables(lambda pair: 10.0 ** (-2 * pair / HEAD_DIM))
    assert fits(rope, tables(linear), "full_attention")
    assert fits(rope, local, "sliding_attention")
    assert not fits(rope, local, "full_attention")
    assert not fits(rope, tables(linear), "sliding_attention")


def test_an_unknown_type() -> None:
    with pytest.raises(Unexplained) as caught:
        angles({"rope_type": "spiral", "rope_theta": THETA})
    assert caught.value.part == "rope"
    assert "spiral" in caught.value.what


def once(pairs: int = PAIRS) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = tables(default, pairs=pairs)
    return cos[0, :, :pairs], sin[0, :, :pairs]


@pytest.mark.parametrize("rotation", ROTATIONS, ids=str)
def test_rotation_keeps_lengths_and_relative_positions(rotation: Rotation) -> None:
    """The two properties of any rotary embedding: norms stay, and a score depends on the distance only."""
    x = torch.randn(HEAD_DIM).expand(1, SEQUENCE, 1, HEAD_DIM)
    y = rotation(x, once())
    assert torch.allclose(y.norm(dim=-1), x.norm(dim=-1), atol=1e-4)
    assert not torch.allclose(y[:, 1:], x[:, 1:])
    y = y[0, :, 0]
    scores = y @ y.T
    for distance in (1, 5):
        along = scores.diagonal(distance)
        assert torch.allclose(along, along[:1].expand_as(along), atol=1e-3)


def test_the_other_way_round_undoes_it() -> None:
    x = torch.randn(1, SEQUENCE, 2, HEAD_DIM)
    for style in ("half", "interleaved"):
        there, back = Rotation(style, False), Rotation(style, True)  # type: ignore[arg-type]
        assert torch.allclose(back(there(x, once()), once()), x, atol=1e-5)


def test_rotation_of_a_part_leaves_the_rest() -> None:
    x = torch.randn(1, SEQUENCE, 2, HEAD_DIM)
    y = Rotation("half", False)(x, once(PAIRS // 2))
    assert torch.equal(y[..., HEAD_DIM // 2 :], x[..., HEAD_DIM // 2 :])
    assert not torch.allclose(y[:, 1:, :, : HEAD_DIM // 2], x[:, 1:, :, : HEAD_DIM // 2])


@pytest.mark.parametrize("rope_type", [name for name in TYPES if name != "longrope"])
def test_a_real_model(rope_type: str) -> None:
    model = tiny(rope_parameters=parameters(rope_type))
    recording, _, _ = whole(model)
    found = recording["model.layers.0.self_attn"].inputs["position_embeddings"]
    assert fits(parameters(rope_type), found)


def test_a_table_rounded_to_bf16() -> None:
    """What a cast of the frequencies to the checkpoint's dtype does."""

    def rounded(pair: int) -> float:
        return torch.tensor(default(pair)).bfloat16().item()

    assert not fits(parameters("default"), tables(rounded))


def test_frequencies_of_height_and_width_apart() -> None:
    """They alternate where a rotation has sections; Cohere Compass sorts them, and both readings are tried."""
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 2, 1]}
    plain, apart = frequencies(config(rope_parameters=rope), 10, SEQUENCE, None)
    assert not plain.sections_apart
    assert apart.sections_apart
    first = plain.inv_freq.tolist()
    assert apart.inv_freq.tolist() == [first[0], first[2], first[1], first[3], first[4]]
    assert len(frequencies(config(rope_parameters={**rope, "mrope_section": [3, 2, 1]}), 10, SEQUENCE, None)) == 1
    assert len(frequencies(config(rope_parameters={**rope, "mrope_section": None}), 10, SEQUENCE, None)) == 1
