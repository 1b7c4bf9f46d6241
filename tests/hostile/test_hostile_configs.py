"""Contract: whatever a config.json says, its strings are never code, nothing is written outside of the target,
and what cannot be a model is refused by name.

The whole way of ``onboard new`` runs in this process, the probe included; test_hostile_cli.py runs real processes.
"""

from __future__ import annotations

import ast
import copy
import json
import math
import re
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onboard.errors import OnboardError
from onboard.pipeline import making
from onboard.pipeline.inspecting import inspect_source
from onboard.render.environment import cell, literal, text
from onboard.spec.keys import ALIASES, data_keys
from onboard.spec.validate import check_config

from .harness import (
    EXAMPLES,
    MARK,
    NUMBERS,
    ROOT,
    ask_here,
    check_error,
    check_package,
    nested,
    onboard_here,
    payloads,
    write_config,
)

WITNESS = Path(tempfile.gettempdir()) / "onboard-hostile-witness"
PAYLOADS = payloads(WITNESS)
READ_KEYS = (
    *(
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
    ),
    *("vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters"),
    *("hidden_act", "layer_types", "sliding_window", "max_window_layers", "use_sliding_window", "tie_word_embeddings"),
    *("attention_bias", "attention_dropout", "resid_pdrop", "partial_rotary_factor", "no_rope_layers", "dtype"),
    *("original_max_position_embeddings", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id"),
    *("architectures", "model_type", "auto_map", "text_config", "torch_dtype", "id2label", "num_labels"),
    *("quantization_config", "_name_or_path", "name_or_path", "per_layer_config", "transformers_version"),
    *("_attn_implementation", "attn_implementation", "use_cache", "num_experts", "vision_config", "is_decoder"),
    *("to_dict", "from_dict", "attribute_map", "__class__", "__dict__", "generation_config", "chunk_size_feed_forward"),
)
# What outcomes the hypothesis test has seen: a test in which nothing is ever made would prove little.
SEEN: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    monkeypatch.setattr(making, "ask_reference", ask_here)
    # transformers fetches nothing: a fetch would fail, and be seen as a failure.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    WITNESS.unlink(missing_ok=True)
    yield
    assert not WITNESS.exists(), "code of a config ran"


def scalars():
    return st.one_of(st.sampled_from(PAYLOADS), st.sampled_from(NUMBERS), st.none(), st.text(max_size=20))


def values():
    rope_types = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional", PAYLOADS[1], 5)
    numbers = st.sampled_from([4096, 4.0, 1.0, *NUMBERS])
    rope = st.fixed_dictionaries(
        {"rope_type": st.sampled_from(rope_types), "factor": numbers},
        optional={
            "rope_theta": numbers,
            "original_max_position_embeddings": numbers,
            "low_freq_factor": numbers,
            "high_freq_factor": numbers,
            "partial_rotary_factor": numbers,
            "short_factor": st.lists(numbers, max_size=3),
            "long_factor": st.lists(numbers, max_size=3),
            PAYLOADS[3]: st.sampled_from(PAYLOADS),
        },
    )
    return st.one_of(
        scalars(),
        scalars(),
        st.lists(scalars(), max_size=3),
        st.dictionaries(st.sampled_from(PAYLOADS), scalars(), max_size=2),
        rope,
        st.integers(0, 40).flatmap(lambda depth: scalars().map(lambda inside: nested(depth, inside))),
    )


def changes():
    """Key to value: keys that are read, keys of the class, keys that are code."""
    keys = st.one_of(st.sampled_from(READ_KEYS), st.sampled_from(PAYLOADS), st.sampled_from(PAYLOADS))
    return st.dictionaries(keys, values(), min_size=1, max_size=3)


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(sorted(EXAMPLES)), changed=changes())
def test_hostile_config(name, changed):
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        source = write_config(base / "model", {**copy.deepcopy(EXAMPLES[name]), **changed})
        before = tree(base)
        try:
            json.dumps(inspect_source(str(source), revision=None).as_json())
        except OnboardError as refusal:
            check_error(refusal)
        error = onboard_here(source, base / "out")
        SEEN["made" if error is None else error.code] += 1
        if error is not None:
            check_error(error)
            assert tree(base) == before, "an error, and something was written"
        else:
            written = tree(base / "out")
            check_package(base / "out")
            assert tree(base) == before | {"out"} | {f"out/{path}" for path in written}
        assert not WITNESS.exists(), "code of the config ran"


