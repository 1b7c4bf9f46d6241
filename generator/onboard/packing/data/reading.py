"""Packed data as a stream of batches: flat arrays with offsets, of a bounded number of tokens."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from onboard.packing.data.damage import Findings
from onboard.packing.data.pickled import Array, load_rows

Ints = npt.NDArray[np.int64]

COLUMNS: Final = ("input_ids", "loss_mask", "seq_start_id")
_NOTHING: Final = np.zeros(0, dtype=np.int64)
_BATCH_TOKENS: Final = 500_000
_MOST_ROWS: Final = 4096


@dataclass(frozen=True)
class Lists:
    """A list for each row: ``values[offsets[i]:offsets[i + 1]]`` is that of row ``i``."""

    offsets: Ints
    values: npt.NDArray[Any]

    @property
    def lengths(self) -> Ints:
        """The length of each row's list."""
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Batch:
    """Consecutive rows.

    Attributes:
        first: the number of the first row.
        tokens: ``input_ids``.
        mask: ``loss_mask``; integers, booleans or floats.
        starts: ``seq_start_id``.
        usable: whether each row's columns could be read; false rows have empty lists.
    """

    first: int
    tokens: Lists
    mask: Lists
    starts: Lists
    usable: npt.NDArray[np.bool_]


def read(paths: Sequence[str], findings: Findings) -> Iterator[Batch]:
    """Read files one after another. What cannot be read becomes a finding, and reading goes on with the next file.

    Args:
        paths: .parquet, .pq or .npy files.
        findings: gets what is wrong with files and columns.
    """
    first = 0
    for path in paths:
        reader = _read_npy if path.lower().endswith(".npy") else _read_parquet
        for batch in reader(path, first, findings):
            yield batch
            first = batch.first + len(batch.usable)


