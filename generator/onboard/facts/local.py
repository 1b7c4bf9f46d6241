"""Facts from a directory or a file on this machine. Nothing here imports more than the standard library.

- A directory gives its config.json and the headers of its checkpoint.
- A file named config.json stands for its directory.
- Any other JSON file gives a config alone: what lies beside it need not belong to it.
"""

from __future__ import annotations

import os
import stat

from onboard.errors import UsageError
from onboard.facts import checkpoint, config_json
from onboard.facts._facts import Facts, Origin, Source, TensorHeader
from onboard.facts._text import few, shown
from onboard.facts.headers import FileHeader, HeaderError, read_header


def read_local(given: str, path: str, *, headers: bool) -> Facts:
    """Read the facts of a directory or a JSON file.

    Args:
        given: what the user typed.
        path: the existing path that it stands for.
        headers: whether to read the checkpoint's headers as well.

    Raises:
        UsageError: something there cannot be read, or is malformed.
    """
    from hashlib import sha256

    is_directory = os.path.isdir(path)
    config_path = os.path.join(path, "config.json") if is_directory else path
    folder, file = os.path.split(config_path)
    origin = Origin(shown(folder or "."), UsageError)
    if is_directory and not os.path.lexists(config_path):
        raise _no_config(path)
    if file.endswith(".safetensors"):
        raise UsageError(
            f"cannot read {shown(given)}",
            "it holds weights, and a model starts from its config.json",
            f"Give the directory: {shown(folder or '.')}",
            code="source.not_json",
        )
    content = _read(config_path, config_json.MOST_BYTES, origin)
    config, warnings = config_json.parse_config(content, origin, shown(file))
    tensors: tuple[TensorHeader, ...] | None = None
    because: str | None = "the headers were not asked for"
    if headers and not is_directory and file != "config.json":
        because = f"{shown(file)} is a config on its own; a directory, or a file named config.json, may have weights"
    elif headers:
        tensors, because, more = read_folder(folder or ".", origin)
        warnings = (*warnings, *more)
    return Facts(
        source=Source(given, "directory" if is_directory else "file", None, None, config_path),
        config=config,
        config_sha256=sha256(content).hexdigest(),
        tensors=tensors,
        no_tensors_because=because,
        warnings=warnings,
    )


def read_folder(
    folder: str, origin: Origin, *, complete: bool = True
) -> tuple[tuple[TensorHeader, ...] | None, str | None, tuple[str, ...]]:
    """Read the headers of the checkpoint in a folder.

    Args:
        folder: a directory, or a snapshot in the Hub's cache.
        origin: the place, for the errors.
        complete: whether a file that the index names has to be there; a cached snapshot may hold any part of a repo.

    Returns:
        The tensors, or None and why; and warnings.

    Raises:
        UsageError: a file of a local checkpoint is missing, unreadable or malformed.
        HubError: a cached one is malformed.
    """
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.is_file()]
    except OSError as error:
        raise _unreadable(folder, error) from error
    layout = checkpoint.find_layout(names)
    if layout.because is not None:
        return None, layout.because, layout.warnings
    weight_map, files = None, list(layout.files)
    if layout.index is not None:
        content = _read(os.path.join(folder, layout.index), checkpoint.MOST_INDEX_BYTES, origin)
        weight_map = checkpoint.read_index(content, origin)
        files = sorted(set(weight_map.values()))
        missing = checkpoint.missing_files(weight_map, names)
        if missing and not complete:
            return None, f"the cache lacks {few(missing)}", layout.warnings
        if missing:
            raise origin.refuse(
                checkpoint.INDEX,
                f"it names files that are not there: {few(missing)}",
                "checkpoint.missing_file",
                "Fetch the missing files, or give the config.json under another name to go on without the checkpoint.",
            )
    tensors, warnings = checkpoint.assemble([_header(folder, file, origin) for file in files], weight_map)
    return tensors, None, (*layout.warnings, *warnings)


def _header(folder: str, file: str, origin: Origin) -> FileHeader:
    path = os.path.join(folder, file)
    try:
        return read_header(path, file)
    except HeaderError as error:
        raise origin.refuse(shown(file), str(error), "checkpoint.bad_header") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _read(path: str, most: int, origin: Origin) -> bytes:
    """The bytes of a regular file, one more than allowed where there are more, so that the parser can refuse it."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            # A pipe or a device could block for ever.
            raise origin.refuse(shown(os.path.basename(path)), "it is not a regular file", "source.unreadable")
        with open(path, "rb") as stream:
            return stream.read(most + 1)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: OSError) -> UsageError:
    return UsageError(
        f"cannot read {shown(path)}",
        shown(error.strerror or type(error).__name__),
        "Check the path and its permissions.",
        code="source.unreadable",
    )


def _no_config(folder: str) -> UsageError:
    try:
        others = sorted(name for name in os.listdir(folder) if name.endswith("config.json"))
    except OSError as error:
        return _unreadable(folder, error)
    return UsageError(
        f"cannot read a model from the directory {shown(folder)}",
        "it holds no config.json" + (f", only {few(others)}" if others else ""),
        "Give the directory that a model was saved to; to read the Hub repo of the same name, give its address"
        " (https://huggingface.co/...).",
        code="source.no_config",
    )