def test_the_outcomes_above_are_of_both_kinds():
    if not SEEN:
        pytest.skip("test_hostile_config did not run")
    assert SEEN["made"] > 10
    assert SEEN["config.bad_value"] > 10


def test_every_payload_as_key_and_as_value_of_an_unread_key(tmp_path):
    """All at once, at places that onboard does not read: the package is made, and they are data in it."""
    config = copy.deepcopy(EXAMPLES["qwen3-0.6b"])
    # Nothing of transformers' own may hide behind a key: the mutable places are objects, lists and strings.
    config |= {payload: payload for payload in PAYLOADS}
    config |= {"lists": PAYLOADS, "objects": {payload: [payload] for payload in PAYLOADS}, "infinite": [math.inf]}
    source = write_config(tmp_path / f"<script>{MARK}|[x](javascript:y)`<!-- ![y", config)
    assert onboard_here(source.parent, tmp_path / "out") is None
    check_package(tmp_path / "out")
    review = (tmp_path / "out" / "REVIEW.md").read_text()
    assert review.count("which Qwen3Config does not know") == len(PAYLOADS) + 3
    published = json.loads((tmp_path / "out" / "tests" / "config.json").read_text())
    assert set(data_keys(dict.fromkeys(PAYLOADS, 0))) <= set(published)
    assert tree(tmp_path) == {source.parent.name, f"{source.parent.name}/config.json", "out"} | {
        f"out/{path}" for path in tree(tmp_path / "out")
    }


def test_payloads_inside_of_a_value_that_is_rendered_into_code(tmp_path):
    """What transformers leaves in ``rope_parameters`` reaches the tiny config of the tests, as literals."""
    for number, scaling in enumerate(
        (
            {"rope_type": "linear", "factor": 2.0, **{payload: payload for payload in PAYLOADS}},
            {"rope_type": "linear", "factor": 2.0, "note": PAYLOADS, "infinite": [1.0]},
        )
    ):
        config = {**copy.deepcopy(EXAMPLES["qwen3-0.6b"]), "rope_scaling": scaling}
        error = onboard_here(write_config(tmp_path / f"model{number}", config), tmp_path / f"out{number}")
        if number:
            assert (error.exit_status, error.code) == (2, "config.bad_value")
            continue
        assert error is None
        check_package(tmp_path / "out0")
        conftest = ast.parse((tmp_path / "out0" / "tests" / "conftest.py").read_text())
        tiny = next(
            node.value for node in conftest.body if isinstance(node, ast.AnnAssign) and node.target.id == "TINY"
        )
        rope = ast.literal_eval(tiny)["rope_parameters"]
        assert {key: value for key, value in rope.items() if key in PAYLOADS} == dict(
            zip(PAYLOADS, PAYLOADS, strict=True)
        )


