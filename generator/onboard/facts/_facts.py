"""What is known about a model before anything is derived from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from onboard.errors import HubError, OnboardError, UsageError


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor of the checkpoint, as its safetensors header describes it; no weights are read.

    Attributes:
        name: the tensor's name on disk.
        dtype: as the header spells it, such as ``"BF16"``.
        shape: the dimensions; ``()`` for a scalar.
        file: the safetensors file that holds it, relative to the checkpoint's folder.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True, slots=True)
class Source:
    """Where the facts came from.

    Attributes:
        given: what the user typed.
        kind: how it was understood.
        id: the Hub repo id, for kind ``"hub"`` only.
        revision: the 40-digit commit that everything was read from, for kind ``"hub"`` only.
        path: the local config.json that was read, spelled as the user spelled it; None for kind ``"hub"``.
    """

    given: str
    kind: Literal["hub", "directory", "file"]
    id: str | None
    revision: str | None
    path: str | None

    def as_json(self) -> dict[str, str | None]:
        """The ``source`` object of the JSON output."""
        return {
            "given": self.given,
            "kind": self.kind,
            "id": self.id,
            "revision": self.revision,
            "path": self.path,
        }


@dataclass(frozen=True, slots=True)
class Facts:
    """A model's configuration and the description of its checkpoint.

    Attributes:
        source: where they came from.
        config: the raw JSON object of config.json, untouched.
        config_sha256: of config.json's bytes.
        tensors: the checkpoint's tensors, sorted by name; None where no checkpoint was seen.
        no_tensors_because: why ``tensors`` is None; None where it is not.
        warnings: what a reviewer should know about the files themselves.
    """

    source: Source
    config: Mapping[str, Any]
    config_sha256: str
    tensors: tuple[TensorHeader, ...] | None
    no_tensors_because: str | None
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """The place that files came from, and the errors that are raised about them.

    The same malformed file is the user's to mend when it is local (:class:`UsageError`), and the Hub's failing when it
    was fetched (:class:`HubError`).

    Attributes:
        place: for messages: ``"models/tiny"`` or ``"org/name at 0123456 on the Hub"``.
        error: the class to raise.
    """

    place: str
    error: type[UsageError] | type[HubError]

    def refuse(self, file: str, why: str, code: str, do: str | None = None) -> OnboardError:
        """The error that a file is not what it should be."""
        if do is None and self.error is HubError:
            do = "Report it to the model's owner, or give a corrected copy: a directory or a config.json."
        elif do is None:
            do = f"Correct {file}, or fetch it again."
        return self.error(f"cannot use {file} of {self.place}", why, do, code=code)
