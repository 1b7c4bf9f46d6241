"""What is looked at in each batch of rows. Everything is an operation on whole arrays: no Python loop over tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from onboard.packing.data.damage import Findings
from onboard.packing.data.reading import Batch, Ints

Bools = npt.NDArray[np.bool_]

FILL_BINS: Final = 10
# Eight bytes and a set's overhead a row; beyond this many, repeated rows are no longer looked for.
_MOST_HASHES: Final = 1_000_000


@dataclass(frozen=True)
class Wanted:
    """What the data is checked against; a check is left out where its number is not known.

    Attributes:
        pack_size: tokens that a row may hold.
        pad_multiple: what the length of a sequence has to be a multiple of.
        pad_id: the token that fills up.
        vocab_size: token ids are below it.
    """

    pack_size: int | None = None
    pad_multiple: int | None = None
    pad_id: int | None = None
    vocab_size: int | None = None


@dataclass
class Totals:
    """Sums over all rows. A packed length is what is trained on: a row's tokens less one for each sequence."""

    rows: int = 0
    tokens: int = 0
    trained: int = 0
    sequences: int = 0
    losses: int = 0
    rows_without_loss: int = 0
    longest_sequence: int = 0
    common_divisor: int = 0
    """Of the lengths of all sequences: what they were padded to a multiple of, or more."""
    most_sequences: int = 0
    shortest_row: int | None = None
    longest_row: int = 0
    measured_rows: int = 0
    lengths: dict[int, int] = field(default_factory=dict)
    """How many rows have each packed length; at most as many entries as there are lengths."""


