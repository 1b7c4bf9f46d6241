"""The generated state dict adapter on real checkpoints of transformers' classes: fused, transposed, renamed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onboard.render.adapter import adapter_context
from onboard.render.style import lint
from safetensors.torch import load_file
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .checkpoints import FAMILIES, native, reference, tiny
from .hand_made import architecture, load, render

FUSED = [name for name in FAMILIES if name != "llama"]


@cache
def adapter_module(name: str) -> Any:
    return load(FAMILIES[name]().spec)


def adapter(name: str) -> Any:
    return adapter_module(name).ToyStateDictAdapter(tiny(FAMILIES[name]()))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Family to the tensors that its reference saves."""

    @cache
    def read(name: str) -> dict[str, torch.Tensor]:
        folder = tmp_path_factory.mktemp(name)
        reference(FAMILIES[name]()).save_pretrained(folder)
        return load_file(folder / "model.safetensors")

    return read


@pytest.mark.parametrize("name", FAMILIES)
def test_disk_to_native_to_disk_to_the_bit(name: str, saved: Any) -> None:
    weights = saved(name)
    found = adapter(name).from_hf(weights)
    expected = native(FAMILIES[name](), weights)
    assert sorted(found) == sorted(expected)
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    back = adapter(name).to_hf(found)
    assert sorted(back) == sorted(weights)
    for key, tensor in weights.items():
        assert torch.equal(back[key], tensor), key
        assert back[key].is_contiguous()


class Products(TorchFunctionMode):
    """Records the factors of the two products of an attention: queries with keys, probabilities with values."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.input: torch.Tensor | None = None

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.input is not None and getattr(func, "__name__", "") in ("matmul", "__matmul__", "baddbmm", "bmm"):
            given = (*args, *(kwargs or {}).values())
            tensors = [value for value in given if isinstance(value, torch.Tensor)]
            # Falcon's linear layers are written as a product with a matrix too.
            if tensors[-1].ndim > 2:
                self.factors.append((tensors[-2], tensors[-1]))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("name", FUSED)
def test_queries_keys_and_values_are_the_references(name: str, saved: Any) -> None:
    """One token at position 0, which no rotation changes, so that what the reference multiplies is what it projects."""
    family = FAMILIES[name]()
    model, config = reference(family), tiny(family)
    row = next(row for row in family.spec.checkpoint.rows if "q_proj.weight" in row.native[0])
    record = Products()

    def start(_module: Any, inputs: tuple[torch.Tensor]) -> None:
        record.input = inputs[0]

    model.get_submodule(row.disk.replace("{layer}", "0").removesuffix(".weight")).register_forward_pre_hook(start)
    with record:
        model(torch.tensor([[3], [7], [11]]), use_cache=False)
    (query, key), (_, value) = record.factors[:2]
    theirs = {"q_proj": query, "k_proj": key.transpose(-1, -2), "v_proj": value}

    state = adapter(name).from_hf(saved(name))
    width = state["model.layers.0.self_attn.o_proj.weight"].shape[1]
    head_dim = width // config.num_attention_heads
    for part, tensor in theirs.items():
        module = f"model.layers.0.self_attn.{part}"
        ours = functional.linear(record.input, state[f"{module}.weight"], state.get(f"{module}.bias"))
        ours = ours.reshape(3, -1, head_dim)
        tensor = tensor.reshape(3, -1, head_dim)
        ours = ours.repeat_interleave(tensor.shape[1] // ours.shape[1], dim=1)
        torch.testing.assert_close(ours, tensor, rtol=1e-5, atol=1e-5, msg=part)


@torch.no_grad()
def test_gate_and_up_are_the_references(saved: Any) -> None:
    model = reference(FAMILIES["phi3"]())
    seen: dict[str, torch.Tensor] = {}
    mlp = model.model.layers[0].mlp
    mlp.gate_up_proj.register_forward_pre_hook(lambda _, inputs: seen.update(x=inputs[0]))
    mlp.down_proj.register_forward_pre_hook(lambda _, inputs: seen.update(y=inputs[0]))
    model(torch.tensor([[3, 5, 7]]), use_cache=False)
    state = adapter("phi3").from_hf(saved("phi3"))
    gate, up = (
        functional.linear(seen["x"], state[f"model.layers.0.mlp.{part}_proj.weight"]) for part in ("gate", "up")
    )
    torch.testing.assert_close(functional.silu(gate) * up, seen["y"], rtol=1e-5, atol=1e-5)


layouts = st.tuples(
    st.integers(1, 6), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.one_of(st.none(), st.integers(0, 3))
)


@settings(deadline=None)
@given(layouts, st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8]))
def test_any_layout_comes_apart_and_together(layout: tuple[int, list[int], int | None], dtype: torch.dtype) -> None:
    """Against row numbers counted in a loop: each row of the fused tensor is where its group, part and place say."""
    groups, shares, columns = layout
    module = adapter_module("gpt2")
    count = groups * sum(shares)
    fused = (torch.arange(count) % 127).to(dtype)
    if columns is not None:
        fused = fused[:, None].expand(count, columns).contiguous()
    numbers: list[list[int]] = [[] for _ in shares]
    row = 0
    for _ in range(groups):
        for part, share in enumerate(shares):
            for _ in range(share):
                numbers[part].append(row)
                row += 1
    parts = module._split_rows(fused, [groups * share for share in shares], groups)
    assert [part.dtype for part in parts] == [dtype] * len(shares)
    for part, wanted in zip(parts, numbers, strict=True):
        assert torch.equal(part, fused[wanted])
    assert torch.equal(module._join_rows(parts, groups), fused)


@pytest.mark.parametrize("name", FAMILIES)
def test_it_passes_the_linter(name: str, tmp_path: Path) -> None:
    (tmp_path / "state_dict_adapter.py").write_text(render(FAMILIES[name]().spec))
    assert lint(tmp_path, ("nemo_automodel", "toy")) == ""


REGROUPING = ("DTensor", "_split", "_join", "groups", "transpose", "Sequence", "_Place", "native: tuple", "BASE_PREFIX")


def test_renames_alone_need_none_of_it() -> None:
    source = render(FAMILIES["llama"]().spec)
    for word in REGROUPING:
        assert word not in source, word
    assert "map_peft_target_module_to_hf" not in source
    assert "only_if" in source


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("gpt_neox", ("transpose", "contiguous", "gate_proj", "only_if")),
        ("mpt", ("transpose", "BASE_PREFIX", "only_if")),
        ("gpt2", ("gate_proj", "only_if")),
    ],
)
def test_only_what_the_checkpoint_needs_is_there(name: str, absent: tuple[str, ...]) -> None:
    source = render(FAMILIES[name]().spec).replace("after the transposition", "")
    for word in absent:
        assert word not in source, word


def test_rows_are_rendered_only_for_parts() -> None:
    assert adapter_context(FAMILIES["llama"]().spec)["part_rows"] == {}
    assert adapter_context(FAMILIES["falcon_7b"]().spec)["part_rows"] == {
        "q_proj": "config.num_attention_heads * head_dim",
        "k_proj": "1 * head_dim",
        "v_proj": "1 * head_dim",
    }
    assert list(adapter_context(FAMILIES["phi3"]().spec)["part_rows"])[-1] == "up_proj"


def test_a_part_of_unknown_size_is_refused() -> None:
    from .checkpoints import fuse

    rows = fuse("model.x", ("model.layers.{layer}.a_proj", "model.layers.{layer}.b_proj"), "weight")
    with pytest.raises(ValueError, match="a_proj"):
        adapter_context(architecture("LlamaConfig", rows))


def test_a_sum_is_a_factor_in_parentheses() -> None:
    spec = architecture("Phi3Config", FAMILIES["phi3"]().spec.checkpoint.rows, num_heads="config.a + config.b")
    assert adapter_context(spec)["part_rows"]["q_proj"] == "(config.a + config.b) * head_dim"


CONFTEST = """
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

