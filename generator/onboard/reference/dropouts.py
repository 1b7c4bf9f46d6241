"""Where each dropout stands: in training, with that one at a probability of one, everything at its place is zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from onboard.reference.blocks import branches, multipliers
from onboard.reference.build import build
from onboard.reference.record import close, record
from onboard.reference.roles import LINEAR, Roles

PLACES = ("embedding", "attention_weights", "attention_output", "mlp_activation", "mlp_output")


@torch.no_grad()
def explain_dropouts(
    cls: type[PreTrainedModel],
    fields: Mapping[str, Any],
    roles: Roles,
    block: Mapping[str, Any],
    ids: torch.Tensor,
) -> dict[str, str | None]:
    """Config key of the dropout at each place; None where there is none.

    A field that acts at no known place stays unplaced: it is live in training and read by nothing.
    """
    keys = [
        name
        for name, value in fields.items()
        if "drop" in name and isinstance(value, (int, float)) and not isinstance(value, bool) and "layer" not in name
    ]
    found: dict[str, str | None] = dict.fromkeys(PLACES)
    for key in keys:
        try:
            places = _places(cls, {**fields, **dict.fromkeys(keys, 0.0), key: 1.0}, roles, block, ids)
        except Exception:  # the class takes no probability of one there
            continue
        for place in places:
            found[place] = found[place] or key
    return found


def _places(
    cls: type[PreTrainedModel],
    fields: Mapping[str, Any],
    roles: Roles,
    block: Mapping[str, Any],
    ids: torch.Tensor,
) -> list[str]:
    model = build(cls, dict(fields)).train()
    recording, _ = record(model, input_ids=ids)
    layer = branches(model, roles, recording, 0)
    attention = [
        path
        for path in recording
        if path.startswith(f"{roles.layer(0)}.{roles.attention}.") and isinstance(model.get_submodule(path), LINEAR)
    ]
    mixed = recording[attention[-1]].x
    hidden = recording[f"{roles.layer(0)}.{roles.mlp_linears[-1]}"].x
    found = []
    if not layer.x.any():
        found.append("embedding")
    if not mixed.any():
        found.append("attention_weights")
    if not hidden.any():
        found.append("mlp_activation")
    factor = multipliers(model.config)[block["multiplier"]] if block["multiplier"] else 1.0
    dropped = _dropped(layer, block, factor)
    return found + [place for place in dropped if not (place == "attention_output" and not layer.attention_out.any())]


def _dropped(layer: Any, block: Mapping[str, Any], factor: float) -> list[str]:
    """Which branches do not reach the residual stream."""
    norms = layer.norms
    by_input = list(norms.values())

    def normed(place: str, state: torch.Tensor) -> torch.Tensor:
        if not block[place]:
            return state
        return next((out for x, out in by_input if close(x, state) is not None), state)

    for keep_attention in (True, False):
        for keep_mlp in (True, False):
            a = layer.attention_out if keep_attention else torch.zeros_like(layer.attention_out)
            m = layer.mlp_out if keep_mlp else torch.zeros_like(layer.mlp_out)
            if block["norm_after_residual"]:
                middle = normed("post_attention_norm", layer.x + factor * a)
                end = normed("post_mlp_norm", middle + factor * m)
            else:
                a = factor * normed("post_attention_norm", a) if keep_attention else a
                m = factor * normed("post_mlp_norm", m) if keep_mlp else m
                end = layer.x + a + m
            if close(end, layer.y) is not None:
                missing = {"attention_output": not keep_attention, "mlp_output": not keep_mlp}
                return [place for place, gone in missing.items() if gone]
    return []
