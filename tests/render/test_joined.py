"""The adapter of reused modules whose checkpoint has several tensors where the model has one, or the reverse."""

from __future__ import annotations

import os
import types
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onboard.render.environment import environment
from onboard.render.style import format_sources, lint
from onboard.spec.reused import JoinedKey, RenamedKey

LAYER = "m.layers.{layer}."


def key(
    disk: Sequence[str], native: Sequence[str], dim: int, leading: int = 0, rows_of: Sequence[str] = ()
) -> JoinedKey:
    sides = [tuple(LAYER + name for name in names) for names in (disk, native, rows_of)]
    operation: Any = "split" if len(native) > 1 else "join"
    return JoinedKey(sides[0], sides[1], operation, dim, leading, sides[2], "", "")


ROWS = (
    RenamedKey("norm", "m.norm", "", ""),
    *(RenamedKey(LAYER + name, LAYER + name, "", "") for name in ("q.weight", "k.weight", "v.weight")),
)
KERNELS = key(["q_conv", "k_conv", "v_conv"], ["conv.weight"], 0, 0, ["q.weight", "k.weight", "v.weight"])
EXPERT = key(["experts.0.gate", "experts.0.up"], ["experts.gate_up"], 1, 1)
ALONE = key(["experts.0.down"], ["experts.down"], 1, 1)
FUSED = key(["gqk.weight"], ["gate.weight", "query.weight", "key.weight"], 0)
ALL = (KERNELS, EXPERT, ALONE, FUSED)


def text(joins: tuple[JoinedKey, ...]) -> str:
    spec = SimpleNamespace(rows=ROWS, joins=joins, ignored=(), config_class="LlamaConfig")
    context = {"spec": spec, "prefix": "Toy", "header": "", "has_conditional_rows": False, "has_indices": False}
    made = (
        environment()
        .get_template("reused/package/state_dict_adapter.py.j2")
        .render(context | {"joined_indices": False})
    )
    return format_sources({"file.py": made}, ("nemo_automodel", "toy"))["file.py"]


@cache
def module(joins: tuple[JoinedKey, ...] = ALL) -> Any:
    made = types.ModuleType("toy_adapter")
    exec(compile(text(joins), "state_dict_adapter.py", "exec"), made.__dict__)
    return made


