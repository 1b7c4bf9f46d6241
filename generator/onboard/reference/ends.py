"""Hypotheses on what stands before the first layer and after the last: embedding, positions, head."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from onboard.reference.build import build
from onboard.reference.meanings import size, spelling
from onboard.reference.mlps import activations
from onboard.reference.norms import explain_norms
from onboard.reference.record import Recording, close, record
from onboard.reference.roles import Roles, Unexplained, is_norm


def explain_embedding(
    model: PreTrainedModel, input_ids: torch.Tensor, roles: Roles, recording: Recording
) -> dict[str, Any]:
    """Find what makes the first layer's input of the token embedding's rows.

    Returns:
        ``embedding`` and ``modules`` of the measurement.

    Raises:
        Unexplained: no known scale, positions and norm do.
    """
    rows = model.get_input_embeddings().weight[input_ids]
    found = recording[roles.layer(0)].x
    modules = [_module(roles.embedding, "model.embed_tokens")]
    norm: str | None = None
    for path, call in recording.items():
        outside = not path.startswith(f"{roles.layers}.")
        if not outside or not is_norm(model.get_submodule(path), call.x, call.output):
            continue
        if call.output.shape == found.shape and torch.equal(call.output, found):
            norm, found = path, call.x
    if norm is not None and norm != roles.final_norm:
        modules.append(_module(norm, "model.embed_norm"))
    elif norm is not None and any(True for _ in model.get_submodule(norm).parameters()):
        raise Unexplained("embedding", f"{norm} normalises both the embeddings and the last hidden states")
    if found.shape != rows.shape:
        raise Unexplained("embedding", f"rows {tuple(rows.shape)} become {tuple(found.shape)} before the first layer")
    nearest = []
    for scale, factor in _scales(model.config).items():
        for positions, vectors, table in _positions(model, roles, recording, input_ids.shape[1]):
            expected = rows * factor + vectors
            difference = close(expected, found)
            if difference is not None:
                if table:
                    modules.append(_module(table, "model.embed_positions"))
                looked_up = recording[roles.embedding].output
                embedding = {
                    "scale": scale,
                    "scales_inputs": scale is not None and close(looked_up, rows) is not None,
                    "positions": positions,
                    "norm": norm is not None,
                }
                return {"embedding": {**embedding, "difference": difference}, "modules": modules}
            nearest.append(f"times {scale or 1} {'and positions' if positions else ''}")
    raise Unexplained("embedding", "the first layer's input is no known function of the rows", tuple(nearest[:4]))


@torch.no_grad()
def rounds_scale(
    cls: type[PreTrainedModel], fields: Mapping[str, Any], embedding: Mapping[str, Any], roles: Roles, ids: torch.Tensor
) -> bool:
    """Whether the embeddings' scale is rounded to bf16 before they are multiplied in bf16."""
    scale = embedding["scale"]
    if scale is None:
        return False
    model = build(cls, dict(fields)).to(torch.bfloat16)
    recording, _ = record(model, input_ids=ids)
    scaled = recording[roles.layer(0)].x if embedding["scales_inputs"] else recording[roles.embedding].output
    rows = model.get_input_embeddings().weight[ids]
    factor = torch.tensor(_scales(model.config)[scale])
    return torch.equal(rows * factor.to(torch.bfloat16), scaled) and not torch.equal(rows * factor.item(), scaled)


def pads(cls: type[PreTrainedModel], fields: Mapping[str, Any]) -> bool:
    """Whether the embedding's row of ``config.pad_token_id`` gets no gradient."""
    token = 2
    try:
        model = build(cls, {**fields, "pad_token_id": token})
    except Exception:  # the class takes no such field
        return False
    return getattr(model.get_input_embeddings(), "padding_idx", None) == token


