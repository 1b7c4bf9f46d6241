"""A proof counts only if planted mistakes fail it: real generated packages, damaged by hand, must not verify."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from onboard.pipeline.verifying import verify

from .damage import damaged, in_a_fork

LLAMA, PHI3, GEMMA3, SMOLLM3, QWEN3 = "llama-3.2-1b", "phi-3-mini-4k", "gemma-3-1b", "smollm3-3b", "qwen3-0.6b"
OLMO2, MISTRAL, QWEN2 = "olmo-2-7b", "mistral-7b-v0.1", "qwen2.5-0.5b"
EXCHANGED = '.replace("gate_proj", "x").replace("up_proj", "gate_proj").replace("x", "up_proj")'

GATE_AND_UP = (
    '("model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight")',
    '("model.layers.{layer}.mlp.up_proj.weight", "model.layers.{layer}.mlp.gate_proj.weight")',
)
K_AND_V = tuple(
    f'self_attn.{first}.weight",\n            "model.layers.{{layer}}.self_attn.{second}.weight",'
    for first, second in (("k_proj", "v_proj"), ("v_proj", "k_proj"))
)


class Quiet:
    def start(self, label: str, total: int | None = None) -> None:
        pass

    def advance(self, n: int = 1, note: str | None = None) -> None:
        pass

    def done(self, note: str | None = None) -> None:
        pass


def norm_dropped(name: str) -> tuple[str, str]:
    return f"hidden_states = self.{name}(hidden_states)\n", "pass\n"


# Name: example, file, edits, the test file that must notice, and the test that must name it.
LAYERS, PARITY, FORWARD, PACKING = "test_layer_parity", "test_parity", "test_forward", "test_packing"
ADAPTER, CONFIG = "test_state_dict_adapter", "test_config"
MISTAKES = {
    "gate and up exchanged": (
        LLAMA,
        "model.py",
        [
            ("self.act_fn(self.gate_proj(", "self.act_fn(self.up_proj("),
            ("gate * self.up_proj(", "gate * self.gate_proj("),
        ],
        f"{LAYERS}::test_hidden_states_of_every_layer",
    ),
    "gate and up exchanged in the fused projection": (
        PHI3,
        "state_dict_adapter.py",
        [GATE_AND_UP],
        f"{LAYERS}::test_hidden_states_of_every_layer",
    ),
    "k and v exchanged in the fused projection": (
        PHI3,
        "state_dict_adapter.py",
        [K_AND_V],
        f"{PARITY}::test_fp32_logits_at_every_position",
    ),
    "a norm dropped": (
        LLAMA,
        "model.py",
        [norm_dropped("post_attention_layernorm")],
        f"{LAYERS}::test_hidden_states_of_every_layer",
    ),
    "a norm after the MLP dropped": (
        OLMO2,
        "model.py",
        [norm_dropped("post_feedforward_layernorm")],
        f"{LAYERS}::test_hidden_states_of_every_layer",
    ),
    "the final norm dropped": (
        LLAMA,
        "model.py",
        [("hidden_states = self.norm(hidden_states)\n", "pass\n")],
        f"{PARITY}::test_fp32_logits_at_every_position",
    ),
    "q and k norms exchanged": (
        QWEN3,
        "model.py",
        [
            ("self.q_norm(self.q_proj", "self.k_norm(self.q_proj"),
            ("self.k_norm(self.k_proj", "self.q_norm(self.k_proj"),
        ],
        f"{LAYERS}::test_hidden_states_of_every_layer",
    ),
    "norm weight without its offset": (
        GEMMA3,
        "layers.py",
        [("1.0 + self.weight.float()", "self.weight.float()")],
        f"{LAYERS}::test_hidden_states_of_every_layer",
    ),
    "embeddings unscaled": (
        GEMMA3,
        "layers.py",
        [("return embeddings * torch.tensor(self.scale, dtype=embeddings.dtype)", "return embeddings")],
        f"{LAYERS}::test_hidden_states_of_every_layer",
    ),
    "layer types shifted by one": (
        GEMMA3,
        "model.py",
        [
            (
                "self.attention_type = config.layer_types[layer_idx]",
                "self.attention_type = config.layer_types[layer_idx - 1]",
            )
        ],
        f"{CONFIG}::test_layer_kinds",
    ),
    "one rotation for all layer types": (
        GEMMA3,
        "rope_utils.py",
        [("rope_parameters[layer_type]", 'rope_parameters["full_attention"]')],
        f"{LAYERS}::test_hidden_states_of_every_layer",
    ),
    "interleaved rotation": (
        GEMMA3,
        "rope_utils.py",
        [
            (
                "torch.cat((-second, first), dim=-1)",
                "torch.stack((-rotary[..., 1::2], rotary[..., ::2]), -1).flatten(-2)",
            )
        ],
        f"{LAYERS}::test_hidden_states_of_every_layer",
    ),
    "factor of the scaling dropped": (
        GEMMA3,
        "rope_utils.py",
        [("angles.cos() * factor, angles.sin() * factor", "angles.cos(), angles.sin()")],
        f"{LAYERS}::test_hidden_states_of_every_layer[yarn_rope]",
    ),
    "every layer rotates": (
        SMOLLM3,
        "model.py",
        [("bool(config.no_rope_layers[layer_idx])", "True")],
        f"{LAYERS}::test_hidden_states_of_every_layer",
    ),
    "softmax scale of another width": (
        LLAMA,
        "model.py",
        [("self.head_dim**-0.5", "config.hidden_size**-0.5")],
        f"{LAYERS}::test_hidden_states_of_every_layer",
    ),
    "window without effect": (
        MISTRAL,
        "model.py",
        [("create_sliding_window_causal_mask(**", "create_causal_mask(**")],
        f"{LAYERS}::test_hidden_states_of_every_layer",
    ),
    "window of the packed kernel one too long": (
        GEMMA3,
        "model.py",
        [("(self.sliding_window - 1, 0)", "(self.sliding_window, 0)")],
        f"{PACKING}::test_te_path_equals_unpacked",
    ),
    "tokens see the document before theirs": (
        LLAMA,
        "model.py",
        [("right=True", "right=False")],
        f"{PACKING}::test_packed_equals_unpacked",
    ),
    "positions start again in every step": (
        LLAMA,
        "model.py",
        [(".unsqueeze(0) + seen", ".unsqueeze(0)")],
        f"{FORWARD}::test_cache_equals_no_cache",
    ),
    "cache not read": (
        LLAMA,
        "model.py",
        [("key, value = past_key_values.update(key, value, self.layer_idx)", "pass")],
        f"{FORWARD}::test_cached_generation_equals_the_reference",
    ),
    "logits_to_keep ignored": (
        LLAMA,
        "model.py",
        [("outputs.last_hidden_state, logits_to_keep,", "outputs.last_hidden_state, 0,")],
        f"{FORWARD}::test_logits_to_keep",
    ),
    "head not tied": (
        LLAMA,
        "model.py",
        [("self.lm_head.weight = self.model.embed_tokens.weight", "pass")],
        f"{CONFIG}::test_real_size_has_the_references_parameters",
    ),
    "a bias missing": (
        QWEN2,
        "model.py",
        [
            (
                "self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=True)",
                "self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)",
            )
        ],
        f"{CONFIG}::test_real_size_has_the_references_parameters",
    ),
    "gradient cut off": (
        LLAMA,
        "model.py",
        [("self.mlp(hidden_states)", "self.mlp(hidden_states.detach())")],
        f"{PARITY}::test_loss_and_all_gradients",
    ),
    "adapter exchanges gate and up on the way in": (
        LLAMA,
        "state_dict_adapter.py",
        [("self.from_hf_name(name): tensor", f"self.from_hf_name(name){EXCHANGED}: tensor")],
        f"{PARITY}::test_fp32_logits_at_every_position",
    ),
    "adapter exchanges gate and up both ways": (
        LLAMA,
        "state_dict_adapter.py",
        [
            (
                "            return prefix + (renamed",
                f"            renamed = renamed{EXCHANGED}\n            return prefix + (renamed",
            )
        ],
        f"{PARITY}::test_fp32_logits_at_every_position",
    ),
    "adapter turns the layers round": (
        LLAMA,
        "state_dict_adapter.py",
        [('replace("{layer}", layer)', 'replace("{layer}", str(self.config.num_hidden_layers - 1 - int(layer)))')],
        f"{PARITY}::test_fp32_logits_at_every_position",
    ),
    "adapter lets unknown tensors pass": (
        LLAMA,
        "state_dict_adapter.py",
        [
            (
                '        raise KeyError(\n            f"No row',
                '        return name\n        raise KeyError(\n            f"No row',
            )
        ],
        f"{ADAPTER}::test_unknown_tensor_is_named",
    ),
    "adapter lets tensors be missing": (
        LLAMA,
        "state_dict_adapter.py",
        [("        self._check_complete(converted)\n", "")],
        f"{ADAPTER}::test_missing_tensor_is_named",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed_and_named(mistake: str, written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example, file, edits, named = MISTAKES[mistake]
    project = damaged(written(example), tmp_path / "project", file, *edits)
    in_a_fork(monkeypatch, tests=[named.partition("::")[0]], only=named.partition("::")[2].partition("[")[0])
    result = verify(project, mutants=False, parallel=False, progress=Quiet())
    assert result.exit_status == 1
    assert any(failure.startswith(named) for failure in result.tests.failures), result.tests.failures
    # The result is that of edited code, and says so.
    assert any(path.endswith(f"/{file}") for path in result.edited)
    assert any(file in warning for warning in result.as_json()["warnings"])


@pytest.mark.parametrize("example", [LLAMA, GEMMA3])
def test_the_same_tests_pass_without_a_mistake(example: str, written, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the tests above would prove nothing."""
    in_a_fork(monkeypatch, tests=[CONFIG, FORWARD, LAYERS])
    result = verify(written(example), mutants=False, parallel=False, progress=Quiet())
    assert (result.exit_status, result.tests.failures, result.edited) == (0, (), ())


