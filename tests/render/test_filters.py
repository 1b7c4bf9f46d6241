"""The filters make a stranger's value safe where it stands: in Python, in prose, in a table."""

from __future__ import annotations

import ast
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from onboard.render.environment import cell, environment, literal, on_self, templates_folder, text, tuple_literal

NASTY = [
    "'",
    '"',
    "\\",
    "\n",
    "\r\n",
    "\x00",
    "\x1b[31m",
    "\u2028",
    "\ud800",
    "{{ 1 }}",
    "{% raw %}",
    '"""',
    "é",
    "\U0001f600",
    "\u202e",
]
strings = st.one_of(st.text(), st.sampled_from(NASTY), st.text(st.sampled_from("'\"\\{}%#\n\t|`<>&;")))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | strings,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(strings, inner, max_size=4),
    max_leaves=12,
)


def evaluate(source: str) -> Any:
    """Only literals, and the one call that floats without a literal need."""
    names = {node.id for node in ast.walk(ast.parse(source, mode="eval")) if isinstance(node, ast.Name)}
    assert names <= {"float"}
    return eval(source, {"__builtins__": {}, "float": float})


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, list):
        return type(b) is list and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


@given(json_values)
def test_a_literal_is_its_value(value: Any) -> None:
    source = literal(value)
    assert same(evaluate(source), value)
    assert "\n" not in source
    assert "\r" not in source
    assert all(char.isprintable() for char in source)


@given(st.lists(json_values, max_size=4))
def test_a_tuple_is_its_values(values: list[Any]) -> None:
    found = evaluate(tuple_literal(values))
    assert type(found) is tuple
    assert same(list(found), values)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), -0.0, 1e400, 1e-320, 10**400])
def test_numbers_without_a_literal(value: float) -> None:
    assert same(evaluate(literal(value)), value)


@given(strings)
def test_a_string_literal_is_what_the_formatter_writes(value: str) -> None:
    assert literal(value)[0] == literal(value)[-1] == '"'
    assert ast.literal_eval(literal(value)) == value


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", 1j, len])
def test_what_is_no_json_has_no_literal(value: Any) -> None:
    with pytest.raises(TypeError):
        literal(value)


@given(strings)
def test_prose_holds_no_markup(value: str) -> None:
    shown = text(value)
    assert not set(shown) & set("<>{}[]`|\\")
    assert shown.isprintable() or not shown
    assert len(shown.splitlines()) <= 1


@given(st.lists(strings, min_size=1, max_size=5))
def test_a_row_of_a_table_keeps_its_columns(values: list[str]) -> None:
    """Also between backticks, as tables show values."""
    row = "| " + " | ".join(f"`{cell(value)}`" for value in values) + " |"
    assert len(row.splitlines()) == 1
    assert row.count("|") == len(values) + 1
    assert row.count("`") == 2 * len(values)
    assert row.isprintable()


@given(strings)
def test_yaml_is_json(value: str) -> None:
    rendered = environment().from_string("{{ value | yaml }}").render(value=value)
    assert json.loads(rendered) == value
    assert len(rendered.splitlines()) == 1


@given(json_values)
def test_a_value_is_never_a_template(value: Any) -> None:
    source = environment().from_string("{{ value | literal }}").render(value=value)
    assert same(evaluate(source), value)


def test_a_name_that_is_not_there_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        environment().from_string("{{ no_such_name }}").render()


TEMPLATES = sorted(
    file.relative_to(templates_folder() / "automodel").as_posix()
    for file in (templates_folder() / "automodel").rglob("*.j2")
)


@pytest.mark.parametrize("template", TEMPLATES)
def test_each_template_compiles(template: str) -> None:
    env = environment()
    source, _, _ = env.loader.get_source(env, template)
    compile(env.compile(source, template, raw=True), template, "exec")


def test_a_teams_own_template_comes_first(tmp_path) -> None:
    own = tmp_path / "package"
    own.mkdir()
    (own / "__init__.py.j2").write_text("# ours\n")
    env = environment(tmp_path)
    assert env.get_template("package/__init__.py.j2").render() == "# ours\n"
    env.get_template("package/model.py.j2")


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("config.head_dim", "self.config.head_dim"),
        ("config.hidden_size // config.num_heads", "self.config.hidden_size // self.config.num_heads"),
        ('getattr(config, "head_dim", None) or config.a', 'getattr(self.config, "head_dim", None) or self.config.a'),
        ("self.config.a", "self.config.a"),
        ("configs.a", "configs.a"),
    ],
)
def test_expressions_of_methods_that_are_not_given_the_config(expression: str, expected: str) -> None:
    assert on_self(expression) == expected