sys.path[:0] = {paths!r}
from tests.render import checkpoints

FAMILY = checkpoints.FAMILIES[{name!r}]()
from {package}.state_dict_adapter import ToyStateDictAdapter


@dataclass
class Native:
    config: Any
    state: dict
    state_dict_adapter: Any

    def state_dict(self):
        return dict(self.state)


@dataclass
class Pair:
    folder: Path
    native: Native


@pytest.fixture
def tiny_config():
    return checkpoints.tiny(FAMILY)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk")
    checkpoints.reference(FAMILY).save_pretrained(folder)
    return folder


@pytest.fixture
def pair(folder, tiny_config):
    state = checkpoints.native(FAMILY, load_file(folder / "model.safetensors"))
    return Pair(folder, Native(tiny_config, state, ToyStateDictAdapter(tiny_config)))


@pytest.fixture
def any_pair(pair):
    return pair
"""


def write_tests(root: Path, damage: dict[str, tuple[str, str]] | None = None) -> None:
    """Every family's adapter with its generated tests, run against a state dict that is taken apart by hand."""
    paths = [str(Path(__file__).parents[2]), str(root)]
    for name in damage or FAMILIES:
        spec = FAMILIES[name]().spec
        package = root / f"toy_{name}"
        (package / "tests").mkdir(parents=True)
        source = render(spec)
        if damage:
            old, new = damage[name]
            assert old in source, old
            source = source.replace(old, new)
        (package / "__init__.py").touch()
        (package / "state_dict_adapter.py").write_text(source)
        test = render(spec, "tests/test_state_dict_adapter.py.j2").replace("from toy.", f"from {package.name}.")
        (package / "tests" / f"test_{name}.py").write_text(test)
        conftest = CONFTEST.format(paths=paths, name=name, package=package.name)
        (package / "tests" / "conftest.py").write_text(textwrap.dedent(conftest))


def run_tests(root: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        "--tb=line",
        ".",
    ]
    (root / "pytest.ini").write_text("[pytest]\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def test_the_generated_tests_pass(tmp_path: Path) -> None:
    write_tests(tmp_path)
    for name in FAMILIES:
        findings = lint(tmp_path / f"toy_{name}" / "tests" / "..", ("nemo_automodel", f"toy_{name}", "tests"))
        assert [line for line in findings.splitlines() if " D10" not in line and "conftest" not in line] == []
    done = run_tests(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout


DAMAGE = {
    "gpt2": ("tensor = tensor.t()", "tensor = tensor.contiguous()"),
    "gpt_neox": ("place.row.groups(self.config)", "1"),
    "falcon": ("if given != rows:", "if False:"),
    "falcon_7b": ("if len(tensor) != sum(rows):", "if False:"),
    "bloom": ("torch.block_diag(*parts).split(rows)", "parts"),
    "mpt": ("chunk(len(rows), dim=1)[i]", "chunk(len(rows), dim=1)[0]"),
    "codegen": ("if name not in tensors:", "if False:"),
    "phi3": ("if not _equal(torch.block_diag(*own), torch.cat(parts)):", "if False:"),
}


def test_the_generated_tests_find_planted_mistakes(tmp_path: Path) -> None:
    write_tests(tmp_path, DAMAGE)
    failures = [line for line in run_tests(tmp_path).stdout.splitlines() if line.startswith("FAILED")]
    assert {name for name in DAMAGE if any(f"toy_{name}/" in line for line in failures)} == set(DAMAGE)
    # Each hurts what it is about, and not everything.
    assert len(failures) < 5 * len(DAMAGE)
