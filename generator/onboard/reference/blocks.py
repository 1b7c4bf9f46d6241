"""Hypotheses on the order of a decoder layer, and on what stands before the first and after the last."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from onboard.reference.record import Recording, close
from onboard.reference.roles import Roles, Unexplained


def explain_block(layer: nn.Module, index: int, roles: Roles, recording: Recording) -> dict[str, Any]:
    """Place each norm of a layer by what it takes and what takes its output, then check both residual additions.

    Raises:
        Unexplained: the layer is not ``h = x + post(attention(pre(x)))``, ``y = h + post(mlp(pre(h)))``.
    """
    path = roles.layer(index)
    x, y = recording[path].x, recording[path].output
    attention, mlp = recording[f"{path}.{roles.attention}"], recording[f"{path}.{roles.mlp}"]
    # A norm that is there and never called is at no place.
    norms = {name: recording[f"{path}.{name}"] for name in roles.norms if f"{path}.{name}" in recording}

    def feeding(target: torch.Tensor) -> str | None:
        return next((name for name, call in norms.items() if torch.equal(call.output, target)), None)

    def fed_by(source: torch.Tensor) -> str | None:
        return next((name for name, call in norms.items() if torch.equal(call.x, source)), None)

    pre_attention, pre_mlp = feeding(attention.x), feeding(mlp.x)
    post_attention, post_mlp = fed_by(attention.output), fed_by(mlp.output)
    placed = [name for name in (pre_attention, post_attention, pre_mlp, post_mlp) if name]
    if sorted(placed) != sorted(roles.norms):
        raise Unexplained("block", f"norms {sorted(set(roles.norms) - set(placed))} stand at no known place in {path}")
    middle = x + (norms[post_attention].output if post_attention else attention.output)
    end = middle + (norms[post_mlp].output if post_mlp else mlp.output)
    before_mlp = norms[pre_mlp].x if pre_mlp else mlp.x
    differences = (
        close(middle, before_mlp),
        close(end, y),
        close(x, norms[pre_attention].x if pre_attention else attention.x),
    )
    if any(difference is None for difference in differences):
        raise Unexplained(
            "block", f"{path} is not two residual branches after one another", ("parallel", "scaled residual")
        )
    return {
        "pre_attention_norm": pre_attention,
        "post_attention_norm": post_attention,
        "pre_mlp_norm": pre_mlp,
        "post_mlp_norm": post_mlp,
        "difference": max(difference for difference in differences if difference is not None),
    }


def explain_dropout(layer: nn.Module, roles: Roles, config: PretrainedConfig) -> dict[str, Any]:
    """Dropout on the two residual branches, and the config key of its probability.

    Raises:
        Unexplained: dropouts that are not one per branch.
    """
    if not roles.dropouts:
        return {"dropout_key": None, "attention_dropout": None, "mlp_dropout": None}
    keys = [
        name
        for name in vars(config)
        if name in ("resid_pdrop", "hidden_dropout", "residual_dropout", "hidden_dropout_prob")
    ]
    if len(roles.dropouts) != 2 or len(keys) != 1:
        raise Unexplained("block", f"dropouts {roles.dropouts} with config keys {keys}")
    first, second = roles.dropouts
    return {"dropout_key": keys[0], "attention_dropout": first, "mlp_dropout": second}


def explain_embedding(
    model: PreTrainedModel, input_ids: torch.Tensor, roles: Roles, recording: Recording
) -> dict[str, Any]:
    """Find the constant between the embedding's rows and the first layer's input.

    Raises:
        Unexplained: they differ by more than a constant that the config gives.
    """
    rows = model.get_input_embeddings().weight[input_ids]
    found = recording[roles.layer(0)].x
    config = model.config
    candidates: dict[str | None, float] = {None: 1.0, "config.hidden_size**0.5": config.hidden_size**0.5}
    candidates |= {
        f"config.{name}": float(value)
        for name, value in vars(config).items()
        if isinstance(value, (int, float))
        and not isinstance(value, bool)
        and "emb" in name
        and name.endswith(("scale", "multiplier"))
    }
    for expression, value in candidates.items():
        difference = close(rows * value, found)
        if difference is not None:
            return {"scale": expression, "difference": difference}
    raise Unexplained(
        "embedding", "the first layer's input is not the embedding times a known constant", tuple(map(str, candidates))
    )


def explain_head(model: PreTrainedModel, logits: torch.Tensor, roles: Roles, recording: Recording) -> dict[str, Any]:
    """Check that the logits are the head's output on the final norm, capped where the config says so.

    Raises:
        Unexplained: they are not.
    """
    head = recording[roles.head]
    if close(recording[roles.final_norm].output, head.x) is None:
        raise Unexplained("head", "the head does not take the final norm's output")
    caps: dict[str | None, float] = {
        name: float(value)
        for name, value in vars(model.config).items()
        if "softcap" in name and isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    bias = getattr(model.get_output_embeddings(), "bias", None) is not None
    difference = close(head.output, logits)
    if difference is not None:
        return {"softcap_key": None, "bias": bias, "difference": difference}
    for key, cap in caps.items():
        difference = close(cap * torch.tanh(head.output / cap), logits)
        if difference is not None:
            return {"softcap_key": key, "bias": bias, "difference": difference}
    raise Unexplained("head", "the logits are not the head's output", tuple(str(key) for key in caps))
