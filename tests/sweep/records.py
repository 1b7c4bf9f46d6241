"""Records as a sweep makes them, for the tests."""

from __future__ import annotations

from typing import Any

from breadth.scope import Subject
from breadth.store import Record


def subject(name: str, config: str = "{}", kind: str = "dense") -> Subject:
    return Subject(name, f"{name.title()}ForCausalLM", kind, config)


def record(name: str, answer: dict[str, Any] | None = None, **changes: Any) -> Record:
    given = {"key": "k", "exit": 0, "stopped": None, "out_of_memory": False, "seconds": 12.3, "said": ""}
    return Record(name=name, answer=answer, **{**given, **changes})


def proven(*origins: str, **tests: Any) -> dict[str, Any]:
    """The JSON of a run that ended well, with one part of each of the origins."""
    modules = [{"path": f"model.part{index}", "origin": origin, "why": "w"} for index, origin in enumerate(origins)]
    return {
        "architecture": "LlamaForCausalLM",
        "kind": "dense",
        "tests": {"passed": 100, "failed": 0, "skipped": 0, "seconds": 9.0, "failures": [], **tests},
        "parity": {"max_abs_logit_diff": 2.5e-6},
        "mutants": {"planted": 9, "caught": 9},
        "origins": {"modules": modules},
    }


def refused(what: str, why: str) -> dict[str, Any]:
    return {"error": {"code": "unsupported", "what": what, "why": why, "do": "nothing"}}
