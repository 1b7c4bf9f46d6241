"""Hypotheses on multi-head latent attention (arXiv:2405.04434): keys and values from a narrow latent, one rotated key.

``c, k_rope = split(W_a x)``; ``k_nope, v = split(W_b norm(c))`` for each head; a head's key is
``[k_nope, rotate(k_rope)]`` with the one ``k_rope`` of all heads, its query ``[q_nope, rotate(q_rope)]`` from ``W x``
or from a latent of its own, ``W_b norm(W_a x)``. Which module is which is told by what it takes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from onboard.reference.attention.evidence import NormCall, has_bias, inner_norms
from onboard.reference.attention.expressions import fields, num_heads
from onboard.reference.attention.qk_norms import NormFit, fit_norm
from onboard.reference.attention.rotations import (
    ROTATIONS,
    STATIC_SCALINGS,
    Frequencies,
    Rotation,
    frequencies,
    handed_table,
    is_nested,
    table_difference,
)
from onboard.reference.attention.scores import mask, mix, products
from onboard.reference.build import build
from onboard.reference.meanings import read
from onboard.reference.norms import settle_eps
from onboard.reference.record import Call, Recording, close, record
from onboard.reference.roles import LINEAR, Roles, Unexplained


@dataclass(frozen=True)
class Latents:
    """The modules of one latent attention, by path within it.

    Args:
        q: from what the attention takes to queries, or to their latent.
        q_up: from the queries' normalised latent to queries; None where they have no latent.
        q_norm: the norm of their latent.
        kv: to the latent of keys and values and the rotated key.
        kv_norm: the norm of the latent.
        kv_up: from the normalised latent to keys without positions, and values.
        out: the output projection.
    """

    q: str
    q_up: str | None
    q_norm: NormCall | None
    kv: str
    kv_norm: NormCall
    kv_up: str
    out: str

    @property
    def linears(self) -> tuple[str, ...]:
        """Every projection."""
        return tuple(name for name in (self.q, self.q_up, self.kv, self.kv_up, self.out) if name)


@dataclass(frozen=True)
class Sizes:
    """Numbers of a latent attention: heads, and the parts of a head that do not rotate, that do, and of its value."""

    heads: int
    nope: int
    rope: int
    value: int
    rank: int


@dataclass(frozen=True)
class LatentFit:
    """What reproduced one layer's latent attention.

    Args:
        sizes: its numbers.
        rotary_first: whether the part that rotates stands before the other one in queries.
        value_first: whether values stand before keys in the projection out of the latent.
        latent_first: whether the latent stands before the rotated key.
        mscale: whether the scale has the square of YaRN's factor by ``mscale_all_dim``.
    """

    modules: Latents
    sizes: Sizes
    rotary_first: bool
    value_first: bool
    latent_first: bool
    rotation: Rotation
    angles: Frequencies
    mscale: bool
    difference: float

    @property
    def shared(self) -> str:
        """What must be the same in all layers, as text."""
        order = (self.rotary_first, self.value_first, self.latent_first)
        return f"{self.modules.linears} {self.sizes} {order} {self.rotation} {self.mscale}"


def find_latents(attention: nn.Module, path: str, recording: Recording) -> Latents | None:
    """The modules of a latent attention; None where this is none."""
    call = recording[path]
    linears = {
        name: recording[f"{path}.{name}"]
        for name, module in attention.named_modules()
        if isinstance(module, LINEAR) and f"{path}.{name}" in recording
    }
    ins = [name for name, one in linears.items() if torch.equal(one.x, call.x)]
    outs = [name for name, one in linears.items() if name not in ins and close(one.output, call.output) is not None]
    norms = inner_norms(attention, path, recording)
    ups = {
        name: norm
        for name, one in linears.items()
        for norm in norms
        if name not in ins and name not in outs and _same(norm.y, one.x)
    }
    if len(ins) != 2 or len(outs) != 1 or len(ups) != len(norms) or len(linears) != 3 + len(ups):
        return None
    found: dict[str, str] = {}  # the projection out of a latent to the one into it
    for up, norm in ups.items():
        for name in ins:
            wide = linears[name].output
            width = norm.x.shape[-1]
            if _same(norm.x, wide[..., :width]) or _same(norm.x, wide[..., -width:]):
                found[up] = name
    kv_ups = [up for up, name in found.items() if linears[name].output.shape[-1] > ups[up].x.shape[-1]]
    if len(found) != len(ups) or len(kv_ups) != 1:
        return None
    kv_up = kv_ups[0]
    q_up = next((up for up in found if up != kv_up), None)
    q = next(name for name in ins if name != found[kv_up])
    return Latents(q, q_up, ups[q_up] if q_up else None, found[kv_up], ups[kv_up], kv_up, outs[0])


NATIVE = "model.layers.{layer}.self_attn"
_NAMES = {"q": "q_proj", "kv": "kv_a_proj_with_mqa", "kv_up": "kv_b_proj", "o": "o_proj"}


def explain_latent_attention(
    cls: type[PreTrainedModel],
    fields: Mapping[str, Any],
    model: PreTrainedModel,
    roles: Roles,
    recording: Recording,
    input_ids: torch.Tensor,
) -> dict[str, Any]:
    """The same as :func:`.explain.explain_attentions`, of a latent attention, with what is special under ``latent``.

    Raises:
        Unexplained: a layer that no setting reproduces, or several do.
    """
    found = explain_latents(model, roles, recording)
    served, mscale = _served(cls, fields, found, roles, input_ids)
    names, biases = found["names"], found["biases"]
    norms = {}
    for name, call in zip(("kv_norm", "q_norm"), found["norm_names"], strict=False):
        paths = [f"{roles.layer(index)}.{roles.attention}.{call}" for index in roles.attention_layers]
        norms[name] = settle_eps(cls, dict(fields), found[name], paths, 0)
    bias = {part: biases[name] for part, name in names.items() if name}
    parameters = read(model.config, "rope_parameters")
    prefix = f"{roles.layers}.{{layer}}.{roles.attention}"
    native = {**_NAMES, "q_up": "q_b_proj"} | ({"q": "q_a_proj"} if names["q_up"] else {})
    attention = model.get_submodule(f"{roles.layer(0)}.{roles.attention}")
    rows = {names[part]: name for part, name in native.items() if names.get(part)}
    rows |= dict(zip(found["norm_names"], ("kv_a_layernorm", "q_a_layernorm"), strict=False))
    return {
        "attention": {
            "num_heads": found["num_heads"],
            "num_key_value_heads": found["num_heads"],
            "head_dim": f"{found['qk_nope_head_dim']} + {found['qk_rope_head_dim']}",
            "scale": "self.head_dim**-0.5",
            "biases": {"q": bias["q"], "k": bias["kv"], "v": bias["kv_up"], "o": bias["o"]},
            **dict.fromkeys(
                ("gate", "qk_norm", "output_norm", "o_bias_layers", "rope_layers", "softcap", "alibi", "query_scale")
            ),
            "differential": False,
            "sinks": False,
            "rotary": found["rotary"],
            **dict.fromkeys(("window_key", "window_layers", "windowed_fields")),
            "implementation": "eager",
            "latent": {
                **{name: found[key] for name, key in _FIELDS.items()},
                "q_norm": norms.get("q_norm"),
                "kv_norm": norms["kv_norm"],
                "q_up_bias": bias.get("q_up", False),
                **{name: found[name] for name in ("rotary_first", "value_first", "latent_first")},
                "mscale": mscale,
            },
            "difference": found["difference"],
        },
        "rope": {
            "types": [found["rope_type"]],
            "per_layer_type": is_nested(parameters) if parameters else False,
            "partial": False,
            "dim": None,
            "theta": None,
            "reversed": found["reversed"],
            "difference": found["difference"],
            "served": served,
        },
        "modules": [
            {
                "reference": f"{prefix}.{name}",
                "native": [f"{NATIVE}.{target}"],
                "transposed": isinstance(attention.get_submodule(name), Conv1D),
                "groups": "1",
            }
            for name, target in rows.items()
        ],
    }


_FIELDS = {
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}


def _served(
    cls: type[PreTrainedModel],
    fields: Mapping[str, Any],
    found: Mapping[str, Any],
    roles: Roles,
    input_ids: torch.Tensor,
) -> tuple[dict[str, Any], bool]:
    """Other static scalings that the reference takes, and whether YaRN's factor is on the softmax scale."""
    rope = fields.get("rope_parameters") or {}
    kept = {name: rope[name] for name in ("rope_theta",) if name in rope}
    like = {name: value for name, value in found.items() if name not in ("rope_type", "mscale", "difference")}
    served: dict[str, Any] = {}
    mscale = bool(found["mscale"])
    for rope_type, extra in STATIC_SCALINGS.items():
        if rope_type == found["rope_type"]:
            continue
        for more in ({"mscale_all_dim": 0.8}, {}) if rope_type == "yarn" else ({},):
            parameters = {"rope_type": rope_type, **extra, **kept, **more}
            try:
                model = build(cls, {**fields, "rope_parameters": parameters})
                recording, _ = record(model, input_ids=input_ids)
                other = explain_latents(model, roles, recording)
            except Exception:
                continue
            if model.config.rope_parameters == parameters and all(other[name] == like[name] for name in like):
                served[rope_type] = parameters
                mscale = mscale or bool(other["mscale"])
                break
    return served, mscale


