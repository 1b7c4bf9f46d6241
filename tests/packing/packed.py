"""Packed data for tests: good rows, each damage as a change of one row, and both file formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

EOS = 2
VOCAB = 1000
SIZE = 64
MULT = 4
Row = dict[str, list[Any]]


def sequence(length: int, padding: int, seed: int) -> tuple[list[int], list[int]]:
    """Tokens and shifted mask of one sequence: ``length`` tokens with EOS, then padding."""
    rng = np.random.default_rng(seed)
    tokens = [*rng.integers(3, VOCAB, length - 1).tolist(), EOS, *[EOS] * padding]
    prompt = length // 2
    # Entry i says whether the label of token i, which is token i + 1, counts.
    mask = [1 if prompt <= index + 1 < length else 0 for index in range(len(tokens))]
    return tokens, mask


def row(number: int, lengths: tuple[int, ...] = (17, 12, 29)) -> Row:
    """A row of sequences that are padded, so that each trains on a multiple of MULT tokens."""
    result: Row = {"input_ids": [], "loss_mask": [], "seq_start_id": []}
    for index, length in enumerate(lengths):
        tokens, mask = sequence(length, -(length - 1) % MULT, 100 * number + index)
        result["seq_start_id"].append(len(result["input_ids"]))
        result["input_ids"] += tokens
        result["loss_mask"] += mask
    return result


def rows(count: int = 12) -> list[Row]:
    return [row(number) for number in range(count)]


def metadata(data: list[Row], size: int = SIZE) -> dict[str, Any]:
    """What packing writes, computed plainly."""
    lengths = [np.diff([*item["seq_start_id"], len(item["input_ids"])]) - 1 for item in data]
    packed = [int(item.sum()) for item in lengths]
    return {
        "dataset_max_seqlen": int(max(item.max() for item in lengths)),
        "max_samples_per_bin": max(map(len, lengths)),
        "packing_factor": round(sum(map(len, lengths)) / len(data), 2),
        "packing_efficiency": round(sum(packed) / len(packed) / size * 100, 2),
        "pack_size": size,
        "min_packed_seqlen": min(packed),
    }


def write_parquet(path: Path, data: list[Row], mask: pa.DataType | None = None, group: int = 5) -> Path:
    if mask is not None and not pa.types.is_signed_integer(mask):
        kind = bool if pa.types.is_boolean(mask) else float
        data = [{**item, "loss_mask": [kind(value) for value in item["loss_mask"]]} for item in data]
    table = pa.table(
        {
            "input_ids": pa.array([item["input_ids"] for item in data], pa.list_(pa.int64())),
            "loss_mask": pa.array([item["loss_mask"] for item in data], pa.list_(mask or pa.int8())),
            "seq_start_id": pa.array([item["seq_start_id"] for item in data], pa.list_(pa.int64())),
        }
    )
    pq.write_table(table, path, row_group_size=group)
    return path


def write_npy(path: Path, data: list[Any]) -> Path:
    array = np.empty(len(data), dtype=object)
    array[:] = data
    np.save(path, array, allow_pickle=True)
    return path


def write_metadata(folder: Path, *entries: Any, size: int = SIZE) -> Path:
    path = folder / f"{size}_metadata.jsonl"
    path.write_text(json.dumps(list(entries)))
    return path
