"""config.json, from bytes to an object, with every way in which it can be malformed named.

``NaN`` and ``Infinity`` are accepted although JSON has no such numbers: transformers writes them, and published models
use them (``"time_step_limit": [0.0, Infinity]``).
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from onboard.facts._facts import Origin
from onboard.facts._text import few, shown

MOST_BYTES = 16 * 1024 * 1024
# Real files nest six deep. Far below Python's own limit, so that nothing that walks a config can exhaust the stack.
DEEPEST = 100


def parse_config(content: bytes, origin: Origin, file: str = "config.json") -> tuple[dict[str, Any], tuple[str, ...]]:
    """Read a config.json.

    Args:
        content: its bytes.
        origin: the place that it came from, for the errors.
        file: its name, for the errors.

    Returns:
        The object, and warnings about keys that are written twice.

    Raises:
        UsageError: a local file is not a JSON object that can be used.
        HubError: a fetched file is not.
    """
    if len(content) > MOST_BYTES:
        raise too_large(origin, file)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise origin.refuse(
            file, f"it is not UTF-8 text: byte {error.start} is 0x{content[error.start]:02x}", "config.not_utf8"
        ) from error
    twice: list[str] = []

    def keep_last(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return found

    try:
        value = json.loads(text, object_pairs_hook=keep_last)
    except json.JSONDecodeError as error:
        why = f"it is not JSON: {shown(error.msg)}, line {error.lineno} column {error.colno}"
        raise origin.refuse(file, why, "config.not_json") from error
    except RecursionError as error:
        raise _too_deep(origin, file) from error
    except ValueError as error:
        # The one other thing that Python's reader refuses: an integer of more digits than it is willing to convert.
        raise origin.refuse(file, f"it is not usable JSON: {shown(str(error))}", "config.not_json") from error
    if not isinstance(value, dict):
        raise origin.refuse(file, f"it holds {_kind(value)}, not an object", "config.not_object")
    if _deeper_than(value, DEEPEST):
        raise _too_deep(origin, file)
    if "\\ud" in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            why = "a string in it holds half of a surrogate pair, which is no character"
            raise origin.refuse(file, why, "config.not_utf8") from error
    warnings = (f"{file} has keys more than once, and the last value counts: {few(twice)}",) if twice else ()
    return value, warnings


def too_large(origin: Origin, file: str) -> Exception:
    """The error that a config.json is larger than any real one."""
    why = f"it is larger than {MOST_BYTES // 1024**2} MiB, which no model's configuration is"
    return origin.refuse(file, why, "config.too_large")


def _too_deep(origin: Origin, file: str) -> Exception:
    return origin.refuse(file, f"it nests more than {DEEPEST} levels deep", "config.too_deep")


def _deeper_than(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return "a string"
    return "null" if value is None else "a boolean" if isinstance(value, bool) else "a number"
