"""A plan passes `check --strict` whatever the layout, keeps the token slots, and refuses families that opt out."""

from __future__ import annotations

import ast
import math

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onboard.errors import Unsupported, UsageError
from onboard.packing.checking import check
from onboard.packing.editing import as_yaml
from onboard.packing.families import FAMILIES, Known
from onboard.packing.planning import Request, as_python, plan

from .rule_cases import GEMMA_VL, GLM, LLAVA, PLAIN_MODEL, QWEN_NEXT, WITH_MTP, model

VLM = model("Qwen3VLForConditionalGeneration", "vlm")
MOE = model("Qwen3MoeForCausalLM", "moe", num_experts=64)
MODELS = (PLAIN_MODEL, VLM, MOE, WITH_MTP)


@st.composite
def layouts(draw) -> Request:
    """Any layout that can exist: whole models in the world, experts that spread evenly."""
    tp, cp, pp = (draw(st.integers(1, 8)) for _ in range(3))
    known = draw(st.sampled_from(MODELS))
    ep = draw(st.sampled_from((1, 2, 4, 8))) if known is MOE else 1
    packing = "in-batch" if known is VLM else draw(st.sampled_from((None, "offline", "in-batch")))
    return Request(
        known,
        seq_length=draw(st.integers(1, 40_000)),
        global_batch_size=draw(st.integers(1, 600)),
        tp=tp,
        cp=cp,
        pp=pp,
        ep=ep,
        sequence_parallel=draw(st.booleans()),
        micro_batch_size=draw(st.none() | st.integers(1, 9)),
        world_size=draw(st.none() | st.integers(1, 8).map(lambda times: times * tp * cp * pp * ep))
        if ep == 1
        else tp * cp * pp * ep,
        packing=packing,
        pack_size=draw(st.none() | st.integers(1, 70_000)),
        dataset=draw(st.sampled_from(("hf_sft", "energon", "mock_vlm"))),
        peft=draw(st.sampled_from((None, "lora"))),
    )


@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(layouts())
def test_every_plan_passes_the_strict_check(request):
    planned = plan(request)
    verdict = check(yaml.safe_load(as_yaml(planned.mapping)), request.known)
    assert verdict.findings == ()
    assert verdict.exit_status(strict=True) == 0
    ast.parse(as_python(planned))
    batch, length = planned.mapping["train"]["global_batch_size"], planned.mapping["model"]["seq_length"]
    asked = request.global_batch_size * request.seq_length
    # No tokens are lost, and what is added is rounding: of the length to its multiple, of the batch to whole ranks.
    unit = planned.mapping["train"]["micro_batch_size"] * planned.computed["data_parallel_size"]
    multiple = planned.computed["pad_multiple"]
    assert (
        asked <= batch * length < (request.global_batch_size + unit) * (request.seq_length + multiple) + length * unit
    )


def test_multiples_of_context_and_sequence_parallel():
    planned = plan(Request(PLAIN_MODEL, 8192, 32, tp=6, cp=4, sequence_parallel=True))
    specs = planned.mapping["dataset"]["offline_packing_specs"]
    assert specs["pad_seq_to_mult"] == math.lcm(2 * 4, 4 * 6) == 24
    assert planned.mapping["model"]["seq_length"] == specs["packed_sequence_size"] == 8208
    assert planned.mapping["model"]["calculate_per_token_loss"] is True


@pytest.mark.parametrize(("pack", "rows"), [(2048, 32), (4096, 16), (8192, 8)])
def test_token_slots_stay_when_batch_and_pack_size_trade(pack, rows):
    planned = plan(Request(PLAIN_MODEL, 2048, 32, pack_size=pack))
    assert planned.mapping["train"]["global_batch_size"] == rows
    assert planned.computed["token_slots_per_step"] == 2048 * 32
    assert planned.mapping["dataset"]["offline_packing_specs"].get("max_single_sequence_length") == (
        2048 if pack > 2048 else None
    )


