"""The kinds of damage that packed data can have, as data, and where each was found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Severity = Literal["error", "warning"]
_MOST_ROWS: Final = 20
_MOST_EXAMPLES: Final = 3


@dataclass(frozen=True)
class Damage:
    """A kind of damage.

    Attributes:
        id: its name in results.
        severity: ``error`` where training is wrong or crashes, else ``warning``.
        what: the damage, and what it does.
        mend: what to do about it.
    """

    id: str
    severity: Severity
    what: str
    mend: str


_AGAIN: Final = "pack the data again from its source"
_KINDS: Final[tuple[tuple[str, Severity, str, str], ...]] = (
    ("D01", "error", "a file cannot be read to its end", "copy or write the file again"),
    ("D02", "error", "a column that packed data needs is missing", _AGAIN),
    ("D03", "error", "there are no rows", _AGAIN),
    (
        "D04",
        "error",
        "a column does not hold lists of whole numbers",
        "write input_ids and seq_start_id as list<int64>, loss_mask as list<int8>",
    ),
    ("D05", "error", "a value is null", _AGAIN),
    ("D06", "error", "loss_mask and input_ids differ in length", _AGAIN),
    ("D07", "error", "seq_start_id is empty or does not begin with 0: the first sequence has no start", _AGAIN),
    ("D08", "error", "seq_start_id does not increase: a sequence would be empty or run backwards", _AGAIN),
    ("D09", "error", "a start is outside its row", _AGAIN),
    (
        "D10",
        "error",
        "a row holds more tokens than the pack size (each sequence stores one more than is trained on)",
        "pack again, or train with a packed_sequence_size that holds it",
    ),
    (
        "D11",
        "error",
        "the length of a sequence, less the one token that is only a label, is no multiple of pad_seq_to_mult: context "
        "or sequence parallel would cut it wrongly",
        "pack again with the pad_seq_to_mult that training uses",
    ),
    ("D12", "warning", "a sequence of one token: it has nothing to predict", "leave such samples out"),
    (
        "D13",
        "error",
        "the last token of a sequence counts in the loss though it predicts nothing: loss_mask is not shifted by one",
        "shift the mask of each sequence left by one, its last entry 0; only where packing computed it from "
        "answer_start_idx is it right as it is, the last entry being dropped when it is read",
    ),
    ("D14", "error", "loss_mask has a value other than 0 and 1", _AGAIN),
    ("D15", "error", "padding counts in the loss", "set loss_mask to 0 where the label is padding"),
    (
        "D16",
        "warning",
        "a row repeats an earlier one and counts in the loss again; a row that only fills a batch has an all-zero "
        "loss_mask",
        "leave it out, or set its loss_mask to 0",
    ),
    (
        "D17",
        "error",
        "a token id is negative, or outside the vocabulary",
        "pack again with the model's own tokenizer",
    ),
    (
        "D18",
        "warning",
        "there is no metadata file",
        "give --metadata FILE; packing writes <size>_metadata.jsonl beside the data",
    ),
    ("D19", "error", "the metadata file is malformed", f"it is one JSON list of objects; {_AGAIN}"),
    (
        "D20",
        "error",
        "the metadata does not agree with the data",
        "write the metadata again, or give the file that belongs to it",
    ),
    ("D21", "warning", "the .npy format is deprecated, and is read into memory as a whole", "write parquet"),
    ("D22", "error", "pad_cu_seqlens needs metadata that says max_samples_per_bin", "give --metadata FILE"),
)
DAMAGES: Final = {kind[0]: Damage(*kind) for kind in _KINDS}
"""Every kind, by id."""


@dataclass
class Found:
    """One kind of damage, where it was found.

    Attributes:
        damage: the kind.
        count: rows that have it, or 1 where it is not one of rows.
        rows: the first rows, counted from 0 over all files.
        examples: the first values, in words.
    """

    damage: Damage
    count: int = 0
    rows: list[int] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """One entry of ``findings``."""
        return {
            "id": self.damage.id,
            "severity": self.damage.severity,
            "what": self.damage.what,
            "mend": self.damage.mend,
            "count": self.count,
            "rows": self.rows,
            "examples": self.examples,
        }


class Findings:
    """What was found so far; holds the first few rows of each kind, however many there are."""

    def __init__(self) -> None:
        self._found: dict[str, Found] = {}

    def rows(self, id: str, rows: Iterable[int], count: int, example: str | None = None) -> None:
        """Add rows that have a damage.

        Args:
            id: the kind.
            rows: the rows, or the first of them.
            count: how many there are.
            example: a value that shows it.
        """
        if not count:
            return
        found = self._found.setdefault(id, Found(DAMAGES[id]))
        found.count += count
        for row in rows:
            if len(found.rows) >= _MOST_ROWS:
                break
            found.rows.append(int(row))
        if example and len(found.examples) < _MOST_EXAMPLES:
            found.examples.append(example)

    def once(self, id: str, example: str | None = None) -> None:
        """Add a damage that is not one of rows."""
        self.rows(id, (), 1, example)

    def has(self, id: str) -> bool:
        """Whether a kind was found."""
        return id in self._found

    def listed(self) -> tuple[Found, ...]:
        """Everything, errors first, in the order of the ids."""
        return tuple(
            sorted(self._found.values(), key=lambda found: (found.damage.severity != "error", found.damage.id))
        )
