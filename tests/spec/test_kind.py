"""A config.json is classified by its properties, and the evidence is what decided."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onboard.spec.keys import ALIASES, Found, find
from onboard.spec.kind import Kind, classify

CONFIGS = Path(__file__).parents[3] / "shared" / "configs"
LM = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512, "intermediate_size": 128}
TOWER = {"hidden_size": 32, "patch_size": 14, "image_size": 224, "num_hidden_layers": 2}


def lm(architecture: str, model_type: str = "unheard_of", **keys: Any) -> dict[str, Any]:
    """A text decoder's config with the usual keys."""
    return {"architectures": [architecture], "model_type": model_type, **LM, **keys}


# The shapes of published configs whose files are not at hand: what remains when everything without meaning for the kind
# is left out. One a line: its name, the kind (or what it is instead), the config.
CASES = [json.loads(line) for line in Path(__file__).with_name("kind_cases.jsonl").read_text().splitlines()]


def answer(kind: Kind) -> str | None:
    return kind.is_ if kind.kind == "unsupported" else kind.kind


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_published_shapes(case: dict[str, Any]) -> None:
    expected, config = case["expected"], case["config"]
    before = copy.deepcopy(config)
    kind = classify(config)
    assert answer(kind) == expected, kind.evidence
    assert kind.evidence, "an answer without evidence"
    assert (kind.reason is None) == (kind.is_ is None) == (kind.kind != "unsupported")
    assert config == before, "classify must not change its argument"


def labelled() -> Iterator[tuple[str, str]]:
    if not (CONFIGS / "LABELS.tsv").exists():
        return
    for line in (CONFIGS / "LABELS.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        file, kind = line.split("\t")[:2]
        yield file, "unsupported" if kind == "other" else kind


LABELLED = list(labelled())
# The config of Molmo shows no trace of images: its model_type is all that tells.
TABLE_DECIDES = {"vlm/MolmoForCausalLM.json"}
needs_configs = pytest.mark.skipif(not LABELLED, reason=f"{CONFIGS} does not exist: real config files are not here")


def load(file: str) -> dict[str, Any]:
    return json.loads((CONFIGS / file).read_text(encoding="utf-8"))


@needs_configs
@pytest.mark.parametrize("use_table", [True, False], ids=["table", "properties"])
@pytest.mark.parametrize(("file", "expected"), LABELLED or [("", "")])
def test_real_configs(file: str, expected: str, use_table: bool) -> None:
    if not use_table and file in TABLE_DECIDES:
        pytest.skip("decided by the table of model types, by design")
    kind = classify(load(file), use_table=use_table)
    assert kind.kind == expected, kind
    assert all(reaches(load(file), piece.key) for piece in kind.evidence), kind.evidence


@needs_configs
@pytest.mark.parametrize(("file", "expected"), LABELLED or [("", "")])
def test_names_of_real_configs_do_not_decide(file: str, expected: str) -> None:
    """With the model_type and the stem of the architecture's name unknown, the answer is the same."""
    if file in TABLE_DECIDES:
        pytest.skip("decided by the table of model types, by design")
    config = load(file)
    config["model_type"] = "unheard_of"
    name = config["architectures"][0]
    start = max(name.find("For"), 0) or max(name.find("LMHead"), 0) or max(name.find("Model"), 0)
    config["architectures"] = ["Unheard" + name[start:] if start else name]
    assert classify(config).kind == expected


def reaches(config: Any, path: str) -> bool:
    """Whether a dotted path with [places] leads to something in the config."""
    for key in path.split("."):
        name, _, place = key.partition("[")
        if not isinstance(config, dict) or name not in config:
            return False
        config = config[name][int(place[:-1])] if place else config[name]
    return True


@pytest.mark.parametrize(
    ("config", "key", "changed", "expected"),
    [
        (lm("MixtralForCausalLM", num_local_experts=8), "num_local_experts", 0, "dense"),
        (lm("FooForCausalLM", vision_config=TOWER), "vision_config", None, "dense"),
        (lm("DogeForCausalLM", is_moe=False, num_experts=16), "is_moe", True, "moe"),
        (lm("FooForCausalLM", is_encoder_decoder=True), "is_encoder_decoder", False, "dense"),
        (lm("FooForCausalLM", draft_vocab_size=8), "draft_vocab_size", None, "dense"),
        (lm("FooForCausalLM", is_causal=False), "is_causal", True, "dense"),
        (lm("FooForConditionalGeneration", audio_config={"d_model": 8}), "audio_config", None, "dense"),
        (lm("MolmoForCausalLM", "molmo"), "model_type", "unheard_of", "dense"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_evidence_is_what_decided(config: dict[str, Any], key: str, changed: Any, expected: str) -> None:
    before = classify(config)
    assert key in [piece.key for piece in before.evidence]
    assert answer(before) != expected
    assert answer(classify({**config, key: changed})) == expected


def test_evidence_reads_well() -> None:
    config = {"architectures": ["FooForCausalLM"], "text_config": {**LM, "num_experts": 128}}
    kind = classify(config)
    assert [(e.key, e.value, e.says) for e in kind.evidence] == [
        ("architectures[0]", "FooForCausalLM", "names a causal language model"),
        ("text_config.num_experts", 128, "counts 128 experts: a mixture of experts"),
    ]
    assert (kind.architecture, kind.model_type, kind.text_config) == ("FooForCausalLM", None, ("text_config",))


def test_the_table_says_that_it_decided() -> None:
    kind = classify(lm("BertModel", "bert-generation-of-none"))
    assert kind.is_ == "base model without a language-modelling head"
    kind = classify(lm("DistilBertModel", "distilbert"))
    assert kind.is_ == "encoder only"
    assert "transformers" in kind.evidence[-1].says
    assert kind.evidence[-1].key == "model_type"


@pytest.mark.parametrize(
    ("config", "path"),
    [
        (lm("FooForCausalLM"), ()),
        (lm("FooForCausalLM", text_config=None), ()),
        (lm("FooForCausalLM", text_config={}), ()),
        (lm("FooForCausalLM", text_config=[LM]), ()),
        (lm("FooForCausalLM", text_config=LM), ("text_config",)),
        ({"architectures": ["Foo"], "llm_cfg": LM, "vision_tower_cfg": TOWER}, ("llm_cfg",)),
        ({"architectures": ["Foo"], "thinker_config": {"text_config": LM}}, ("thinker_config", "text_config")),
    ],
)
def test_where_the_decoder_is(config: dict[str, Any], path: tuple[str, ...]) -> None:
    assert classify(config).text_config == path


# --- hostile input -------------------------------------------------------------------------------------------------

NUMBERS = st.one_of(st.integers(), st.just(10**400), st.floats())
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8), st.just("FooForCausalLM"))
NAMES = st.sampled_from(
    [
        *sorted({key for keys in ALIASES.values() for key in keys}),
        "architectures",
        "model_type",
        "auto_map",
        "text_config",
        "thinker_config",
        "vision_config",
        "audio_config",
        "is_encoder_decoder",
        "encoder",
        "decoder",
        "encoder_layers",
        "decoder_layers",
        "is_moe",
        "moe_layer_freq",
        "mlp_only_layers",
        "mask_token_id",
        "block_size",
        "image_token_id",
        "image_size",
        "num_mel_bins",
        "is_causal",
        "first_k_dense_replace",
        "hybrid_override_pattern",
        "layers_block_type",
        "ffn_config",
        "_class_name",
        "peft_type",
        "AutoModelForCausalLM",
        "AutoModel",
        "id2label",
        "quantization_config",
        "diffusion",
        "mm_vision_tower",
    ]
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(NAMES, st.text(max_size=6)), inner, max_size=6)
    ),
    max_leaves=12,
)
HEADS = st.one_of(JSON, st.just(["FooForCausalLM"]), st.just(["FooModel"]), st.just(["FooForConditionalGeneration"]))


