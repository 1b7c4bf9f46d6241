"""Reads what numpy pickles into a ``.npy`` file of objects, without running anything and without numpy's own unpickler.

A pickle can run code, so only arrays, dicts, lists and numbers are admitted. And numpy's ``__setstate__`` believes
what a damaged file says of an array's shape and type, which ends in a crash of the process; here each array is a
:class:`Array` whose state is checked before numpy sees it.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

_PLAIN: Final = re.compile(r"[biuf][1248]|\?")
_ORDERS: Final = frozenset("<>|=")


class Dtype:
    """A numpy dtype as it is pickled: a code, then a state that has the byte order."""

    def __init__(self, code: str, *_: Any) -> None:
        self.is_object = code in ("O", "O8")
        if not self.is_object and (type(code) is not str or not _PLAIN.fullmatch(code)):
            raise pickle.UnpicklingError(f"it holds numbers of the type {str(code)[:20]!r}")
        self._code, self._order = code, "="

    def __setstate__(self, state: Any) -> None:
        order = state[1]
        if order not in _ORDERS:
            raise pickle.UnpicklingError("an array has no byte order")
        self._order = order

    def read(self, data: Any) -> npt.NDArray[Any]:
        """Numbers from bytes."""
        if self.is_object or not isinstance(data, (bytes, bytearray)):
            raise pickle.UnpicklingError("an array of numbers is not stored as bytes")
        return np.frombuffer(bytes(data), dtype=np.dtype(self._order.replace("|", "=") + self._code))


class Array:
    """A numpy array as it is pickled: made empty, then given its state.

    Attributes:
        values: its numbers, or the objects of an array of objects, flat.
    """

    def __init__(self) -> None:
        self.values: npt.NDArray[Any] | list[Any] = []

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, _, data = state
        self.fill(shape, dtype, data)

    def fill(self, shape: Any, dtype: Any, data: Any) -> Array:
        """Take a state, if it is consistent."""
        if not isinstance(dtype, Dtype) or not all(type(size) is int and size >= 0 for size in shape):
            raise pickle.UnpicklingError("an array has no shape or type")
        if dtype.is_object and not isinstance(data, list):
            raise pickle.UnpicklingError("an array of objects is not stored as a list")
        self.values = data if dtype.is_object else dtype.read(data)
        if len(self.values) != math.prod(shape):
            raise pickle.UnpicklingError(f"an array of the shape {list(shape)} has {len(self.values)} values")
        if len(shape) != 1 and not dtype.is_object:
            self.values = self.values.reshape(shape)
        return self


def _reconstruct(*_: Any) -> Array:
    return Array()


def _scalar(dtype: Dtype, data: Any) -> Any:
    return dtype.read(data)[0]


def _from_buffer(data: Any, dtype: Dtype, shape: Any, _: Any) -> Array:
    return Array().fill(shape, dtype, data)


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError("bytes are stored in an unknown way")
    return text.encode("latin1")


_HARMLESS: Final[dict[tuple[str, str], Callable[..., Any]]] = {
    ("numpy", "ndarray"): Array,
    ("numpy", "dtype"): Dtype,
    ("_codecs", "encode"): _encode,
    **{
        (f"{package}.{module}", name): stand_in
        for package in ("numpy.core", "numpy._core")
        for module, name, stand_in in (
            ("multiarray", "_reconstruct", _reconstruct),
            ("multiarray", "scalar", _scalar),
            ("numeric", "_frombuffer", _from_buffer),
        )
    },
}


class _Unpickler(pickle._Unpickler):
    """The one in Python: the one in C takes the gigabytes that a damaged index asks for."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"it wants to run {module}.{name}, which no packed data needs")
        return _HARMLESS[module, name]


def load_rows(stream: IO[bytes]) -> list[Any]:
    """The objects of a pickled array of objects.

    Raises:
        pickle.UnpicklingError: it holds something else, or contradicts itself; a damaged pickle can raise anything.
    """
    loaded = _Unpickler(stream).load()
    if not isinstance(loaded, Array) or not isinstance(loaded.values, list):
        raise pickle.UnpicklingError("it holds no array of rows")
    return loaded.values