def test_kind_decides_the_packing():
    assert plan(Request(PLAIN_MODEL, 4096, 8)).packing == "offline"
    vlm = plan(Request(VLM, 4096, 8))
    assert (vlm.packing, vlm.mapping["train"]["micro_batch_size"]) == ("in-batch", 2)


def test_multi_token_prediction_is_turned_off_and_said():
    planned = plan(Request(WITH_MTP, 4096, 8))
    assert planned.mapping["model"]["mtp_num_layers"] is None
    assert any("multi-token" in note for note in planned.notes)


def test_fixed_shapes_for_stages_and_experts():
    def pads(**layout):
        return plan(Request(MOE, 4096, 8, **layout)).mapping["dataset"]["dataset_kwargs"]["pad_to_max_length"]

    assert (pads(), pads(pp=2), pads(ep=2, world_size=2)) == (False, True, True)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (Request(QWEN_NEXT, 4096, 8), "Qwen3-Next family opts out (full fine-tuning)"),
        (Request(GLM, 4096, 8, peft="lora"), "GLM-4.5"),
        (Request(GEMMA_VL, 4096, 8), "Gemma3-VL"),
        (Request(LLAVA, 4096, 8, pp=2), "LLaVA"),
        (Request(VLM, 4096, 8, packing="offline"), "cannot be packed offline"),
        (Request(Known("whisper", "unsupported", is_="speech"), 4096, 8), "speech"),
    ],
)
def test_refuses_with_the_reason(request_, says):
    with pytest.raises(Unsupported) as error:
        plan(request_)
    assert says in error.value.what
    assert error.value.exit_status == 3


def test_a_family_is_not_refused_where_its_opt_out_does_not_hold():
    assert plan(Request(QWEN_NEXT, 4096, 8, peft="lora")).packing == "offline"
    assert plan(Request(LLAVA, 4096, 8)).packing == "in-batch"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_is_refused_under_its_own_opt_out(family):
    packing = family.opt_outs[0].packing
    known = Known(family.name, "dense" if packing == "offline" else "vlm", (family,))
    with pytest.raises(Unsupported, match=family.name):
        plan(Request(known, 4096, 8, pp=2, packing=packing))


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ({"tp": 3, "world_size": 8}, "3*1*1 = 3"),
        ({"ep": 2}, "no experts"),
        ({"ep": 3, "known": MOE, "world_size": 3}, "64 experts"),
        ({"ep": 4, "known": MOE, "world_size": 2}, "does not divide"),
        ({"known": Known("org/name", by_name="offline")}, "config.json was not read"),
    ],
)
def test_a_layout_that_cannot_exist_is_a_usage_error(layout, says):
    with pytest.raises(UsageError) as error:
        plan(Request(**{"known": PLAIN_MODEL, "seq_length": 4096, "global_batch_size": 8, **layout}))
    assert says in error.value.why


def test_python_overrides_set_what_the_yaml_says():
    planned = plan(Request(PLAIN_MODEL, 2048, 32, cp=2, pack_size=8192))
    set_ = {}

    class Section:
        def __init__(self, path):
            self.__dict__["path"] = path

        def __getattr__(self, name):
            return Section(f"{self.path}.{name}" if self.path else name)

        def __setattr__(self, name, value):
            set_[f"{self.path}.{name}"] = value

    code = as_python(planned).replace("from megatron.bridge.data.packing import PackedSequenceSpecs", "")
    code = code.replace("{**(cfg.dataset.dataset_kwargs or {}), **", "{**").replace("}}", "}}")
    exec(code, {"cfg": Section(""), "PackedSequenceSpecs": dict})
    for section in ("train", "model", "ddp"):
        for key, value in planned.mapping[section].items():
            assert set_[f"{section}.{key}"] == value
    for key, value in planned.mapping["dataset"].items():
        assert key == "kind" or set_[f"dataset.{key}"] == value
