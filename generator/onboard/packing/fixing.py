"""``onboard packing plan --fix``: the smallest changes that leave nothing to find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from onboard.packing.checking import Verdict, check
from onboard.packing.families import Known
from onboard.packing.rules import Change, Finding, apply

# A change may uncover or cause another finding (a batch that a larger micro batch no longer divides); chains are short.
_MOST_STEPS: Final = 50


@dataclass(frozen=True)
class Fixed:
    """A mended configuration.

    Attributes:
        mapping: the configuration as it is now.
        before: what a check said of it first.
        steps: what was found and changed, in turn.
        verdict: what a check says of it now; what a person has to decide is still there.
    """

    mapping: Mapping[str, Any]
    before: Verdict
    steps: tuple[Finding, ...]
    verdict: Verdict

    @property
    def changes(self) -> tuple[Change, ...]:
        """The values that were set, the last of each key."""
        last = {change.path: change for step in self.steps for change in step.mend.changes}
        return tuple(last.values())

    @property
    def mended(self) -> tuple[str, ...]:
        """The rules that held and hold no more."""
        left = {finding.rule.id for finding in self.verdict.findings}
        held = [finding.rule.id for finding in (*self.before.findings, *self.steps)]
        return tuple(dict.fromkeys(id for id in held if id not in left))


def fix(mapping: Mapping[str, Any], known: Known | None = None) -> Fixed:
    """Mend what can be mended without a decision of a person.

    Args:
        mapping: the configuration, which stays as it is.
        known: what is known of its model.

    Raises:
        UsageError: a value cannot be read.
    """
    current: Mapping[str, Any] = mapping
    steps: list[Finding] = []
    tried: set[tuple[str, str]] = set()
    before = verdict = check(current, known)
    while True:
        finding = next((item for item in verdict.findings if item.mend.changes and _key(item) not in tried), None)
        if finding is None or len(steps) == _MOST_STEPS:
            return Fixed(current, before, tuple(steps), verdict)
        tried.add(_key(finding))
        steps.append(finding)
        current = apply(current, finding.mend.changes)
        verdict = check(current, known)


def _key(finding: Finding) -> tuple[str, str]:
    return finding.rule.id, repr(finding.mend.changes)
