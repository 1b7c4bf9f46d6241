"""Every field of a spec says where it comes from, and nothing that could matter is left without a word."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from onboard.errors import Unsupported
from onboard.spec.arch import ArchSpec, Provenance
from onboard.spec.derive import derive, read_keys
from onboard.spec.nearest import nearest
from onboard.spec.review import HARMLESS
from onboard.spec.static import fill_in, measured_architecture, measured_types

ROOT = Path(__file__).parents[2]
FILES = {file.parent.name: json.loads(file.read_text()) for file in sorted((ROOT / "examples").glob("*/config.json"))}
EXAMPLES = {name: raw for name, raw in FILES.items() if raw["model_type"] in measured_types()}


def found_in(raw: dict[str, Any]) -> dict[str, Any]:
    return fill_in(raw, measured_architecture(raw["model_type"]))


def spec_of(raw: dict[str, Any], found: dict[str, Any] | None = None) -> ArchSpec:
    return derive(raw, raw["architectures"][0], raw["model_type"], found or found_in(raw))


def bare(model_type: str, **keys: Any) -> dict[str, Any]:
    return {"architectures": [measured_architecture(model_type)["architecture"]], "model_type": model_type, **keys}


ALL = {name: spec_of(bare(name)) for name in measured_types()} | {name: spec_of(raw) for name, raw in EXAMPLES.items()}


@pytest.mark.parametrize("name", ALL)
def test_every_leaf_has_provenance(name: str) -> None:
    spec = ALL[name]
    paths = [path for path, _ in spec.leaves()]
    assert len(paths) == len(set(paths))
    assert set(paths) == set(spec.provenance)
    for path in paths:
        where = spec.provenance[path]
        assert isinstance(where, Provenance)
        assert where.source, path
        assert re.match(r"config\.json|measured|transformers \d", where.source), path
    shown = spec.as_json()
    assert json.loads(json.dumps(shown)) == shown


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_size_names_the_key_that_it_comes_from(name: str) -> None:
    """Take the key away, and the provenance says that the class filled it in."""
    raw = EXAMPLES[name]
    spec = ALL[name]
    given = spec.provenance["dimensions.hidden_size"]
    assert (given.source, given.detail in raw) == ("config.json", True)
    taken_away = ("max_position_embeddings", "n_positions", "head_dim")
    other = spec_of({key: value for key, value in raw.items() if key not in taken_away})
    where = other.provenance["dimensions.max_position_embeddings"]
    assert "default of" in where.detail
    assert where.source.startswith("transformers")
    # A size of a head is a default, or computed by an expression that was measured.
    assert other.provenance["dimensions.head_dim"].source != "config.json"


def test_a_key_that_the_class_ignores_is_no_provenance() -> None:
    raw = {**EXAMPLES["llama-3.2-1b"], "max_sequence_length": 99}
    del raw["max_position_embeddings"]
    spec = spec_of(raw)
    assert spec.dimensions.max_position_embeddings == 2048
    assert spec.provenance["dimensions.max_position_embeddings"].source.startswith("transformers")


@pytest.mark.parametrize("name", EXAMPLES)
def test_unknown_keys_are_listed(name: str) -> None:
    raw = EXAMPLES[name]
    plain = spec_of(raw).review
    spec = spec_of({**raw, "attention_temperature": 1.5, "use_surprise": True, "nothing": None})
    new = [item.what for item in spec.review if item not in plain]
    assert len(new) == 2
    assert any("attention_temperature" in what for what in new)
    assert any("use_surprise" in what for what in new)
    assert all(item.do for item in spec.review)


@pytest.mark.parametrize("name", EXAMPLES)
def test_real_files_have_few_unknown_keys(name: str) -> None:
    """A list that cries wolf is not read."""
    unknown = [item for item in spec_of(EXAMPLES[name]).review if "does not know" in item.what]
    assert len(unknown) <= 2


def test_a_bias_that_is_off_agrees_only_where_there_is_none() -> None:
    """phi3 has no biases, qwen2 has some whatever a key says that its class does not know."""
    phi, qwen = (spec_of({**EXAMPLES[name], "surprise_bias": False}) for name in ("phi-4-mini", "qwen2.5-0.5b"))
    assert not any("surprise_bias" in item.what for item in phi.review)
    assert any("surprise_bias" in item.what for item in qwen.review)


def test_harmless_keys_are_not_those_of_a_forward_pass() -> None:
    words = re.compile(r"norm|head|bias|act|scale|softcap|hidden_size|layers|expert|router_(?!logits)")
    assert not [key for key in HARMLESS if words.search(key) and key not in ("_attn_implementation",)]


def test_fields_that_the_code_does_not_serve_are_fixed() -> None:
    spec = ALL["gpt2"]
    fixed = {item.key: item.value for item in spec.fixed}
    assert {"scale_attn_by_inverse_layer_idx", "n_inner"} <= set(fixed)
    assert fixed["scale_attn_by_inverse_layer_idx"] is False
    assert not set(fixed) & read_keys(spec, {})
    for key in fixed:
        assert any(f"config.{key} changes the reference" in item.what for item in spec.review)


def test_a_dropout_that_the_code_does_not_have_is_refused() -> None:
    raw = bare("llama")
    found = copy.deepcopy(found_in(raw))
    found["live"]["surprising_dropout"] = {"effect": "training", "added": [], "removed": [], "other": 0.5}
    found["real"]["values"]["surprising_dropout"] = 0.1
    with pytest.raises(Unsupported) as caught:
        spec_of(raw, found)
    assert caught.value.code == "unsupported.dropout"
    assert "surprising_dropout" in caught.value.do


@pytest.mark.parametrize("name", ALL)
def test_every_live_field_is_read_or_fixed(name: str) -> None:
    spec = ALL[name]
    model_type = spec.model_type
    measured = measured_architecture(model_type)
    live = measured["live"]
    unknown = {name for name in live if any(f"config.{name} " in item.what for item in spec.review)}
    read = read_keys(spec, measured["real"]["attribute_map"])
    by_mixer = set(spec.mixer.reads) if spec.mixer else set()
    assert set(live) <= read | by_mixer | {item.key for item in spec.fixed} | unknown
    assert {name for name in unknown if name not in read} <= {
        name for name in live if live[name]["effect"] == "unvaried"
    } | {item.key for item in spec.fixed}


@pytest.mark.parametrize(
    ("name", "path", "value", "key"),
    [
        ("llama-3.2-1b", "q_bias", False, "attention_bias"),
        ("llama-3.2-1b", "o_bias", False, "attention_bias"),
        ("qwen2.5-0.5b", "v_bias", True, None),
        ("qwen2.5-0.5b", "o_bias", False, None),
        ("seed_oss", "k_bias", True, "attention_bias"),
        ("seed_oss", "o_bias", False, "attention_out_bias"),
        ("phi-3-mini-4k", "q_bias", False, None),
    ],
)
def test_biases(name: str, path: str, value: bool, key: str | None) -> None:
    bias = getattr(ALL[name].attention, path)
    assert (bias.present, bias.key) == (value, key)


def test_a_bias_follows_the_file() -> None:
    raw = {**EXAMPLES["llama-3.2-1b"], "attention_bias": True, "mlp_bias": True}
    spec = spec_of(raw)
    assert all(bias.present for bias in spec.biases[:6])
    assert not spec.norm.bias.present


def match(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\{layer\}", r"\d+"), name) is not None


@pytest.mark.parametrize("name", ALL)
def test_each_tensor_is_matched_by_exactly_one_row(name: str) -> None:
    spec = ALL[name]
    measured = measured_architecture(spec.model_type)
    rows = spec.checkpoint.rows
    for tensor in measured["disk"]:
        assert len([row for row in rows if match(row.disk, tensor)]) == 1, tensor
    for row in rows:
        assert row.only_if or any(match(row.disk, tensor) for tensor in measured["disk"]), row
        assert all(("{layer}" in row.disk) == ("{layer}" in native) for native in row.native)
        assert ("split" in row.operation) == (len(row.native) > 1)
    natives = [native for row in rows for native in row.native]
    assert len({row.disk for row in rows}) == len(rows)
    assert len(set(natives)) == len(natives)


def test_layouts_on_disk() -> None:
    rows = {row.disk: row for row in ALL["gpt2"].checkpoint.rows}
    fused = rows["transformer.h.{layer}.attn.c_attn.weight"]
    assert fused.operation == "transpose, split"
    assert [native.split(".")[-2] for native in fused.native] == ["q_proj", "k_proj", "v_proj"]
    assert rows["transformer.h.{layer}.attn.c_attn.bias"].operation == "split"
    assert ALL["gpt2"].checkpoint.base_prefix == "transformer."
    neox = {row.disk: row for row in ALL["gpt_neox"].checkpoint.rows}
    by_head = neox["gpt_neox.layers.{layer}.attention.query_key_value.weight"]
    assert (by_head.operation, by_head.groups) == ("split", "config.num_attention_heads")


def test_optional_tensors_name_their_field() -> None:
    rows = {row.disk: row.only_if for row in ALL["llama-3.2-1b"].checkpoint.rows}
    assert rows["model.layers.{layer}.self_attn.q_proj.bias"] == "attention_bias"
    assert rows["model.layers.{layer}.mlp.up_proj.bias"] == "mlp_bias"
    assert rows["model.layers.{layer}.self_attn.q_proj.weight"] == ""


def test_tensors_of_other_names_on_disk_are_refused() -> None:
    raw = EXAMPLES["qwen3-0.6b"]
    found = copy.deepcopy(found_in(raw))
    found["disk"]["model.layers.0.experts.w1"] = [2, 2]
    with pytest.raises(Unsupported) as caught:
        spec_of(raw, found)
    assert caught.value.code == "unsupported.layout"
    assert "experts.w1" in caught.value.why


def test_tensors_outside_of_the_decoder_are_refused() -> None:
    raw = EXAMPLES["qwen3-0.6b"]
    found = copy.deepcopy(found_in(raw))
    for section in ("disk", "native"):
        found[section] = {name: [2, 2] for name in (*found[section], "vision.patch.weight")}
    with pytest.raises(Unsupported) as caught:
        spec_of(raw, found)
    assert "vision.patch.weight" in caught.value.why


@pytest.mark.parametrize(
    ("name", "sliding"),
    [("gemma-3-1b", 22), ("mistral-7b-v0.1", 32), ("llama-3.2-1b", 0), ("qwen2.5-0.5b", 0), ("smollm3-3b", 0)],
)
def test_layer_kinds(name: str, sliding: int) -> None:
    spec = ALL[name]
    assert len(spec.layer_kinds) == spec.dimensions.num_hidden_layers
    assert spec.layer_kinds.count("sliding_attention") == sliding


def test_a_window_that_is_off_makes_every_layer_full() -> None:
    raw = {**EXAMPLES["mistral-7b-v0.1"], "sliding_window": None}
    assert set(spec_of(raw).layer_kinds) == {"full_attention"}


@pytest.mark.parametrize("model_type", measured_types())
def test_the_nearest_of_an_architecture(model_type: str) -> None:
    measured = measured_architecture(model_type)
    found = nearest(measured, model_type)
    assert len(found) == 3
    assert len({name for name, _ in found}) == 3
    builtin = {
        measured_architecture(other)["architecture"]
        for other in measured_types()
        if measured_architecture(other)["builtin"]
    }
    assert {name for name, _ in found} <= builtin
    if measured["builtin"]:
        assert found[0] == (measured["architecture"], "the same architecture")
    counts = [why.count(",") + 1 if why.startswith("differs") else 0 for _, why in found[measured["builtin"] :]]
    assert counts == sorted(counts)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "gemma-3-1b", "phi-4-mini"])
def test_inspect_imports_neither_torch_nor_transformers(name: str) -> None:
    code = (
        "import sys\n"
        "from onboard.pipeline.inspecting import inspect_source\n"
        f"found = inspect_source({str(ROOT / 'examples' / name)!r}, revision=None)\n"
        "assert found.spec and found.nearest, found\n"
        "heavy = {'torch', 'transformers', 'numpy', 'nemo_automodel', 'safetensors', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
