"""A safetensors header: read without opening the weights, and without the safetensors package.

A file is an 8-byte little-endian length, that many bytes of JSON, and the tensors' bytes. The official reader wants the
whole file to be there; onboard needs only the header, so a file whose end is missing gets a warning here, not an error.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from math import prod
from typing import Any

from onboard.facts._facts import TensorHeader
from onboard.facts._text import few, shown

# The official reader's own limit.
MOST_HEADER_BYTES = 100_000_000
_LARGEST = 2**63 - 1
_MOST_DIMENSIONS = 64
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


class HeaderError(ValueError):
    """The header is not one; the message says where it stops being one."""


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The tensors of one safetensors file, and what is odd about them."""

    tensors: tuple[TensorHeader, ...]
    warnings: tuple[str, ...]


def read_header(path: str, file: str) -> FileHeader:
    """Read the header of a local safetensors file.

    Args:
        path: the file to open.
        file: its name in the checkpoint.

    Raises:
        HeaderError: it is not a safetensors file.
        OSError: it cannot be read.
    """
    with open(path, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        start = stream.read(8)
        if len(start) < 8:
            raise HeaderError(f"it has {len(start)} bytes, too few for a safetensors file")
        length = int.from_bytes(start, "little")
        if length > MOST_HEADER_BYTES:
            raise HeaderError(f"its first 8 bytes announce a header of {length} bytes, more than any file has")
        if 8 + length > size:
            raise HeaderError(f"its header should be {length} bytes long, and the file ends after {size - 8}")
        content = stream.read(length)
    return parse_header(content, file, data_bytes=size - 8 - length)


def parse_header(content: bytes, file: str, data_bytes: int | None = None) -> FileHeader:
    """Check a header's JSON.

    Args:
        content: the JSON, without the length before it.
        file: the file's name in the checkpoint.
        data_bytes: how many bytes follow the header, where that is known.

    Raises:
        HeaderError: it does not describe tensors.
    """
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=_no_name_twice)
    except HeaderError:
        raise
    except RecursionError as error:
        raise HeaderError("its header nests too deeply") from error
    except ValueError as error:
        raise HeaderError(f"its header is not JSON: {shown(str(error))}") from error
    if not isinstance(value, dict):
        raise HeaderError("its header is not a JSON object")
    entries = {}
    for name, entry in value.items():
        if name == "__metadata__":
            continue
        if not isinstance(entry, dict):
            raise HeaderError(f"its header's entry for {shown(name)} is not an object")
        entries[name] = (entry.get("dtype"), entry.get("shape"), entry.get("data_offsets"))
    return check_entries(entries, file, data_bytes)


def check_entries(entries: dict[str, tuple[Any, Any, Any]], file: str, data_bytes: int | None = None) -> FileHeader:
    """Check what a header says about each tensor.

    Args:
        entries: dtype, shape and data offsets for each name, of whatever types the header had.
        file: the file's name in the checkpoint.
        data_bytes: how many bytes follow the header, where that is known.

    Raises:
        HeaderError: a dtype, shape or offset is of the wrong type, or out of range.
    """
    tensors, odd, end = [], [], 0
    for name, (dtype, shape, offsets) in entries.items():
        if not isinstance(dtype, str) or not dtype:
            raise HeaderError(f"the dtype of {shown(name)} is not a name")
        if (
            not isinstance(shape, list | tuple)
            or len(shape) > _MOST_DIMENSIONS
            or not all(_is_size(size) for size in shape)
        ):
            raise HeaderError(f"the shape of {shown(name)} is not a list of sizes")
        if not isinstance(offsets, list | tuple) or len(offsets) != 2 or not all(_is_size(at) for at in offsets):
            raise HeaderError(f"the data offsets of {shown(name)} are not two positions")
        first, last = offsets
        if first > last:
            raise HeaderError(f"the data of {shown(name)} ends before it begins")
        end = max(end, last)
        bits = _BITS.get(dtype)
        if bits is not None and prod(shape) * bits != (last - first) * 8:
            odd.append(name)
        tensors.append(TensorHeader(name, dtype, tuple(shape), file))
    warnings = []
    if odd:
        warnings.append(f"{file}: the bytes of {few(odd)} do not fit the dtype and shape that the header gives")
    if data_bytes is not None and end > data_bytes:
        warnings.append(f"{file} is cut short: {data_bytes} of {end} bytes of weights are there")
    return FileHeader(tuple(tensors), tuple(warnings))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise HeaderError("its header names something twice")
    return found