def test_mutants_that_no_comparison_notices_are_counted(
    written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants that change nothing stand for those that slip through: with them the proof does not count."""
    project = tmp_path / "project"
    shutil.copytree(written(LLAMA), project)
    tests = project / "tests" / "test_mutants.py"
    text = tests.read_text(encoding="utf-8")
    planting = "    mutant.change(pair.native)\n"
    assert planting in text
    without = '    if "norm" not in mutant.name:\n    ' + planting
    tests.write_text(text.replace(planting, without), encoding="utf-8")
    in_a_fork(monkeypatch, tests=["test_mutants"])
    result = verify(project, mutants=True, parallel=False, progress=Quiet())
    assert result.exit_status == 1
    assert result.tests.planted >= 8
    assert 0 < result.tests.caught < result.tests.planted
    assert len(result.tests.survived) == result.tests.planted - result.tests.caught
    assert all("norm" in name for name in result.tests.survived)


def test_the_command_says_so(written, tmp_path: Path) -> None:
    """`onboard verify --json` as a user runs it: exit 1, the mistake named, and JSON alone on stdout."""
    project = damaged(written(PHI3), tmp_path / "project", "state_dict_adapter.py", GATE_AND_UP)
    for file in ("test_registration", "test_training", "test_packing", "test_state_dict_adapter", "test_forward"):
        (project / "tests" / f"{file}.py").unlink()
    done = subprocess.run(
        [sys.executable, "-m", "onboard", "verify", str(project), "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1, done.stderr
    payload = json.loads(done.stdout)
    assert payload["tests"]["failed"] >= 2
    assert any("test_hidden_states_of_every_layer" in failure for failure in payload["tests"]["failures"])
    assert payload["parity"]["max_abs_logit_diff"] > 1e-2
    assert any("state_dict_adapter.py" in warning for warning in payload["warnings"])
