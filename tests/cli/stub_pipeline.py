"""A pipeline that answers at once, so that the command line can be tested alone.

The source says what happens: ``acme/dense`` works, the others are in :func:`_happen`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onboard.errors import HubError, Unsupported, UsageError

EVIL = "\x1b]0;owned\x07\x1b[2Jv\u202ealue [red]x[/red]\n" + "long" * 100
CALLS: list[Any] = []


@dataclass
class Evidence:
    key: str
    value: object
    says: str


@dataclass
class Inspection:
    source_label: str = "acme/dense@0123abc"
    kind: str = "dense"
    architecture: str | None = "AcmeForCausalLM"
    model_type: str | None = "acme"
    evidence: tuple[Evidence, ...] = (Evidence("architectures", ["AcmeForCausalLM"], "a causal language model"),)
    rows: tuple[tuple[str, str, str, str], ...] = (
        ("attention", "num_attention_heads", "16", "config.json: num_attention_heads"),
        ("mlp", "intermediate_size", "3072", "config.json: intermediate_size"),
        ("attention", "head_dim", "128", "rule: hidden_size / num_attention_heads"),
    )
    nearest: tuple[tuple[str, str], ...] = (("qwen3", "same norms and rope"),)
    warnings: tuple[str, ...] = ("sliding_window is set and never used",)
    reason: str | None = None
    is_: str | None = None
    packing: Any = None
    exit_status: int = 0

    def as_json(self) -> dict[str, Any]:
        if self.exit_status:
            source = {"id": self.source_label}
            return {"schema_version": 1, "source": source, "kind": self.kind, "is": self.is_, "reason": self.reason}
        return {
            "schema_version": 1,
            "source": {"id": self.source_label, "revision": "0123abc", "path": None},
            "kind": self.kind,
            "spec": {"rope": {"limit": float("inf")}, "path": Path("a")},
            "review": [{"what": "qk norm order", "why": "two candidates agree"}],
        }


def _happen(given: str) -> None:
    if given == "acme/gated":
        raise HubError(
            "acme/gated cannot be read", "it is gated", "accept its terms, then set HF_TOKEN", code="hub.gated"
        )
    if given == "acme/unsupported":
        raise Unsupported(
            "acme/unsupported cannot be written", "it has no decoder", "choose another", is_="vision only"
        )
    if given == "acme/usage":
        raise UsageError("the name is not usable", "it is a keyword", "choose another with --name")
    if given == "acme/bug":
        raise ValueError("boom with hf_abcdefghijklmnop \x1b[31m")
    if given == "acme/interrupt":
        raise KeyboardInterrupt
    if given == "acme/full":
        raise OSError(28, "No space left on device", "/somewhere/model.py")
    if given == "acme/child-pipe":
        raise BrokenPipeError(32, "Broken pipe")
    if given == "acme/noisy":
        print("printed by a library")
        os.write(1, b"written by C code\n")
        subprocess.run([sys.executable, "-S", "-c", "print('printed by a child')"], check=True)
    if given == "acme/slow":
        with tempfile.TemporaryDirectory() as folder:
            print(f"folder {folder}", file=sys.stderr, flush=True)
            time.sleep(30)


def inspect_source(given: str, *, revision: str | None) -> Inspection:
    CALLS.append((given, revision))
    _happen(given)
    if given == "acme/t5":
        return Inspection(
            source_label="acme/t5",
            kind="unsupported",
            architecture=None,
            rows=(),
            nearest=(),
            reason="is_encoder_decoder is true",
            is_="encoder-decoder",
            exit_status=3,
        )
    if given == "acme/evil":
        return Inspection(
            source_label=EVIL,
            architecture=EVIL,
            rows=((EVIL, EVIL[:20], EVIL, EVIL),),
            evidence=(Evidence(EVIL, EVIL, EVIL),),
            warnings=(EVIL, "caf\u00e9 \udcff"),
        )
    return Inspection()


@dataclass(frozen=True)
class NewRequest:
    source: str
    revision: str | None
    target: str | None
    out: Path | None
    into: Path | None
    name: str | None
    style: str
    verify: bool
    dry_run: bool
    diff: bool
    force: bool
    trust_remote_code: bool
    license_header: Path | None


DIFF = "--- a/model.py\n+++ b/model.py\n@@ -0,0 +1 @@\n+x = 1\n"
SUMMARY = {
    "schema_version": 1,
    "source": {"id": "acme/dense", "revision": "0123abc", "path": None},
    "kind": "dense",
    "architecture": "AcmeForCausalLM",
    "model_type": "acme",
    "name": "acme",
    "files": ["src/nemo_automodel_acme/model.py", "REVIEW.md"],
    "origins": {"native": 9, "reused": 1, "novel": 1, "modules": []},
    "tests": {"passed": 41, "failed": 0, "skipped": 2, "seconds": 12.34},
    "parity": {"max_abs_logit_diff": 3.5e-7, "dtype": "float32"},
    "mutants": {"planted": 6, "caught": 6},
    "capabilities": {"tp": True, "pp": False, "ep": None},
    "warnings": ["a warning"],
    "review": ["the novel norm", {"what": "rope", "why": "unusual"}],
}
FAILED = {
    "tests": {"passed": 39, "failed": 2, "skipped": 2, "seconds": 1.0, "failures": ["test_parity: 0.3"]},
    "mutants": {"planted": 6, "caught": 5},
}


@dataclass
class NewResult:
    payload: dict[str, Any]
    packing: Any = None
    exit_status: int = 0
    diff: str | None = None
    summary_rows: list[dict[str, Any]] = field(
        default_factory=lambda: [
            {"path": "src/nemo_automodel_acme/model.py", "action": "create", "lines": 92, "reason": "always"},
            {"path": "REVIEW.md", "action": "create", "lines": 40, "reason": "the start of the review"},
        ]
    )

    def as_json(self) -> dict[str, Any]:
        return self.payload


def make(request: NewRequest, progress: Any) -> NewResult:
    CALLS.append(request)
    progress.start("rendering", 2)
    progress.advance(note="model.py")
    progress.advance()
    progress.done("2 files")
    progress.start("tests")
    _happen(request.source)
    progress.done()
    payload = {**SUMMARY, "target": request.target or "plugin", "out": str(Path.cwd() / "nemo automodel")}
    if not request.verify:
        payload |= {"tests": None, "parity": None, "mutants": None, "capabilities": {}}
    if request.source == "acme/failing":
        return NewResult({**payload, **FAILED}, exit_status=1)
    result = NewResult(payload, diff=DIFF if request.diff else None)
    if request.source == "acme/again":
        result.summary_rows[0]["action"] = "same"
    return result


@dataclass
class VerifyResult:
    payload: dict[str, Any]
    packing: Any = None
    exit_status: int = 0
    rows: tuple[tuple[str, str], ...] = ()

    def as_json(self) -> dict[str, Any]:
        return self.payload


def verify(path: Path, *, mutants: bool, parallel: bool, progress: Any) -> VerifyResult:
    CALLS.append((path, mutants, parallel))
    progress.start("tests", 3)
    progress.done("3 passed")
    keys = ("tests", "parity", "mutants", "capabilities")
    payload = {"schema_version": 1, **{key: SUMMARY[key] for key in keys}}
    return VerifyResult({**payload, **FAILED}, exit_status=1) if path.name == "failing" else VerifyResult(payload)


def check(path: Path) -> VerifyResult:
    rows = (("model.py", "as written"), ("REVIEW.md", "edited"))
    payload = {"schema_version": 1, "files": [{"path": file, "state": state} for file, state in rows]}
    if path.name == "drifted":
        return VerifyResult(payload, exit_status=1, rows=rows)
    return VerifyResult({"schema_version": 1, "files": []}, rows=rows[:1])


def modules() -> dict[str, types.ModuleType]:
    """The modules of the stub, by the names that the commands import."""
    package = types.ModuleType("onboard.pipeline")
    package.__path__ = []
    made = {"onboard.pipeline": package}
    for name, functions in {
        "inspecting": (inspect_source, Inspection),
        "making": (make, NewRequest, NewResult),
        "verifying": (verify, check),
    }.items():
        module = types.ModuleType(f"onboard.pipeline.{name}")
        for function in functions:
            setattr(module, function.__name__, function)
        made[f"onboard.pipeline.{name}"] = module
    return made


if __name__ == "__main__":
    sys.modules.update(modules())
    from onboard.cli import main

    main()
