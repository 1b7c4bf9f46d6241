"""Small checkpoints, byte by byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any

CONFIG = b'{"architectures": ["TinyForCausalLM"], "hidden_size": 8}'
_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "F8_E4M3": 1, "BOOL": 1}


def safetensors(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: bool = True) -> bytes:
    """A safetensors file of zeros.

    Args:
        tensors: dtype and shape for each name.
        metadata: whether to write the metadata that transformers writes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = prod(shape) * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    return with_header(json.dumps(header).encode()) + bytes(end)


def with_header(header: bytes) -> bytes:
    """A header with its length before it."""
    return len(header).to_bytes(8, "little") + header


def index(weight_map: Mapping[str, str]) -> bytes:
    """A model.safetensors.index.json."""
    return json.dumps({"metadata": {"total_size": 0}, "weight_map": dict(weight_map)}).encode()


# Every way in which a safetensors file can be no safetensors file; shared by the local reader's tests and the Hub's.
MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": bytes(7),
    "length beyond the file": (1000).to_bytes(8, "little") + b"{}",
    "absurd length": b"\xff" * 8 + b"{}",
    "no JSON": with_header(b"not json"),
    "cut JSON": with_header(b'{"w": {"dtype": "F32"'),
    "no text": with_header(b"\xff\xfe\xfd"),
    "a list": with_header(b"[]"),
    "a number": with_header(b"3"),
    "an entry that is a list": with_header(b'{"w": []}'),
    "an entry that is null": with_header(b'{"w": null}'),
    "no dtype": with_header(b'{"w": {"shape": [1], "data_offsets": [0, 4]}}'),
    "a numeric dtype": with_header(b'{"w": {"dtype": 3, "shape": [1], "data_offsets": [0, 4]}}'),
    "no shape": with_header(b'{"w": {"dtype": "F32", "data_offsets": [0, 4]}}'),
    "a shape that is a string": with_header(b'{"w": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}'),
    "a shape of strings": with_header(b'{"w": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}'),
    "a fractional size": with_header(b'{"w": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}'),
    "a boolean size": with_header(b'{"w": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}'),
    "a negative size": with_header(b'{"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}'),
    "a giant size": with_header(b'{"w": {"dtype": "F32", "shape": [1%s], "data_offsets": [0, 4]}}' % (b"0" * 30)),
    "a number without end": with_header(
        b'{"w": {"dtype": "F32", "shape": [1%s], "data_offsets": [0, 4]}}' % (b"0" * 5000)
    ),
    "many dimensions": with_header(b'{"w": {"dtype": "F32", "shape": [%s1], "data_offsets": [0, 4]}}' % (b"1," * 99)),
    "no offsets": with_header(b'{"w": {"dtype": "F32", "shape": [1]}}'),
    "one offset": with_header(b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}'),
    "negative offsets": with_header(b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}'),
    "offsets in the wrong order": with_header(b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}'),
    "offsets that are null": with_header(b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": null}}'),
    "deep nesting": with_header(b'{"w": ' + b"[" * 20000 + b"]" * 20000 + b"}"),
}
