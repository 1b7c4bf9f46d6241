"""The Jinja environment: where templates lie, and the filters that make a value safe to stand in code."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, StrictUndefined

from onboard.render.style import LINE_LENGTH


def templates_folder() -> Path:
    """Folder of the shipped templates: inside the wheel, or beside ``generator/`` in an editable install."""
    shipped = Path(str(resources.files("onboard"))) / "_templates"
    return shipped if shipped.is_dir() else Path(__file__).resolve().parents[3] / "templates"


@cache
def environment(overrides: Path | None = None) -> Environment:
    """The environment that renders AutoModel packages.

    Args:
        overrides: a team's own folder; a template in it replaces the shipped one of the same path.
    """
    folders = [folder for folder in (overrides, templates_folder() / "automodel") if folder is not None]
    env = Environment(
        loader=ChoiceLoader([FileSystemLoader(str(folder)) for folder in folders]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    env.filters["literal"] = literal
    env.filters["tuple_literal"] = tuple_literal
    env.filters["yaml"] = json.dumps
    env.filters["text"] = text
    env.filters["cell"] = cell
    env.filters["docstring"] = docstring
    env.filters["on_self"] = on_self
    return env


def on_self(expression: str) -> str:
    """An expression of ``config`` as one of ``self.config``, for methods that are not given the config."""
    return re.sub(r"(?<![\w.])config\b", "self.config", expression)


def tuple_literal(values: Iterable[Any]) -> str:
    """Render JSON values as a Python tuple."""
    items = [literal(value) for value in values]
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def docstring(sentence: str, indent: int) -> str:
    """A sentence as a docstring: on one line where it fits, else what stands before `` with `` and the rest below.

    Args:
        sentence: ``<what> with <details>.``
        indent: columns before the quotes.
    """
    if indent + len(sentence) + 6 <= LINE_LENGTH:
        return sentence
    what, _, details = sentence.partition(" with ")
    pad = " " * indent
    body = textwrap.fill(f"With {details}", LINE_LENGTH, initial_indent=pad, subsequent_indent=pad)
    return f"{what}.\n\n{body}\n{pad}"


def text(value: Any) -> str:
    """A string for prose in Markdown and MDX: one line, and nothing in it is markup or code."""
    line = " ".join(str(value).split())
    return "".join(f"&#{ord(char)};" if char in "<>{}[]`|\\" or not char.isprintable() else char for char in line)


def cell(value: Any) -> str:
    """A string for a table cell, also between backticks: one line, no pipe, no backtick."""
    line = " ".join(str(value).split())
    return "".join(
        char if char.isprintable() and char not in "|`" else "\N{FULLWIDTH VERTICAL LINE}" if char == "|" else "'"
        for char in line
    )


def literal(value: Any) -> str:
    """Render a JSON value as a Python literal.

    Infinite and undefined floats, which JSON files of the field do contain, have no literal of their own.
    """
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f'float("{value}")'
    if isinstance(value, str):
        return f'"{"".join(map(_escaped, value))}"'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(literal(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _escaped(char: str) -> str:
    """A character inside double quotes, as the formatter would write it."""
    if char in '"\\':
        return f"\\{char}"
    return char if char.isprintable() else repr(char)[1:-1]
