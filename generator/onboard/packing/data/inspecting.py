"""``onboard packing inspect``: read packed data once, and say what it is and what is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onboard.errors import UsageError
from onboard.packing.data import metadata
from onboard.packing.data.damage import Findings, Found
from onboard.packing.data.reading import read
from onboard.packing.data.rows import RowChecker, Totals, Wanted, fill
from onboard.packing.upstream import packed_files


@dataclass(frozen=True)
class Inspection:
    """Packed data, looked at.

    Attributes:
        files: what was read.
        totals: sums over all rows.
        pack_size: tokens that a row holds, and where the number is from.
        metadata_path: the metadata file; None where there is none.
        entry: its entry for this data.
        wanted: what was checked against.
        findings: errors first.
        remarks: checks that were left out, and why.
    """

    files: tuple[str, ...]
    totals: Totals
    pack_size: tuple[int, str]
    metadata_path: Path | None
    entry: Mapping[str, Any] | None
    wanted: Wanted
    findings: tuple[Found, ...]
    remarks: tuple[str, ...]

    @property
    def errors(self) -> tuple[Found, ...]:
        """Damage that makes training wrong or crash."""
        return tuple(found for found in self.findings if found.damage.severity == "error")

    def exit_status(self, strict: bool) -> int:
        """1 for an error, and for a warning too where ``strict``."""
        return 1 if self.errors or (strict and self.findings) else 0

    def as_json(self) -> dict[str, Any]:
        """The JSON of ``onboard packing inspect``."""
        totals = self.totals
        size, source = self.pack_size
        rows = max(totals.measured_rows, 1)
        return {
            "verdict": "error" if self.errors else "ok",
            "files": list(self.files),
            "rows": totals.rows,
            "tokens": totals.tokens,
            "sequences": totals.sequences,
            "rows_without_loss": totals.rows_without_loss,
            "tokens_in_loss": totals.losses,
            "pack_size": size,
            "pack_size_from": source,
            "efficiency": round(totals.trained / rows / max(size, 1) * 100, 2),
            "packing_factor": round(totals.sequences / rows, 2),
            "longest_sequence": totals.longest_sequence,
            "common_divisor_of_lengths": totals.common_divisor,
            "most_sequences_in_a_row": totals.most_sequences,
            "shortest_row": totals.shortest_row,
            "longest_row": totals.longest_row,
            "fill": fill(totals, size),
            "metadata": {"path": None if self.metadata_path is None else str(self.metadata_path), "entry": self.entry},
            "checked_against": {
                "pad_multiple": self.wanted.pad_multiple,
                "pad_id": self.wanted.pad_id,
                "vocab_size": self.wanted.vocab_size,
            },
            "findings": [found.as_json() for found in self.findings],
            "remarks": list(self.remarks),
        }


def inspect_data(
    data: str, wanted: Wanted, *, metadata_path: Path | None = None, pad_cu_seqlens: bool = False
) -> Inspection:
    """Look at packed data.

    Args:
        data: a .parquet or .npy file, a pattern, or a directory of parquet files.
        wanted: what it is checked against.
        metadata_path: the metadata file; looked for beside the data where None.
        pad_cu_seqlens: whether training pads the boundaries, which needs metadata.

    Raises:
        UsageError: there is no such data.
    """
    files = packed_files(data)
    if not files:
        raise _no_data(data)
    findings, remarks = Findings(), []
    found = [metadata_path] if metadata_path else metadata.find(files, wanted.pack_size or metadata.size_in_name(files))
    if len(found) > 1:
        remarks.append(f"{len(found)} metadata files may belong to it; {found[0]} was read, --metadata gives another")
    path = found[0] if found else None
    entries = metadata.read(path, findings) if path else []
    others = {int(entry["pack_size"]) for entry in entries} - {wanted.pack_size}
    if wanted.pack_size is not None and others and len(others) == len({entry["pack_size"] for entry in entries}):
        findings.once("D20", f"pack_size is {min(others)}, training uses {wanted.pack_size}")
    size, source = _pack_size(wanted, entries, files)
    wanted = Wanted(size, wanted.pad_multiple, wanted.pad_id, wanted.vocab_size)
    checker = RowChecker(wanted, findings)
    for batch in read(files, findings):
        checker.look(batch)
    totals = checker.totals
    if not totals.rows and not findings.has("D01") and not findings.has("D02") and not findings.has("D04"):
        findings.once("D03")
    entry = None
    if entries and totals.measured_rows == totals.rows:
        entry = metadata.compare(entries, totals, findings)
    elif entries:
        remarks.append("the metadata was not compared: rows whose sequences have no sound starts cannot be measured")
    if path is None:
        findings.once("D22" if pad_cu_seqlens else "D18")
    elif pad_cu_seqlens and not entries:
        findings.once("D22")
    if size is None:
        size, source = totals.longest_row, "the longest row"
        remarks.append("the pack size is not known, so that rows were not checked against it: give --pack-size")
    remarks += _left_out(wanted)
    return Inspection(tuple(files), totals, (size, source), path, entry, wanted, findings.listed(), tuple(remarks))


def _pack_size(wanted: Wanted, entries: list[Mapping[str, Any]], files: list[str]) -> tuple[int | None, str]:
    if wanted.pack_size is not None:
        return wanted.pack_size, "given"
    sizes = {int(entry["pack_size"]) for entry in entries}
    if len(sizes) == 1:
        return sizes.pop(), "metadata"
    named = metadata.size_in_name(files)
    return named, "the file's name"


def _left_out(wanted: Wanted) -> list[str]:
    checks = (
        (wanted.pad_multiple, "lengths were not checked against pad_seq_to_mult: give --pad-seq-to-mult or --config"),
        (wanted.pad_id, "padding was not checked: give --pad-id or --hf-model"),
        (wanted.vocab_size, "ids were not checked against a vocabulary: give --vocab-size or --hf-model"),
    )
    return [text for value, text in checks if value is None]


def _no_data(data: str) -> UsageError:
    why = (
        "there is no such file"
        if not os.path.exists(data)
        else "it is neither .npy nor .parquet, and holds no such file"
    )
    return UsageError(
        f"cannot read {data}",
        why,
        "give a .parquet or .npy file that packing wrote, a pattern for several, or their directory",
        code="packing.no_data",
    )
