"""Runs `onboard new` as a user does, in a process and a home folder of its own, and judges its JSON."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"


def environment(home: Path, **variables: str) -> dict[str, str]:
    """This process's environment, but without anybody's cache, token or settings of the Hub."""
    dropped = ("HF_", "HUGGING", "TRANSFORMERS", "PYTEST_", "PYTHONPATH", "XDG_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    ours = {"HOME": str(home), "HF_HOME": str(home / "hf"), "PYTHONPATH": str(REPOSITORY / "generator")}
    return {**kept, **ours, "OMP_NUM_THREADS": "1", **variables}


def run(*words: str, home: Path, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `onboard` in the home folder or `cwd`, offline unless told otherwise."""
    home.mkdir(parents=True, exist_ok=True)
    return subprocess.run(
        [sys.executable, "-m", "onboard", *words],
        env=environment(home, **{"HF_HUB_OFFLINE": "1", **variables}),
        cwd=cwd or home,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def new(*words: str, home: Path, **variables: str) -> dict[str, Any]:
    """Run `onboard new --json`, which must succeed, and return what it printed."""
    done = run("new", *words, "--json", home=home, **variables)
    report = done.stdout[-4000:] + done.stderr[-4000:]
    assert done.returncode == 0, report
    assert "Traceback" not in done.stderr, report
    payload: dict[str, Any] = json.loads(done.stdout)  # fails if stdout holds anything but one JSON value
    return payload


def assert_shape(payload: dict[str, Any]) -> None:
    """The keys and types that scripts rely on."""
    assert payload["schema_version"] == 1
    assert {"id", "revision", "path"} <= payload["source"].keys()
    assert payload["kind"] in ("dense", "moe", "vlm")
    assert payload["target"] in ("plugin", "intree")
    assert all(isinstance(payload[key], str) for key in ("architecture", "model_type", "name", "out"))
    names = ("sys_path", "package", "model_module", "model_class", "adapter_class")
    assert all(isinstance(payload["import"][name], str) for name in names)
    origins = payload["origins"]
    assert [{"path", "origin", "why"} <= module.keys() for module in origins["modules"]]
    for origin in ("native", "reused", "novel"):
        assert origins[origin] == sum(module["origin"] == origin for module in origins["modules"])
    assert all(isinstance(payload["tests"][key], int) for key in ("passed", "failed", "skipped"))
    assert payload["tests"]["seconds"] > 0
    assert isinstance(payload["parity"]["max_abs_logit_diff"], float)
    assert payload["parity"]["dtype"] == "float32"
    assert isinstance(payload["capabilities"], dict)
    assert all(isinstance(value, bool) for value in payload["capabilities"].values())
    for key in ("warnings", "review"):
        assert all(isinstance(item, str) and item for item in payload[key])
    assert len(set(payload["files"])) == len(payload["files"])
    for file in payload["files"]:
        assert (Path(payload["out"]) / file).is_file(), file


def assert_proven(payload: dict[str, Any]) -> None:
    """Everything native, nothing failed, and every planted mistake seen."""
    tests, mutants, origins = payload["tests"], payload["mutants"], payload["origins"]
    assert tests["failed"] == 0, tests
    assert tests["passed"] >= 50, tests
    assert tests["skipped"] == len(tests["skips"])
    assert all(re.search(r": .{20}", skip) for skip in tests["skips"]), "a skipped test must say why"
    assert payload["parity"]["max_abs_logit_diff"] < 1e-4
    assert mutants["caught"] == mutants["planted"] >= 8, mutants
    assert origins["reused"] == origins["novel"] == 0, origins
    assert origins["native"] >= 7
