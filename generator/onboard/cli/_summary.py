"""The human rendering of results that ``new`` and ``verify`` share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onboard.cli._output import Output
from onboard.cli._text import plural, sentence
from onboard.errors import VerificationFailed

Row = tuple[str, str, str]


def origins_row(payload: Mapping[str, Any]) -> list[Row]:
    """How native the result is."""
    origins = payload.get("origins")
    if not origins:
        return []
    counts = {name: int(origins.get(name) or 0) for name in ("native", "reused", "novel")}
    text = ", ".join(f"{count} {name}" for name, count in counts.items())
    return [("origins", text, "warn" if counts["novel"] else "")]


def proof_rows(payload: Mapping[str, Any]) -> list[Row]:
    """Tests, parity, mutants and capabilities."""
    return [*_tests(payload), *_parity(payload), *_mutants(payload), *_capabilities(payload)]


def _tests(payload: Mapping[str, Any]) -> list[Row]:
    tests = payload.get("tests")
    if not tests:
        return [("tests", "not run", "warn")]
    passed, failed, skipped = (int(tests.get(name) or 0) for name in ("passed", "failed", "skipped"))
    text = f"{passed} passed, {failed} failed, {skipped} skipped"
    if tests.get("seconds") is not None:
        text += f" in {float(tests['seconds']):.1f} s"
    return [("tests", text, "bad" if failed else "good" if passed else "warn")]


def _parity(payload: Mapping[str, Any]) -> list[Row]:
    parity = payload.get("parity")
    difference = parity.get("max_abs_logit_diff") if parity else None
    if parity is None or difference is None:
        return []
    dtype = f" in {parity['dtype']}" if parity.get("dtype") else ""
    return [("parity", f"largest difference of a logit {float(difference):.2e}{dtype}", "")]


def _mutants(payload: Mapping[str, Any]) -> list[Row]:
    mutants = payload.get("mutants")
    if not mutants or not mutants.get("planted") or mutants.get("caught") is None:
        return []
    planted, caught = int(mutants["planted"]), int(mutants.get("caught") or 0)
    return [("mutants", f"{caught} caught of {planted} planted", "good" if caught == planted else "bad")]


def _capabilities(payload: Mapping[str, Any]) -> list[Row]:
    capabilities = payload.get("capabilities")
    if not isinstance(capabilities, Mapping) or not capabilities:
        return []
    text = ", ".join(f"{name} {_said(value)}" for name, value in capabilities.items())
    return [("capabilities", text, "")]


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "not measured" if value is None else sentence(value)


def lists(output: Output, payload: Mapping[str, Any]) -> None:
    """What failed, the warnings, and what is to be reviewed."""
    failures = (payload.get("tests") or {}).get("failures") or ()
    output.bullets("failed", [sentence(item) for item in failures], style="bad")
    survived = (payload.get("mutants") or {}).get("survived") or ()
    if isinstance(survived, (list, tuple)):
        output.bullets("mutants that survived", [sentence(item) for item in survived], style="bad")
    open_points = [f"{item.get('what')} {item.get('do')}" for item in payload.get("unproven") or ()]
    output.bullets("unproven", [sentence(item) for item in open_points], style="warn", numbered=True)
    output.bullets("warnings", [sentence(item) for item in payload.get("warnings") or ()], style="warn")
    review = [sentence(item) for item in payload.get("review") or ()]
    output.bullets("to review", review, style="warn", numbered=True)


def failure(payload: Mapping[str, Any], do: str) -> VerificationFailed:
    """The error that says which proof failed."""
    tests, mutants = payload.get("tests") or {}, payload.get("mutants") or {}
    failed = int(tests.get("failed") or 0)
    survived = int(mutants.get("planted") or 0) - int(mutants.get("caught") or 0)
    reasons = []
    if failed:
        reasons.append(f"{plural(failed, 'test')} failed")
    if survived > 0:
        reasons.append(f"{plural(survived, 'planted mistake')} passed the tests")
    why = " and ".join(reasons) or "the result does not agree with the reference"
    return VerificationFailed("verification failed", why, do)
