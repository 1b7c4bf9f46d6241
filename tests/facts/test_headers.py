"""A safetensors header is read as the official reader reads it; whatever else a file may hold becomes a named error."""

from __future__ import annotations

import json

import numpy
import pytest
import safetensors as official
import safetensors.numpy as official_numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from onboard.facts.headers import HeaderError, parse_header, read_header

from .files import MALFORMED, safetensors


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_named(name, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(MALFORMED[name])
    with pytest.raises(HeaderError) as caught:
        read_header(str(path), path.name)
    assert str(caught.value).isprintable()


def test_a_name_twice(tmp_path):
    entry = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    with pytest.raises(HeaderError, match="twice"):
        parse_header(f'{{"w": {entry}, "w": {entry}}}'.encode(), "x.safetensors")


def test_bytes_that_do_not_fit_are_a_warning():
    header = parse_header(b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "x.safetensors", 4)
    assert [tensor.shape for tensor in header.tensors] == [(2,)]
    assert "w do not fit" in header.warnings[0]


def test_a_file_without_its_end_is_a_warning(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors({"w": ("F32", (100,))})[:-1])
    header = read_header(str(path), path.name)
    assert header.warnings == ("x.safetensors is cut short: 399 of 400 bytes of weights are there",)


def test_a_dtype_of_the_future_is_kept():
    header = parse_header(b'{"w": {"dtype": "F3_E1M1", "shape": [8], "data_offsets": [0, 3]}}', "x.safetensors")
    assert header.tensors[0].dtype == "F3_E1M1"
    assert header.warnings == ()


_TENSORS = st.dictionaries(
    st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__" and name.isprintable()),
    st.tuples(st.sampled_from(["F32", "F16", "I64", "BOOL"]), st.lists(st.integers(0, 4), max_size=4).map(tuple)),
    max_size=6,
)
_NUMPY = {"F32": "float32", "F16": "float16", "I64": "int64", "BOOL": "bool"}


def _official_reading(content):
    return {name: (tensor["dtype"], tuple(tensor["shape"])) for name, tensor in official.deserialize(content)}


@settings(max_examples=100, deadline=None)
@given(_TENSORS)
def test_what_the_official_package_writes_is_read_the_same(tensors):
    arrays = {name: numpy.zeros(shape, dtype=_NUMPY[dtype]) for name, (dtype, shape) in tensors.items()}
    content = official_numpy.save(arrays)
    length = int.from_bytes(content[:8], "little")
    header = parse_header(content[8 : 8 + length], "x.safetensors", len(content) - 8 - length)
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors} == _official_reading(content)
    assert header.warnings == ()


@settings(max_examples=200, deadline=None)
@given(_TENSORS.filter(bool), st.data())
def test_a_damaged_header_is_read_as_officially_or_refused(tensors, data):
    """Nothing but a HeaderError gets out, and what the official reader accepts is never refused or read otherwise."""
    content = bytearray(safetensors(tensors, metadata=False))
    length = int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(8, 7 + length))] = data.draw(st.integers(0, 255))
    try:
        header = parse_header(bytes(content[8 : 8 + length]), "x.safetensors", len(content) - 8 - length)
    except HeaderError as error:
        # The one deliberate difference: officially the last of two equal names counts.
        if "twice" not in str(error):
            with pytest.raises(official.SafetensorError):
                official.deserialize(bytes(content))
        return
    try:
        expected = _official_reading(bytes(content))
    except official.SafetensorError:
        return
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors} == expected


def _parsed(content):
    try:
        return parse_header(content, "x.safetensors", 8), None
    except HeaderError as error:
        return None, error


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
_ENTRY = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "BF16"]) | _JSON},
    optional={"shape": st.lists(st.integers(-2, 2**64)) | _JSON, "data_offsets": st.lists(st.integers(-2, 9)) | _JSON},
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=5), _ENTRY | _JSON, max_size=3) | _JSON)
def test_any_json_is_tensors_or_a_named_error(value):
    header, error = _parsed(json.dumps(value).encode())
    assert str(error).isprintable()
    for tensor in header.tensors if header else ():
        assert all(size >= 0 for size in tensor.shape)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_are_a_header_or_a_named_error(content):
    assert str(_parsed(content)[1]).isprintable()
