"""Packages that reuse transformers' decoder, damaged by hand: their tests must notice, and name the test that did."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from onboard.pipeline.making import NewRequest, make
from onboard.pipeline.verifying import verify

from .damage import damaged, in_a_fork

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 96,
    "num_hidden_layers": 6,
    "intermediate_size": 192,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}


class Quiet:
    def start(self, label: str, total: int | None = None) -> None:
        pass

    def advance(self, n: int = 1, note: str | None = None) -> None:
        pass

    def done(self, note: str | None = None) -> None:
        pass


# Name: file, what stands there, the mistake, and the test that must notice.
MISTAKES = {
    "the head's product is doubled": (
        "model.py",
        "logits_to_keep).logits\n",
        "logits_to_keep).logits * 2\n",
        "test_parity::test_fp32_logits_at_every_position",
    ),
    "the padding mask is lost": (
        "model.py",
        "attention_mask=attention_mask,",
        "attention_mask=None,",
        "test_parity::test_padding",
    ),
    "the state of earlier tokens is lost": (
        "model.py",
        "past_key_values=past_key_values,\n            inputs",
        "past_key_values=None,\n            inputs",
        "test_forward::",
    ),
    "packed documents see each other": (
        "model.py",
        'kwargs.get("qkv_format") == "thd"',
        'kwargs.get("qkv_format") == "no"',
        "test_packing::test_thd_is_refused",
    ),
    "tables are rounded": (
        "model.py",
        "        self.post_init()\n",
        "        self.post_init()\n        self.to(config.dtype)\n",
        "test_parity::test_bf16_keeps_the_references_dtypes",
    ),
    "a row is renamed": (
        "state_dict_adapter.py",
        'KeyRow("model.norm.weight",',
        'KeyRow("model.norms.weight",',
        "test_state_dict_adapter::",
    ),
    "missing tensors are not named": (
        "state_dict_adapter.py",
        "if name not in converted:",
        "if False:",
        "test_state_dict_adapter::test_missing_tensor_is_named",
    ),
    "the labels are shifted twice": (
        "model.py",
        "labels=labels, vocab_size",
        "labels=labels.roll(-1, 1), vocab_size",
        "test_parity::test_loss_and_all_gradients",
    ),
    "the decoder is another class": (
        "model.py",
        "= LlamaModel(config)",
        '= type("Other", (LlamaModel,), {})(config)',
        "test_origins::test_the_decoder_is_transformers_own",
    ),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package that reuses a decoder, though every part of it is explained."""
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    result = make(NewRequest(str(folder), out=folder / "out", verify=False, style="reuse"), Quiet())
    assert result.payload["origins"]["novel"] == 0
    return folder / "out"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, before, after, named = MISTAKES[mistake]
    project = damaged(llama, tmp_path / "project", file, (before, after))
    in_a_fork(monkeypatch, tests=[named.partition("::")[0]])
    result = verify(project, mutants=False, parallel=False, progress=Quiet())
    assert result.exit_status == 1
    assert any(failure.startswith(named) for failure in result.tests.failures), result.tests.failures


HYBRID = {
    "architectures": ["OlmoHybridForCausalLM"],
    "model_type": "olmo_hybrid",
    **{name: value for name, value in CONFIG.items() if name not in ("architectures", "model_type")},
    "pad_token_id": 0,
    "eos_token_id": 2,
}
PARTS = {
    "two parts are exchanged": (
        '            "model.layers.{layer}.linear_attn.q_conv1d.weight",\n'
        '            "model.layers.{layer}.linear_attn.k_conv1d.weight",\n',
        '            "model.layers.{layer}.linear_attn.k_conv1d.weight",\n'
        '            "model.layers.{layer}.linear_attn.q_conv1d.weight",\n',
        "test_state_dict_adapter::test_joined_tensors_are_the_references",
    ),
    "parts are cut at other places": (
        "sizes = [self.shapes[name][0] for name in place.names(row.rows_of)]",
        "sizes = [length // 3] * 3",
        "test_state_dict_adapter::test_disk_to_native_to_disk_to_the_bit",
    ),
    "a missing part is not named": (
        "        if name not in tensors:\n",
        "        if False:\n",
        "test_state_dict_adapter::test_missing_part_is_named",
    ),
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package whose checkpoint has the parts of a tensor."""
    folder = tmp_path_factory.mktemp("hybrid")
    (folder / "config.json").write_text(json.dumps(HYBRID), encoding="utf-8")
    make(NewRequest(str(folder), out=folder / "out", verify=False), Quiet())
    return folder / "out"


@pytest.mark.parametrize("mistake", PARTS)
def test_a_mistake_with_parts_is_noticed(
    mistake: str, hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after, named = PARTS[mistake]
    project = damaged(hybrid, tmp_path / "project", "state_dict_adapter.py", (before, after))
    in_a_fork(monkeypatch, tests=[named.partition("::")[0]])
    result = verify(project, mutants=False, parallel=False, progress=Quiet())
    assert result.exit_status == 1
    assert any(failure.startswith(named) for failure in result.tests.failures), result.tests.failures


def test_the_same_tests_pass_without_a_mistake(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(llama, tmp_path / "project")
    in_a_fork(monkeypatch)
    result = verify(tmp_path / "project", mutants=True, parallel=False, progress=Quiet())
    assert (result.exit_status, result.tests.failures, result.tests.skips) == (0, (), ())
