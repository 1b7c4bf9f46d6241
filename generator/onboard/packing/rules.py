"""What a rule is: data, a predicate, and the smallest change that mends what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from onboard.packing.settings import MISSING, PATHS, Settings

Severity = Literal["error", "warning"]

# Settings that are computed, as they are called where values are shown.
_COMPUTED: Final[Mapping[str, str]] = {
    "dp": "data_parallel_size",
    "eval_dp": "eval_data_parallel_size",
    "eval_micro_batch_size": "eval_micro_batch_size",
    "eval_global_batch_size": "eval_global_batch_size",
    "model_parallel_size": "TP*PP*CP",
    "eval_model_parallel_size": "TP*PP*eval CP",
    "collate_multiple": "collate_multiple",
    "needed_pad_multiple": "lcm(2*CP, CP*TP)",
    "mtp_layers": "mtp_layers",
    "fixed_length": "pad_to_max_length",
    "graph_modules": "cuda_graph_modules",
}


@dataclass(frozen=True)
class Change:
    """A value to set, by the dotted path of its key."""

    path: str
    value: Any

    def __str__(self) -> str:
        return f"set {self.path} to {shown(self.value)}"


@dataclass(frozen=True)
class Mend:
    """What to do about a finding.

    Attributes:
        changes: values that mend it; empty where a person has to decide.
        advice: what else to know, or what the person has to decide.
    """

    changes: tuple[Change, ...] = ()
    advice: str = ""

    def __str__(self) -> str:
        changes = " and ".join(map(str, self.changes))
        return f"{changes}; {self.advice}" if changes and self.advice else changes or self.advice


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        id: ``P..`` for what Megatron-Bridge refuses, ``T..`` for what it lets through.
        severity: ``error`` for the former, ``warning`` for the latter.
        when: the condition in words, for the table in the documentation.
        then: what happens where it holds.
        source: where in Megatron-Bridge the behaviour is.
        reads: the settings that decide, which a finding shows.
        fires: the predicate.
        mend: the smallest change that mends it.
    """

    id: str
    severity: Severity
    when: str
    then: str
    source: str
    reads: tuple[str, ...]
    fires: Callable[[Settings], bool]
    mend: Callable[[Settings], Mend]

    def look(self, settings: Settings) -> Finding | None:
        """What the rule finds in these settings."""
        if not self.fires(settings):
            return None
        return Finding(
            self, {_label(name): _plain(getattr(settings, name)) for name in self.reads}, self.mend(settings)
        )


@dataclass(frozen=True)
class Finding:
    """A rule that holds, the values that made it, and what mends it."""

    rule: Rule
    values: Mapping[str, Any]
    mend: Mend

    def as_json(self) -> dict[str, Any]:
        """One entry of ``findings``."""
        return {
            "id": self.rule.id,
            "severity": self.rule.severity,
            "values": dict(self.values),
            "what": self.rule.then,
            "mend": str(self.mend),
            "changes": {change.path: change.value for change in self.mend.changes},
        }


def change(**values: Any) -> tuple[Change, ...]:
    """Changes by the names of :class:`Settings`' fields."""
    return tuple(Change(PATHS[name], value) for name, value in values.items())


def to(advice: str = "", **values: Any) -> Mend:
    """A mend of changes by the names of fields, with advice."""
    return Mend(change(**values), advice)


def apply(mapping: Mapping[str, Any], changes: Iterable[Change]) -> dict[str, Any]:
    """A configuration with values set, sections that lack being made; the one that is given stays as it is.

    Only the sections on the way to a value are copied: two that are the same object (a YAML alias) part there.
    """
    result = dict(mapping)
    for item in changes:
        *parents, key = item.path.split(".")
        section = result
        for parent in parents:
            inner = section.get(parent)
            section[parent] = dict(inner) if isinstance(inner, Mapping) else {}
            section = section[parent]
        section[key] = item.value
    return result


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below ``value``, and not below one multiple."""
    return max(-(-value // multiple), 1) * multiple


def _label(name: str) -> str:
    return PATHS.get(name) or _COMPUTED[name]


def _plain(value: Any) -> Any:
    if value is MISSING:
        return None
    return list(value) if isinstance(value, tuple) else value


def shown(value: Any) -> str:
    """A value as YAML would have it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) + "}"
    return str(value)
