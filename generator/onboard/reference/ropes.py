"""Hypotheses on rotary positions: the table of cosines and sines that the layers get, and how they rotate with it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from onboard.reference.record import close
from onboard.reference.roles import Unexplained

# Scalings whose frequencies depend on the config alone, with parameters of a size that shows at tiny length.
STATIC_SCALINGS: dict[str, dict[str, float]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
}

Table = tuple[torch.Tensor, torch.Tensor]


def rotate(x: torch.Tensor, table: Table, style: str) -> torch.Tensor:
    """Rotate ``[B, heads, S, D]`` by a table ``[B, S, rotary dims]``; ``none`` leaves it.

    ``half`` pairs dimension i with i + rotary dims / 2 (transformers' Llama), ``interleaved`` with i + 1
    (arXiv:2104.09864).
    """
    if style == "none":
        return x
    cos, sin = (part.unsqueeze(1) for part in table)
    rotary, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if style == "half":
        first, second = rotary.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    else:
        turned = torch.stack((-rotary[..., 1::2], rotary[..., ::2]), dim=-1).flatten(-2)
    return torch.cat((rotary * cos + turned * sin, rest), dim=-1)


def explain_tables(config: PretrainedConfig, tables: dict[str, Table], head_dim: int) -> dict[str, Any]:
    """Reproduce the recorded tables from ``config.rope_parameters``.

    Args:
        config: the tiny config.
        tables: layer type to the recorded ``(cos, sin)``, each ``[1, S, rotary dims]``.
        head_dim: head size.

    Returns:
        ``types``, ``per_layer_type``, ``partial`` and the largest ``difference``.

    Raises:
        Unexplained: a table that the parameters do not give, or a rope type that transformers does not know.
    """
    parameters = config.rope_parameters
    nested = any(isinstance(value, dict) for value in parameters.values())
    types, worst, partial = set(), 0.0, False
    for layer_type, (cos, sin) in tables.items():
        own = parameters[layer_type] if nested else parameters
        rope_type = own["rope_type"]
        if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
            raise Unexplained("rope", f"unknown rope type {rope_type!r}", tuple(sorted(ROPE_INIT_FUNCTIONS)))
        types.add(rope_type)
        rotary = int(head_dim * own.get("partial_rotary_factor", 1.0))
        partial = partial or rotary != head_dim
        length = cos.shape[-2]
        if rope_type == "default":
            inv_freq, factor = 1.0 / own["rope_theta"] ** (torch.arange(0, rotary, 2).float() / rotary), 1.0
        else:
            kwargs = {"layer_type": layer_type} if nested else {}
            inv_freq, factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=length, **kwargs)
        angles = torch.arange(length).float()[:, None] * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        for found, expected in ((cos, angles.cos() * factor), (sin, angles.sin() * factor)):
            difference = close(expected, found[0])
            if difference is None:
                raise Unexplained("rope", f"{rope_type} with {own} does not give the table of {layer_type} layers")
            worst = max(worst, difference)
    return {"types": sorted(types), "per_layer_type": nested, "partial": partial, "difference": worst}
