"""Expressions of equal value, and which of them is left when the config changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from onboard.reference.attention.expressions import (
    by_value,
    head_dim,
    num_heads,
    num_key_value_heads,
    scales,
    soft_caps,
)
from onboard.reference.attention.layers import layer_choices
from onboard.reference.attention.scores import slopes
from onboard.reference.attention.settle import settle, variants
from onboard.reference.roles import Unexplained
from onboard.spec.expressions import evaluate
from transformers import BartConfig, GPT2Config, LlamaConfig, MptConfig, PretrainedConfig

from .toys import LLAMA, config


def texts(found: Any) -> list[str]:
    return [one.text for one in found]


def test_numbers_of_heads() -> None:
    own = config()
    assert texts(num_heads(own)) == ["config.num_attention_heads"]
    assert texts(num_key_value_heads(own)) == ["config.num_key_value_heads", "config.num_attention_heads", "1"]


def test_a_field_of_another_name_has_its_canonical_one() -> None:
    own = GPT2Config(n_embd=40, n_head=4)
    assert texts(num_heads(own)) == ["config.num_attention_heads"]
    assert num_heads(own)[0].keys == ("n_head",)
    assert texts(head_dim(own))[0] == "config.hidden_size // config.num_attention_heads"


def test_the_heads_of_a_decoder_beside_an_encoder() -> None:
    own = BartConfig(d_model=40, encoder_attention_heads=4, decoder_attention_heads=8)
    assert {one.text: one.value for one in num_heads(own)} == {
        "config.num_attention_heads": 4,
        "config.decoder_attention_heads": 8,
    }
    assert {one.text: one.value for one in head_dim(own)}["config.hidden_size // config.decoder_attention_heads"] == 5


def test_a_field_of_a_nested_config() -> None:
    own = MptConfig(attn_config={"softmax_scale": 0.3})
    assert "config.attn_config.softmax_scale" in texts(scales(own, 16))


def test_the_size_of_a_head() -> None:
    share = "config.hidden_size // config.num_attention_heads"
    own = config(head_dim=None)
    assert {one.text: one.value for one in head_dim(own)} == {share: 10, f"config.head_dim or {share}": 10}
    own = config(head_dim=16)
    assert {one.text: one.value for one in head_dim(own)} == {
        "config.head_dim": 16,
        share: 10,
        f"config.head_dim or {share}": 16,
    }


@pytest.mark.parametrize("given", [None, 16])
def test_what_is_written_is_what_was_meant(given: int | None) -> None:
    """Expressions have the value that the spec reads in them."""
    own = config(head_dim=given)
    values = {**LLAMA, "head_dim": given}
    for one in (*head_dim(own), *num_heads(own), *num_key_value_heads(own)):
        assert evaluate(one.text, values) == (one.value if one.text != "config.head_dim" else given)
    undeclared = 'getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads'
    assert evaluate(undeclared, {"hidden_size": 40, "num_attention_heads": 4}) == 10
    assert evaluate(undeclared, {"hidden_size": 40, "num_attention_heads": 4, "head_dim": 16}) == 16


def test_scales_of_equal_value_stand_together() -> None:
    own = config(attention_multiplier=0.25, query_pre_attn_scalar=16, logit_scale=True)
    groups = [texts(group) for group in by_value(scales(own, 16), range(3)).values()]
    assert ["self.head_dim**-0.5", "config.attention_multiplier", "config.query_pre_attn_scalar**-0.5"] in groups
    assert ["self.head_dim**-0.5 / (layer_idx + 1)"] in groups


def test_caps_of_the_attention_come_first() -> None:
    own = config(final_logit_softcapping=5.0, attn_logit_softcapping=5.0)
    assert texts(soft_caps(own)) == ["config.attn_logit_softcapping", "config.final_logit_softcapping"]


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (8, [2.0**-power for power in range(1, 9)]),
        # arXiv:2108.12409's own code: every second slope of twice as many heads.
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (3, [2**-4, 2**-8, 2**-2]),
    ],
)
def test_slopes(heads: int, expected: list[float]) -> None:
    assert torch.allclose(slopes(heads, 8.0), torch.tensor(expected))


# Which layers.


def choices(flags: list[bool], **fields: Any) -> list[str]:
    named = config(num_hidden_layers=len(flags), **fields)
    return [one.text for one in layer_choices(dict(enumerate(flags)), len(flags), named)]


SLIDING, FULL = "sliding_attention", "full_attention"


def test_every_layer() -> None:
    assert choices([True, True]) == ["True"]
    assert choices([True, True], layer_types=[FULL, FULL]) == ["True", f'config.layer_types[layer_idx] == "{FULL}"']
    assert choices([False, False]) == []


def test_layers_of_a_kind() -> None:
    types = [SLIDING, FULL, SLIDING]
    assert choices([True, False, True], layer_types=types) == [f'config.layer_types[layer_idx] == "{SLIDING}"']
    assert choices([False, True, False], layer_types=types) == [f'config.layer_types[layer_idx] == "{FULL}"']
    assert choices([True, True, False], layer_types=types) == []


def test_layers_that_a_list_marks() -> None:
    assert choices([True, False], no_rope_layers=[1, 0]) == ["bool(config.no_rope_layers[layer_idx])"]
    assert choices([False, True], no_rope_layers=[1, 0]) == ["not config.no_rope_layers[layer_idx]"]
    assert choices([True, False], attention_layers=["local", "global"]) == [
        'config.attention_layers[layer_idx] == "local"'
    ]


def test_kinds_of_layers_before_other_lists() -> None:
    found = choices([True, False], marks=[1, 0], layer_types=[SLIDING, FULL])
    assert found == [f'config.layer_types[layer_idx] == "{SLIDING}"', "bool(config.marks[layer_idx])"]


def test_a_list_that_holds_only_where_there_is_a_window() -> None:
    slides = f'config.layer_types[layer_idx] == "{SLIDING}"'
    types = [SLIDING, FULL]
    assert choices([True, True], layer_types=types, sliding_window=None)[1:] == [
        f"config.sliding_window is None or {slides}",
        f'config.sliding_window is None or config.layer_types[layer_idx] == "{FULL}"',
    ]
    assert choices([True, False], layer_types=types, sliding_window=6) == [
        slides,
        f"config.sliding_window is None or {slides}",
    ]


def test_a_kind_that_is_no_plain_word() -> None:
    with pytest.raises(Unexplained, match="no plain word"):
        choices([True, False], kinds=['a" or exit() or "', "b"])


def test_choices_hold_what_the_spec_reads_in_them() -> None:
    fields = {"layer_types": [SLIDING, FULL, SLIDING], "no_rope_layers": [1, 0, 1], "sliding_window": 6}
    flags = [True, False, True]
    for text in choices(flags, **fields):
        assert [evaluate(text, fields, index) for index in range(3)] == flags


# What is left.


def test_what_was_right_in_every_run_is_left() -> None:
    first = {"scale": {"1.0": (), "config.a": ("a",), "config.b": ("b",)}, "heads": {"config.n": ("n",)}}
    second = {"scale": {"config.b": ("b",), "config.a": ("a",)}}
    assert settle([first, second]) == {"scale": {"config.a": ("a",), "config.b": ("b",)}, "heads": {"config.n": ("n",)}}


def changed(choices: Any, own: PretrainedConfig, **fields: Any) -> list[list[dict[str, Any]]]:
    return [
        [{key: value for key, value in change.items() if fields.get(key, ...) != value} for change in changes]
        for changes in variants(choices, fields, own)
    ]


def test_nothing_changes_where_one_is_left() -> None:
    assert changed({"heads": {"config.n": ("n",)}}, config(), n=4) == []


def test_the_fields_that_tell_them_apart_change() -> None:
    two = {"scale": {"1.0": (), "config.a": ("a",)}}
    assert changed(two, config(), a=1.0, b=2.0) == [[{"a": 1.5}, {"a": 0.5}]]


def test_a_window_goes_with_the_layers_that_need_it() -> None:
    two = {"layers": {"x": ("layer_types",), "y": ("layer_types", "sliding_window")}}
    found = changed(two, config(), sliding_window=6, layer_types=[SLIDING, FULL])
    assert found == [[{"sliding_window": None}, {"sliding_window": None, "layer_types": [FULL, FULL]}]]


def test_layers_of_one_kind_become_two() -> None:
    two = {"layers": {"True": (), "x": ("layer_types",)}}
    assert changed(two, config(), layer_types=[FULL] * 3) == [[{"layer_types": [FULL, SLIDING, FULL]}]]


def test_more_heads_are_wider() -> None:
    two = {"groups": {"config.num_attention_heads": ("num_attention_heads",), "4": ()}}
    found = changed(two, LlamaConfig(**LLAMA), num_attention_heads=4, hidden_size=40)
    assert {"num_attention_heads": 8, "hidden_size": 80} in found[0]


def test_layers_by_their_place() -> None:
    """Only where no list of the config says it."""
    assert choices([False, True, True]) == ["layer_idx > 0"]
    assert choices([False, False, True]) == ["layer_idx == config.num_hidden_layers - 1"]
    assert choices([False, True]) == ["layer_idx > 0", "layer_idx == config.num_hidden_layers - 1"]
    types = [FULL, SLIDING, SLIDING]
    assert choices([False, True, True], layer_types=types) == [f'config.layer_types[layer_idx] == "{SLIDING}"']
    assert choices([True, False, True, True]) == []
