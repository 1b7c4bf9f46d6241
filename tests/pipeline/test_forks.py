"""Forks that keep the model_type of what they were forked from: their name is nobody's, their tensors decide."""

from __future__ import annotations

import json
from types import MappingProxyType

import pytest
from onboard.errors import Unsupported
from onboard.pipeline import referring
from onboard.pipeline.reading import read
from onboard.spec.derive import derive

CONFIG = {
    "architectures": ["ForkForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 640,
}
AUTO_MAP = {"AutoConfig": "configuration_fork.ForkConfig", "AutoModelForCausalLM": "modeling_fork.ForkForCausalLM"}
LLAMA = {"model.embed_tokens.weight": [640, 64], "model.norm.weight": [64], "lm_head.weight": [640, 64]} | {
    f"model.layers.{layer}.{name}.weight": shape
    for layer in range(3)
    for name, shape in {
        "input_layernorm": [64],
        "post_attention_layernorm": [64],
        "self_attn.q_proj": [64, 64],
        "self_attn.k_proj": [32, 64],
        "self_attn.v_proj": [32, 64],
        "self_attn.o_proj": [64, 64],
        "mlp.gate_proj": [96, 64],
        "mlp.up_proj": [96, 64],
        "mlp.down_proj": [64, 96],
    }.items()
}
QK_NORMS = {f"model.layers.{layer}.self_attn.{part}_norm.weight": [16] for layer in range(3) for part in "qk"}
NOBODYS = {f"model.layers.{layer}.self_attn.gate.weight": [64, 64] for layer in range(3)}


@pytest.fixture
def fork(tmp_path):
    """Config and tensors to a directory with a checkpoint whose weights are zeros, and code that leaves a mark."""

    def write(tensors=None, **fields):
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **fields}))
        for name in ("configuration_fork.py", "modeling_fork.py"):
            (tmp_path / name).write_text(f"open({str(tmp_path / 'RAN')!r}, 'w')\n")
        if tensors is not None:
            header, end = {}, 0
            for name, shape in tensors.items():
                size = 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
                header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
                end += size
            content = json.dumps(header).encode()
            (tmp_path / "model.safetensors").write_bytes(len(content).to_bytes(8, "little") + content + bytes(end))
        return str(tmp_path)

    yield write
    assert not (tmp_path / "RAN").exists()


class Asked(list):
    """The questions put to the reference, which answers as transformers does by name, then by model_type."""

    def find(self, folder, **options):
        return referring.find_reference(read(folder, revision=None), "auto", self.answer, **options)

    by_type = MappingProxyType({"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"})

    def answer(self, config, architecture, model_type, style="native", problem=None, code=None):
        self.append((architecture, model_type, code))
        known = architecture in self.by_type.values()
        return {"reference_class": code.model if code else architecture if known else self.by_type[model_type]}


@pytest.fixture
def asked():
    return Asked()


def test_a_fork_with_the_same_tensors_is_held_against_its_model_types_class(fork, asked):
    found = asked.find(fork(LLAMA))
    assert found.measured["reference_class"] == "LlamaForCausalLM"
    assert found.recognised is None


def test_a_fork_with_another_classs_tensors_is_held_against_that_class(fork, asked):
    found = asked.find(fork(LLAMA | QK_NORMS))
    assert found.recognised is not None
    assert asked[-1][:2] == ("Qwen3ForCausalLM", "qwen3")


def test_a_fork_with_tensors_that_no_class_has_is_refused_by_name(fork, asked):
    with pytest.raises(Unsupported) as refusal:
        asked.find(fork(LLAMA | NOBODYS, auto_map=AUTO_MAP))
    assert "self_attn.gate.weight" in refusal.value.why
    assert "--trust-remote-code" in refusal.value.do


def test_a_fork_without_a_checkpoint_is_taken_by_its_model_type(fork, asked):
    assert asked.find(fork()).recognised is None
    assert len(asked) == 1


@pytest.mark.parametrize("tensors", [None, LLAMA, LLAMA | NOBODYS], ids=["none", "same", "other"])
def test_a_forks_own_code_is_its_reference_where_it_is_trusted(fork, asked, tensors):
    found = asked.find(fork(tensors, auto_map=AUTO_MAP), trust_remote_code=True)
    assert found.warnings == ()
    assert found.code is asked[-1][2]
    assert found.code.model == "modeling_fork.ForkForCausalLM"


def test_transformers_own_class_is_never_replaced_by_code(fork, asked):
    found = asked.find(fork(LLAMA, architectures=["LlamaForCausalLM"], auto_map=AUTO_MAP), trust_remote_code=True)
    assert found.code is None
    assert "no effect" in found.warnings[0]


@pytest.mark.parametrize(
    ("tensors", "known"), [(None, True), (LLAMA, True), (LLAMA | QK_NORMS, False), (LLAMA | NOBODYS, False)]
)
def test_inspect_decides_as_new_does(fork, tensors, known):
    """Without the reference, which would have to import transformers."""
    assert referring.has_class(read(fork(tensors), revision=None)) is known


def test_a_name_that_differs_in_case_alone_is_the_class(fork, asked):
    """LLaMAForCausalLM; its odd tensors are named for review, as those of LlamaForCausalLM would be."""
    folder = fork(LLAMA | NOBODYS, architectures=["LLaMAForCausalLM"])
    assert referring.has_class(read(folder, revision=None))
    assert asked.find(folder).recognised is None


@pytest.mark.parametrize(
    ("keys", "listed"),
    [
        ({"rope_theta": None}, True),
        ({"rope_theta": None, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, True),
        ({}, False),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, False),
        ({"rope_theta": None, "rope_scaling": {"full_attention": {"rope_theta": 10000.0}}}, False),
    ],
)
def test_a_base_of_the_rotation_that_nobody_gave_is_listed(fork, measured, keys, listed):
    """The recognised class has a default; the original code may have another in its place."""
    example = measured("llama-3.2-1b")
    example["real"]["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    source = read(fork(LLAMA, model_type="fork", **keys), revision=None)
    spec = derive(source.decoder, source.architecture, source.model_type, example)
    found = referring.Reference(source, example, referring.recognise_source(source))
    items = referring.unproven(spec, found)
    assert any("rope_theta=10000.0" in item.what for item in items) is listed