@torch.no_grad()
def explain_latents(model: PreTrainedModel, roles: Roles, recording: Recording) -> dict[str, Any]:
    """Explain the latent attention of every layer.

    Returns:
        Sizes, orders, norms, biases, ``rotary``, ``reversed``, ``mscale`` and the largest ``difference``.

    Raises:
        Unexplained: a layer that no setting reproduces, or several do.
    """
    config = model.config
    found: list[LatentFit] = []
    for index in range(len(model.get_submodule(roles.layers))):
        path = f"{roles.layer(index)}.{roles.attention}"
        attention = model.get_submodule(path)
        latents = find_latents(attention, path, recording)
        fits = list(_fits(latents, path, recording, config, index)) if latents else []
        if not fits:
            raise Unexplained("attention", f"no latent attention reproduces {path}")
        if len(fits) > 1:
            raise Unexplained("attention", f"{len(fits)} latent attentions fit {path}")
        found += fits
    if len({fit.shared for fit in found}) > 1:
        raise Unexplained("attention", "layers differ in their latent attentions")
    return _described(found, model, roles)


def _described(found: list[LatentFit], model: PreTrainedModel, roles: Roles) -> dict[str, Any]:
    first, config = found[0], model.config
    attention = model.get_submodule(f"{roles.layer(0)}.{roles.attention}")
    modules, sizes = first.modules, first.sizes
    norms = {
        name: _formula(call, config)
        for name, call in (("q_norm", modules.q_norm), ("kv_norm", modules.kv_norm))
        if call is not None
    }
    return {
        "num_heads": next(one.text for one in num_heads(config) if one.value == sizes.heads),
        "qk_nope_head_dim": _field(config, sizes.nope, "nope"),
        "qk_rope_head_dim": _field(config, sizes.rope, "rope"),
        "v_head_dim": _field(config, sizes.value, "v"),
        "kv_lora_rank": _field(config, sizes.rank, "kv", "rank"),
        "q_lora_rank": _field(config, modules.q_norm.x.shape[-1], "q", "rank") if modules.q_norm else None,
        "names": {"q": modules.q, "q_up": modules.q_up, "kv": modules.kv, "kv_up": modules.kv_up, "o": modules.out},
        "biases": {name: has_bias(attention.get_submodule(name)) for name in modules.linears},
        **norms,
        "norm_names": [call.name for call in (modules.kv_norm, modules.q_norm) if call is not None],
        "rotary_first": first.rotary_first,
        "value_first": first.value_first,
        "latent_first": first.latent_first,
        "rotary": first.rotation.style,
        "reversed": first.rotation.reversed,
        "rope_type": first.angles.rope_type,
        "mscale": first.mscale,
        "difference": max(fit.difference for fit in found),
    }


