"""The lock file, ``.onboard.lock.json``: what was asked, of which commit, and the hash of every file that was written.

It has no times and no paths of the machine it was written on: the same input gives the same bytes anywhere.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal, get_args

from onboard.errors import UsageError
from onboard.plan.changes import FileChange, check_path, sha256
from onboard.plan.names import shown
from onboard.plan.targets import LOCK_NAME, MODELS, Kind, find_checkout

SCHEMA_VERSION = 1

State = Literal["same", "edited", "missing"]

_MAX_BYTES = 4_000_000
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Lock:
    """What a lock file says.

    Attributes:
        schema_version: of the file's format.
        source: ``given``, ``kind``, ``id``, ``revision`` and, for a file or directory, the base name as ``path``.
        config_sha256: of the config.json.
        versions: of onboard, transformers, nemo_automodel and torch; None where one was not there.
        answers: the options of the run, so that it can be run again.
        kind: dense, moe or vlm.
        architecture: the class name in the config.
        model_type: the config's.
        name: the module name.
        files: path to SHA-256, of every generated file but the lock itself.
    """

    schema_version: int
    source: Mapping[str, str | None]
    config_sha256: str
    versions: Mapping[str, str | None]
    answers: Mapping[str, Any]
    kind: Kind
    architecture: str
    model_type: str
    name: str
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Drift:
    """How one generated file compares with the lock."""

    path: str
    state: State


def file_hashes(changes: Iterable[FileChange]) -> dict[str, str]:
    """The lock's ``files``. Edits of files that are not ours (the registry) are left out: others may edit them too."""
    return {
        change.path: sha256(change.data)
        for change in changes
        if not change.edits_existing and PurePosixPath(change.path).name != LOCK_NAME
    }


def render_lock(
    *,
    source: Mapping[str, str | None],
    config_sha256: str,
    versions: Mapping[str, str | None],
    answers: Mapping[str, Any],
    kind: Kind,
    architecture: str,
    model_type: str,
    name: str,
    files: Mapping[str, str],
) -> str:
    """The text of a lock file; see :class:`Lock` for the arguments and :func:`file_hashes` for ``files``.

    Absolute paths, which are nobody else's business, are cut to their base name.
    """
    local = source.get("kind") != "hub"
    return (
        json.dumps(
            {
                "schema_version": SCHEMA_VERSION,
                "source": {
                    key: _base_name(value)
                    if value is not None and (key == "path" or (key == "given" and local))
                    else value
                    for key, value in source.items()
                },
                "config_sha256": config_sha256,
                "versions": dict(versions),
                "answers": _without_paths(dict(answers)),
                "kind": kind,
                "architecture": architecture,
                "model_type": model_type,
                "name": name,
                "files": dict(files),
            },
            indent=2,
            sort_keys=True,
        )
        + "\n"
    )


def read_lock(path: Path) -> Lock:
    """Read and check a lock file.

    Raises:
        UsageError: there is none, it is not one, or a newer onboard wrote it.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"cannot read {path}",
            error.strerror or str(error),
            "give the folder that `onboard new` wrote",
            code="lock.missing",
        ) from None
    if len(data) > _MAX_BYTES:
        raise _invalid(path, f"it is larger than {_MAX_BYTES} bytes")
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _invalid(path, f"it is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise _invalid(path, "it is not a JSON object")
    version = raw.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise _invalid(path, "schema_version is not a positive number")
    if version > SCHEMA_VERSION:
        raise UsageError(
            f"{path} is from a newer onboard",
            f"its schema_version is {version}, this onboard knows {SCHEMA_VERSION}",
            "upgrade onboard",
            code="lock.newer",
        )
    return _checked(raw, path)


def drift(root: Path, lock: Lock) -> list[Drift]:
    """Compare the generated files below ``root`` with the lock, in the order of their paths."""
    return [Drift(path, _state(root / path, digest)) for path, digest in sorted(lock.files.items())]


def locate(path: Path) -> tuple[Path, Path]:
    """The lock file that ``path`` stands for, and the root that its paths are relative to.

    Args:
        path: a project folder, a model's package folder in a checkout, or a lock file.

    Raises:
        UsageError: there is no lock file.
    """
    lock_file = (path if path.name == LOCK_NAME else path / LOCK_NAME).absolute()
    if not lock_file.is_file():
        raise UsageError(
            f"{path} is nothing that onboard wrote",
            f"there is no {LOCK_NAME} in it",
            "give a project folder, or a model's package folder in a checkout",
            code="lock.missing",
        )
    checkout = find_checkout(lock_file.parent)
    if checkout is not None and lock_file.parent.parent == checkout / MODELS:
        return lock_file, checkout
    return lock_file, lock_file.parent


def is_unchanged(path: Path, digest: str) -> bool:
    """Whether ``path`` is a plain file with that hash."""
    return _state(path, digest) == "same"


def _state(path: Path, digest: str) -> State:
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return "edited"
        return "same" if sha256(path.read_bytes()) == digest else "edited"
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except OSError:
        return "edited"


def _base_name(path: str) -> str:
    # Both kinds of separators: a lock may be read on another system than it was written on.
    return PureWindowsPath(path.rstrip("/\\")).name or "."


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(item) for item in value]
    if isinstance(value, Path):
        return _base_name(str(value))
    if isinstance(value, str) and (value.startswith(("/", "~", "\\")) or PureWindowsPath(value).drive):
        return _base_name(value)
    return value


def _checked(raw: dict[str, Any], path: Path) -> Lock:
    def text(key: str) -> str:
        value = raw.get(key)
        if not isinstance(value, str):
            raise _invalid(path, f"{key} is not a string")
        return value

    def table(key: str) -> dict[str, Any]:
        value = raw.get(key)
        if not isinstance(value, dict):
            raise _invalid(path, f"{key} is not an object")
        return value

    def strings(key: str) -> dict[str, str | None]:
        value = table(key)
        for name, item in value.items():
            if item is not None and not isinstance(item, str):
                raise _invalid(path, f"{key}.{shown(name)} is not a string")
        return value

    def digest(value: object, what: str) -> str:
        if not isinstance(value, str) or not _SHA256.fullmatch(value):
            raise _invalid(path, f"{what} is not a SHA-256")
        return value

    kind: Kind
    for kind in get_args(Kind):
        if kind == raw.get("kind"):
            break
    else:
        raise _invalid(path, f"kind is {shown(raw.get('kind'))}")
    files = {}
    for name, value in table("files").items():
        try:
            files[check_path(name)] = digest(value, f"files.{name}")
        except UsageError as error:
            raise error if error.code == "lock.invalid" else _invalid(path, f"{error.what}: {error.why}") from None
    return Lock(
        schema_version=raw["schema_version"],
        source=strings("source"),
        config_sha256=digest(raw.get("config_sha256"), "config_sha256"),
        versions=strings("versions"),
        answers=table("answers"),
        kind=kind,
        architecture=text("architecture"),
        model_type=text("model_type"),
        name=text("name"),
        files=files,
    )


def _invalid(path: Path, why: str) -> UsageError:
    return UsageError(
        f"{path} is not a lock file of onboard",
        why,
        "restore it from version control, or generate the model anew with `onboard new --force`",
        code="lock.invalid",
    )
