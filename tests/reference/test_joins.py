"""Checkpoints that hold a tensor in parts, or several in one: found by the values, in their true order."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onboard.reference.build import build
from onboard.reference.joins import Join, find_joins, rows_of
from onboard.reference.layout import Layout, layout, real_names, tabulate
from onboard.reference.roles import Unexplained
from torch import nn
from transformers import HrmTextForCausalLM, HunYuanMoEV1ForCausalLM, OlmoHybridForCausalLM

from .toys import LLAMA, ids


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    other=st.lists(st.integers(2, 4), min_size=0, max_size=2),
    leading=st.integers(0, 2),
    place=st.integers(0, 2),
    operation=st.sampled_from(["join", "split"]),
    seed=st.integers(0, 2**16),
)
def test_parts_are_found_in_order(
    lengths: list[int], other: list[int], leading: int, place: int, operation: str, seed: int
) -> None:
    """Beside parts of another tensor, and given in any order."""
    dim = min(place, len(other))
    if len(lengths) == 1 and not leading:
        lengths = [*lengths, 2]
    shapes = [(*other[:dim], length, *other[dim:]) for length in lengths]
    parts = {f"p{at}": noise(*shape, seed=seed + at) for at, shape in enumerate(shapes)}
    whole = torch.cat(list(parts.values()), dim)[(None,) * leading]
    shuffled = [*parts.items(), ("stranger", noise(*shapes[0], seed=seed + 99))]
    random.Random(seed).shuffle(shuffled)
    sides = (dict(shuffled), {"whole": whole})
    (found,) = find_joins(*(sides if operation == "join" else sides[::-1]))
    assert found.operation == operation
    names = found.disk if operation == "join" else found.native
    assert names == tuple(parts)
    assert found.leading == leading
    if len(parts) > 1:
        assert found.dim == dim + leading
    joined = torch.cat([parts[name] for name in names], found.dim - found.leading)
    assert torch.equal(joined[(None,) * found.leading], whole)


@pytest.mark.parametrize("change", ["a value", "a part is missing", "one too many rows", "another dtype"])
def test_what_nearly_makes_up_a_tensor(change: str) -> None:
    parts = {"a": noise(2, 3), "b": noise(4, 3, seed=1)}
    whole = torch.cat(list(parts.values()))
    if change == "a value":
        parts["b"] = parts["b"] + 1e-3
    elif change == "a part is missing":
        del parts["b"]
    elif change == "one too many rows":
        parts["b"] = torch.cat((parts["b"], parts["b"][:1]))
    else:
        parts = {name: part.double() for name, part in parts.items()}
    assert find_joins(parts, {"whole": whole}) == []


SIZES = {name: LLAMA[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HYBRID: dict[str, Any] = {
    **SIZES,
    **TOKENS,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
}
HRM: dict[str, Any] = {**SIZES, **TOKENS, "num_hidden_layers": 2, "head_dim": 16}
ONE_EXPERT: dict[str, Any] = {**SIZES, **TOKENS, "num_hidden_layers": 2, "head_dim": 16, "num_experts": 1}


def test_kernels_of_several_projections() -> None:
    """transformers cuts the joined kernels into equal parts, to which the projections' rows are no guide."""
    found = layout(OlmoHybridForCausalLM, HYBRID)
    model = build(OlmoHybridForCausalLM, HYBRID)
    assert [join.native for join in found.joins] == [(f"model.layers.{i}.linear_attn.conv1d.weight",) for i in (0, 2)]
    for index, join in zip((0, 2), found.joins, strict=True):
        path = f"model.layers.{index}.linear_attn"
        assert join.disk == tuple(f"{path}.{name}_conv1d.weight" for name in "qkv")
        assert (join.operation, join.dim, join.leading) == ("join", 0, 0)
        assert rows_of(model, join, ids()) == tuple(f"{path}.{name}_proj.weight" for name in "qkv")


