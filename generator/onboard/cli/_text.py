"""Text from outside, made fit for a terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{8,}")
_ELLIPSIS = "..."


def printable(value: object, limit: int | None = None) -> str:
    r"""One line without anything that a terminal would act on.

    A config and the Hub are untrusted: an escape sequence in a value must not recolour, retitle or rewrite the
    terminal, and a direction override must not reorder the line. White space of every kind becomes a space, and any
    other unprintable character is shown as its escape (``\x1b``, ``\u202e``).

    Args:
        value: what to print.
        limit: the longest result; the middle of what is longer is left out.
    """
    text = value if isinstance(value, str) else str(value)
    text = "".join(_visible(character) for character in text)
    return text if limit is None else shortened(text, limit)


def _visible(character: str) -> str:
    if character.isspace():
        return " "
    if character.isprintable():
        return character
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def printable_lines(text: str) -> str:
    """The same for text of several lines, whose line ends and tabs stay."""
    return "\n".join("\t".join(printable(part) for part in line.split("\t")) for line in text.split("\n"))


def shortened(text: str, limit: int) -> str:
    """``text``, its middle left out where it is longer than ``limit``: both ends of a path or a list tell most."""
    if len(text) <= limit:
        return text
    room = max(limit - len(_ELLIPSIS), 2)
    head = max(room * 2 // 3, 1)
    return text[:head] + _ELLIPSIS + text[len(text) - (room - head) :]


def without_tokens(text: str) -> str:
    """``text`` without Hugging Face access tokens, since error messages are pasted into public reports."""
    return _TOKEN.sub("hf_***", text)


def sentence(item: object) -> str:
    """A warning or a review item, which may be a string or an object of strings, as one line."""
    if isinstance(item, Mapping):
        return ": ".join(sentence(part) for part in item.values() if part not in (None, "", [], {}))
    if isinstance(item, Sequence) and not isinstance(item, str):
        return ", ".join(sentence(part) for part in item)
    return printable(item)


def plural(number: int, one: str, many: str | None = None) -> str:
    """``1 file``, ``2 files``."""
    return f"{number} {one if number == 1 else many or one + 's'}"