def state(
    q: int, k: int, v: int, width: int, inner: int, rows: Sequence[int], seed: int = 0
) -> dict[str, torch.Tensor]:
    """A model's tensors."""
    shapes: dict[str, tuple[int, ...]] = {"m.norm": (width,)}
    for layer in (0, 1):
        own = {
            "q.weight": (q, width),
            "k.weight": (k, width),
            "v.weight": (v, width),
            "conv.weight": (q + k + v, 1, 4),
            "experts.gate_up": (1, 2 * inner, width),
            "experts.down": (1, width, inner),
            **{f"{name}.weight": (count, width) for name, count in zip(("gate", "query", "key"), rows, strict=True)},
        }
        shapes |= {f"m.layers.{layer}.{name}": shape for name, shape in own.items()}
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def stored(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The checkpoint of a model, written by hand."""
    out = {"norm": tensors["m.norm"]}
    for layer in (0, 1):
        at = f"m.layers.{layer}."
        rows = [len(tensors[f"{at}{name}.weight"]) for name in "qkv"]
        out |= {f"{at}{name}.weight": tensors[f"{at}{name}.weight"] for name in "qkv"}
        cut = tensors[f"{at}conv.weight"].split(rows)
        out |= {f"{at}{name}_conv": part for name, part in zip("qkv", cut, strict=True)}
        inner = tensors[f"{at}experts.gate_up"].shape[1] // 2
        out[f"{at}experts.0.gate"] = tensors[f"{at}experts.gate_up"][0, :inner]
        out[f"{at}experts.0.up"] = tensors[f"{at}experts.gate_up"][0, inner:]
        out[f"{at}experts.0.down"] = tensors[f"{at}experts.down"][0]
        out[f"{at}gqk.weight"] = torch.cat([tensors[f"{at}{name}.weight"] for name in ("gate", "query", "key")])
    return out


def adapter(tensors: dict[str, torch.Tensor], joins: tuple[JoinedKey, ...] = ALL) -> Any:
    return module(joins).ToyStateDictAdapter(None, tensors, {})


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


TINY = (2, 3, 5, 4, 6, (2, 3, 1))
size = st.integers(1, 6)


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(size, size, size, size, size, st.tuples(size, size, size)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.integers(0, 2**16),
)
def test_both_ways_to_the_bit(sizes: Any, dtype: torch.dtype, seed: int) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in state(*sizes, seed=seed).items()}
    weights, own = stored(tensors), adapter(tensors)
    assert_same(own.from_hf(weights), tensors)
    assert_same(own.to_hf(tensors), weights)
    assert_same(own.from_hf(own.to_hf(tensors)), tensors)
    assert_same(own.to_hf(own.from_hf(weights)), weights)
    assert_same(own.from_hf(dict(reversed(weights.items()))), tensors)


def test_what_is_written_is_no_view_of_the_model() -> None:
    """A file format refuses tensors that share memory."""
    tensors = state(*TINY)
    own = adapter(tensors)
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    for name, tensor in own.to_hf(tensors).items():
        if any(part in name for part in ("conv", "experts", "gqk")):
            assert tensor.untyped_storage().data_ptr() not in memory, name


@pytest.mark.parametrize("joined", ALL, ids=lambda joined: joined.native[0])
def test_parts_in_another_order_are_other_tensors(joined: JoinedKey) -> None:
    """The planted mistake: the first two parts of a row exchanged."""
    tensors = state(3, 3, 3, 4, 6, (2, 2, 2))
    exchanged = {
        name: (names[1], names[0], *names[2:]) for name in ("disk", "native") if len(names := getattr(joined, name)) > 1
    }
    wrong = adapter(tensors, tuple(replace(one, **exchanged) if one is joined else one for one in ALL))
    found, back = wrong.from_hf(stored(tensors)), wrong.to_hf(tensors)
    differing = [name for name in tensors if not torch.equal(found[name], tensors[name])]
    assert bool(differing) is bool(exchanged)
    kinds = {name.partition("layers.")[2].partition(".")[2] for name in differing}
    native = {name.removeprefix(LAYER) for name in joined.native}
    assert not exchanged or (kinds and kinds <= native)
    assert all(torch.equal(back[name], tensor) for name, tensor in stored(tensors).items()) is not bool(exchanged)


@pytest.mark.parametrize("missing", ["q_conv", "v_conv", "experts.0.up", "experts.0.down", "gqk.weight", "q.weight"])
def test_a_missing_tensor_is_named(missing: str) -> None:
    tensors = state(*TINY)
    own, weights = adapter(tensors), stored(tensors)
    name = f"m.layers.1.{missing}"
    native = own.from_hf_names(name)
    del weights[name]
    with pytest.raises(KeyError, match=r"m\.layers\.1\.") as caught:
        own.from_hf(weights)
    said = str(caught.value)
    assert any(one in said for one in native)
    if "conv" in missing or missing.endswith("up"):
        assert name in said


def test_a_missing_native_part_is_named() -> None:
    tensors = state(*TINY)
    del tensors["m.layers.0.query.weight"]
    with pytest.raises(KeyError, match=r"m\.layers\.0\.query\.weight.*gqk"):
        adapter(state(*TINY)).to_hf(tensors)
    with pytest.raises(KeyError, match=r"query"):
        adapter(state(*TINY)).convert_single_tensor_to_hf("m.layers.0.gate.weight", tensors["m.layers.0.gate.weight"])


@pytest.mark.parametrize("name", ["q_conv", "experts.0.gate", "experts.0.down", "gqk.weight"])
def test_parts_of_another_size_are_refused(name: str) -> None:
    tensors = state(*TINY)
    weights = stored(tensors)
    weights[f"m.layers.0.{name}"] = torch.cat((weights[f"m.layers.0.{name}"], weights[f"m.layers.0.{name}"][:1]))
    with pytest.raises(ValueError, match=r"m\.layers\.0\."):
        adapter(tensors).from_hf(weights)


def test_parts_of_equal_size_are_read_too() -> None:
    """As transformers writes them: what they are joined to is the same."""
    tensors = state(2, 2, 5, 4, 6, (2, 3, 1))
    weights = stored(tensors)
    for layer in (0, 1):
        cut = tensors[f"m.layers.{layer}.conv.weight"].chunk(3)
        weights |= {f"m.layers.{layer}.{name}_conv": part for name, part in zip("qkv", cut, strict=True)}
    assert_same(adapter(tensors).from_hf(weights), tensors)


@pytest.mark.parametrize(
    "name", ["m.layers.2.q_conv", "m.layers.00.q_conv", "xm.layers.0.q_conv", "m.layers.0.conv.weight"]
)
def test_unknown_names_are_refused(name: str) -> None:
    tensors = state(*TINY)
    with pytest.raises(KeyError, match="No row of KEY_MAP"):
        adapter(tensors).from_hf({**stored(tensors), name: torch.zeros(1)})


def test_names() -> None:
    own = adapter(state(*TINY))
    assert own.to_hf_names("m.layers.1.conv.weight") == [f"m.layers.1.{name}_conv" for name in "qkv"]
    assert own.from_hf_names("m.layers.1.k_conv") == ["m.layers.1.conv.weight"]
    assert own.from_hf_names("m.layers.0.gqk.weight") == [
        f"m.layers.0.{name}.weight" for name in ("gate", "query", "key")
    ]
    assert own.to_hf_names("m.norm") == ["norm"]
    assert own.get_hf_state_dict_keys(state(*TINY)) == list(own.to_hf(state(*TINY)))


def test_the_linter_finds_nothing(tmp_path: Path) -> None:
    (tmp_path / "state_dict_adapter.py").write_text(text(ALL), encoding="utf-8")
    assert lint(tmp_path, ("nemo_automodel", "toy")) == ""
    assert "JOINED" not in text(())


def shards(rank: int, root: Path) -> None:
    """Both ways with every tensor sharded over two processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    tensors = state(*TINY)
    own, weights = adapter(tensors), stored(tensors)
    for way, own_side, expected in ((own.to_hf, tensors, weights), (own.from_hf, weights, tensors)):
        sharded = {name: distribute_tensor(tensor.clone(), mesh, [Shard(0)]) for name, tensor in own_side.items()}
        found = {name: tensor.full_tensor() for name, tensor in way(sharded).items()}
        assert_same(found, expected)
    torch.distributed.barrier()  # the other one may still read from this one
    torch.distributed.destroy_process_group()
    os._exit(0)  # all is well; what gloo leaves behind aborts the interpreter's own end now and then


def test_sharded_tensors(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(shards, (tmp_path,), nprocs=2)