def test_rows_of_what_a_tensor_is_applied_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is that of the channels, not of the projections' definition."""
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid as module

    model = build(OlmoHybridForCausalLM, HYBRID)
    (join, _) = layout(OlmoHybridForCausalLM, HYBRID).joins
    cat = torch.cat

    def turned(tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        several = isinstance(tensors, (list, tuple)) and len(tensors) == 3
        return cat(tensors[::-1] if several else tensors, *args, **kwargs)

    monkeypatch.setattr(module.torch, "cat", turned)
    path = "model.layers.0.linear_attn"
    assert rows_of(model, join, ids()) == tuple(f"{path}.{name}_proj.weight" for name in "vkq")


def test_no_projection_feeds_a_tensor_alone() -> None:
    """Joined projections are applied to what they all take: their parts are equal."""
    model = build(OlmoHybridForCausalLM, HYBRID)
    weights = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")]
    join = Join(("a", "b"), (weights[0],), "join", 0, 0)
    assert rows_of(model, join, ids()) == ()
    assert rows_of(model, Join(("a",), tuple(weights), "split", 0, 0), ids()) == ()


def test_one_tensor_on_disk_for_several_projections() -> None:
    found = layout(HrmTextForCausalLM, HRM)
    assert {join.operation for join in found.joins} == {"split"}
    joins = {join.disk[0]: join for join in found.joins}
    path = "model.H_module.layers.1"
    assert joins[f"{path}.attn.gqkv_proj.weight"].native == tuple(
        f"{path}.self_attn.{name}_proj.weight" for name in ("gate", "q", "k", "v")
    )
    assert joins[f"{path}.mlp.gate_up_proj.weight"].native == tuple(
        f"{path}.mlp.{name}_proj.weight" for name in ("gate", "up")
    )


def test_an_expert_that_is_one_of_a_list() -> None:
    found = layout(HunYuanMoEV1ForCausalLM, ONE_EXPERT)
    joins = {join.native[0]: join for join in found.joins}
    path = "model.layers.0.mlp.experts"
    assert joins[f"{path}.gate_up_proj"].disk == tuple(f"{path}.0.{name}_proj.weight" for name in ("gate", "up"))
    assert joins[f"{path}.down_proj"].disk == (f"{path}.0.down_proj.weight",)
    assert joins[f"{path}.gate_up_proj"].leading == joins[f"{path}.down_proj"].leading == 1


def test_several_experts_are_not_explained() -> None:
    with pytest.raises(Unexplained, match="another form"):
        layout(HunYuanMoEV1ForCausalLM, {**ONE_EXPERT, "num_experts": 3})


def test_rows_for_every_layer() -> None:
    joins = [
        Join((f"m.l.{i}.a", f"m.l.{i}.b"), (f"m.l.{i}.w",), "join", 0, 0, (f"m.l.{i}.p", f"m.l.{i}.q")) for i in (0, 1)
    ]
    real = {f"m.l.{i}.w": [8, 4] for i in range(3)} | {"m.norm": [4]}
    table = tabulate(Layout({"m.norm": "m.norm"}, joins), "m.l", {}, real)
    assert [row["native"] for row in table.rows] == ["m.norm"]
    (row,) = table.joins
    assert row == {
        "disk": ["m.l.{layer}.a", "m.l.{layer}.b"],
        "native": ["m.l.{layer}.w"],
        "rows_of": ["m.l.{layer}.p", "m.l.{layer}.q"],
        "operation": "join",
        "dim": 0,
        "leading": 0,
        "shape": [8, 4],
        "only_if": "",
    }
    assert real_names(table, "m.l", real)[-3:] == ["m.l.2.a", "m.l.2.b", "m.norm"]


def test_rows_for_several_lists_of_layers() -> None:
    """The list that is not the decoder's is longer in the real model, too; a tensor of several counts once."""
    joins = [Join((f"{s}.l.0.d",), (f"{s}.l.0.a", f"{s}.l.0.b"), "split", 0, 0) for s in ("m", "n")]
    real = {f"{s}.l.{i}.{name}": [4, 4] for s in ("m", "n") for i in (0, 1) for name in ("a", "b")}
    table = tabulate(Layout({}, joins), "m.l", {}, real)
    assert [row["disk"] for row in table.joins] == [["m.l.{layer}.d"], ["n.l.{index}.d"]]
    assert real_names(table, "m.l", real) == ["m.l.0.d", "m.l.1.d", "n.l.0.d", "n.l.1.d"]


def test_layers_that_are_joined_in_different_orders() -> None:
    joins = [Join(("m.l.0.a", "m.l.0.b"), ("m.l.0.w",), "join", 0, 0)]
    joins.append(Join(("m.l.1.b", "m.l.1.a"), ("m.l.1.w",), "join", 0, 0))
    with pytest.raises(Unexplained, match="in one layer"):
        tabulate(Layout({}, joins), "m.l", {}, None)


def test_shared_tensors_are_no_part() -> None:
    """A tied head lies in memory twice; what is left of it is no tensor that something could be made of."""
    found = layout(OlmoHybridForCausalLM, {**HYBRID, "tie_word_embeddings": True})
    names = {*found.names.values(), *(name for join in found.joins for name in join.native)}
    assert "lm_head.weight" not in names
    assert "model.embed_tokens.weight" in names
    assert isinstance(build(OlmoHybridForCausalLM, HYBRID).get_output_embeddings(), nn.Linear)
