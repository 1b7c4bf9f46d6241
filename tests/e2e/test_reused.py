"""Decoders with a part that nothing explains, from a config.json to a package whose tests pass, and can fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .command import assert_shape, new, run

COMMON = {"vocab_size": 512, "hidden_size": 96, "num_hidden_layers": 6}
CONFIGS: dict[str, dict[str, Any]] = {
    "a decoder with a native head": {
        "architectures": ["RecurrentGemmaForCausalLM"],
        "model_type": "recurrent_gemma",
        **COMMON,
        "intermediate_size": 192,
        "num_attention_heads": 6,
        "lru_width": 96,
        "attention_window_size": 16,
    },
    "a checkpoint that has the parts of a tensor": {
        "architectures": ["OlmoHybridForCausalLM"],
        "model_type": "olmo_hybrid",
        **COMMON,
        "intermediate_size": 192,
        "num_attention_heads": 6,
        "pad_token_id": 0,
        "eos_token_id": 2,
    },
    "a whole class": {"architectures": ["MambaForCausalLM"], "model_type": "mamba", **COMMON, "state_size": 8},
}


def onboard(name: str, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
    return new(str(folder), "--out", str(folder / "out"), home=folder)


@pytest.mark.parametrize("name", CONFIGS)
def test_from_a_config_to_a_proven_package(name: str, tmp_path: Path) -> None:
    payload = onboard(name, tmp_path)
    assert_shape(payload)
    tests, mutants, origins = payload["tests"], payload["mutants"], payload["origins"]
    assert (tests["failed"], tests["skipped"]) == (0, 0)
    assert tests["passed"] >= 50
    assert payload["parity"]["max_abs_logit_diff"] < 1e-4
    assert mutants["caught"] == mutants["planted"] >= 10
    assert origins["novel"] >= 1
    novel = [module["path"] for module in origins["modules"] if module["origin"] == "novel"]
    for path in novel:
        assert any(warning.startswith(f"{path} is novel") for warning in payload["warnings"])
    assert run("check", payload["out"], home=tmp_path).returncode == 0


def test_native_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["a whole class"]), encoding="utf-8")
    done = run("new", str(tmp_path), "--out", str(tmp_path / "out"), "--style", "native", "--json", home=tmp_path)
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"]["code"].startswith(("unsupported.", "reference."))
    assert not (tmp_path / "out").exists()
