"""The checkpoint's layout of a reference that is reused as it is: which tensor on disk is which tensor in memory.

Measured by the values: every parameter is random, so that a tensor on disk equals exactly one in memory.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from onboard.reference.build import build
from onboard.reference.roles import Unexplained


def layout(cls: type[PreTrainedModel], fields: Mapping[str, Any]) -> dict[str, str]:
    """Name on disk to name in memory of every tensor that the tiny model's checkpoint stores.

    Raises:
        Unexplained: a tensor on disk equals none in memory.
    """
    model = build(cls, fields)
    state = model.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        disk: dict[str, torch.Tensor] = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            disk.update(load_file(file))
    names: dict[str, str] = {}
    for name, tensor in disk.items():
        if name in state and _same(state[name], tensor):
            names[name] = name
            continue
        found = next((other for other in state if other not in disk and _same(state[other], tensor)), None)
        if found is None:
            raise Unexplained(
                "layout", f"{name} {list(tensor.shape)} is stored in another form than any tensor in memory"
            )
        names[name] = found
    return names


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype and bool(torch.equal(first, second))


def aliases(model: PreTrainedModel) -> dict[str, str]:
    """Names in memory of tensors that are another one's, to that one's name: tied heads, layers that share weights."""
    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if first.setdefault(id(tensor), name) != name:
            shared[name] = first[id(tensor)]
    return shared


def rows(
    pairs: Mapping[str, str],
    layers: str | None,
    only_if: Mapping[str, str],
    real: Mapping[str, list[int]] | None,
) -> list[dict[str, Any]]:
    """One row a kind of tensor; ``{layer}`` stands for the index of a decoder layer.

    Args:
        pairs: disk name to name in memory, of all settings together.
        layers: path of the list of decoder layers.
        only_if: name in memory to the config field that decides whether the tensor exists.
        real: name in memory to shape of the real model's tensors, None where they are not known.

    Raises:
        Unexplained: layers differ in the way in which a tensor is renamed, or the real model has another kind of
            tensor.
    """
    table: dict[str, dict[str, Any]] = {}
    for disk, native in pairs.items():
        index, native_pattern = pattern_of(native, layers)
        disk_pattern = disk if index is None else re.sub(rf"(?<=\.){index}(?=\.)", "{layer}", disk, count=1)
        row = {"disk": disk_pattern, "native": native_pattern, "shape": None, "only_if": only_if.get(native, "")}
        before = table.setdefault(native_pattern, row)
        if before["disk"] != disk_pattern:
            raise Unexplained("layout", f"{native_pattern} is {before['disk']} on disk in one layer, {disk} in another")
    patterns: dict[str, list[int]] = {}
    for name, shape in (real or {}).items():
        patterns.setdefault(pattern_of(name, layers)[1], shape)
    if not patterns.keys() <= table.keys():
        table = _without_indices(table)
        patterns = {_INDEX.sub(_PLACE, pattern): shape for pattern, shape in patterns.items()}
    for pattern, shape in patterns.items():
        if pattern not in table:
            raise Unexplained("layout", f"the tiny model has no tensor of the kind {pattern}, which the real one has")
        table[pattern]["shape"] = shape
    return list(table.values())


_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")
_PLACE = "{index}"


def _without_indices(table: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows with ``{index}`` in place of every other index: of lists that are longer in a larger model.

    Raises:
        Unexplained: an index on disk is another one in memory.
    """
    out: dict[str, dict[str, Any]] = {}
    for native, row in table.items():
        if _INDEX.findall(native) != _INDEX.findall(row["disk"]):
            raise Unexplained("layout", f"{native} is {row['disk']} on disk, with another index")
        general = _INDEX.sub(_PLACE, native)
        out.setdefault(general, {**row, "native": general, "disk": _INDEX.sub(_PLACE, row["disk"])})
    return out


def real_names(table: list[dict[str, Any]], layers: str | None, real: Mapping[str, list[int]]) -> list[str]:
    """Names on disk of the real model's tensors."""
    renames = {row["native"]: row["disk"] for row in table}
    names = []
    for name in real:
        index, pattern = pattern_of(name, layers)
        disk = renames.get(pattern)
        if disk is None:
            disk = renames[_INDEX.sub(_PLACE, pattern)]
            for place in _INDEX.findall(pattern):
                disk = disk.replace(_PLACE, place, 1)
        names.append(disk.replace("{layer}", str(index)))
    return names


def pattern_of(name: str, layers: str | None) -> tuple[int | None, str]:
    """Index of the decoder layer that a tensor belongs to, None outside of them, and its name with ``{layer}``."""
    match = re.match(rf"{re.escape(layers)}\.(\d+)\.", name) if layers else None
    if match is None:
        return None, name
    return int(match[1]), f"{layers}.{{layer}}.{name[match.end() :]}"
