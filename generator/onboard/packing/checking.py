"""``onboard packing check``: every rule over one configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from onboard.errors import UsageError
from onboard.packing.editing import load
from onboard.packing.families import Known, look_up
from onboard.packing.rules import Finding, Rule
from onboard.packing.settings import Settings, lookup, misspelt
from onboard.packing.traps import TRAPS
from onboard.packing.upstream import UPSTREAM

RULES: Final[tuple[Rule, ...]] = (*UPSTREAM, *TRAPS)
"""Every rule, in the order in which findings are listed."""
_MOST_BYTES: Final = 10_000_000


@dataclass(frozen=True)
class Verdict:
    """What the rules say about a configuration.

    Attributes:
        findings: errors in the order in which Megatron-Bridge would raise them, then the traps.
        remarks: what the reader should know about how the configuration was read.
        settings: the values that were looked at.
    """

    findings: tuple[Finding, ...]
    settings: Settings
    remarks: tuple[str, ...] = ()

    @property
    def errors(self) -> tuple[Finding, ...]:
        """What Megatron-Bridge refuses."""
        return tuple(finding for finding in self.findings if finding.rule.severity == "error")

    @property
    def first_error(self) -> str | None:
        """The rule that Megatron-Bridge's validation raises, or None where it passes."""
        return self.errors[0].rule.id if self.errors else None

    def exit_status(self, strict: bool) -> int:
        """1 for an error, and for a trap too where ``strict``."""
        return 1 if self.errors or (strict and self.findings) else 0

    def as_json(self) -> dict[str, Any]:
        """DESIGN's JSON of ``onboard packing check``."""
        return {
            "verdict": "error" if self.errors else "ok",
            "first_error": self.first_error,
            "findings": [finding.as_json() for finding in self.findings],
            "remarks": list(self.remarks),
        }


def check(mapping: Mapping[str, Any], known: Known | None = None) -> Verdict:
    """Check a configuration.

    Args:
        mapping: its sections.
        known: what is known of its model; None where it names none.

    Raises:
        UsageError: a value cannot be read.
    """
    settings = Settings.read(mapping, known)
    findings = tuple(finding for rule in RULES if (finding := rule.look(settings)))
    remarks = [f"{key} is not a key that packing knows; did you mean {near}?" for key, near in misspelt(mapping)]
    if known is not None and known.by_name is not None:
        remarks.append(
            f"the config.json of {known.label} was not read ({known.by_name}): its family follows from its name, and "
            "multi-token prediction was not looked for"
        )
    return Verdict(findings, settings, tuple(remarks))


def check_file(path: Path) -> tuple[Verdict, dict[str, Any]]:
    """Check a configuration in a file, with the model that it names.

    Returns:
        The verdict, and the configuration.

    Raises:
        UsageError: the file or the model that it names cannot be read.
    """
    mapping = read_mapping(path)
    return check(mapping, model_of(mapping, path.parent)), mapping


def model_of(mapping: Mapping[str, Any], folder: Path) -> Known | None:
    """What is known of the model that a configuration names, a path being looked for beside its file as well.

    Raises:
        UsageError: a local model cannot be read.
    """
    source = lookup(mapping, "hf_model")
    if not isinstance(source, str) or not source:
        return None
    beside = folder / source
    if not os.path.exists(source) and not os.path.isabs(source) and beside.exists():
        return look_up(str(beside))
    return look_up(source)


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file; JSON is YAML, so its name does not matter.

    Raises:
        UsageError: it is missing, no YAML, or holds no mapping.
    """
    import yaml

    try:
        with path.open("rb") as stream:
            content = stream.read(_MOST_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    if len(content) > _MOST_BYTES:
        raise _unreadable(path, f"it is larger than {_MOST_BYTES // 1_000_000} MB, which no configuration is")
    try:
        loaded = load(content)
    except (yaml.YAMLError, UnicodeError, RecursionError, ValueError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise _unreadable(path, f"it is neither YAML nor JSON: {why}") from error
    if not isinstance(loaded, dict):
        raise _unreadable(path, "it holds no mapping of sections such as train, model and dataset")
    if _contains_itself(loaded, set(), set()):
        raise _unreadable(path, "a section contains itself, by an alias")
    return loaded


def _contains_itself(value: Any, above: set[int], done: set[int]) -> bool:
    if not isinstance(value, (dict, list)) or id(value) in done:
        return False
    if id(value) in above:
        return True
    items = value.values() if isinstance(value, dict) else value
    found = any(_contains_itself(item, above | {id(value)}, done) for item in items)
    done.add(id(value))
    return found


def _unreadable(path: Path, why: str) -> UsageError:
    return UsageError(
        f"cannot read {path}",
        why,
        "give a YAML or JSON file with the sections of a Megatron-Bridge configuration",
        code="packing.bad_config",
    )
