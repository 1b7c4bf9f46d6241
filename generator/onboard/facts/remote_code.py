"""A model's own code: which files it is, and which classes ``auto_map`` names. It is read here, and never imported."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onboard.errors import Unsupported
from onboard.facts._facts import Facts
from onboard.facts._text import few, shown

PACKAGE = "remote_code"
_MOST_FILES = 200
_MOST_BYTES = 4 * 1024 * 1024
_MODEL_KEYS = ("AutoModelForCausalLM", "AutoModel")


@dataclass(frozen=True, slots=True)
class RemoteCode:
    """The modules of a model's own code.

    Attributes:
        files: name of each module's file to its text.
        model: ``module.Class`` of the language model.
        config: ``module.Class`` of its config.
    """

    files: Mapping[str, str]
    model: str
    config: str

    def as_request(self) -> dict[str, Any]:
        """What :func:`onboard.reference.remote.load_remote` takes."""
        return {"package": PACKAGE, "files": dict(self.files), "model": self.model, "config": self.config}


def names_code(config: Mapping[str, Any]) -> bool:
    """Whether a config names a language model in code of its own."""
    auto_map = config.get("auto_map")
    return isinstance(auto_map, Mapping) and any(isinstance(auto_map.get(key), str) for key in _MODEL_KEYS)


def read_remote_code(facts: Facts) -> RemoteCode:
    """Read the files of a model's own code, for ``--trust-remote-code``.

    Args:
        facts: of a model whose config names code.

    Raises:
        Unsupported: the code is not there, or is not laid out as Python modules beside config.json.
        HubError: the Hub did not give it.
    """
    auto_map = facts.config["auto_map"]
    repo = facts.source.id
    model = _reference(next(auto_map[key] for key in _MODEL_KEYS if isinstance(auto_map.get(key), str)), repo)
    if not isinstance(auto_map.get("AutoConfig"), str):
        raise _refuse("auto_map names no AutoConfig", "Add it to a copy of the directory, if the code has a config.")
    config = _reference(auto_map["AutoConfig"], repo)
    if repo is not None:
        from onboard.facts.hub import read_code

        paths = read_code(facts.source.given, repo, str(facts.source.revision))
    else:
        paths = _beside(facts)
    if len(paths) > _MOST_FILES:
        raise _refuse(f"it has {len(paths)} Python files", f"Keep at most {_MOST_FILES} in a copy of the directory.")
    named = {f"{name.rpartition('.')[0]}.py" for name in (model, config)}
    missing = sorted(named - paths.keys())
    if missing:
        raise _refuse(
            f"auto_map names {few(missing)}, which is not there", "Give the directory or the Hub id that has the code."
        )
    return RemoteCode(_needed(named, paths), model, config)


def _needed(named: set[str], paths: Mapping[str, str]) -> dict[str, str]:
    """The named modules and those that they import from beside them, as transformers' own loader follows them.

    A repo's other Python files (demos, tokenizers, tests that pytest would collect) are no part of the reference.
    """
    files: dict[str, str] = {}
    waiting = sorted(named)
    while waiting:
        name = waiting.pop()
        if name not in files:
            files[name] = _text(name, paths[name])
            waiting += sorted(paths.keys() & _siblings(name, files[name]))
    return dict(sorted(files.items()))


def _siblings(name: str, text: str) -> set[str]:
    """Files that a module imports from its own package; also where it tries to, or does so in a function."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _refuse(f"{shown(name)} is not Python: {shown(str(error))}", "Correct it, or fetch it again.") from error
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 1]
    modules = {node.module.split(".")[0] for node in imports if node.module}
    modules |= {alias.name for node in imports if not node.module for alias in node.names}
    return {f"{module}.py" for module in modules}


def _reference(given: str, repo: str | None) -> str:
    """``module.Class``, where the module lies beside config.json."""
    place, _, local = given.rpartition("--")
    if place and place != repo:
        raise _refuse(
            f"its code lies in another repo, {shown(place)}",
            "Copy its Python files beside the config.json, and take the repo out of auto_map there.",
        )
    parts = local.split(".")
    if len(parts) != 2 or not all(part.isidentifier() for part in parts):
        raise _refuse(f"auto_map names {shown(given)}", "Give it as module.Class, of a file beside config.json.")
    return local


def _beside(facts: Facts) -> dict[str, str]:
    path = facts.source.path or ""
    folder, file = os.path.split(path)
    if facts.source.kind != "directory" and file != "config.json":
        raise _refuse(f"{shown(file)} is a config on its own", "Give the directory that holds it and the code.")
    with os.scandir(folder or ".") as entries:
        return {entry.name: entry.path for entry in entries if entry.name.endswith(".py") and entry.is_file()}


def _text(name: str, path: str) -> str:
    if not name.removesuffix(".py").isidentifier():
        raise _refuse(f"{shown(name)} is no name of a module", "Rename it in a copy of the directory.")
    try:
        with open(path, "rb") as stream:
            content = stream.read(_MOST_BYTES + 1)
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _refuse(f"{shown(name)} cannot be read: {shown(str(error))}", "Correct it, or fetch it again.") from error
    if len(content) > _MOST_BYTES:
        raise _refuse(f"{shown(name)} is larger than {_MOST_BYTES // 1024**2} MiB", "Take it out of a copy.")
    return text


def _refuse(why: str, do: str) -> Unsupported:
    return Unsupported("The model's own code cannot be used as the reference.", f"{why}.", do, code="remote_code.files")
