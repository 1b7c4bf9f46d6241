"""The rules agree with a walk through Megatron-Bridge's validation, and no value ends in a traceback."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onboard.errors import UsageError
from onboard.packing.checking import check
from onboard.packing.rules import Change, apply
from onboard.packing.settings import PATHS

from .rule_cases import CASES, IN_BATCH, OFFLINE, PLAIN, PRETRAIN
from .test_fixing import configurations
from .walk import first_error

SLOW = [HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large]


@settings(max_examples=3000, deadline=None, suppress_health_check=SLOW)
@given(configurations())
def test_first_error_is_that_of_the_walk(mapping):
    verdict = check(mapping).as_json()
    expected = first_error(mapping)
    assert verdict["first_error"] == expected
    assert verdict["verdict"] == ("ok" if expected is None else "error")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_cases_agree_with_the_walk(case):
    for mapping in (case.fires, case.passes):
        if "do_validation" not in mapping["dataset"]:
            assert check(mapping).first_error == first_error(mapping)


def test_a_grid_agrees_with_the_walk():
    """Every kind under every layout of up to 8 processes, with one or both batch sizes and four lengths."""
    count = errors = 0
    kinds = (OFFLINE, IN_BATCH, PLAIN, PRETRAIN, {**IN_BATCH, "dataset": {**IN_BATCH["dataset"], "kind": "energon"}})
    parallel = itertools.product((1, 2, 4), (1, 2, 3), (1, 2), (True, False), (None, 2))
    for base, layout in itertools.product(kinds, parallel):
        for length, micro, token_loss in itertools.product((4096, 4092, 4094, 4095), (1, 2), (True, False)):
            tp, cp, pp, sequence_parallel, eval_cp = layout
            mapping = {
                **base,
                "world_size": 24,
                "train": {"micro_batch_size": micro, "global_batch_size": 48},
                "model": {
                    "seq_length": length,
                    "tensor_model_parallel_size": tp,
                    "context_parallel_size": cp,
                    "pipeline_model_parallel_size": pp,
                    "sequence_parallel": sequence_parallel,
                    "eval_context_parallel_size": eval_cp,
                    "calculate_per_token_loss": token_loss,
                },
                "dataset": {**base["dataset"], "seq_length": length},
            }
            expected = first_error(mapping)
            assert check(mapping).first_error == expected, mapping
            count, errors = count + 1, errors + (expected is not None)
    assert count == 5760
    assert 0 < errors < count


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=500, deadline=None, suppress_health_check=SLOW)
@given(st.sampled_from((OFFLINE, IN_BATCH)), st.dictionaries(st.sampled_from(sorted(PATHS.values())), JSON, max_size=4))
def test_any_value_is_read_or_refused(base, values):
    mapping = apply(base, [Change(path, value) for path, value in values.items() if path != "hf_model"])
    try:
        verdict = check(mapping)
    except UsageError:
        return
    json.dumps(verdict.as_json(), default=str)
