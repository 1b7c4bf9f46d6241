"""What is kept of each architecture, so that a sweep that was stopped goes on where it was.

One JSON file an architecture. Its key is a hash of all that the result depends on; a record with another key is as
good as none. A record of a run that did not end by itself (too long, killed) is shown and run again the next time.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Record:
    """How `onboard new` ended on one config.

    Attributes:
        name: as :attr:`~.scope.Subject.name`.
        key: see :func:`record_key`.
        exit: the exit status; negative for the signal that ended it; None where it was stopped.
        stopped: why this sweep stopped it, or None.
        out_of_memory: whether the machine killed processes, these or others, because it had no memory left.
        seconds: wall-clock time of the whole command, beside the other workers.
        answer: what ``--json`` printed; None where that was no JSON.
        said: the end of stderr, for where there is no answer.
    """

    name: str
    key: str
    exit: int | None
    stopped: str | None
    out_of_memory: bool
    seconds: float
    answer: dict[str, Any] | None
    said: str

    @property
    def ended(self) -> bool:
        """Whether the command ended by itself, so that running it again would give the same."""
        if self.stopped is not None or self.exit is None or not 0 <= self.exit < 128:
            return False
        return self.exit == 0 or not self.out_of_memory  # a killed child looks like a failure of its own


class Store:
    """The folder of records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, name: str, key: str) -> Record | None:
        """The record of this name if it has this key."""
        try:
            raw = json.loads(self._path(name).read_text(encoding="utf-8"))
            if raw.pop("schema_version") != SCHEMA_VERSION:
                return None
            record = Record(**raw)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # none, or cut off, or written by another version: it is run again
        return record if record.key == key else None

    def save(self, record: Record) -> None:
        """Write a record, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(record.name)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        text = json.dumps({"schema_version": SCHEMA_VERSION, **asdict(record)}, indent=1)
        partial.write_text(text + "\n", encoding="utf-8")
        os.replace(partial, path)

    def _path(self, name: str) -> Path:
        return self.folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.json"


def record_key(base: str, config: str) -> str:
    """The key of a config's record.

    Args:
        base: what all records of a sweep depend on, see :func:`base_key`.
        config: the text of config.json.
    """
    return hashlib.sha256(f"{base}\n{config}".encode()).hexdigest()


def base_key(versions: dict[str, str | None], folders: Iterable[Path]) -> str:
    """A hash of the versions, the interpreter and every source file of the generator and its templates."""
    digest = hashlib.sha256(json.dumps([platform.python_version(), versions], sort_keys=True).encode())
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                digest.update(f"{folder.name}/{path.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()
