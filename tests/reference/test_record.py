"""Recordings hold what a module was really given, and leave nothing behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from onboard.reference.record import close, record
from torch import nn

from .toys import ids, tiny


class Twice(nn.Module):
    """Calls its child by position and by keyword, and spoils what it handed over."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Child()
        self.words = Words()
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, use_cache: bool = True, fail: bool = False) -> SimpleNamespace:
        assert use_cache is False
        first, _ = self.child(x, 2.0)
        x.zero_()
        first.zero_()
        self.child(x=x + 5, factor=3.0)
        self.words(x)
        if fail:
            raise RuntimeError("planted")
        return SimpleNamespace(logits=x)


class Child(nn.Module):
    def forward(self, x: torch.Tensor, factor: float) -> tuple[torch.Tensor, str]:
        return x * factor, "more"


class Words(nn.Module):
    def forward(self, x: torch.Tensor) -> str:
        return "no tensor"


def test_the_first_call_as_it_was() -> None:
    recording, _ = record(Twice(), x=torch.ones(3))
    call = recording["child"]
    assert call.inputs["factor"] == 2.0
    assert torch.equal(call.x, torch.ones(3))
    assert torch.equal(call.output, torch.full((3,), 2.0))
    assert set(recording) == {"child"}


@pytest.mark.parametrize("fail", [False, True])
def test_no_hook_stays(fail: bool) -> None:
    model = Twice()
    if fail:
        with pytest.raises(RuntimeError, match="planted"):
            record(model, x=torch.ones(3), fail=True)
    else:
        record(model, x=torch.ones(3))
    assert not any(module._forward_hooks for module in model.modules())


def test_keyword_arguments_of_a_real_model() -> None:
    model = tiny()
    recording, logits = record(model, input_ids=ids())
    inputs: dict[str, Any] = recording["model.layers.0.self_attn"].inputs
    cos, sin = inputs["position_embeddings"]
    assert cos.shape == sin.shape == (1, 24, 16)
    assert torch.equal(recording["lm_head"].output, logits)
    assert not logits.requires_grad


@pytest.mark.parametrize(
    ("a", "b", "fits"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.0], [1.0, 2.0 + 5e-5], False),
        ([1000.0, 2.0], [1000.0, 2.005], True),
        ([0.0, 0.0], [0.0, 2e-5], False),
        ([1.0], [1.0, 1.0], False),
        ([float("nan"), 1.0], [1.0, 1.0], False),
        ([1.0, 1.0], [float("nan"), 1.0], False),
        ([float("inf"), 1.0], [1.0, 1.0], False),
        ([1.0, 1.0], [float("inf"), 1.0], False),
    ],
)
def test_close(a: list[float], b: list[float], fits: bool) -> None:
    assert (close(torch.tensor(a), torch.tensor(b)) is not None) is fits