def _fits(
    latents: Latents, path: str, recording: Recording, config: PretrainedConfig, index: int
) -> Iterator[LatentFit]:
    """The settings that reproduce one layer."""
    calls = {name: recording[f"{path}.{name}"] for name in latents.linears}
    mixed = calls[latents.out].x.flatten(2) if calls[latents.out].x.ndim > 3 else calls[latents.out].x
    length = mixed.shape[1]
    table = handed_table(recording[path])
    for heads in dict.fromkeys(int(one.value) for one in num_heads(config)):
        sizes = _sizes(latents, calls, heads)
        if sizes is None:
            continue
        angles = [
            one
            for one in frequencies(config, sizes.rope, length, _layer_type(config, index))
            if table is None or table_difference(one, table) is not None
        ]
        orders = itertools.product((False, True), repeat=3)
        for (rotary_first, value_first, latent_first), rotation, one in itertools.product(orders, ROTATIONS, angles):
            q, k, v = _states(latents, calls, sizes, (rotary_first, value_first, latent_first))
            if close(v[:, 0].flatten(1), mixed[:, 0]) is None:
                continue
            if not _same(latents.kv_norm.x, _cut(calls[latents.kv].output, sizes.rank, latent_first)[0]):
                continue
            turned = [
                torch.cat((state[..., : sizes.nope], rotation(state[..., sizes.nope :], one.table(length))), dim=-1)
                for state in (q, k)
            ]
            raw = products(*turned) * (sizes.nope + sizes.rope) ** -0.5
            for mscale, factor in _mscales(config).items():
                difference = close(mix(raw * factor, v, mask(length, None), None), mixed)
                if difference is not None:
                    order = (rotary_first, value_first, latent_first)
                    yield LatentFit(latents, sizes, *order, rotation, one, mscale, difference)


