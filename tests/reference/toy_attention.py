"""An attention with one property each, written apart from the formulas that explain it: one head at a time."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from onboard.reference.attention.fit import Fit, fit_layers
from onboard.reference.build import randomise
from onboard.reference.record import record
from onboard.reference.roles import Roles
from torch import nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from .toys import HEAD_DIM, HIDDEN, SEQUENCE, config

HEADS, KV_HEADS = 4, 2
Q = HEADS * HEAD_DIM


def turn(x: torch.Tensor, angles: torch.Tensor, style: str) -> torch.Tensor:
    """Rotation pair by pair, in complex numbers: ``[S, heads, D]`` by angles ``[S, pairs]``."""
    pairs, turns = angles.shape[-1], torch.polar(torch.ones_like(angles), angles)[:, None]
    if style == "half":
        turned = torch.complex(x[..., :pairs], x[..., pairs : 2 * pairs]) * turns
        return torch.cat((turned.real, turned.imag, x[..., 2 * pairs :]), -1)
    turned = torch.complex(x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]) * turns
    return torch.cat((torch.stack((turned.real, turned.imag), -1).flatten(-2), x[..., 2 * pairs :]), -1)


class Norm(nn.Module):
    """Root mean square with a weight of any shape, or none."""

    def __init__(self, *shape: int, centred: bool = False, offset: float = 0.0, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape)) if shape else None
        self.centred, self.offset, self.eps = centred, offset, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        x = x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return x if self.weight is None else x * (self.offset + self.weight)


class Toy(nn.Module):
    """Attention with what ``has`` says; see the defaults."""

    def __init__(self, layer: int = 0, **has: Any) -> None:
        super().__init__()
        self.layer = layer
        self.has = {
            "names": ("q_proj", "k_proj", "v_proj"),
            "biases": (True, True, True),
            "fused": None,  # from [S, width] to q, k and v
            "transposed": False,
            "norms": None,  # of q and k
            "norm": None,  # "width", "head", "after rotation"
            "norm_names": ("q_norm", "k_norm"),
            "output_norm": None,
            "style": "half",
            "angles": None,  # [S, pairs]
            "scale": HEAD_DIM**-0.5,
            "visible": lambda i, j: j <= i,
            "kv_heads": KV_HEADS,
            "bias": None,  # from head, i and j
            "sinks": False,
            "gate": None,  # width and function of a projection that the outputs are multiplied with
            "extra": None,
        } | has
        kv = self.has["kv_heads"] * HEAD_DIM
        linear = (lambda a, b, bias: Conv1D(b, a)) if self.has["transposed"] else nn.Linear
        if self.has["fused"]:
            self.wqkv = linear(HIDDEN, Q + 2 * kv, True)
        else:
            for name, width, bias in zip(self.has["names"], (Q, kv, kv), self.has["biases"], strict=True):
                setattr(self, name, linear(HIDDEN, width, bias))
        for name, norm in zip(self.has["norm_names"], self.has["norms"] or (), strict=False):
            setattr(self, name, norm)
        if self.has["output_norm"]:
            self.sub_norm = self.has["output_norm"]
        if self.has["gate"]:
            self.side = nn.Linear(HIDDEN, self.has["gate"][0])
        if self.has["sinks"]:
            self.sinks = nn.Parameter(torch.zeros(HEADS))
        self.out = linear(Q, HIDDEN, True)

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any = None, attention_mask: Any = None) -> Any:
        has, length = self.has, hidden_states.shape[1]
        if has["fused"]:
            q, k, v = has["fused"](self.wqkv(hidden_states)[0], has["kv_heads"] * HEAD_DIM)
        else:
            q, k, v = (getattr(self, name)(hidden_states)[0] for name in has["names"])
        norms = [getattr(self, name) for name in has["norm_names"]] if has["norms"] else []
        if has["norm"] == "width":
            q, k = norms[0](q), norms[1](k)
        q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)) for part in (q, k, v))
        if has["norm"] == "head":
            q, k = norms[0](q), norms[1](k)
        if has["norm"] == "each head":
            q, k = (norm(part.transpose(0, 1)[None])[0].transpose(0, 1) for norm, part in zip(norms, (q, k)))  # noqa: B905
        if has["style"] and has["angles"] is not None:
            q = q if has["extra"] == "only keys rotate" else turn(q, has["angles"], has["style"])
            k = turn(k, has["angles"], has["style"])
        if has["norm"] == "after rotation":
            q, k = norms[0](q), norms[1](k)
        if has["extra"] == "growing queries":
            q = q * torch.tensor([1 + 0.4 * math.log(1 + i // 8) for i in range(length)])[:, None, None]
        mixed = torch.cat([self.attend(q, k, v, head, length) for head in range(HEADS)], -1)[None]
        if has["gate"]:
            width, act = has["gate"]
            mixed = mixed * act(self.side(hidden_states)).repeat_interleave(mixed.shape[-1] // width, dim=-1)
        if has["extra"] == "gate":
            mixed = mixed * torch.sigmoid(mixed)
        out = self.out(self.sub_norm(mixed) if has["output_norm"] else mixed)
        if has["extra"] == "residual":
            out = out + hidden_states
        return (2 * out if has["extra"] == "scaled output" else out), None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, head: int, length: int) -> torch.Tensor:
        has, kv_heads = self.has, self.has["kv_heads"]
        group = head % kv_heads if has["extra"] == "heads in turn" else head // (HEADS // kv_heads)
        scale = has["scale"](self.layer) if callable(has["scale"]) else has["scale"]
        out = []
        for i in range(length):
            scores = (k[:, group] @ q[i, head]) * scale
            if has["extra"] == "softcap":
                scores = 5 * torch.tanh(scores / 5)
            if has["bias"]:
                scores = scores + torch.tensor([float(has["bias"](head, i, j)) for j in range(length)])
            seen = torch.tensor([bool(has["visible"](i, j)) for j in range(length)])
            exponents = torch.where(seen, scores - scores[seen].max(), -torch.inf).exp()
            total = exponents.sum()
            if has["sinks"]:
                total = total + (self.sinks[head] - scores[seen].max()).exp()
            out.append(exponents @ v[:, group] / total)
        return torch.stack(out)


class Layer(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, hidden_states: torch.Tensor, table: Any) -> torch.Tensor:
        out, _ = self.mixer(hidden_states, position_embeddings=table)
        return hidden_states + 0.1 * out


class Decoder(nn.Module):
    """A decoder of toys."""

    def __init__(self, toys: list[nn.Module], own: PretrainedConfig) -> None:
        super().__init__()
        self.config = own
        self.layers = nn.ModuleList(Layer(toy) for toy in toys)

    def forward(self, x: torch.Tensor, table: Any, use_cache: bool = False) -> SimpleNamespace:
        for layer in self.layers:
            x = layer(x, table)
        return SimpleNamespace(logits=x)


ROLES = Roles("", "layers", None, "", "mixer", None, (), (0,))


def angles(pairs: int = HEAD_DIM // 2, length: int = SEQUENCE, theta: float = 100.0) -> torch.Tensor:
    """``[S, pairs]``."""
    return torch.tensor([[i * theta ** (-pair / pairs) for pair in range(pairs)] for i in range(length)])


def explain(
    *toys: nn.Module, hand: bool = True, length: int = SEQUENCE, rotary: int = HEAD_DIM, **fields: Any
) -> list[Fit]:
    """What explains a decoder of these attentions; the config says their rotation, as published ones do.

    Args:
        toys: an attention for each layer.
        hand: whether the layers get tables of cosines and sines.
        length: tokens.
        rotary: dimensions that rotate.
        fields: of the config.
    """
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": rotary / HEAD_DIM}
    own = config(**{"rope_parameters": rope, "num_hidden_layers": len(toys)} | fields)
    turns = angles(rotary // 2, length)
    spread = torch.cat((turns, turns), -1)[None]
    model = Decoder(list(toys), own).eval()
    randomise(model)
    x = torch.randn(1, length, HIDDEN, generator=torch.Generator().manual_seed(3))
    recording, _ = record(model, x=x, table=(spread.cos(), spread.sin()) if hand else None)
    return fit_layers(model, ROLES, recording)
