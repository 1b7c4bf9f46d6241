"""Hypotheses on attention: projections, q/k norm, rotation, scale and window, one layer at a time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from onboard.reference.meanings import size
from onboard.reference.record import Call, Recording, close
from onboard.reference.roles import LINEAR, Unexplained, is_norm
from onboard.reference.ropes import Table, rotate


@dataclass(frozen=True)
class Fit:
    """What reproduced one layer's attention."""

    names: dict[str, Any]
    style: str
    scale: str
    windowed: bool
    difference: float


@torch.no_grad()
def explain_attention(
    attention: nn.Module, path: str, recording: Recording, config: PretrainedConfig, head_dim: int, window: int | None
) -> Fit:
    """Find the setting that reproduces one layer's attention.

    Args:
        attention: the layer's attention module.
        path: its path in the recording.
        recording: of a run longer than the window.
        config: the tiny config.
        head_dim: head size.
        window: tokens that a windowed layer sees, its own counted (transformers' convention), or None.

    Raises:
        Unexplained: none or several settings fit.
    """
    call = recording[path]
    heads = config.num_attention_heads
    kv_heads = size(config, "num_key_value_heads") or heads
    scales = scale_candidates(config, head_dim)
    fits: list[Fit] = []
    for names in _projections(attention, path, recording, heads * head_dim, kv_heads * head_dim):
        q, k, v = _states(attention, names, call, heads, kv_heads, head_dim)
        settings = itertools.product(
            ("half", "interleaved", "none"), scales.items(), (False, True) if window else (False,)
        )
        for style, (scale, value), windowed in settings:
            table: Table | None = call.inputs.get("position_embeddings")
            if style != "none" and table is None:
                continue
            mixed = _attend(
                rotate(q, table, style) if table else q,
                rotate(k, table, style) if table else k,
                v,
                value,
                window if windowed else None,
            )
            difference = close(attention.get_submodule(names["o_proj"])(mixed), call.output)
            if difference is not None:
                fits.append(Fit(names, style, scale, windowed, difference))
    if not fits:
        raise Unexplained("attention", f"no candidate reproduces {path} ({type(attention).__name__})")
    if len({(fit.style, fit.windowed, str(sorted(fit.names.items(), key=str))) for fit in fits}) > 1:
        raise Unexplained("attention", f"{len(fits)} candidates fit {path}, the input does not tell them apart")
    return fits[0]


def scale_candidates(config: PretrainedConfig, head_dim: int) -> dict[str, float]:
    """Python expression to softmax scale; expressions of equal value are given once, the first one."""
    candidates = {"self.head_dim**-0.5": head_dim**-0.5, "1.0": 1.0}
    for name, value in vars(config).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            if name.endswith("scalar"):
                candidates[f"config.{name}**-0.5"] = value**-0.5
            elif name.endswith(("multiplier", "scale")):
                candidates[f"config.{name}"] = float(value)
    seen: dict[float, str] = {}
    for expression, value in candidates.items():
        seen.setdefault(value, expression)
    return {expression: value for value, expression in seen.items()}


def _projections(
    attention: nn.Module, path: str, recording: Recording, q_width: int, kv_width: int
) -> list[dict[str, Any]]:
    """Ways to name the projections and norms, by their widths and what they are fed."""
    call = recording[path]
    linears = {name: module for name, module in attention.named_modules() if isinstance(module, LINEAR)}
    ins = [name for name in linears if torch.equal(recording[f"{path}.{name}"].x, call.x)]
    outs = [name for name in linears if name not in ins]
    if len(outs) != 1:
        raise Unexplained("attention", f"{path} has {len(ins)} projections in and {len(outs)} out")
    base: dict[str, Any] = {"fused_qkv": None, "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": outs[0]}
    base |= _qk_norms(attention, path, recording, q_width, kv_width)
    widths = {name: recording[f"{path}.{name}"].output.shape[-1] for name in ins}
    if len(ins) == 1 and widths[ins[0]] == q_width + 2 * kv_width:
        return [{**base, "fused_qkv": ins[0]}]
    if len(ins) == 3:
        orders = itertools.permutations(ins)
        return [
            {**base, "q_proj": q, "k_proj": k, "v_proj": v}
            for q, k, v in orders
            if (widths[q], widths[k], widths[v]) == (q_width, kv_width, kv_width)
        ]
    raise Unexplained("attention", f"projections of widths {widths} in {path}")


def _qk_norms(attention: nn.Module, path: str, recording: Recording, q_width: int, kv_width: int) -> dict[str, Any]:
    norms = [name for name, module in attention.named_modules() if is_norm(module) and f"{path}.{name}" in recording]
    if not norms:
        return {"qk_norm": None, "q_norm": None, "k_norm": None}
    if len(norms) != 2:
        raise Unexplained("attention", f"{len(norms)} norms inside {path}")
    sizes = {name: recording[f"{path}.{name}"].x.numel() for name in norms}
    q_norm, k_norm = sorted(norms, key=lambda name: -sizes[name])
    weights = [attention.get_submodule(name).weight.shape[0] for name in (q_norm, k_norm)]
    kind = "width" if weights == [q_width, kv_width] else "head"
    return {"qk_norm": kind, "q_norm": q_norm, "k_norm": k_norm}


def _states(
    attention: nn.Module, names: dict[str, Any], call: Call, heads: int, kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values ``[B, heads, S, D]`` before rotation."""
    if names["fused_qkv"]:
        widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        q, k, v = attention.get_submodule(names["fused_qkv"])(call.x).split(widths, dim=-1)
    else:
        q, k, v = (attention.get_submodule(names[name])(call.x) for name in ("q_proj", "k_proj", "v_proj"))
    if names["qk_norm"] == "width":
        q, k = attention.get_submodule(names["q_norm"])(q), attention.get_submodule(names["k_norm"])(k)
    q, k, v = (state.unflatten(-1, (-1, head_dim)) for state in (q, k, v))
    if names["qk_norm"] == "head":
        q, k = attention.get_submodule(names["q_norm"])(q), attention.get_submodule(names["k_norm"])(k)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """Causal softmax attention ``[B, S, N * D]``; a window counts the token itself."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(-1, -2) * scale
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    visible = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    return (scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v).transpose(1, 2).flatten(-2)