def _sizes(latents: Latents, calls: Mapping[str, Call], heads: int) -> Sizes | None:
    """Numbers that the widths give, None where they are no multiples of the heads."""
    widths = (calls[latents.q_up or latents.q].output, calls[latents.kv_up].output)
    queries, up = (one.shape[-1] for one in widths)
    value = calls[latents.out].x.flatten(2).shape[-1]
    rank = latents.kv_norm.x.shape[-1]
    rope = calls[latents.kv].output.shape[-1] - rank
    if queries % heads or up % heads or value % heads:
        return None
    sizes = Sizes(heads, queries // heads - rope, rope, value // heads, rank)
    return sizes if up // heads == sizes.nope + sizes.value and sizes.nope > 0 else None


def _states(
    latents: Latents, calls: Mapping[str, Call], sizes: Sizes, order: tuple[bool, bool, bool]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values ``[B, S, N, D]``, the part that rotates last."""
    rotary_first, value_first, latent_first = order
    batch, length = calls[latents.q].x.shape[:2]
    shape = (batch, length, sizes.heads, -1)
    q = calls[latents.q_up or latents.q].output.reshape(shape)
    if rotary_first:
        q = torch.cat((q[..., sizes.rope :], q[..., : sizes.rope]), dim=-1)
    up = calls[latents.kv_up].output.reshape(shape)
    first, second = up.split([sizes.value, sizes.nope] if value_first else [sizes.nope, sizes.value], dim=-1)
    v, k_nope = (first, second) if value_first else (second, first)
    k_rope = _cut(calls[latents.kv].output, sizes.rank, latent_first)[1]
    k_rope = k_rope.reshape(batch, length, 1, sizes.rope).expand(-1, -1, sizes.heads, -1)
    return q, torch.cat((k_nope, k_rope), dim=-1), v


def _cut(x: torch.Tensor, rank: int, latent_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The latent, and the key that rotates."""
    if latent_first:
        return x[..., :rank], x[..., rank:]
    return x[..., -rank:], x[..., :-rank]


def _mscales(config: PretrainedConfig) -> dict[bool, float]:
    """Factors on the scale: none, and the square of YaRN's by ``mscale_all_dim`` where the config has one."""
    rope = read(config, "rope_parameters")
    factors = {False: 1.0}
    if isinstance(rope, Mapping) and rope.get("mscale_all_dim") and (rope.get("factor") or 0) > 1:
        factors[True] = (0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1.0) ** 2
    return factors


def _layer_type(config: PretrainedConfig, index: int) -> str | None:
    types = read(config, "layer_types")
    return types[index] if isinstance(types, list) and len(types) > index else None


def _formula(call: NormCall, config: PretrainedConfig) -> dict[str, Any]:
    fit: NormFit | None = fit_norm(call.modules[0], call.x.shape, config)
    if fit is None:
        raise Unexplained("attention", f"no candidate reproduces the norm {call.name} of a latent")
    return fit.formula()


def _field(config: PretrainedConfig, value: int, *words: str) -> str:
    """The field of a size whose name has these words."""
    for text, name, found in fields(config):
        if type(found) is int and found == value and set(words) <= set(name.split("_")):
            return text
    raise Unexplained("attention", f"no field of the config gives {' '.join(words)} {value} of a latent attention")


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.numel() == b.numel() and bool(torch.equal(a.reshape(-1), b.reshape(-1)))
