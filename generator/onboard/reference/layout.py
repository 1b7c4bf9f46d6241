"""The checkpoint's layout of a reference that is reused as it is: which tensor on disk is which tensor in memory.

Measured by the values: every parameter is random, so that a tensor on disk equals exactly one in memory.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from onboard.reference.build import build
from onboard.reference.joins import Join, find_joins
from onboard.reference.roles import Unexplained


@dataclass(frozen=True)
class Layout:
    """What a checkpoint stores.

    Args:
        names: name on disk to name in memory of the tensors that are the same.
        joins: tensors that are parts of one, on one of the two sides.
    """

    names: dict[str, str]
    joins: list[Join]


def layout(cls: type[PreTrainedModel], fields: Mapping[str, Any]) -> Layout:
    """Every tensor that the tiny model's checkpoint stores.

    Raises:
        Unexplained: a tensor on disk equals none in memory, is no part of one, and has none as its parts.
    """
    model = build(cls, fields)
    state = model.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        disk: dict[str, torch.Tensor] = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            disk.update(load_file(file))
    names: dict[str, str] = {}
    others: dict[str, torch.Tensor] = {}
    for name, tensor in disk.items():
        if name in state and _same(state[name], tensor):
            names[name] = name
            continue
        found = next((other for other in state if other not in disk and _same(state[other], tensor)), None)
        if found is None:
            others[name] = tensor
        else:
            names[name] = found
    if not others:
        return Layout(names, [])
    shared, taken = aliases(model), set(names.values())
    left = {name: tensor for name, tensor in state.items() if name not in taken and name not in shared}
    joins = find_joins(others, left)
    for name in others.keys() - {one for join in joins for one in join.disk}:
        shape = list(others[name].shape)
        raise Unexplained("layout", f"{name} {shape} is stored in another form than any tensor in memory")
    return Layout(names, joins)


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


@dataclass(frozen=True)
class Table:
    """One row a kind of tensor; ``{layer}`` stands for the index of a decoder layer.

    Args:
        rows: ``disk``, ``native``, ``shape`` in the real model and ``only_if``.
        joins: the same of tensors that are parts of one, with lists of names; also ``operation``, ``dim``, ``leading``
            and ``rows_of``.
    """

    rows: list[dict[str, Any]]
    joins: list[dict[str, Any]]


def tabulate(
    found: Layout,
    layers: str | None,
    only_if: Mapping[str, str],
    real: Mapping[str, list[int]] | None,
) -> Table:
    """Sum up what the checkpoints of all settings store.

    Args:
        found: the layouts of all settings together.
        layers: path of the list of decoder layers.
        only_if: name in memory to the config field that decides whether the tensor exists.
        real: name in memory to shape of the real model's tensors, None where they are not known.

    Raises:
        Unexplained: layers differ in the way in which a tensor is stored, or the real model has another kind of
            tensor.
    """
    pairs = [Join((disk,), (native,), "rename", 0, 0) for disk, native in found.names.items()]
    table: dict[tuple[str, ...], Join] = {}
    decides: dict[tuple[str, ...], str] = {}
    for one in (*pairs, *found.joins):
        general = _for_every_layer(one, layers)
        before = table.setdefault(general.native, general)
        decides.setdefault(general.native, only_if.get(one.native[0], ""))
        if before != general:
            disk = f"{', '.join(before.disk)} on disk in one layer, {', '.join(one.disk)}"
            raise Unexplained("layout", f"{', '.join(general.native)} is {disk} in another")
    patterns: dict[str, list[int]] = {}
    for name, shape in (real or {}).items():
        patterns.setdefault(pattern_of(name, layers)[1], shape)
    if not patterns.keys() <= {name for names in table for name in names}:
        decides = {tuple(_INDEX.sub(_PLACE, name) for name in names): key for names, key in decides.items()}
        table = _without_indices(table)
        patterns = {_INDEX.sub(_PLACE, pattern): shape for pattern, shape in patterns.items()}
    lacking = sorted(patterns.keys() - {name for names in table for name in names})
    if lacking:
        raise Unexplained("layout", f"the tiny model has no tensor of the kind {lacking[0]}, which the real one has")
    out = Table([], [])
    for names, one in table.items():
        shapes = [patterns.get(name) for name in names]
        common = shapes[0] if all(other == shapes[0] for other in shapes) else None
        if one.operation == "rename":
            out.rows.append({"disk": one.disk[0], "native": names[0], "shape": common, "only_if": decides[names]})
        else:
            lists = {"disk": list(one.disk), "native": list(names), "rows_of": list(one.rows_of)}
            how = {"operation": one.operation, "dim": one.dim, "leading": one.leading}
            out.joins.append({**lists, **how, "shape": common, "only_if": decides[names]})
    return out


def _for_every_layer(one: Join, layers: str | None) -> Join:
    """The same with ``{layer}`` in place of a layer's index."""
    index = pattern_of(one.native[0], layers)[0]
    native, rows_of = (tuple(pattern_of(name, layers)[1] for name in names) for names in (one.native, one.rows_of))
    if index is None:
        return replace(one, native=native, rows_of=rows_of)
    disk = tuple(re.sub(rf"(?<=\.){index}(?=\.)", "{layer}", name, count=1) for name in one.disk)
    return replace(one, disk=disk, native=native, rows_of=rows_of)


_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")
_PLACE = "{index}"


def _without_indices(table: Mapping[tuple[str, ...], Join]) -> dict[tuple[str, ...], Join]:
    """The rows with ``{index}`` in place of every other index: of lists that are longer in a larger model.

    Raises:
        Unexplained: an index on disk is another one in memory.
    """
    out: dict[tuple[str, ...], Join] = {}
    for native, one in table.items():
        names = (*one.disk, *native, *one.rows_of)
        if any(_INDEX.findall(name) != _INDEX.findall(native[0]) for name in names):
            raise Unexplained("layout", f"{native[0]} is {one.disk[0]} on disk, with another index")
        general = replace(
            one,
            disk=tuple(_INDEX.sub(_PLACE, name) for name in one.disk),
            native=tuple(_INDEX.sub(_PLACE, name) for name in native),
            rows_of=tuple(_INDEX.sub(_PLACE, name) for name in one.rows_of),
        )
        out.setdefault(general.native, general)
    return out


def real_names(table: Table, layers: str | None, real: Mapping[str, list[int]]) -> list[str]:
    """Names on disk of the real model's tensors."""
    stored: dict[str, Sequence[str]] = {row["native"]: [row["disk"]] for row in table.rows}
    for row in table.joins:
        stored |= dict.fromkeys(row["native"], row["disk"])
    names: dict[str, None] = {}
    for name in real:
        index, pattern = pattern_of(name, layers)
        places: list[str] = []
        if pattern not in stored:
            places, pattern = _INDEX.findall(pattern), _INDEX.sub(_PLACE, pattern)
        for disk in stored[pattern]:
            for place in places:
                disk = disk.replace(_PLACE, place, 1)
            names[disk.replace("{layer}", str(index))] = None
    return list(names)


def pattern_of(name: str, layers: str | None) -> tuple[int | None, str]:
    """Index of the decoder layer that a tensor belongs to, None outside of them, and its name with ``{layer}``."""
    match = re.match(rf"{re.escape(layers)}\.(\d+)\.", name) if layers else None
    if match is None:
        return None, name
    return int(match[1]), f"{layers}.{{layer}}.{name[match.end() :]}"
