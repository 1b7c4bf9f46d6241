"""The scope is computed, and a config that its class cannot make leaves the others alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from breadth.scope import find_scope, read_folder, why_left_out
from onboard.spec.kind import classify
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto


@pytest.fixture(scope="module")
def found():
    return find_scope()


def test_every_causal_lm_is_either_in_scope_or_left_out_with_a_reason(found):
    inside = {subject.name for subject in found.subjects}
    assert not inside & found.left_out.keys()
    assert inside | found.left_out.keys() == set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert all(len(reason) > 4 and "\n" not in reason for reason in found.left_out.values())


@pytest.mark.parametrize(
    "name", ["llama", "phi3", "gpt2", "bloom", "mpt", "ctrl", "mamba", "rwkv", "xglm", "gemma3_text"]
)
def test_decoders_are_in_scope(found, name):
    assert name in {subject.name for subject in found.subjects}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bert", "encoder"),
        ("roberta", "encoder"),
        ("electra", "encoder"),
        ("rembert", "encoder"),
        ("bart", "encoder-decoder"),
        ("marian", "encoder-decoder"),
        ("trocr", "encoder-decoder"),
        ("whisper", "encoder-decoder"),
        ("prophetnet", "encoder-decoder"),
        ("mixtral", "mixture of experts"),
        ("mllama", "vision"),
        ("git", "vision"),
        ("fuyu", "vision"),
        ("gemma3", "vision"),
        ("moshi", "audio"),
        ("musicgen", "no default"),
        ("gemma4_assistant", "draft"),
    ],
)
def test_what_is_no_dense_decoder_is_left_out(found, name, reason):
    assert reason in found.left_out[name]


def test_the_breadth_that_transformers_5_18_has(found):
    import transformers

    if transformers.__version__.startswith("5.18."):
        assert len(found.subjects) == 82
    assert len(found.subjects) >= 60


def test_a_subject_is_the_default_config_with_its_architecture(found):
    for subject in found.subjects:
        raw = json.loads(subject.config)
        assert raw["architectures"] == [subject.architecture]
        assert raw["model_type"] == found.aliases.get(subject.name, subject.name)
        assert classify(raw).kind == subject.kind == "dense"
    llama = json.loads(next(subject.config for subject in found.subjects if subject.name == "llama"))
    assert llama["hidden_size"] == CONFIG_MAPPING["llama"]().hidden_size  # also what equals its default is written


def test_an_alias_has_the_config_of_the_other(found):
    configs = {subject.name: subject.config for subject in found.subjects}
    assert found.aliases
    for name, other in found.aliases.items():
        assert configs[name] == configs[other]


def test_a_decoder_that_counts_its_own_layers_is_half_of_something():
    plain = {"architectures": ["XForCausalLM"], "model_type": "x", "num_hidden_layers": 2}
    assert why_left_out(plain) is None
    assert "decoder_layers" in why_left_out({**plain, "decoder_layers": 2})
    assert why_left_out({**plain, "decoder_bias": True}) is None


def test_a_folder_is_read_in_both_layouts(tmp_path: Path):
    raw = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8}
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    (tmp_path / "a.json").write_text("{ no JSON", encoding="utf-8")
    (tmp_path / "c.json").write_text(json.dumps({**raw, "num_experts": 8}), encoding="utf-8")
    a, b, c = read_folder(tmp_path)
    assert (a.name, a.kind, a.config) == ("a", "no JSON object", "{ no JSON")
    assert (b.name, b.architecture, b.kind, json.loads(b.config)) == ("b", "LlamaForCausalLM", "dense", raw)
    assert (c.name, c.kind) == ("c", "moe")


def test_a_folder_without_configs_or_with_a_name_twice_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="neither"):
        read_folder(tmp_path)
    (tmp_path / "a").mkdir()
    for path in (tmp_path / "a" / "config.json", tmp_path / "a.json"):
        path.write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"two files of one name.*: a"):
        read_folder(tmp_path)
