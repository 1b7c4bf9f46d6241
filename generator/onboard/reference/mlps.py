"""Hypotheses on the feed-forward network: gated, with separate or fused projections, each activation of the config."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.activations import ACT2FN

from onboard.reference.record import Recording, close
from onboard.reference.roles import LINEAR, Unexplained


@torch.no_grad()
def explain_mlp(mlp: nn.Module, path: str, recording: Recording, config: PretrainedConfig) -> dict[str, Any]:
    """Find the formula that reproduces one MLP.

    Returns:
        ``fused`` or ``gate_proj`` and ``up_proj``; ``down_proj``; ``activation`` and its ``activation_key``;
        ``bias`` of each projection; the ``difference``.

    Raises:
        Unexplained: none or several candidates fit.
    """
    call = recording[path]
    linears = {name: module for name, module in mlp.named_modules() if isinstance(module, LINEAR)}
    ins = [name for name in linears if torch.equal(recording[f"{path}.{name}"].x, call.x)]
    outs = [name for name in linears if name not in ins]
    activations = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, str) and value in ACT2FN and not name.startswith("_")
    }
    if len(outs) != 1 or not activations:
        raise Unexplained("mlp", f"{len(ins)} projections in, {len(outs)} out, activations {sorted(activations)}")
    down = linears[outs[0]]
    fits: list[dict[str, Any]] = []
    for key, activation in activations.items():
        act = ACT2FN[activation]
        if len(ins) == 2:
            for gate, up in (ins, ins[::-1]):
                hidden = act(linears[gate](call.x)) * linears[up](call.x)
                fits += _fit(
                    down,
                    hidden,
                    call.output,
                    fused=None,
                    gate_proj=gate,
                    up_proj=up,
                    activation_key=key,
                    activation=activation,
                )
        elif len(ins) == 1:
            first, second = linears[ins[0]](call.x).chunk(2, dim=-1)
            if first.shape[-1] == down.weight.shape[1]:
                fits += _fit(
                    down,
                    act(first) * second,
                    call.output,
                    fused=ins[0],
                    gate_proj="gate",
                    up_proj="up",
                    activation_key=key,
                    activation=activation,
                )
    if len(fits) != 1:
        raise Unexplained(
            "mlp", f"{len(fits)} candidates fit", tuple(f"gated, {name}" for name in activations.values())
        )
    biased = {name: linears[name].bias is not None for name in linears}
    if len(set(biased.values())) > 1:
        raise Unexplained("mlp", f"some projections have a bias and some have not: {biased}")
    return {**fits[0], "down_proj": outs[0], "bias": all(biased.values())}


def _fit(down: nn.Module, hidden: torch.Tensor, output: torch.Tensor, **found: Any) -> list[dict[str, Any]]:
    difference = close(down(hidden), output)
    return [] if difference is None else [{**found, "difference": difference}]
