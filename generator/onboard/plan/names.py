"""Names that come from a stranger's config and end up in code.

Everything here either returns a name that is safe to write into Python source and into a path, or raises a
:class:`~onboard.errors.UsageError` that says what is wrong with it. Only ASCII is let through: Python folds look-alike
letters of other alphabets into one identifier, so two names that differ in an editor could be the same name to the
interpreter.
"""

from __future__ import annotations

import keyword
import re
import sys

from onboard.errors import UsageError

MAX_PACKAGE_NAME = 64
MAX_IDENTIFIER = 128

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PACKAGE = re.compile(r"[a-z][a-z0-9_]*")
# What may stand in a model type before it is normalised; real ones have hyphens and dots ("xlm-roberta", "qwen2.5").
_RAW_PACKAGE = re.compile(r"[A-Za-z][A-Za-z0-9_.\-]*")
_CAMEL_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
# "…ForCausalLM", "…LMHeadModel", "…Model": the part of an architecture's name that names the task, not the family.
_TASK_SUFFIX = re.compile(r"(?P<family>.+)(?:For[A-Z][A-Za-z0-9]*|Model)")

# Folders that the framework and test runners already give a meaning to, and device names that no Windows checkout can
# hold.
_TAKEN = frozenset({"common", "conftest", "src", "test", "tests", "torch", "transformers", "nemo_automodel", "onboard"})
_DEVICES = frozenset({"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10))})


def shown(value: object, limit: int = 60) -> str:
    """A stranger's value on one line of an error: quoted, escaped and cut."""
    text = ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def check_identifier(value: object, what: str) -> str:
    """Return ``value`` if it can be a name in generated code.

    Args:
        value: the string, straight from a config (anything JSON can hold).
        what: what it is, for the error (``"architectures[0]"``).

    Raises:
        UsageError: it is not a plain ASCII identifier, is a keyword, starts with two underscores or is too long.
    """
    why = None
    if not isinstance(value, str):
        why = "it is not a string"
    elif len(value) > MAX_IDENTIFIER:
        why = f"it is longer than {MAX_IDENTIFIER} characters"
    elif not _IDENTIFIER.fullmatch(value):
        why = "a name has only ASCII letters, digits and underscores, and does not start with a digit"
    elif keyword.iskeyword(value):
        why = "it is a Python keyword"
    elif value.startswith("__"):
        why = "names that start with two underscores belong to Python"
    if why is not None or not isinstance(value, str):
        raise UsageError(
            f"{what} {shown(value)} cannot be a name in code",
            why or "",
            "correct it in a copy of the config.json and give that file as the source",
            code="name.invalid",
        )
    return value


def class_prefix(architecture: str) -> str:
    """The family part of an architecture's class name: ``"LlamaForCausalLM"`` gives ``"Llama"``.

    Raises:
        UsageError: the architecture is no identifier, or nothing is left without the task.
    """
    check_identifier(architecture, "architecture")
    return check_identifier(_family(architecture), f"the family of architecture {architecture}:")


def package_name(architecture_or_model_type: str) -> str:
    """The module name for a model.

    ``"gemma3_text"`` stays as it is; ``"xlm-roberta"`` gives ``"xlm_roberta"``, and ``"Qwen3MoeForCausalLM"`` gives
    ``"qwen3_moe"``.

    Raises:
        UsageError: no safe module name can be made of it.
    """
    given = architecture_or_model_type
    if not isinstance(given, str) or not _RAW_PACKAGE.fullmatch(given):
        raise _bad_package(
            given, "a module name starts with a letter and has only ASCII letters, digits, '_', '-' and '.'"
        )
    name = given
    if name != name.lower():
        name = _CAMEL_BOUNDARY.sub("_", _family(name)).lower()
    name = re.sub(r"[_.\-]+", "_", name).strip("_")
    if len(name) > MAX_PACKAGE_NAME:
        raise _bad_package(given, f"it is longer than {MAX_PACKAGE_NAME} characters")
    if not _PACKAGE.fullmatch(name):
        raise _bad_package(given, "nothing that starts with a letter is left once the task is taken off")
    if keyword.iskeyword(name):
        raise _bad_package(given, "it is a Python keyword")
    # A test folder of this name can come first on sys.path, and would then hide the real module.
    if name in sys.stdlib_module_names or name in _TAKEN:
        raise _bad_package(given, f"{name} is already the name of another package")
    if is_device_name(name):
        raise _bad_package(given, "it is a reserved file name on Windows")
    return name


def is_device_name(part: str) -> bool:
    """Whether a path part is one of the names that Windows keeps for devices (``aux``, ``con.py``, ...)."""
    return part.split(".", 1)[0].strip().lower() in _DEVICES


def _family(architecture: str) -> str:
    match = _TASK_SUFFIX.fullmatch(architecture)
    return match["family"].removesuffix("LMHead").rstrip("_") if match else architecture


def _bad_package(value: object, why: str) -> UsageError:
    return UsageError(
        f"{shown(value)} cannot be a module name",
        why,
        "choose another with --name",
        code="name.invalid",
    )
