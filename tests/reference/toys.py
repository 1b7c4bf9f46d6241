"""Small modules with one property each, and the recordings of their calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import transformers
from onboard.reference.build import build, randomise
from onboard.reference.record import Recording, record
from onboard.reference.roles import Roles, find_roles
from onboard.reference.tiny import SEQUENCE, WINDOW
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

__all__ = [
    "HEAD_DIM",
    "HIDDEN",
    "LLAMA",
    "SEQUENCE",
    "WINDOW",
    "Holder",
    "build",
    "config",
    "ids",
    "recorded",
    "tiny",
    "whole",
]

HIDDEN, HEAD_DIM = 40, 16
LLAMA: dict[str, Any] = {
    "vocab_size": 151,
    "hidden_size": HIDDEN,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 64,
}


def config(**fields: Any) -> LlamaConfig:
    """A config that some fields were added to."""
    made = LlamaConfig(**LLAMA)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


class Holder(nn.Module):
    """A model that is one module."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, use_cache: bool = False, **inputs: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.part(**inputs))


def recorded(part: nn.Module, **inputs: Any) -> Recording:
    """Randomise a module, run it as a model's ``part``, and keep the calls of all that is in it."""
    holder = Holder(part).eval()
    randomise(holder)
    return record(holder, **inputs)[0]


def tiny(name: str = "LlamaForCausalLM", **fields: Any) -> PreTrainedModel:
    """One of transformers' own models, with random weights."""
    return build(getattr(transformers, name), {**LLAMA, **fields})


def ids(length: int = SEQUENCE) -> torch.Tensor:
    return torch.randint(3, LLAMA["vocab_size"], (1, length), generator=torch.Generator().manual_seed(7))


def whole(model: PreTrainedModel) -> tuple[Recording, torch.Tensor, Roles]:
    """A whole model's recording, its logits and its parts."""
    recording, logits = record(model, input_ids=ids())
    return recording, logits, find_roles(model, recording)