@torch.no_grad()
def initial_std(cls: type[PreTrainedModel], fields: Mapping[str, Any]) -> str | None:
    """Expression of the deviation that fresh embeddings have, None where it is that of all weights."""
    torch.manual_seed(0)
    config = cls.config_class(**fields)
    named = {name: value for name, value in vars(config).items() if "init" in name and isinstance(value, float)}
    common = named.pop("initializer_range", None)
    apart = {name: value for name, value in named.items() if "emb" in name and value and value != common}
    if not apart:
        return None
    weight = cls(config).get_input_embeddings().weight
    std = weight[weight.abs().sum(-1) > 0].std().item()
    return next((f"config.{name}" for name, value in apart.items() if abs(std / value - 1) < _SAMPLED), None)


_SAMPLED = 0.1
"""How far the deviation of so few numbers may be from that of which they are a sample."""


def _module(reference: str, native: str) -> dict[str, Any]:
    return {"reference": reference, "native": [native], "transposed": False, "groups": "1"}


def _scales(config: PretrainedConfig) -> dict[str | None, float]:
    out: dict[str | None, float] = {None: 1.0}
    out |= {
        f"config.{name}": float(value)
        for name, value in vars(config).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
        if "emb" in name and any(word in name for word in ("scale", "multiplier")) and value != 1.0
    }
    out["config.hidden_size**0.5"] = config.hidden_size**0.5
    return out


def _positions(
    model: PreTrainedModel, roles: Roles, recording: Recording, length: int
) -> list[tuple[dict[str, Any] | None, torch.Tensor, str | None]]:
    """Candidates: none, each table of learned positions, sines and cosines with each offset."""
    config = model.config
    out: list[tuple[dict[str, Any] | None, torch.Tensor, str | None]] = [(None, torch.zeros(()), None)]
    key = spelling(config, "max_position_embeddings")
    most = size(config, "max_position_embeddings")
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and path != roles.embedding and not path.startswith(f"{roles.layers}."):
            if key is None or most is None or module.weight.shape[0] < most:
                continue
            offset = module.weight.shape[0] - most
            vectors = module.weight[offset : offset + length]
            if vectors.shape[0] == length:
                found = {"kind": "learned", "offset": offset, "size": f"config.{key}", "reaches_base": False}
                out.append((found, vectors, path))
    for offset, full in itertools.product(range(4), (False, True)):
        found = {"kind": "sinusoidal", "offset": offset, "size": f"config.{key}", "reaches_base": full}
        out.append((found, sinusoids(torch.arange(length) + offset, config.hidden_size, full), None))
    return out


def sinusoids(positions: torch.Tensor, dim: int, reaches_base: bool) -> torch.Tensor:
    """Sines in the first half, cosines in the second (arXiv:1706.03762, section 3.5): ``[S, dim]``.

    Args:
        positions: ``[S]``.
        dim: width.
        reaches_base: whether the longest wavelength is that of the base itself, so that the exponents run from 0 to 1
            (fairseq); in the paper they end one step before.
    """
    half = dim // 2
    steps = half - 1 if reaches_base else half
    angles = positions.float()[:, None] * torch.exp(-torch.arange(half).float() * (math.log(10000) / steps))
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def explain_head(model: PreTrainedModel, logits: torch.Tensor, roles: Roles, recording: Recording) -> dict[str, Any]:
    """Find what makes the logits of the last hidden states: the head, a factor before or after it, a cap.

    Raises:
        Unexplained: no known factor and cap do.
    """
    head = recording[roles.head]
    last = roles.final_norm or roles.layer(len(model.get_submodule(roles.layers)) - 1)
    states = recording.last(last).output
    bias = getattr(model.get_output_embeddings(), "bias", None) is not None
    scales = _head_scales(model.config)
    transform = _transform(model, roles, recording, states, head.x)
    if transform:
        states = head.x
    before = [scale for scale, factor in scales.items() if close(states * factor, head.x) is not None]
    if not before or (bias and before[0]):
        tried = tuple(f"times {scale or 1}" for scale in scales)
        raise Unexplained("head", "the head does not take the last hidden states", tried)
    caps = {name: value for name, value in _numbers(model.config).items() if is_cap(name)}
    nearest: list[tuple[float, str]] = []
    for scale, factor in ({before[0]: 1.0} if before[0] else scales).items():
        scaled = head.output * factor
        for key, cap in ({None: 0.0} | caps).items():
            capped = cap * torch.tanh(scaled / cap) if key else scaled
            difference = close(capped, logits)
            if difference is not None:
                found = {"bias": bias, "scale": scale, "softcap_key": key, "difference": difference}
                return found | {"transform": transform}
            if capped.shape == logits.shape:
                miss = (capped - logits).abs().max().item()
                nearest.append((miss, f"times {scale or 1}{f', cap {key}' if key else ''}: {miss:.2g}"))
    raise Unexplained("head", "the logits are not the head's output", tuple(text for _, text in sorted(nearest)[:3]))