@pytest.mark.parametrize(
    ("changed", "status", "code", "names"),
    [
        # Names.
        ({"architectures": ["os.system"]}, 3, "unsupported", "base model|says nothing|no language"),
        ({"architectures": ["__import__ForCausalLM"]}, 2, "name.invalid", "__import__ForCausalLM"),
        ({"architectures": ['x");import os#ForCausalLM']}, 2, "name.invalid", "ASCII"),
        ({"architectures": ["\uff31wen3ForCausalLM"]}, 2, "name.invalid", "ASCII"),
        ({"architectures": ["\u041clamaForCausalLM"]}, 2, "name.invalid", "ASCII"),
        (
            {"architectures": ["PreTrainedModelForCausalLM"], "model_type": "x", "unheard_of": 7},
            3,
            "unsupported.no_reference",
            "no class",
        ),
        ({"architectures": ["AutoModelForCausalLM"], "model_type": "x"}, 3, "unsupported.no_reference", "no class"),
        ({"architectures": ["PreTrainedModel"], "model_type": "x"}, 3, "unsupported", ""),
        ({"architectures": ["LlamaForSequenceClassification"]}, 3, "unsupported", "classification"),
        ({"architectures": ["A" * 5000 + "ForCausalLM"]}, 2, "name.invalid", "longer"),
        ({"model_type": "../../x"}, 2, "name.invalid", "module name"),
        ({"model_type": ".."}, 2, "name.invalid", "module name"),
        ({"model_type": "con"}, 2, "name.invalid", "Windows"),
        ({"model_type": "os"}, 2, "name.invalid", "another package"),
        ({"model_type": "a/b"}, 2, "name.invalid", "module name"),
        ({"model_type": "qwen3\n"}, 2, "name.invalid", "module name"),
        ({"hidden_act": "__import__('os')"}, 3, "unsupported.activation", "__import__.*hidden_act.*silu"),
        ({"hidden_act": "swiglu9"}, 3, "unsupported.activation", "swiglu9.*gelu"),
        ({"hidden_act": ["silu"]}, 3, "unsupported.no_reference", "hidden_act"),
        (
            {"rope_scaling": {"rope_type": "x', evil()", "factor": 2.0}},
            3,
            "unsupported.rope_type",
            "evil.*llama3.*yarn",
        ),
        ({"rope_scaling": {"type": "mrope2", "factor": 2.0}}, 3, "unsupported.rope_type", "mrope2.*longrope"),
        ({"rope_scaling": {"type": 7}}, 2, "config.bad_value", "rope_scaling.rope_type"),
        ({"rope_scaling": "linear"}, 2, "config.bad_value", "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, 3, "unsupported.no_reference", "factor"),
        ({"layer_types": ["full_attention'); evil(('"] * 28}, 3, "unsupported.no_reference", "layer_types"),
        ({"layer_types": ["linear_attention"] * 28}, 3, "unsupported.tiny_config", "tiny size.*linear_attention"),
        ({"layer_types": ["full_attention"] * 3}, 3, "unsupported.no_reference", "layer_types"),
        ({"layer_types": "full_attention"}, 2, "config.bad_value", "layer_types"),
        ({"layer_types": ["full_attention"] * 2000}, 2, "config.bad_value", "layer_types"),
        ({"torch_dtype": "load"}, 2, "config.bad_value", "torch_dtype.*bfloat16"),
        ({"to_dict": 5}, 2, "config.bad_key", "to_dict"),
        ({"__class__": "x"}, 2, "config.bad_key", "__class__"),
        ({"attribute_map": {"hidden_size": "evil"}}, 2, "config.bad_key", "attribute_map"),
        ({"architectures": ["ReformerModelWithLMHead"], "model_type": "reformer"}, 3, "unsupported.size", "num_hidden"),
        (
            {"num_hidden_layers": 300, "layer_types": ["full_attention"] * 200 + ["sliding_attention"] * 100},
            3,
            "unsupported.layer_pattern",
            "at most 127",
        ),
        # Sizes.
        ({"hidden_size": 0}, 2, "config.bad_value", "hidden_size = 0"),
        ({"hidden_size": -1}, 2, "config.bad_value", "hidden_size = -1"),
        ({"hidden_size": 10**30}, 2, "config.bad_value", "hidden_size"),
        ({"hidden_size": 1e308}, 2, "config.bad_value", "hidden_size"),
        ({"hidden_size": 1024.0}, 2, "config.bad_value", "whole number"),
        ({"hidden_size": True}, 2, "config.bad_value", "True"),
        ({"hidden_size": "1024"}, 2, "config.bad_value", "'1024'"),
        ({"num_hidden_layers": 10**9}, 2, "config.bad_value", "num_hidden_layers"),
        ({"n_layers": 10**9}, 2, "config.bad_value", "n_layers"),
        ({"num_labels": 10**9}, 2, "config.bad_value", "num_labels"),
        ({"vocab_size": 0}, 2, "config.bad_value", "vocab_size"),
        ({"vocab_size": 10**12}, 2, "config.bad_value", "vocab_size"),
        ({"num_attention_heads": 0}, 2, "config.bad_value", "num_attention_heads"),
        ({"num_key_value_heads": 3}, 2, "config.bad_value", "num_key_value_heads.*divide"),
        ({"head_dim": 10**9}, 2, "config.bad_value", "head_dim"),
        ({"sliding_window": -1, "use_sliding_window": True}, 2, "config.bad_value", "sliding_window = -1"),
        ({"sliding_window": 0, "use_sliding_window": True}, 2, "config.bad_value", "sliding_window = 0"),
        ({"max_position_embeddings": -5}, 2, "config.bad_value", "max_position_embeddings"),
        # Numbers.
        ({"rms_norm_eps": math.nan}, 2, "config.bad_value", "rms_norm_eps"),
        ({"rms_norm_eps": -1e-6}, 2, "config.bad_value", "rms_norm_eps"),
        ({"rms_norm_eps": math.inf}, 2, "config.bad_value", "rms_norm_eps"),
        ({"rope_theta": 0}, 2, "config.bad_value", "rope_theta"),
        ({"rope_theta": -10000.0}, 2, "config.bad_value", "rope_theta"),
        ({"rope_theta": math.inf}, 2, "config.bad_value", "rope_theta"),
        ({"rope_theta": math.nan}, 2, "config.bad_value", "rope_theta"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, 2, "config.bad_value", "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": math.inf}}, 2, "config.bad_value", "rope_scaling.factor"),
        ({"attention_dropout": 5}, 2, "config.bad_value", "attention_dropout"),
        ({"somewhere": {"deep": [{"in": math.nan}]}}, 2, "config.bad_value", r"somewhere.deep\[0\].in"),
        # Token ids.
        ({"eos_token_id": [1, "x"]}, 2, "config.bad_value", "eos_token_id"),
        ({"eos_token_id": 10**30}, 2, "config.bad_value", "eos_token_id"),
        ({"pad_token_id": 151936}, 2, "config.bad_value", "pad_token_id"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_refused_by_name(changed, status, code, names, tmp_path):
    """The error says which key, which value, and what is allowed."""
    source = write_config(tmp_path / "model", {**copy.deepcopy(EXAMPLES["qwen3-0.6b"]), **changed})
    error = onboard_here(source, tmp_path / "out")
    assert error is not None
    said = f"{error.what} {error.why}"
    assert (error.exit_status, error.code) == (status, code), said
    assert re.search(names, said, re.DOTALL), said
    assert len(said) < 1200
    assert not (tmp_path / "out").exists()


def test_wrong_length_of_longrope_factors(tmp_path):
    config = copy.deepcopy(EXAMPLES["qwen3-0.6b"])
    config["rope_scaling"] = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 64,
        "long_factor": [1.0] * 65,
        "original_max_position_embeddings": 4096,
    }
    error = onboard_here(write_config(tmp_path, config), tmp_path / "out")
    assert (error.exit_status, error.code) == (2, "config.bad_value")
    assert "long_factor" in error.what
    assert "64 pairs" in error.why


def test_what_loads_code_or_kernels_reaches_no_file(tmp_path):
    """The generated tests build the published config; they must not fetch a kernel or a module that it names."""
    config = copy.deepcopy(EXAMPLES["qwen3-0.6b"])
    config |= {
        "auto_map": {"AutoModelForCausalLM": f"{MARK}/{MARK}--modeling.{MARK}"},
        "_attn_implementation": f"{MARK}/{MARK}",
        "attn_implementation": f"{MARK}/{MARK}:{MARK}",
        "experts_implementation": MARK,
        "_attn_implementation_internal": MARK,
        "quantization_config": {"quant_method": MARK},
    }
    assert onboard_here(write_config(tmp_path / "model", config), tmp_path / "out") is None
    for path in (tmp_path / "out").rglob("*"):
        assert path.is_dir() or MARK not in path.read_text().lower(), path


def test_real_configs_pass_the_checks():
    """The limits are wide: no published config of a dense decoder runs into one."""
    for config in EXAMPLES.values():
        check_config(config)
    lines = (ROOT / "tests" / "spec" / "kind_cases.jsonl").read_text().splitlines()
    dense = [case["config"] for case in map(json.loads, lines) if case["expected"] == "dense"]
    assert len(dense) > 20
    for config in dense:
        check_config(config)
    check_config({"gradient_accumulation_steps": 64, "model_max_length": 10**30, "sliding_window": None})


@given(st.sampled_from(sorted({key for keys in ALIASES.values() for key in keys})), values())
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_checks_end_in_an_error_or_nothing(key, value):
    try:
        check_config({key: value})
    except OnboardError as error:
        check_error(error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.sampled_from(PAYLOADS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.sampled_from(PAYLOADS), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(JSON)
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_a_literal_is_the_value(value):
    """Every JSON value, rendered and evaluated, is itself; on one printable line."""
    rendered = literal(value)
    assert rendered.isprintable()
    plain = rendered.replace('float("inf")', "1e999").replace('float("-inf")', "-1e999")
    if plain == rendered:
        assert ast.literal_eval(rendered) == value


@given(st.text() | st.sampled_from(PAYLOADS))
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_prose_and_cells_are_one_line_without_markup(value):
    assert not set(text(value)) & set("<>{}[]`|\\\n\r")
    assert text(value).isprintable()
    assert not set(cell(value)) & set("`|\n\r")
    assert cell(value).isprintable()


def test_deep_and_long_objects_are_quick(tmp_path):
    """100 levels, 100,000 keys: refused or done in the time of any other config."""
    config = copy.deepcopy(EXAMPLES["qwen3-0.6b"])
    deep = onboard_here(write_config(tmp_path / "deep", {**config, "text_config": nested(200, 1)}), tmp_path / "out")
    assert deep.code == "config.too_deep"
    inner: dict = dict(config)
    for _ in range(60):
        inner = {"text_config": inner, "architectures": config["architectures"]}
    error = onboard_here(write_config(tmp_path / "recursive", inner), tmp_path / "out")
    if error is not None:
        check_error(error)


@pytest.mark.parametrize(
    "name",
    ["../x", "a/b", "/abs", "x\n", "__init__", "os", "con", "a" * 100, "x;y", "{{7*7}}", "\u0430bc", "", "-x", "."],
)
def test_hostile_package_name(name, tmp_path):
    source = write_config(tmp_path / "model", EXAMPLES["qwen3-0.6b"])
    error = onboard_here(source, tmp_path / "out", name=name)
    if name:
        assert (error.exit_status, error.code) == (2, "name.invalid")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\xff\xfe\x00binary", "UTF-8"),
        (b"Copyright\x00 me", "printable"),
        (b"# -*- coding: utf-7 -*-\n# +AAo-import os", "encoding"),
        (b"vim: set fileencoding=utf-7 :", "encoding"),
        (b"#!/bin/sh\nrm -rf /", "script"),
        (b"x" * 100_000, "longer"),
        ("\u202eesrever".encode(), "printable"),
    ],
)
def test_hostile_licence_header(content, why, tmp_path):
    header = tmp_path / "header"
    header.write_bytes(content)
    source = write_config(tmp_path / "model", EXAMPLES["qwen3-0.6b"])
    error = onboard_here(source, tmp_path / "out", license_header=header)
    assert (error.exit_status, error.code) == (2, "header.invalid")
    assert why in error.why


def test_code_in_a_licence_header_is_comment(tmp_path):
    header = tmp_path / "header"
    lines = ["Copyright me.", f"import {MARK}", f'"""; {MARK}()', f"\t{MARK}()", f"# x\r{MARK}()", "{{ 7 * 7 * 1009 }}"]
    header.write_text("\n".join(lines))
    source = write_config(tmp_path / "model", EXAMPLES["qwen3-0.6b"])
    assert onboard_here(source, tmp_path / "out", license_header=header) is None
    model = next((tmp_path / "out" / "src").rglob("model.py")).read_text()
    head, _, _ = model.partition('\n"""Qwen3 for NeMo AutoModel')
    assert "{{ 7 * 7 * 1009 }}" in head
    assert all(line.startswith("#") or not line for line in head.splitlines())
    assert MARK not in ast.dump(ast.parse(model))
    shutil.rmtree(tmp_path / "out")
