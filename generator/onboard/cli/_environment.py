"""What ``onboard doctor`` looks at.

Package metadata only: importing torch to learn its version takes seconds, and may be the very thing that fails.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

Status = Literal["ok", "warn", "fail"]

_OLDEST_PYTHON = (3, 10)
_TRUE = {"1", "on", "true", "yes"}
_INSTALL = "pip install 'onboard-models[automodel]'"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Status
    found: str
    do: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The check in the JSON output."""
        return {"name": self.name, "status": self.status, "found": self.found, "do": self.do}


@dataclass(frozen=True)
class _Need:
    """A distribution that onboard uses: which versions, how bad it is without, and what for."""

    name: str
    bounds: str
    without: Status
    purpose: str


_NEEDS = (
    _Need("click", ">=8.1", "fail", "the command line"),
    _Need("rich", ">=13", "fail", "tables and progress"),
    _Need("jinja2", ">=3.1", "fail", "the templates"),
    _Need("huggingface_hub", ">=1.0", "fail", "reading from the Hub"),
    _Need("safetensors", ">=0.5", "fail", "reading checkpoints"),
    _Need("torch", ">=2.6", "fail", "building the reference"),
    _Need("transformers", ">=5.0", "fail", "building the reference"),
    _Need("nemo-automodel", ">=0.7.0", "fail", "running the generated tests"),
    _Need("pytest", ">=8", "fail", "running the generated tests"),
    _Need("ruff", "", "fail", "formatting generated code"),
    _Need("libcst", "", "warn", "editing the registry of a checkout"),
    _Need("pyyaml", ">=6", "warn", "onboard packing"),
    _Need("pyarrow", ">=15", "warn", "onboard packing inspect"),
)


def examine(environ: Mapping[str, str] | None = None) -> list[Check]:
    """Look at everything.

    Args:
        environ: the environment variables; the process's own when omitted.
    """
    environ = os.environ if environ is None else environ
    return [
        _python(),
        *(_distribution(need) for need in _NEEDS),
        _triton(),
        *_automodel_pins(),
        _temporary_folder(),
        _cache(environ),
        _endpoint(environ),
        _offline(environ),
        _token(environ),
    ]


def version_of(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        # None in the metadata of a half-removed distribution, whatever the annotation says.
        return importlib.metadata.version(name) or None
    except importlib.metadata.PackageNotFoundError:
        return None


def satisfies(version: str, bounds: str) -> bool:
    """Whether ``version`` keeps comma-separated bounds such as ``>=2.6,<3``.

    Only release numbers are compared (2.14.1+cu130 is 2.14.1), and operators that are not known here are taken as
    kept: the doctor must work where nothing is installed, and must not raise a false alarm.
    """
    given = _release(version)
    for bound in filter(None, (part.strip() for part in bounds.split(","))):
        match = re.fullmatch(r"(==|>=|<=|>|<)\s*(\d[\w.]*)", bound)
        if match is None or not given:
            continue
        operator, other = match[1], _release(match[2])
        width = max(len(given), len(other))
        left, right = (numbers + (0,) * (width - len(numbers)) for numbers in (given, other))
        kept = {"==": left == right, ">=": left >= right, "<=": left <= right, ">": left > right, "<": left < right}
        if not kept[operator]:
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in match[0].split(".")) if match else ()


def _python() -> Check:
    found = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info[:2] >= _OLDEST_PYTHON:
        return Check("python", "ok", found)
    return Check("python", "fail", found, f"use Python {'.'.join(map(str, _OLDEST_PYTHON))} or later")


def _distribution(need: _Need) -> Check:
    version = version_of(need.name)
    wanted = f"{need.name}{need.bounds}"
    if version is None:
        return Check(
            need.name, need.without, f"not installed; for {need.purpose}", f"pip install '{wanted}', or {_INSTALL}"
        )
    if not satisfies(version, need.bounds):
        return Check(need.name, need.without, f"{version}; {need.bounds} is needed", f"pip install '{wanted}'")
    return Check(need.name, "ok", version)


def _triton() -> Check:
    version = version_of("triton")
    if version is None:
        return Check("triton", "ok", "not installed; not needed on a CPU")
    if not satisfies(version, "<3.9") and version_of("nemo-automodel") is not None:
        return Check(
            "triton",
            "fail",
            f"{version}; importing nemo_automodel's model classes fails with 3.9",
            "pip install 'triton<3.9'",
        )
    return Check("triton", "ok", version)


def _automodel_pins() -> Iterator[Check]:
    """What the installed nemo-automodel asks of torch and transformers, which pip leaves broken if told to."""
    try:
        requirements = importlib.metadata.requires("nemo-automodel") or []
    except importlib.metadata.PackageNotFoundError:
        return
    for requirement in requirements:
        match = re.fullmatch(r"(torch|transformers)\s*\(?([<>=!~][^;()]*)\)?\s*", requirement)
        version = version_of(match[1]) if match else None
        if match and version and not satisfies(version, match[2]):
            name, bounds = match[1], match[2].strip()
            yield Check(
                f"{name} for nemo-automodel",
                "warn",
                f"{version}; nemo-automodel asks for {bounds}",
                f"pip install '{name}{bounds}'",
            )


def _temporary_folder() -> Check:
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        return Check(
            "temporary folder", "fail", "none can be written to", "set TMPDIR to a folder that can be written to"
        )
    return Check("temporary folder", "ok", folder)


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps its cache."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(variable):
            return Path(environ[variable]).expanduser()
    return _home(environ) / "hub"


def _home(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environ.get("HF_HOME") or f"{base}/huggingface").expanduser()


def _cache(environ: Mapping[str, str]) -> Check:
    folder = cache_folder(environ)
    existing = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if existing is not None and existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return Check("cache", "ok", str(folder))
    # Not a failure: local models and what is already in the cache still work.
    do = "set HF_HOME to a folder that can be written to"
    return Check("cache", "warn", f"{folder} cannot be written to", do)


def _endpoint(environ: Mapping[str, str]) -> Check:
    given = environ.get("HF_ENDPOINT")
    if not given:
        return Check("HF_ENDPOINT", "ok", "not set: https://huggingface.co")
    try:
        parts = urlsplit(given)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        # Credentials may be part of a mirror's address.
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    except ValueError:
        valid, shown = False, ""
    if valid:
        return Check("HF_ENDPOINT", "ok", shown)
    return Check("HF_ENDPOINT", "warn", "not an http address", "set it to an address such as https://huggingface.co")


def _offline(environ: Mapping[str, str]) -> Check:
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if environ.get(variable, "").strip().lower() in _TRUE:
            do = f"unset {variable} to reach the Hub"
            return Check("HF_HUB_OFFLINE", "warn", f"{variable} is set: local models and the cache only", do)
    return Check("HF_HUB_OFFLINE", "ok", "not set")


def _token(environ: Mapping[str, str]) -> Check:
    """Whether there is an access token. Its value is never read from a file and never printed."""
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if environ.get(variable, "").strip():
            return Check("HF_TOKEN", "ok", f"set ({variable})")
    file = Path(environ.get("HF_TOKEN_PATH") or _home(environ) / "token").expanduser()
    if file.is_file():
        return Check("HF_TOKEN", "ok", f"not set; a token file is there ({file})")
    return Check("HF_TOKEN", "ok", "not set: gated and private models cannot be read")