def _transform(
    model: PreTrainedModel, roles: Roles, recording: Recording, states: torch.Tensor, taken: torch.Tensor
) -> dict[str, Any] | None:
    """What stands between the last hidden states and the head: ``norm(act(W x + b))`` (BERT), or None.

    Args:
        model: the tiny reference.
        roles: its parts.
        recording: of its run.
        states: the last hidden states.
        taken: what the head takes.
    """
    calls = {path: call for path, call in recording.items() if path != roles.head and not path.startswith(roles.layers)}
    dense = [
        path
        for path, call in calls.items()
        if isinstance(model.get_submodule(path), nn.Linear)
        and call.x.shape == states.shape
        and torch.equal(call.x, states)
    ]
    norms = [
        path
        for path, call in calls.items()
        if call.output.shape == taken.shape and torch.equal(call.output, taken) and path != roles.final_norm
        if is_norm(model.get_submodule(path), call.x, call.output)
    ]
    if len(dense) != 1 or len(norms) != 1:
        return None
    projected, normed = calls[dense[0]].output, calls[norms[0]].x
    owner = model.get_submodule(dense[0].rpartition(".")[0])
    for name, key, act in activations(model.config, owner):
        if close(act(projected), normed) is not None:
            module = model.get_submodule(norms[0])
            norm = explain_norms({norms[0]: module}, normed.shape[-1], model.config)
            return {
                "bias": getattr(model.get_submodule(dense[0]), "bias", None) is not None,
                "activation": name,
                "activation_key": key,
                "norm": norm,
                "modules": [_module(dense[0], "head_dense"), _module(norms[0], "head_norm")],
            }
    return None


def settle_activation(
    cls: type[PreTrainedModel], fields: Mapping[str, Any], found: dict[str, Any], roles: Roles, input_ids: torch.Tensor
) -> dict[str, Any]:
    """The field that names the activation before the head, of several that name the same one; None where none does.

    Args:
        cls: the reference's class.
        fields: constructor arguments of the tiny config.
        found: of :func:`explain_head`.
        roles: the model's parts.
        input_ids: ``[1, S]``.
    """
    transform = found["transform"]
    if transform is None:
        return found
    other = "relu" if transform["activation"] != "relu" else "silu"
    for key in (name for name, value in fields.items() if value == transform["activation"]):
        try:
            model = build(cls, {**fields, key: other})
            recording, logits = record(model, input_ids=input_ids)
            changed = explain_head(model, logits, roles, recording)["transform"]
        except Exception:  # the class takes no other, or another part of it does not
            continue
        if changed and changed["activation"] == other:
            return {**found, "transform": {**transform, "activation_key": key}}
    return {**found, "transform": {**transform, "activation_key": None}}


def is_cap(name: str) -> bool:
    """Whether a config field may hold a cap ``cap * tanh(logits / cap)``."""
    return "softcap" in name.replace("_", "")


def _numbers(config: PretrainedConfig) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in vars(config).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value
    }


def _head_scales(config: PretrainedConfig) -> dict[str | None, float]:
    """Python expression to factor on the logits, or on the hidden states that the head takes (muP: a base width)."""
    scales: dict[str | None, float] = {None: 1.0}
    for name, value in _numbers(config).items():
        if (("logit" in name or "head" in name) and "scal" in name) or name.endswith("lm_head_multiplier"):
            scales |= {f"config.{name}": value, f"1 / config.{name}": 1 / value}
        elif "base" in name and ("dim" in name or "width" in name):
            scales[f"config.{name} / config.hidden_size"] = value / config.hidden_size
    return scales
