"""Which files hold a checkpoint, and the tensors of all of them together.

The same for a directory, a cached snapshot and a repo on the Hub: :func:`find_layout` looks at file names alone, the
caller reads the headers, and :func:`assemble` joins them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from onboard.facts._facts import Origin, TensorHeader
from onboard.facts._text import few, shown
from onboard.facts.headers import FileHeader

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MOST_INDEX_BYTES = 64 * 1024 * 1024
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_OTHER_WEIGHTS = (".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".ckpt", ".npz", ".onnx")
# Additions to a checkpoint rather than one: PEFT writes the first, trainers the others.
_NOT_A_CHECKPOINT = ("adapter_", "optimizer", "training_", "scheduler")


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a checkpoint's headers are.

    Attributes:
        files: the safetensors files to read, where no index names them.
        index: the index that names them.
        warnings: what is unusual about the choice.
        because: why there is nothing to read; None where there is.
    """

    files: tuple[str, ...] = ()
    index: str | None = None
    warnings: tuple[str, ...] = ()
    because: str | None = None


def find_layout(names: Iterable[str]) -> Layout:
    """Choose the checkpoint among a folder's files, as transformers would, and say so where it would not find one.

    Args:
        names: the names of the files in the folder; anything in a sub-folder is ignored.
    """
    here = sorted(name for name in names if "/" not in name)
    if SINGLE in here:
        both = (f"{INDEX} is ignored: {SINGLE} is there too, and transformers reads that",) if INDEX in here else ()
        return Layout(files=(SINGLE,), warnings=both)
    if INDEX in here:
        return Layout(index=INDEX)
    weights = [name for name in here if name.endswith(".safetensors") and not name.startswith(_NOT_A_CHECKPOINT)]
    shards = _whole_set(weights)
    if shards:
        return Layout(files=shards, warnings=(f"the shards have no index ({INDEX}); transformers will not find them",))
    if len(weights) == 1 and not _SHARD.fullmatch(weights[0]):
        return Layout(files=(weights[0],), warnings=(f"the only weights are in {shown(weights[0])}, not in {SINGLE}",))
    if weights:
        return Layout(because=f"there is no {SINGLE} and no {INDEX} to say what {few(weights)} are")
    others = [name for name in here if name.endswith(_OTHER_WEIGHTS)]
    if others:
        return Layout(because=f"the weights are not safetensors: {few(others)}")
    return Layout(because="there are no weights beside config.json")


def read_index(content: bytes, origin: Origin) -> dict[str, str]:
    """Read ``model.safetensors.index.json``.

    Args:
        content: its bytes.
        origin: the place that it came from, for the errors.

    Returns:
        The file of each tensor.

    Raises:
        UsageError: a local index is malformed.
        HubError: a fetched index is.
    """
    code = "checkpoint.bad_index"
    if len(content) > MOST_INDEX_BYTES:
        raise origin.refuse(INDEX, f"it is larger than {MOST_INDEX_BYTES // 1024**2} MiB", code)
    try:
        value = json.loads(content.decode("utf-8"))
    except RecursionError as error:
        raise origin.refuse(INDEX, "it nests too deeply", code) from error
    except ValueError as error:
        raise origin.refuse(INDEX, f"it is not JSON: {shown(str(error))}", code) from error
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise origin.refuse(INDEX, "it has no weight_map from tensors to files", code)
    for name, file in weight_map.items():
        # A name alone: a path here could lead a reader of local files out of the checkpoint's folder.
        if (
            not isinstance(file, str)
            or not file.endswith(".safetensors")
            or "/" in file
            or "\\" in file
            or "\0" in file
        ):
            raise origin.refuse(INDEX, f"its entry for {shown(name)} is not the name of a safetensors file", code)
    return weight_map


def missing_files(weight_map: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """The files that an index names and the folder lacks."""
    return sorted(set(weight_map.values()).difference(names))


def assemble(
    headers: Sequence[FileHeader], weight_map: Mapping[str, str] | None
) -> tuple[tuple[TensorHeader, ...], tuple[str, ...]]:
    """Join the headers of a checkpoint's files.

    Args:
        headers: one for each file.
        weight_map: the file of each tensor as the index gives it, where there is an index.

    Returns:
        The tensors sorted by name, and warnings where the files disagree with each other or with the index.
    """
    found: dict[str, TensorHeader] = {}
    repeated = []
    for tensor in (tensor for header in headers for tensor in header.tensors):
        if tensor.name in found:
            repeated.append(tensor.name)
            if weight_map is not None and weight_map.get(tensor.name) != tensor.file:
                continue
        found[tensor.name] = tensor
    warnings = [warning for header in headers for warning in header.warnings]
    if repeated:
        chosen = "the index's file counts" if weight_map is not None else "the last counts"
        warnings.append(f"tensors are in more than one file, and {chosen}: {few(sorted(repeated))}")
    if weight_map is not None:
        absent = sorted(name for name, file in weight_map.items() if name not in found or found[name].file != file)
        unlisted = sorted(found.keys() - weight_map.keys())
        if absent:
            warnings.append(f"the index names tensors that are not in the files it gives: {few(absent)}")
        if unlisted:
            warnings.append(f"the files hold tensors that the index does not name: {few(unlisted)}")
    return tuple(found[name] for name in sorted(found)), tuple(warnings)


def _whole_set(weights: list[str]) -> tuple[str, ...]:
    """All shards of one checkpoint, or nothing unless every one of them is there and nothing else is."""
    matches = [match for name in weights if (match := _SHARD.fullmatch(name))]
    if not matches or len(matches) != len(weights):
        return ()
    stems = {(match[1], match[3]) for match in matches}
    numbers = sorted(int(match[2]) for match in matches)
    return tuple(weights) if len(stems) == 1 and numbers == list(range(1, int(matches[0][3]) + 1)) else ()
