"""Text from elsewhere (arguments, file names, a server's words), made safe to show on one line."""

from __future__ import annotations

from collections.abc import Iterable


def shown(text: str, most: int = 160) -> str:
    """The text on one printable line: control characters and half surrogates escaped, long texts cut.

    Args:
        text: any string, also one that cannot be encoded.
        most: the number of characters to keep.
    """
    line = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
    return line if len(line) <= most else line[: most - 3] + "..."


def few(names: Iterable[str], most: int = 3) -> str:
    """The first names of a list, and how many more there are."""
    listed = list(names)
    text = ", ".join(shown(name) for name in listed[:most])
    return text if len(listed) <= most else f"{text} and {len(listed) - most} more"
