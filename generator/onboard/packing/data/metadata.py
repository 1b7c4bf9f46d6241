"""The metadata that packing writes beside its data, and whether it says what the data says."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from onboard.packing.data.damage import Findings
from onboard.packing.data.rows import Totals

_MOST_BYTES: Final = 10_000_000
_KEYS: Final = (
    "dataset_max_seqlen",
    "max_samples_per_bin",
    "packing_factor",
    "packing_efficiency",
    "pack_size",
    "min_packed_seqlen",
)
# Two decimals are written; half a unit in the last of them, and what a float adds.
_ROUNDING: Final = 0.0051


def find(data: Sequence[str], pack_size: int | None) -> list[Path]:
    """The metadata files that may belong to the data, in its folder and in the one above."""
    found: list[Path] = []
    for folder in dict.fromkeys(Path(path).parent for path in data):
        for place in (folder, folder.parent):
            found += sorted(place.glob("*_metadata.jsonl"))
    named = [path for path in found if path.name == f"{pack_size}_metadata.jsonl"]
    return list(dict.fromkeys(named or found))


def size_in_name(data: Sequence[str]) -> int | None:
    """The pack size in the names of files such as ``training_4096.idx.parquet``, where all have the same."""
    sizes = {int(match[1]) for path in data if (match := re.search(r"_(\d{2,})(?:\.|$)", Path(path).name))}
    return sizes.pop() if len(sizes) == 1 else None


def read(path: Path, findings: Findings) -> list[Mapping[str, Any]]:
    """Read a metadata file; what is wrong with it becomes a finding.

    Returns:
        Its objects, those that are well-formed.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError("it is too large to be metadata")
        loaded = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        findings.once("D19", f"{path}: {error}")
        return []
    if not isinstance(loaded, list) or not loaded:
        findings.once("D19", f"{path}: it is no list of objects")
        return []
    entries = []
    for number, entry in enumerate(loaded):
        wrong = "it is no object" if not isinstance(entry, dict) else _wrong_values(entry)
        if wrong:
            findings.once("D19", f"{path}: entry {number}: {wrong}")
        else:
            entries.append(entry)
    return entries


def _wrong_values(entry: Mapping[str, Any]) -> str | None:
    missing = [key for key in _KEYS if key not in entry]
    if missing:
        return f"it lacks {', '.join(missing)}"
    for key in _KEYS:
        if isinstance(entry[key], bool) or not isinstance(entry[key], (int, float)) or not entry[key] >= 0:
            return f"{key} is {entry[key]!r}"
    return None


def stated(totals: Totals, pack_size: int) -> dict[str, Any]:
    """What the metadata of this data has to say."""
    rows = max(totals.measured_rows, 1)
    return {
        "dataset_max_seqlen": totals.longest_sequence,
        "max_samples_per_bin": totals.most_sequences,
        "packing_factor": round(totals.sequences / rows, 2),
        "packing_efficiency": round(totals.trained / rows / max(pack_size, 1) * 100, 2),
        "pack_size": pack_size,
        "min_packed_seqlen": totals.shortest_row or 0,
    }


def compare(entries: Sequence[Mapping[str, Any]], totals: Totals, findings: Findings) -> Mapping[str, Any] | None:
    """Find the entry that belongs to the data: a file has one for each data set of its pack size.

    Returns:
        The entry that agrees best.
    """
    if not entries or not totals.measured_rows:
        return None
    differences = [(_differences(entry, totals), entry) for entry in entries]
    least, entry = min(differences, key=lambda item: len(item[0]))
    if least:
        findings.once("D20", "; ".join(least))
    return entry


def _differences(entry: Mapping[str, Any], totals: Totals) -> list[str]:
    actual = stated(totals, int(entry["pack_size"]))
    return [
        f"{key} is {entry[key]}, the data has {value}"
        for key, value in actual.items()
        if abs(entry[key] - value) > (_ROUNDING * 2 if isinstance(value, float) else 0)
    ]
