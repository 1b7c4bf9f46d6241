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
    return first.shape == second.shape and first.dtype == second.dtype and torch.equal(first, second)


def aliases(model: PreTrainedModel) -> dict[str, str]:
    """Names in memory of tensors that are another one's, to that one's name: tied heads, layers that share weights."""
    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if first.setdefault(id(tensor), name) != name:
            shared[name] = first[id(tensor)]
    return shared


def rows(
    pairs: Mapping[str, str], layers: str | None, only_if: Mapping[str, str], shapes: Mapping[str, list[int]]
) -> list[dict[str, Any]]:
    """One row a kind of tensor; ``{layer}`` stands for the index of a decoder layer.

    Args:
        pairs: disk name to name in memory, of all settings together.
        layers: path of the list of decoder layers.
        only_if: pattern in memory to the config field without which the tensor does not exist.
        shapes: pattern in memory to shape, of the real model where it has such a tensor.

    Raises:
        Unexplained: layers differ in the way in which a tensor is renamed.
    """
    found: dict[str, dict[str, Any]] = {}
    for disk, native in pairs.items():
        index, native_pattern = pattern_of(native, layers)
        disk_pattern = disk if index is None else re.sub(rf"(?<=\.){index}(?=\.)", "{layer}", disk, count=1)
        row = found.setdefault(
            native_pattern,
            {
                "disk": disk_pattern,
                "native": native_pattern,
                "shape": shapes.get(native_pattern),
                "only_if": only_if.get(native_pattern, ""),
            },
        )
        if row["disk"] != disk_pattern:
            raise Unexplained("layout", f"{native_pattern} is {row['disk']} on disk in one layer, {disk} in another")
    return list(found.values())


def pattern_of(name: str, layers: str | None) -> tuple[int | None, str]:
    """Index of the decoder layer that a tensor belongs to, None outside of them, and its name with ``{layer}``."""
    match = re.match(rf"{re.escape(layers)}\.(\d+)\.", name) if layers else None
    if match is None:
        return None, name
    return int(match[1]), f"{layers}.{{layer}}.{name[match.end() :]}"