def _read_parquet(path: str, first: int, findings: Findings) -> Iterator[Batch]:
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            columns = _columns(path, file.schema_arrow, findings)
            if columns is None:
                return
            rows = max(file.metadata.num_rows, 1)
            tokens = _count(file.metadata, "input_ids")
            size = int(min(max(_BATCH_TOKENS * rows // max(tokens, 1), 1), _MOST_ROWS))
            for record in file.iter_batches(batch_size=size, columns=list(COLUMNS)):
                batch = _from_arrow(record, first, findings)
                first += record.num_rows
                yield batch
    except (pa.ArrowException, OSError, ValueError) as error:
        findings.rows("D01", [first] if first else [], 1, f"{path}, from row {first}: {_one_line(error)}")


def _count(metadata: Any, column: str) -> int:
    """Values of a column in all row groups, as the footer says."""
    found = 0
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(index)
            if chunk.path_in_schema.split(".")[0] == column:
                found += chunk.num_values
    return found


def _columns(path: str, schema: pa.Schema, findings: Findings) -> tuple[str, ...] | None:
    missing = [name for name in COLUMNS if name not in schema.names]
    if missing:
        findings.once("D02", f"{path}: {', '.join(missing)}")
        return None
    wrong = [
        f"{name} is {schema.field(name).type}"
        for name in COLUMNS
        if not _is_list_of_numbers(schema.field(name).type, name)
    ]
    if wrong:
        findings.once("D04", f"{path}: {', '.join(wrong)}")
        return None
    return COLUMNS


def _is_list_of_numbers(kind: pa.DataType, name: str) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return False
    inner = kind.value_type
    # A mask is read as it is found: booleans and floats happen.
    return bool(
        pa.types.is_integer(inner)
        or (name == "loss_mask" and (pa.types.is_boolean(inner) or pa.types.is_floating(inner)))
    )


def _from_arrow(record: pa.RecordBatch, first: int, findings: Findings) -> Batch:
    usable = np.ones(record.num_rows, dtype=np.bool_)
    lists = {}
    for name in COLUMNS:
        column = record.column(name)
        if pa.types.is_fixed_size_list(column.type):
            column = column.cast(pa.list_(column.type.value_type))
        if column.null_count:
            empty = column.is_null().to_numpy(zero_copy_only=False)
            usable &= ~empty
            column = pa.array([row if row is not None else [] for row in column.to_pylist()], type=column.type)
        offsets = column.offsets.to_numpy().astype(np.int64)
        values = column.values.slice(offsets[0], offsets[-1] - offsets[0])
        offsets = offsets - offsets[0]
        if values.null_count:
            where = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))
            usable[np.searchsorted(offsets, where, side="right") - 1] = False
            values = pc.fill_null(values, pa.scalar(0).cast(values.type))
        lists[name] = Lists(offsets, _numbers(name, values.to_numpy(zero_copy_only=False)))
    broken = np.flatnonzero(~usable)
    findings.rows("D05", broken + first, len(broken))
    if len(broken):
        lists = {name: _without(rows, usable) for name, rows in lists.items()}
    return Batch(first, lists["input_ids"], lists["loss_mask"], lists["seq_start_id"], usable)


def _without(lists: Lists, usable: npt.NDArray[np.bool_]) -> Lists:
    """The same rows, those that are not usable emptied."""
    lengths = lists.lengths
    kept = lists.values[np.repeat(usable, lengths)]
    return Lists(np.concatenate(([0], np.cumsum(np.where(usable, lengths, 0)))).astype(np.int64), kept)


def _read_npy(path: str, first: int, findings: Findings) -> Iterator[Batch]:
    findings.once("D21", path)
    try:
        with open(path, "rb") as stream:
            rows = _load_objects(stream)
    except (OSError, ValueError, EOFError, pickle.UnpicklingError, MemoryError, RecursionError) as error:
        findings.once("D01", f"{path}: {_one_line(error)}")
        return
    except Exception as error:  # a damaged pickle stumbles in any way
        findings.once("D01", f"{path}: {type(error).__name__}: {_one_line(error)}")
        return
    missing = sorted({name for row in rows if isinstance(row, dict) for name in COLUMNS if name not in row})
    if missing:
        findings.once("D02", f"{path}: {', '.join(missing)}")
    pending: list[list[Any]] = []
    bad: list[bool] = []
    tokens = 0
    for row in rows:
        lists = _row_lists(row)
        pending.append(lists or [_NOTHING] * len(COLUMNS))
        bad.append(lists is None)
        tokens += len(pending[-1][0])
        if tokens >= _BATCH_TOKENS or len(pending) >= _MOST_ROWS:
            yield _from_rows(pending, bad, first, findings)
            first += len(pending)
            pending, bad, tokens = [], [], 0
    if pending:
        yield _from_rows(pending, bad, first, findings)


def _load_objects(stream: IO[bytes]) -> list[Any]:
    npy: Any = np.lib.format
    version = npy.read_magic(stream)
    readers: dict[tuple[int, int], Callable[[IO[bytes]], Any]] = {
        (1, 0): npy.read_array_header_1_0,
        (2, 0): npy.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"it is of the .npy version {version}")
    _, _, dtype = readers[version](stream)
    if not dtype.hasobject:
        raise ValueError(f"it holds {dtype}, and not an array of rows")
    return load_rows(stream)


def _row_lists(row: Any) -> list[Any] | None:
    """The three lists of a row as arrays, or None where it is no row of numbers."""
    if not isinstance(row, dict):
        return None
    lists = []
    for name in COLUMNS:
        try:
            given = row.get(name, ())
            values = np.asarray(given.values if isinstance(given, Array) else given)
        except (ValueError, TypeError):
            return None
        if not values.size:
            values = _NOTHING
        if values.ndim != 1 or not (values.dtype.kind in "iu" or (name == "loss_mask" and values.dtype.kind in "bf")):
            return None
        lists.append(values)
    return lists


def _from_rows(rows: list[list[Any]], bad: list[bool], first: int, findings: Findings) -> Batch:
    usable = ~np.array(bad, dtype=np.bool_)
    broken = np.flatnonzero(~usable)
    findings.rows("D04", broken + first, len(broken))
    columns = []
    for index in range(len(COLUMNS)):
        parts = [row[index] for row in rows]
        offsets = np.concatenate(([0], np.cumsum([len(part) for part in parts]))).astype(np.int64)
        columns.append(Lists(offsets, _numbers(COLUMNS[index], np.concatenate(parts))))
    return Batch(first, columns[0], columns[1], columns[2], usable)


def _numbers(name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Ids and starts as int64, whatever the file has; a mask as it is."""
    return values if name == "loss_mask" else values.astype(np.int64, copy=False)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
