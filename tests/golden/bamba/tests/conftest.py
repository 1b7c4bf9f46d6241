"""The tiny Bamba that all tests share: the reference with randomised weights, and this package's model with the same.

The oracle is transformers. Its checkpoint goes through the disk (names there differ from names in memory), and every
parameter is randomised, because norms of one and biases of zero hide mistakes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BambaConfig
from transformers import BambaForCausalLM as HFBambaForCausalLM

from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel_bamba.model import BambaForCausalLM

TINY: dict[str, Any] = {
    "vocab_size": 151,
    "tie_word_embeddings": False,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 19,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "attn_layer_indices": [9, 18],
    "mamba_n_heads": 16,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 14,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "z_loss_coefficient": 0.0,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "rope_type": "default"},
    "attention_bias": False,
    "mlp_bias": False,
}
"""Every feature of the real config; sizes differ from each other wherever the architecture allows it."""

VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "tied": {"tie_word_embeddings": True},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "other_values": {"rms_norm_eps": 0.0001, "hidden_act": "relu"},
    "linear_rope": {
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    },
    "llama3_rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        }
    },
    "yarn_rope": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        }
    },
}
"""Other settings that the class serves, as differences from ``TINY``."""

SEQUENCE = 24  # tokens; longer than the tiny window and the tiny original length of a RoPE scaling

# The norms are compiled by default, which costs seconds per shape and changes no result.
torch._dynamo.config.disable = True
torch.set_num_threads(1)


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Fill every parameter: matrices 0.3 N(0, 1), norm weights 1 + 0.4 N(0, 1), biases 0.3 N(0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        scale_like = parameter.ndim == 1 and not name.endswith("bias")
        parameter.copy_(1 + 0.4 * noise if scale_like else 0.3 * noise)


@dataclass
class Pair:
    """The reference and this package's model, with the same weights, and the checkpoint that they share."""

    reference: HFBambaForCausalLM
    native: BambaForCausalLM
    folder: Path

    def inputs(self, batch: int = 2, length: int = SEQUENCE, seed: int = 7) -> torch.Tensor:
        """Random token ids ``[batch, length]`` above the special ones."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, self.reference.config.vocab_size, (batch, length), generator=generator)


def load_native(folder: Path, dtype: torch.dtype = torch.float32, **fields: Any) -> BambaForCausalLM:
    """Build this package's model and load a checkpoint from disk through its adapter."""
    config = BambaConfig.from_pretrained(folder, dtype=dtype, **fields)
    native = BambaForCausalLM(config, BackendConfig(attn="sdpa")).eval()
    weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights.update(load_file(file))
    native.load_state_dict(native.state_dict_adapter.from_hf(weights), strict=not config.tie_word_embeddings)
    return native


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Variant to the folder of the checkpoint that the reference saved, made once."""
    folders: dict[str, Path] = {}

    def folder(variant: str) -> Path:
        if variant not in folders:
            torch.manual_seed(0)
            reference = HFBambaForCausalLM(BambaConfig(**{**TINY, **VARIANTS[variant]}))
            randomise(reference)
            folders[variant] = tmp_path_factory.mktemp(variant)
            reference.save_pretrained(folders[variant])
        return folders[variant]

    return folder


@pytest.fixture(scope="session")
def make_pair(folder_of: Callable[[str], Path]) -> Callable[..., Pair]:
    """Variant, dtype and further config fields to a fresh pair."""

    def make(variant: str = "base", dtype: torch.dtype = torch.float32, **fields: Any) -> Pair:
        folder = folder_of(variant)
        reference = HFBambaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa", **fields).eval()
        return Pair(reference, load_native(folder, dtype, **fields), folder)

    return make


@pytest.fixture
def pair(make_pair: Callable[..., Pair]) -> Pair:
    """A fresh pair of the base variant in fp32."""
    return make_pair()


@pytest.fixture(params=list(VARIANTS))
def any_pair(request: pytest.FixtureRequest, make_pair: Callable[..., Pair]) -> Pair:
    """A fresh fp32 pair of each variant."""
    return make_pair(request.param)


@pytest.fixture
def tiny_config() -> BambaConfig:
    """The tiny config."""
    return BambaConfig(**copy.deepcopy(TINY))


@pytest.fixture(scope="session")
def difference() -> Callable[[torch.Tensor, torch.Tensor], float]:
    """Largest absolute difference, in units of the expected tensor's largest value where that is above one."""

    def measure(actual: torch.Tensor, expected: torch.Tensor) -> float:
        assert actual.shape == expected.shape, f"{tuple(actual.shape)} for {tuple(expected.shape)}"
        return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1.0)).item()

    return measure


@pytest.fixture(scope="session")
def as_native() -> Callable[..., dict[str, Any]]:
    """Tensors by the names of the reference's parameters, to this package's names and layout."""

    def convert(native: BambaForCausalLM, reference: HFBambaForCausalLM, tensors: dict[str, Any]) -> dict[str, Any]:
        stored = reference.state_dict()
        buffers = {name: tensor for name, tensor in reference.named_buffers() if name in stored}
        return native.state_dict_adapter.from_hf({**buffers, **tensors})

    return convert


@pytest.fixture
def automodel_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the framework's entry points, which ask for the current GPU, run where there is none."""
    if torch.cuda.is_available():
        return
    from nemo_automodel._transformers import auto_model

    class CpuTorch:
        """torch, whose ``device`` maps cuda to the CPU."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def device(*args: Any, **kwargs: Any) -> torch.device:
            return torch.device("cpu")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(auto_model, "torch", CpuTorch())
