"""Expressions of config fields: what generated code will compute, without running code."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onboard.spec.expressions import evaluate

CONFIG = {"hidden_size": 40, "heads": 4, "window": None, "types": ["local", "global"], "scale": 0.5}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("config.hidden_size // config.heads", 10),
        ("4 * config.hidden_size", 160),
        ("config.hidden_size**0.5", 40**0.5),
        ("1e-05", 1e-5),
        ("-config.scale / 2", -0.25),
        ("config.types[layer_idx] == 'local'", False),
        ("config.window is None or config.types[layer_idx] == 'local'", True),
        ("not config.window", True),
        ("bool(config.types[layer_idx % 2])", True),
        ("config.heads if config.window else 1", 1),
    ],
)
def test_value(expression: str, expected: object) -> None:
    assert evaluate(expression, CONFIG, layer_idx=1) == expected


@pytest.mark.parametrize(
    "expression",
    ["__import__('os')", "config.hidden_size.real", "open('x')", "other.field", "[1]", "lambda: 1", "config", "(1, 2)"],
)
def test_anything_else_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match="not understood"):
        evaluate(expression, CONFIG)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(KeyError, match="absent"):
        evaluate("config.absent", CONFIG)


@given(st.integers(1, 999), st.integers(1, 999))
def test_it_agrees_with_python(first: int, second: int) -> None:
    for operator in ("+", "-", "*", "/", "//", "%"):
        text = f"config.first {operator} config.second"
        assert evaluate(text, {"first": first, "second": second}) == eval(f"{first} {operator} {second}")
