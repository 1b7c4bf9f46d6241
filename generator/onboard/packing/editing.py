"""Sets values in the text of a YAML or JSON file and leaves the rest of it, comments included, as it is.

The places come from the parser's own marks, and the result is parsed again: where it does not say exactly what it
should, the whole mapping is written anew instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from onboard.packing.rules import Change, apply


def load(content: str | bytes) -> Any:
    """Read YAML without building objects: what a recipe dumps as ``!!python/...`` is its plain value.

    Raises:
        yaml.YAMLError: it is no YAML.
    """
    import yaml

    loader: Any = type("Loader", (yaml.SafeLoader,), {})

    def plain(loader: Any, suffix: str, node: Any) -> Any:
        if isinstance(node, yaml.MappingNode):
            return loader.construct_mapping(node, deep=True)
        if isinstance(node, yaml.SequenceNode):
            return loader.construct_sequence(node, deep=True)
        return loader.construct_scalar(node)

    loader.add_multi_constructor("tag:yaml.org,2002:python/", plain)
    return yaml.load(content, Loader=loader)


def as_yaml(mapping: Mapping[str, Any]) -> str:
    """A mapping as YAML, its keys in their order."""
    import yaml

    return str(yaml.safe_dump(_plain(mapping), sort_keys=False, allow_unicode=True, width=100))


def edited(text: str, mapping: Mapping[str, Any], changes: Iterable[Change]) -> tuple[str, bool]:
    """The text of a configuration with values set.

    Args:
        text: the file's text.
        mapping: what it says.
        changes: the values to set.

    Returns:
        The new text, and whether everything else in it, comments included, is as it was.
    """
    changes = tuple(changes)
    wanted = apply(mapping, changes)
    if "\r\n" in text:
        written, kept = edited(text.replace("\r\n", "\n"), mapping, changes)
        return written.replace("\n", "\r\n"), kept
    try:
        json.loads(text)
    except ValueError:
        pass
    else:
        return json.dumps(wanted, indent=2, ensure_ascii=False) + "\n", True
    new = _in_place(text, changes)
    if new is not None and _says(new, wanted):
        return new, True
    return as_yaml(wanted), not changes


def _says(text: str, wanted: Mapping[str, Any]) -> bool:
    import yaml

    try:
        return bool(load(text) == wanted)
    except yaml.YAMLError:
        return False


def _in_place(text: str, changes: tuple[Change, ...]) -> str | None:
    import yaml

    for change in changes:
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.YAMLError:
            return None
        new = _set(text, node, change.path.split("."), change.value) if node is not None else None
        if new is None:
            return None
        text = new
    return text


def _set(text: str, node: Any, path: list[str], value: Any) -> str | None:
    """Set the value at ``path`` below a mapping node."""
    import yaml

    while True:
        if not isinstance(node, yaml.MappingNode) or not node.value:
            return None
        pair = next(((key, item) for key, item in node.value if key.value == path[0]), None)
        if pair is None:
            return _insert(text, node, path, value)
        key, item = pair
        path = path[1:]
        if not path:
            return _replace(text, key, item, _flow(value))
        if not isinstance(item, yaml.MappingNode) or not item.value:
            return _replace(text, key, item, _flow(_nest(path, value)))
        node = item


def _replace(text: str, key: Any, item: Any, new: str) -> str | None:
    colon = text.find(":", key.end_mark.index)
    if colon < 0 or text[key.end_mark.index : colon].strip():
        return None
    end = max(_end(item), colon + 1)
    return f"{text[: colon + 1]} {new}{text[end:]}"


def _insert(text: str, node: Any, path: list[str], value: Any) -> str:
    entry = f"{path[0]}: {_flow(_nest(path[1:], value))}"
    end = _end(node)
    if node.flow_style:
        last = _end(node.value[-1][1])
        return f"{text[:last]}, {entry}{text[last:]}"
    # On a line of its own after the last value's, so that a comment beside that value stays there.
    line_end = text.find("\n", end)
    line_end = len(text) if line_end < 0 else line_end
    return f"{text[:line_end]}\n{' ' * node.start_mark.column}{entry}{text[line_end:]}"


def _end(node: Any) -> int:
    """Where the last character of a node is; a block's own mark is where the next block begins."""
    import yaml

    if isinstance(node, yaml.ScalarNode) or node.flow_style or not node.value:
        return int(node.end_mark.index)
    last = node.value[-1]
    return _end(last[1] if isinstance(last, tuple) else last)


def _nest(path: list[str], value: Any) -> Any:
    for key in reversed(path):
        value = {key: value}
    return value


def _flow(value: Any) -> str:
    import yaml

    text = yaml.safe_dump(_plain(value), default_flow_style=True, sort_keys=False, allow_unicode=True, width=10_000)
    return str(text).removesuffix("...\n").strip()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