class RowChecker:
    """Looks at one batch after another."""

    def __init__(self, wanted: Wanted, findings: Findings) -> None:
        self._wanted = wanted
        self._findings = findings
        self._seen: set[int] = set()
        self.totals = Totals()

    def look(self, batch: Batch) -> None:
        """Check a batch and add it to the totals."""
        self.totals.rows += len(batch.usable)
        self.totals.tokens += len(batch.tokens.values)
        self._look_at_tokens(batch)
        even = batch.usable & (batch.tokens.lengths == batch.mask.lengths)
        self._rows("D06", batch, batch.usable & ~even)
        self._look_at_values(batch)
        whole = self._look_at_starts(batch)
        if whole.any():
            self._look_at_sequences(batch, whole, even)
        self._look_at_losses(batch, even)

    def _rows(self, id: str, batch: Batch, which: Bools, example: str | None = None) -> None:
        found = np.flatnonzero(which)
        self._findings.rows(id, found[:64] + batch.first, len(found), example)

    def _look_at_tokens(self, batch: Batch) -> None:
        values = batch.tokens.values
        if not len(values):
            return
        limit = self._wanted.vocab_size
        if int(values.min()) >= 0 and (limit is None or int(values.max()) < limit):
            return
        bad = values < 0
        if limit is not None:
            bad |= values >= limit
        where = np.flatnonzero(bad)
        rows = np.unique(np.searchsorted(batch.tokens.offsets, where, side="right") - 1)
        outside = "" if limit is None else f", the vocabulary has {limit}"
        self._findings.rows("D17", rows + batch.first, len(rows), f"token {int(values[where[0]])}{outside}")

    def _look_at_values(self, batch: Batch) -> None:
        values = batch.mask.values
        bad = np.flatnonzero((values != 0) & (values != 1))
        if len(bad):
            rows = np.unique(np.searchsorted(batch.mask.offsets, bad, side="right") - 1)
            self._findings.rows("D14", rows + batch.first, len(rows), f"value {values[bad[0]]}")

    def _look_at_starts(self, batch: Batch) -> Bools:
        """Which rows have starts that make sense."""
        starts, offsets, lengths = batch.starts.values, batch.starts.offsets, batch.starts.lengths
        row_lengths = batch.tokens.lengths
        some = lengths > 0
        first_zero = np.zeros(len(lengths), dtype=np.bool_)
        first_zero[some] = starts[offsets[:-1][some]] == 0
        self._rows("D07", batch, batch.usable & ~first_zero)
        row_of = np.repeat(np.arange(len(lengths)), lengths)
        outside = np.zeros(len(lengths), dtype=np.bool_)
        outside[row_of[(starts < 0) | (starts >= row_lengths[row_of])]] = True
        self._rows("D09", batch, batch.usable & outside)
        falls = np.zeros(len(lengths), dtype=np.bool_)
        if len(starts) > 1:
            inside = row_of[1:] == row_of[:-1]
            falls[row_of[1:][inside & (starts[1:] <= starts[:-1])]] = True
        self._rows("D08", batch, batch.usable & falls)
        return batch.usable & first_zero & ~outside & ~falls

    def _look_at_sequences(self, batch: Batch, whole: Bools, even: Bools) -> None:
        wanted, totals = self._wanted, self.totals
        counts = np.where(whole, batch.starts.lengths, 0)
        row_of = np.repeat(np.arange(len(whole)), counts)
        begin = batch.starts.values[np.repeat(whole, batch.starts.lengths)] + batch.tokens.offsets[row_of]
        end = np.append(begin[1:], 0)
        last = np.cumsum(counts[whole]) - 1
        end[last] = batch.tokens.offsets[1:][whole]
        trained = end - begin - 1
        packed = (batch.tokens.lengths - counts)[whole]
        self._add(packed, counts[whole], trained)
        self._in_rows("D12", batch, row_of, trained == 0)
        if wanted.pad_multiple is not None and wanted.pad_multiple > 1:
            uneven = trained % wanted.pad_multiple != 0
            length = f"length {int(trained[uneven][0])}, multiple {wanted.pad_multiple}" if uneven.any() else None
            self._in_rows("D11", batch, row_of, uneven, length)
        if wanted.pack_size is not None:
            long = np.zeros(len(whole), dtype=np.bool_)
            long[np.flatnonzero(whole)] = packed > wanted.pack_size
            example = f"{int(packed.max())} tokens, pack size {wanted.pack_size}" if long.any() else None
            self._rows("D10", batch, long, example)
        # Positions in the mask are those of the tokens only where both have the same length in every row before.
        masked = even[row_of]
        shift = (batch.mask.offsets - batch.tokens.offsets)[row_of]
        if masked.any():
            at_end = np.zeros(len(end), dtype=np.bool_)
            at_end[masked] = batch.mask.values[(end + shift - 1)[masked]] != 0
            self._in_rows("D13", batch, row_of, at_end)
            if wanted.pad_id is not None:
                self._look_at_padding(batch, row_of[masked], begin[masked], end[masked], shift[masked])
        totals.most_sequences = max(totals.most_sequences, int(counts.max()))

    def _add(self, packed: Ints, counts: Ints, trained: Ints) -> None:
        totals = self.totals
        totals.measured_rows += len(packed)
        totals.trained += int(packed.sum())
        totals.sequences += int(counts.sum())
        totals.longest_sequence = max(totals.longest_sequence, int(trained.max()))
        totals.common_divisor = int(np.gcd(totals.common_divisor, np.gcd.reduce(trained)))
        totals.longest_row = max(totals.longest_row, int(packed.max()))
        shortest = int(packed.min())
        totals.shortest_row = shortest if totals.shortest_row is None else min(totals.shortest_row, shortest)
        for length, count in zip(*np.unique(packed, return_counts=True), strict=True):
            totals.lengths[int(length)] = totals.lengths.get(int(length), 0) + int(count)

    def _in_rows(self, id: str, batch: Batch, row_of: Ints, which: Bools, example: str | None = None) -> None:
        rows = np.unique(row_of[which])
        self._findings.rows(id, rows + batch.first, len(rows), example)

    def _look_at_padding(self, batch: Batch, row_of: Ints, begin: Ints, end: Ints, shift: Ints) -> None:
        """Look for losses whose label is padding.

        A sequence ends with its own end-of-text token and then with padding, which is the same token: of a run of
        them at the end all but the first are padding, and so are the labels from the run's first position on.
        """
        tokens = batch.tokens.values
        positions = np.where(tokens != self._wanted.pad_id, np.arange(len(tokens)), -1)
        # Between two sequences of rows that are looked at there may be rows that are not.
        edges = np.empty(2 * len(begin), dtype=np.int64)
        edges[0::2], edges[1::2] = begin, end
        last_text = np.maximum.reduceat(np.append(positions, -1), edges)[0::2]
        run = np.maximum(last_text + 1, begin)
        losses = np.concatenate(([0], np.cumsum(batch.mask.values != 0)))
        counted = losses[end + shift] - losses[run + shift]
        self._in_rows("D15", batch, row_of, (end - run >= 2) & (counted > 0))

    def _look_at_losses(self, batch: Batch, even: Bools) -> None:
        losses = np.concatenate(([0], np.cumsum(batch.mask.values != 0)))
        counted = losses[batch.mask.offsets[1:]] - losses[batch.mask.offsets[:-1]]
        self.totals.losses += int(counted.sum())
        self.totals.rows_without_loss += int((batch.usable & (counted == 0)).sum())
        again = []
        offsets = batch.tokens.offsets
        for row in np.flatnonzero(even & (batch.tokens.lengths > 0)):
            if len(self._seen) >= _MOST_HASHES:
                break
            key = hash(batch.tokens.values[offsets[row] : offsets[row + 1]].tobytes())
            if key in self._seen and counted[row]:
                again.append(int(row))
            self._seen.add(key)
        self._findings.rows("D16", (row + batch.first for row in again), len(again))


def fill(totals: Totals, pack_size: int) -> list[dict[str, Any]]:
    """How full the rows are: the rows of each tenth of the pack size."""
    bins = [0] * FILL_BINS
    for length, count in totals.lengths.items():
        bins[min(length * FILL_BINS // max(pack_size, 1), FILL_BINS - 1)] += count
    width = 100 // FILL_BINS
    return [{"from": index * width, "to": (index + 1) * width, "rows": count} for index, count in enumerate(bins)]
