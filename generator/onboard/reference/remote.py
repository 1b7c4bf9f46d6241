"""The model's own code as the reference: ``--trust-remote-code``, in the probe's process and nowhere else."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from onboard.facts._text import shown


class BrokenCode(Exception):
    """The model's own code cannot be imported, or is not what ``auto_map`` says."""


def load_remote(code: Mapping[str, Any], folder: Path) -> type[PreTrainedModel]:
    """Import the model's own classes.

    Args:
        code: ``files``: name to text of each module; ``package``: what the package is to be called; ``model`` and
            ``config``: ``module.Class``.
        folder: an empty folder, which the modules are copied into as a package.

    Raises:
        BrokenCode: with the last line of the traceback.
    """
    package = folder / code["package"]
    package.mkdir()
    (package / "__init__.py").touch()
    for name, text in code["files"].items():
        (package / name).write_text(text, encoding="utf-8")
    sys.path.insert(0, str(folder))
    try:
        cls = _attribute(code["package"], code["model"])
        config_class = _attribute(code["package"], code["config"])
    except (Exception, SystemExit) as error:
        words = " ".join(str(error).split())
        raise BrokenCode(shown(f"{type(error).__name__}: {words}", 300)) from error
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise BrokenCode(f"{code['model']} is not a PreTrainedModel")
    if not (isinstance(config_class, type) and issubclass(config_class, PretrainedConfig)):
        raise BrokenCode(f"{code['config']} is not a PretrainedConfig")
    own: Any = cls
    own.config_class = config_class
    declare_fields(config_class)
    return cls


def _attribute(package: str, reference: str) -> Any:
    module, _, name = reference.rpartition(".")
    return getattr(importlib.import_module(f"{package}.{module}"), name)


def declare_fields(config_class: type[PretrainedConfig]) -> None:
    """Give a config class with an ``__init__`` of its own the fields that its arguments are.

    Today's classes declare their fields; those of most models' own code name them in ``__init__`` alone. The rest of
    the probe looks at ``__dataclass_fields__``.
    """
    own: Any = config_class
    known = dict(own.__dataclass_fields__)
    for name, argument in inspect.signature(own.__init__).parameters.items():
        if name == "self" or argument.kind in (argument.VAR_KEYWORD, argument.VAR_POSITIONAL):
            continue
        if name not in known:
            default = None if argument.default is argument.empty else argument.default
            plain = default is None or isinstance(default, (bool, int, float, str))
            # A list as a default is one that a dataclass refuses; only the names and plain defaults are looked at.
            entry = (name, Any, dataclasses.field(default=default if plain else None))
            made: Any = dataclasses.make_dataclass("_", [entry])
            known[name] = made.__dataclass_fields__[name]
    own.__dataclass_fields__ = known
