"""Models that transformers has no class for: known ones under another name, and those with code of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from .command import assert_proven, assert_shape, new, run

CODE = Path(__file__).parent / "remote_model"
AUTO_MAP = {
    "AutoConfig": "configuration_packed.PackedConfig",
    "AutoModelForCausalLM": "modeling_packed.PackedForCausalLM",
}
PACKED = {
    "architectures": ["PackedForCausalLM"],
    "model_type": "packed",
    "auto_map": AUTO_MAP,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-06,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}


def clone(folder: Path, **keys: Any) -> Path:
    """A tiny llama checkpoint, as transformers saves it, under the name of a model with code of its own."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        vocab_size=151,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    file = folder / "config.json"
    auto_map = {"AutoConfig": "configuration_yi.YiConfig", "AutoModelForCausalLM": "modeling_yi.YiForCausalLM"}
    named = {"architectures": ["YiForCausalLM"], "model_type": "Yi", "auto_map": auto_map}
    file.write_text(json.dumps({**json.loads(file.read_text()), **named, **keys}))
    return folder


def packed(folder: Path) -> Path:
    """A model with code of its own: fused projections, and its rotation in the attention itself."""
    folder.mkdir()
    for file in CODE.glob("*.py"):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(PACKED))
    return folder


def test_a_known_model_under_another_name(tmp_path: Path) -> None:
    source = clone(tmp_path / "yi")
    out = tmp_path / "project"
    payload = new(str(source), "--out", str(out), home=tmp_path / "home")
    assert_shape(payload)
    assert_proven(payload)
    assert payload["architecture"] == "YiForCausalLM"
    first = payload["unproven"][0]
    assert first.keys() == {"what", "why", "do"}
    assert first["what"] == "That YiForCausalLM computes what LlamaForCausalLM computes."
    review = (out / "REVIEW.md").read_text()
    assert review.index("## Unproven") < review.index("## Review these first")
    assert all(item["what"] in review for item in payload["unproven"])
    assert "LlamaConfig.from_pretrained" in (out / "README.md").read_text()


def test_an_ordinary_model_has_nothing_unproven(tmp_path: Path) -> None:
    source = clone(tmp_path / "llama", architectures=["LlamaForCausalLM"], model_type="llama", auto_map=None)
    payload = new(str(source), "--out", str(tmp_path / "p"), "--no-verify", home=tmp_path / "home")
    assert payload["unproven"] == []
    assert "Unproven" not in (tmp_path / "p" / "REVIEW.md").read_text()


def test_a_clone_with_one_more_bias_is_not_taken_for_llama(tmp_path: Path) -> None:
    source = clone(tmp_path / "yi")
    file = source / "model.safetensors"
    weights = load_file(file)
    biases = {f"model.layers.{layer}.mlp.down_proj.bias": torch.zeros(64) for layer in range(2)}
    save_file({**weights, **biases}, file)
    done = run("new", str(source), "--out", str(tmp_path / "p"), "--json", home=tmp_path / "home")
    assert done.returncode == 3, done.stdout + done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "unsupported.no_reference"
    assert "down_proj.bias" in error["why"]
    assert not (tmp_path / "p").exists()


def test_biases_that_the_checkpoint_shows(tmp_path: Path) -> None:
    """The class has them behind a switch that config.json does not have; the README says how to load it."""
    source = clone(tmp_path / "yi")
    raw = json.loads((source / "config.json").read_text())
    del raw["attention_bias"]
    (source / "config.json").write_text(json.dumps({**raw, "bias": True}))
    file = source / "model.safetensors"
    sizes = {"q": 64, "k": 32, "v": 32, "o": 64}
    biases = {
        f"model.layers.{layer}.self_attn.{name}_proj.bias": torch.zeros(size)
        for layer in range(2)
        for name, size in sizes.items()
    }
    save_file({**load_file(file), **biases}, file)
    payload = new(str(source), "--out", str(tmp_path / "p"), home=tmp_path / "home")
    assert_proven(payload)
    assert any("attention_bias=True" in item["what"] for item in payload["unproven"])
    assert "attention_bias=True)" in (tmp_path / "p" / "README.md").read_text()
    assert not [item for item in payload["review"] if "KEY_MAP" in item]


@pytest.mark.parametrize("command", ["new", "inspect"])
def test_code_does_not_run_unless_it_is_trusted(command: str, tmp_path: Path) -> None:
    source = packed(tmp_path / "packed")
    marker = tmp_path / "ran"
    words = ["--out", str(tmp_path / "p"), "--no-verify"] if command == "new" else []
    done = run(command, str(source), *words, "--json", home=tmp_path / "home", PACKED_RAN=str(marker))
    assert done.returncode in (0, 3), done.stderr
    assert not marker.exists()


def test_trusted_code_is_the_reference(tmp_path: Path) -> None:
    source, marker = packed(tmp_path / "packed"), tmp_path / "ran"
    out = tmp_path / "project"
    words = (str(source), "--out", str(out), "--trust-remote-code")
    payload = new(*words, home=tmp_path / "home", PACKED_RAN=str(marker))
    assert marker.exists()
    assert_proven(payload)
    assert payload["unproven"] == []
    copied = out / "tests" / "remote_code"
    assert (copied / "modeling_packed.py").read_text() == (CODE / "modeling_packed.py").read_text()
    package = "".join(file.read_text() for file in (out / "src").rglob("*.py"))
    assert "remote_code" not in package
    assert "W_pack" in (out / "src" / "nemo_automodel_packed" / "state_dict_adapter.py").read_text()
    assert "the model's own code" in (out / "REVIEW.md").read_text()


def test_trusted_code_that_does_not_run(tmp_path: Path) -> None:
    source = packed(tmp_path / "packed")
    file = source / "modeling_packed.py"
    file.write_text("from transformers.utils import gone_since_version_4\n" + file.read_text())
    words = ("new", str(source), "--out", str(tmp_path / "p"), "--trust-remote-code", "--json")
    done = run(*words, home=tmp_path / "home")
    assert done.returncode == 3, done.stdout + done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "remote_code.broken"
    assert "gone_since_version_4" in error["why"]
    assert not (tmp_path / "p").exists()
