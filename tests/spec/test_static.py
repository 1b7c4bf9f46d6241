"""What `onboard inspect` reads from a file without transformers is what transformers' own config class reads."""

from __future__ import annotations

import contextlib
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from onboard.errors import Unsupported
from onboard.reference.build import NoReference, find_class, read_config
from onboard.reference.meanings import size
from onboard.spec.derive import derive
from onboard.spec.keys import SIZES
from onboard.spec.static import fill_in, known_names, measured_architecture, measured_types

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "configs" / "dense"
FIELDS = (*SIZES, "layer_types", "sliding_window", "rope_parameters", "tie_word_embeddings")
# How a file is stored, not what a model computes; transformers writes them anew.
BOOKKEEPING = {"dtype", "transformers_version"}


def real_configs() -> dict[str, dict[str, Any]]:
    files = [*sorted((ROOT / "examples").glob("*/config.json")), *sorted(SHARED.glob("*.json"))]
    configs = {f"{file.parent.name}/{file.stem}": json.loads(file.read_text(encoding="utf-8")) for file in files}
    return {name: raw for name, raw in configs.items() if raw.get("model_type") in measured_types()}


CONFIGS = real_configs()
BARE = {
    name: {"model_type": name, "architectures": [measured_architecture(name)["architecture"]]}
    for name in measured_types()
}
VARIANTS: dict[str, dict[str, Any]] = {
    "gemma3 flat scaling": {**BARE["gemma3_text"], "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gemma3 pattern": {**BARE["gemma3_text"], "sliding_window_pattern": 3, "num_hidden_layers": 10},
    "gemma3 no window": {**BARE["gemma3_text"], "sliding_window": None},
    "gemma3 new rope": {
        **BARE["gemma3_text"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    },
    "llama new rope": {**BARE["llama"], "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e5}},
    "llama old type": {**BARE["llama"], "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 7e5},
    "llama3 without original": {
        **BARE["llama"],
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "llama yarn": {**BARE["llama"], "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "llama heads": {**BARE["llama"], "hidden_size": 1024, "num_attention_heads": 8},
    "llama other spellings": {**BARE["llama"], "n_layer": 7, "model_max_length": 99, "max_seq_len": 5, "n_kv_heads": 1},
    "qwen2 window": {**BARE["qwen2"], "use_sliding_window": True, "sliding_window": 64, "num_hidden_layers": 40},
    "qwen2 window first": {**BARE["qwen2"], "use_sliding_window": True, "max_window_layers": 3, "num_hidden_layers": 5},
    "qwen2 window off": {**BARE["qwen2"], "use_sliding_window": False, "sliding_window": 64},
    "qwen3 null window": {**BARE["qwen3"], "use_sliding_window": True, "sliding_window": None},
    "qwen3 listed": {**BARE["qwen3"], "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "smollm3 window": {**BARE["smollm3"], "use_sliding_window": True, "sliding_window": 64, "num_hidden_layers": 9},
    "smollm3 window off": {**BARE["smollm3"], "use_sliding_window": False, "sliding_window": 64},
    "smollm3 no rope": {
        **BARE["smollm3"],
        "use_sliding_window": True,
        "sliding_window": 64,
        "num_hidden_layers": 3,
        "no_rope_layers": [0, 1, 1],
    },
    "phi3 outside length": {
        **BARE["phi3"],
        "original_max_position_embeddings": 2048,
        "max_position_embeddings": 8192,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    },
    "phi3 old name": {
        **BARE["phi3"],
        "max_position_embeddings": 8192,
        "rope_scaling": {
            "type": "su",
            "original_max_position_embeddings": 4096,
            "short_factor": [1.0] * 48,
            "long_factor": [2.0] * 48,
        },
    },
    "phi3 partial": {**BARE["phi3"], "partial_rotary_factor": 0.5},
    "mistral head_dim": {**BARE["mistral"], "head_dim": 80, "sliding_window": None, "hidden_size": 1024},
    "olmo3 theta": {**BARE["olmo3"], "rope_theta": 1e6, "num_hidden_layers": 7},
    "cwm depth": {**BARE["cwm"], "num_hidden_layers": 6, "rope_theta": 5.0},
}


def reading(raw: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return read_config(find_class(raw["architectures"][0], raw["model_type"]), raw)


def plain(value: Any) -> Any:
    """As JSON, without the older spelling that transformers keeps beside ``rope_type``."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key != "type"}
    return json.loads(json.dumps(value))


def assert_same(raw: dict[str, Any]) -> None:
    ours, theirs = fill_in(raw, measured_architecture(raw["model_type"]))["real"], reading(raw)
    for name in FIELDS:
        expected = size(theirs, name) if name in SIZES else getattr(theirs, name, None)
        assert plain(ours[name]) == plain(expected), name
    for name, value in ours["values"].items():
        if name not in BOOKKEEPING:
            assert value == getattr(theirs, name, None), name


def test_the_families_of_the_examples_are_measured() -> None:
    expected = {"llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2", "phi3", "gemma3_text", "gpt2", "cohere"}
    assert expected <= set(measured_types())
    assert expected == {raw["model_type"] for name, raw in CONFIGS.items() if name.endswith("/config")}


@pytest.mark.parametrize("name", CONFIGS)
def test_real_configs(name: str) -> None:
    assert_same(CONFIGS[name])


@pytest.mark.parametrize("name", BARE)
def test_nothing_but_the_type(name: str) -> None:
    assert_same(BARE[name])


@pytest.mark.parametrize("name", VARIANTS)
def test_what_files_of_the_field_do(name: str) -> None:
    assert_same(VARIANTS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_without_any_one_key(name: str) -> None:
    """What is absent from a file is the class's to fill in."""
    raw = CONFIGS[name]
    for key in set(raw) - {"model_type", "architectures"}:
        without = {other: value for other, value in raw.items() if other != key}
        try:
            reading(without)
        except NoReference:
            continue
        assert_same(without)


RENAMED = [
    (name, key, own)
    for name in measured_types()
    for key, own in measured_architecture(name)["real"].get("attribute_map", {}).items()
    if key in SIZES
]


@pytest.mark.parametrize(("name", "key", "own"), RENAMED)
@pytest.mark.parametrize("turned", [False, True])
def test_a_size_under_both_its_names(name: str, key: str, own: str, turned: bool) -> None:
    """Some files carry the common name beside the class's own; one of them counts, whichever stands first."""
    default = measured_architecture(name)["real"][key]
    given = [(key, default), (own, 2 * default)]  # a class may check its number of layers against a list
    assert_same({**BARE[name], **dict(reversed(given) if turned else given)})


def test_unknown_names_are_refused_with_what_comes_near() -> None:
    raw = CONFIGS["qwen3-0.6b/config"]
    for change, near in (({"hidden_act": "sillu"}, "silu"), ({"rope_scaling": {"rope_type": "yarm"}}, "yarn")):
        with pytest.raises(Unsupported) as caught:
            fill_in({**raw, **change}, measured_architecture("qwen3"))
        assert near in caught.value.why
        assert caught.value.code in ("unsupported.activation", "unsupported.rope_type")


def test_an_unmeasured_type() -> None:
    assert measured_architecture("no_such_type") is None
    assert measured_architecture("../static") is None


def test_the_known_names_are_those_of_transformers() -> None:
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert known_names() == {"activations": sorted(ACT2FN), "rope_types": sorted({"default", *ROPE_INIT_FUNCTIONS})}


@pytest.mark.parametrize("name", ["qwen2", "smollm3", "gemma3_text"])
def test_the_shipped_measurements_are_still_true(name: str) -> None:
    """Measured again, with the installed transformers; differences of rounding aside."""
    import sys

    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from measure_architectures import measure
    finally:
        sys.path.pop(0)
    shipped = dict(measured_architecture(name))
    again = json.loads(json.dumps(measure(name, shipped["architecture"]), sort_keys=True))
    del shipped["origin"]
    assert_measured_alike(shipped, again, name)


def assert_measured_alike(a: Any, b: Any, path: str) -> None:
    if isinstance(a, dict) and isinstance(b, dict):
        assert a.keys() == b.keys(), path
        for key, value in a.items():
            if key == "difference":
                assert max(value, b[key]) < 1e-4
            else:
                assert_measured_alike(value, b[key], f"{path}.{key}")
    else:
        assert a == b, path


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.endswith("/config")])
def test_the_spec_is_the_one_that_new_measures(name: str, measured) -> None:
    """The same architecture from the shipped measurement as from one of this very model."""
    raw = CONFIGS[name]
    shipped = fill_in(raw, measured_architecture(raw["model_type"]))
    own = measured(name.split("/")[0])
    architecture, model_type = raw["architectures"][0], raw["model_type"]
    static, probed = (derive(raw, architecture, model_type, found) for found in (shipped, own))
    first, second = dict(static.leaves()), dict(probed.leaves())
    assert first.keys() == second.keys()
    for path in first:
        # Of two expressions that are equal in the defaults, another model may tell which it is.
        if path not in ("rope.parameters", "rope.served", "rope.partial", "attention.head_dim"):
            assert first[path] == second[path], path
    assert plain(first.get("rope.parameters")) == plain(second.get("rope.parameters"))


WRONG = [
    None,
    True,
    0,
    -3,
    2.5,
    "x",
    [],
    [1],
    {},
    {"full_attention": 5},
    {"full_attention": {}, "sliding_attention": 5},
]


@pytest.mark.parametrize("name", ["gemma3_text", "smollm3", "qwen2", "phi3"])
def test_values_of_wrong_types_break_nothing(name: str) -> None:
    """What a stranger's file may hold: refused with a reason, or read."""
    raw = {**BARE[name], "use_sliding_window": True, "sliding_window": 8}
    keys = (*FIELDS, "rope_scaling", "rope_theta", "rope_local_base_freq", "max_window_layers", "no_rope_layers")
    for key in (*keys, "no_rope_layer_interval", "sliding_window_pattern", "use_sliding_window"):
        for value in WRONG:
            with contextlib.suppress(Unsupported):
                fill_in({**raw, key: value}, measured_architecture(name))
