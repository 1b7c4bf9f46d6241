"""Families are recognised by config.json, or by name where there is none; nearest relatives are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onboard.errors import HubError
from onboard.packing.families import FAMILIES, from_config, from_name, look_up
from onboard.packing.models import model_packing
from onboard.pipeline.inspecting import inspect_source
from onboard.spec.kind import classify

EXAMPLES = Path(__file__).parents[2] / "examples"
OFFLINE = HubError("cannot read it", "there is no network", "connect")

BY_CONFIG = (
    ("Qwen3-Next", "Qwen3NextForCausalLM", "qwen3_next"),
    ("GLM-4.5", "Glm4MoeForCausalLM", "glm4_moe"),
    ("DeepSeek-V4", "DeepseekV4ForCausalLM", "deepseek_v4"),
    ("Qwen3.5-VL", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
    ("Gemma3-VL", "Gemma3ForConditionalGeneration", "gemma3"),
    ("Gemma4-VL", "Gemma4ForConditionalGeneration", "gemma4"),
    ("GLM-4.5V", "Glm4vMoeForConditionalGeneration", "glm4v_moe"),
    ("Kimi-K2.5-VL", "KimiK25ForConditionalGeneration", "kimi_k25"),
    ("EXAONE-4.5", "Exaone4_5_ForConditionalGeneration", "exaone4_5"),
    ("Nemotron-Nano-v2-VL", "NemotronH_Nano_VL_V2", "NemotronH_Nano_VL_V2"),
    ("Qwen3-Omni", "Qwen3OmniMoeForConditionalGeneration", "qwen3_omni_moe"),
    ("Nemotron-Omni", "NemotronH_Nano_Omni_Reasoning_V3", "nemotron_h_omni"),
    ("Qwen2.5-Omni", "Qwen2_5OmniForConditionalGeneration", "qwen2_5_omni"),
    ("Gemma2", "Gemma2ForCausalLM", "gemma2"),
    ("LLaVA", "LlavaNextForConditionalGeneration", "llava_next"),
    ("Qwen2-Audio", "Qwen2AudioForConditionalGeneration", "qwen2_audio"),
)
NAMES = {
    "Qwen3-Next": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "GLM-4.5": "zai-org/GLM-4.5-Air",
    "DeepSeek-V4": "deepseek-ai/DeepSeek-V4",
    "Qwen3.5-VL": "Qwen/Qwen3.5-35B-A3B",
    "Ministral3-VL": "mistralai/Ministral-3-8B-Instruct-2512",
    "Gemma3-VL": "google/gemma-3-4b-it",
    "Gemma4-VL": "google/gemma-4-26b-a4b-it",
    "GLM-4.5V": "zai-org/GLM-4.5V",
    "Kimi-K2.5-VL": "moonshotai/Kimi-K2.5",
    "EXAONE-4.5": "LGAI-EXAONE/EXAONE-4.5-33B",
    "Nemotron-Nano-v2-VL": "nvidia/Nemotron-Nano-12B-v2-VL-BF16",
    "Qwen3-Omni": "Qwen/Qwen3-Omni-30B-A3B-Instruct",
    "Nemotron-Omni": "nvidia/Nemotron-3-Nano-Omni-30B",
    "Qwen2.5-Omni": "Qwen/Qwen2.5-Omni-7B",
    "Gemma2": "google/gemma-2-9b-it",
    "LLaVA": "llava-hf/llava-1.5-7b-hf",
    "Qwen2-Audio": "Qwen/Qwen2-Audio-7B-Instruct",
}


def names(known) -> list[str]:
    return [family.name for family in known.families]


@pytest.mark.parametrize(("name", "architecture", "model_type"), BY_CONFIG)
def test_by_config(name, architecture, model_type):
    assert names(from_config("x", {"architectures": [architecture], "model_type": "other"}, "dense")) == [name]
    assert names(from_config("x", {"model_type": model_type}, "dense")) == [name]


def test_ministral_is_told_from_other_models_of_its_class():
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    assert names(from_config("x", {**config, "text_config": {"model_type": "ministral3"}}, "vlm")) == ["Ministral3-VL"]
    assert names(from_config("x", {**config, "text_config": {"model_type": "mistral"}}, "vlm")) == []


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_by_name_where_there_is_no_config(family):
    known = from_name(NAMES[family.name], OFFLINE)
    assert names(known) == [family.name]
    assert (known.kind, known.by_name) == (None, "there is no network")


@pytest.mark.parametrize(
    "name",
    [
        *("Qwen/Qwen3-8B", "Qwen/Qwen3-VL-8B", "google/gemma-3-1b-it", "google/gemma-3n-E4B", "zai-org/GLM-4-9B"),
        *("deepseek-ai/DeepSeek-V3", "meta-llama/Llama-3.2-1B", "moonshotai/Kimi-K2-Instruct", "mistralai/Mistral-7B"),
        *("nvidia/Nemotron-Nano-9B-v2", "LGAI-EXAONE/EXAONE-4.0-32B"),
    ],
)
def test_nearest_names_are_of_no_family(name):
    assert names(from_name(name, OFFLINE)) == []


def test_multi_token_prediction_vocabulary_and_experts():
    inner = {"num_nextn_predict_layers": 2, "vocab_size": 99, "n_routed_experts": 8}
    known = from_config(
        "x",
        {"eos_token_id": [1, 5], "text_config": inner},
        "moe",
    )
    assert (known.mtp_key, known.mtp_layers) == ("num_nextn_predict_layers", 2)
    assert (known.vocab_size, known.eos_ids, known.experts) == (99, (1, 5), 8)
    assert from_config("x", {"num_nextn_predict_layers": 0}, "moe").mtp_layers == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
KEYS = ("architectures", "model_type", "text_config", "num_nextn_predict_layers", "vocab_size", "eos_token_id")


@given(st.dictionaries(st.sampled_from(KEYS), JSON))
def test_any_config_is_read(config):
    from_config("x", config, "dense")
    packing = model_packing(config, classify(config))
    if packing is not None:
        json.dumps(packing.as_json())
        assert packing.line


def test_look_up_reads_a_local_model_and_falls_back_to_the_name(tmp_path, monkeypatch):
    assert look_up(str(EXAMPLES / "qwen3-0.6b")).vocab_size == 151936
    monkeypatch.chdir(tmp_path)
    import onboard.facts

    def refuse(*args, **kwargs):
        raise OFFLINE

    monkeypatch.setattr(onboard.facts, "read_facts", refuse)
    assert names(look_up("zai-org/GLM-4.5")) == ["GLM-4.5"]


def test_what_inspect_says():
    inspection = inspect_source(str(EXAMPLES / "qwen3-0.6b"), revision=None)
    assert inspection.packing.line == "offline or in-batch"
    assert inspection.as_json()["packing"] == {
        "natural": "offline",
        "offline": {"takes": True, "against": []},
        "in_batch": {"takes": True, "against": []},
        "mtp": None,
    }


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "num_nextn_predict_layers": 1},
            "in-batch, not offline (GLM-4.5 opts out, off in the recipes of Megatron-Bridge), multi-token prediction "
            "off (num_nextn_predict_layers)",
        ),
        (
            {"architectures": ["Qwen3VLForConditionalGeneration"], "vision_config": {"depth": 1}, "text_config": {}},
            "in-batch, not offline (images are not part of the token ids that offline packing joins)",
        ),
    ],
)
def test_lines(config, line):
    packing = model_packing(config, classify(config))
    assert packing.line == line
    assert packing.sentences


def test_no_decoder_packs_nothing():
    config = {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}
    assert model_packing(config, classify(config)) is None
