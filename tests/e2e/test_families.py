"""Each dense family, from a published config.json to a package whose tests pass on the real framework."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from .command import EXAMPLES, assert_proven, assert_shape, environment, new

FAMILIES = {
    "llama": "llama-3.2-1b",
    "mistral": "mistral-7b-v0.1",
    "qwen2": "qwen2.5-0.5b",
    "qwen3": "qwen3-0.6b",
    "smollm3": "smollm3-3b",
    "olmo2": "olmo-2-7b",
    "phi3": "phi-3-mini-4k",
    "phi3 with longrope and partial rotary": "phi-4-mini",
    "gemma3_text": "gemma-3-1b",
    "gpt2, with transposed and fused projections": "gpt2",
    "falcon, with attention and MLP in parallel": "falcon-40b",
    "cohere, with scaled logits and neighbouring dimensions rotated": "command-r",
}

ASK_THE_PACKAGE = """
import importlib, json, sys
from pathlib import Path
payload = json.loads(sys.argv[1])["import"]
sys.path.insert(0, payload["sys_path"])
model = importlib.import_module(payload["model_module"])
cls = getattr(model, payload["model_class"])
adapter = getattr(importlib.import_module(payload["package"] + ".state_dict_adapter"), payload["adapter_class"])
assert model.ModelClass is cls, model.ModelClass
assert callable(adapter.from_hf) and callable(adapter.to_hf)
assert Path(model.__file__).is_relative_to(payload["sys_path"])
"""


@pytest.mark.parametrize("example", FAMILIES.values(), ids=FAMILIES)
def test_a_family_is_onboarded_and_proven(example, tmp_path):
    out = tmp_path / "project"
    payload = new(str(EXAMPLES / example), "--out", str(out), home=tmp_path / "home")
    assert_shape(payload)
    assert_proven(payload)
    assert payload["kind"] == "dense"
    assert payload["target"] == "plugin"
    assert payload["out"] == str(out)
    # Nothing is left beside the project: no temporary folder, no backup.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "project"]
    written = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert written == set(payload["files"])
    check_the_code(out, [out / file for file in payload["files"] if file.endswith(".py")])


def test_the_json_says_how_to_import_the_package(tmp_path):
    payload = new(str(EXAMPLES / "qwen3-0.6b"), "--out", str(tmp_path / "p"), "--no-verify", home=tmp_path / "home")
    assert payload["tests"] is None
    assert payload["parity"] is None
    done = subprocess.run(
        [sys.executable, "-c", ASK_THE_PACKAGE, json.dumps(payload)],
        env=environment(tmp_path / "home", HF_HUB_OFFLINE="1"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_project_proves_itself_with_plain_pytest(tmp_path):
    """As the project's README says, without onboard: its own pyproject.toml has all that pytest needs."""
    out = tmp_path / "project"
    new(str(EXAMPLES / "olmo-2-7b"), "--out", str(out), "--no-verify", home=tmp_path / "home")
    variables = environment(tmp_path / "home", HF_HUB_OFFLINE="1")
    del variables["PYTHONPATH"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    chosen = ["tests/test_config.py", "tests/test_registration.py"]
    done = subprocess.run([*command, *chosen], cwd=out, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert " passed" in done.stdout


def check_the_code(out: Path, files: list[Path]) -> None:
    """CPU-clean and device-agnostic, free of onboard itself, and clean by the project's own ruff settings."""
    for file in files:
        text = file.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(text)))
        imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        assert not {name for name in imported if name.split(".")[0] == "onboard"}, file
        if "src" in file.parts:
            assert "cuda" not in text, file
    for words in (["check", "--select", "E,F,I,W,B,UP"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *words, "--no-cache", "."]
        done = subprocess.run(command, cwd=out, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr
