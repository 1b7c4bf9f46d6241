"""How a value of the spec is shown to people: one line, and a long pattern by its runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from typing import Any


def show(value: Any) -> str:
    """One line for a leaf of the spec: ``5 x sliding_attention, full_attention``."""
    if isinstance(value, tuple):
        runs = ((str(item), len(list(group))) for item, group in groupby(value, key=str))
        return ", ".join(item if count == 1 else f"{count} x {item}" for item, count in runs) or "none"
    if isinstance(value, (Mapping, list)):
        return json.dumps(value, default=str)
    return "none" if value is None else str(value)