@settings(max_examples=300, deadline=None)
@given(config=st.dictionaries(st.one_of(NAMES, st.text(max_size=6)), JSON, max_size=12), heads=HEADS)
def test_no_json_object_makes_it_raise(config: dict[str, Any], heads: Any) -> None:
    for use_table in (True, False):
        kind = classify({"architectures": heads, **config}, use_table=use_table)
        assert kind.evidence
        assert all(isinstance(piece.says, str) and piece.says for piece in kind.evidence)
        assert kind.kind in ("dense", "moe", "vlm", "unsupported")


@pytest.mark.parametrize(
    "architectures", ["", [], {}, None, [1], [None], [[]], [""], 7, True, ["\x00"], ["x" * 100_000]]
)
def test_architectures_of_any_type(architectures: Any) -> None:
    kind = classify({**LM, "architectures": architectures})
    assert kind.kind == "unsupported"
    assert kind.is_ in ("no architecture", "base model without a language-modelling head")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, -3, True, "8", [[8]], {"a": 8}, [None, "8"]])
def test_counts_of_any_type(value: Any) -> None:
    kind = classify(lm("FooForCausalLM", num_experts=value, num_hidden_layers=value, mlp_only_layers=[0]))
    assert kind.kind == "dense"


def test_deep_nesting() -> None:
    config: dict[str, Any] = {"num_experts": 2}
    listed: Any = 1
    for _ in range(5_000):
        config, listed = {"text_config": config}, [listed]
    assert classify({"architectures": ["FooForCausalLM"], **config, "num_experts": listed}).kind == "dense"
    assert classify({"architectures": listed}).is_ == "no architecture"


# --- keys ----------------------------------------------------------------------------------------------------------


def test_find_gives_the_spelling_that_matched() -> None:
    assert find({"n_embd": 64}, "hidden_size") == Found("n_embd", 64)
    assert find({"d_model": 8, "hidden_size": 64}, "hidden_size") == Found("hidden_size", 64)
    assert find({"num_experts": 0}, "num_experts") == Found("num_experts", 0)


def test_null_is_absent() -> None:
    assert find({"n_inner": None}, "intermediate_size") is None
    assert find({"hidden_size": None, "n_embd": 64}, "hidden_size") == Found("n_embd", 64)


def test_an_unknown_field_is_our_mistake() -> None:
    with pytest.raises(KeyError):
        find({}, "no_such_field")


def test_each_table_opens_with_its_canonical_name() -> None:
    assert all(keys[0] == name and len(set(keys)) == len(keys) for name, keys in ALIASES.items())


STACK = {"hidden_size": 32, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("parts", "path"),
    [
        ({"decoder_config": STACK}, ("decoder_config",)),
        ({"decoder_config": STACK, "global_config": STACK}, ()),
        ({"decoder_config": STACK, "global_config": {"hidden_size": 32}}, ("decoder_config",)),
        ({"decoder_config": STACK, "vision_config": TOWER}, ("decoder_config",)),
        ({"decoder_config": STACK, "backbone": TOWER}, ("decoder_config",)),
        ({"text_config": STACK, "global_config": STACK}, ("text_config",)),
    ],
)
def test_a_decoder_is_the_model_unless_text_runs_through_other_stacks(
    parts: dict[str, Any], path: tuple[str, ...]
) -> None:
    assert classify({"architectures": ["NewForCausalLM"], "vocab_size": 512, **parts}).text_config == path
