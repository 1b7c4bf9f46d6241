"""What the probe says of attention and rotation: the setting that fits, in expressions of the config."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from onboard.reference.attention import expressions
from onboard.reference.attention.expressions import Expression
from onboard.reference.attention.fit import Fit, fit_layers
from onboard.reference.attention.layers import expression_of_layers
from onboard.reference.attention.qk_norms import fit_norm_call
from onboard.reference.attention.rotations import STATIC_SCALINGS, is_nested, table_difference
from onboard.reference.build import build
from onboard.reference.meanings import read
from onboard.reference.record import Recording, record
from onboard.reference.roles import Roles, Unexplained
from onboard.reference.tiny import WINDOW

NATIVE = "model.layers.{layer}.self_attn"


def explain_attentions(
    cls: type[PreTrainedModel],
    fields: dict[str, Any],
    model: PreTrainedModel,
    roles: Roles,
    recording: Recording,
    input_ids: torch.Tensor,
) -> dict[str, Any]:
    """Explain the attention of every layer.

    Args:
        cls: the reference's class.
        fields: constructor arguments of the tiny config.
        model: the tiny reference.
        roles: its parts.
        recording: of its run.
        input_ids: what it ran on, ``[1, S]``, longer than the tiny window.

    Returns:
        ``attention`` and ``rope`` in the terms of :mod:`onboard.spec.arch`, with the largest ``difference`` each;
        and ``modules``: which module of the reference became which native one.

    Raises:
        Unexplained: an attention that no hypothesis reproduces, or several do.
    """
    fits = fit_layers(model, roles, recording)
    config = model.config
    windowed_fields = _windowed(fields)
    windowed = fits
    if windowed_fields is not None:
        other = build(cls, windowed_fields)
        windowed = fit_layers(other, roles, record(other, input_ids=input_ids)[0])
    first = fits[0].setting
    heads, evidence = first.layout.heads, fits[0].evidence
    rotating = [fit for fit in fits if fit.setting.rotation]
    if len({str(fit.setting.rotation) for fit in rotating}) > 1:
        raise Unexplained("rope", "layers rotate in different ways")
    rotation = rotating[0].setting.rotation if rotating else None
    bias = {part: evidence.biases[name] for name, parts in first.layout.parts for part in parts}
    output_norm = fit_norm_call(evidence, evidence.output_norm, config).formula() if evidence.output_norm else None
    attention = {
        "num_heads": _named(expressions.num_heads(config), heads.queries),
        "num_key_value_heads": _named(expressions.num_key_value_heads(config), heads.keys),
        "head_dim": _named(expressions.head_dim(config), heads.dim),
        "biases": {**{part: bias[part] for part in ("q", "k", "v")}, "o": evidence.biases[""]},
        "qk_norm": _qk_norm(fits[0]),
        "output_norm": output_norm,
        "rotary": rotation.style if rotation else None,
        "rope_layers": _rope_layers(fits, config),
        "scale": first.scale[0].text,
        "softcap": first.soft_cap[0].text if first.soft_cap else None,
        "sinks": evidence.sinks is not None,
        "alibi": {"bias_max": first.alibi.bias_max[0].text, "scaled": first.alibi.scaled} if first.alibi else None,
        "query_scale": first.query_scale.text if first.query_scale else None,
        **_window(windowed, other.config if windowed_fields is not None else config),
        "windowed_fields": windowed_fields,
        "difference": max(fit.difference for fit in fits),
    }
    rope = _rope(rotating, config)
    if rope is not None:
        rope["served"] = _served(cls, fields, roles, input_ids)
    return {"attention": attention, "rope": rope, "modules": _modules(fits[0], roles, config)}


def _named(candidates: list[Expression], value: float) -> str:
    return next(one.text for one in candidates if one.value == value)


def _qk_norm(fit: Fit) -> dict[str, Any] | None:
    norm = fit.setting.qk_norm
    if norm is None:
        return None
    if norm.q.formula() != norm.k.formula():
        raise Unexplained("attention", "queries and keys are normalised by different formulas")
    return {"over": norm.over, "after_rope": norm.after_rope, "norm": norm.q.formula()}


def _rope_layers(fits: list[Fit], config: PretrainedConfig) -> str | None:
    flags = [fit.setting.rotation is not None for fit in fits]
    if all(flags) or not any(flags):
        return None
    found = expression_of_layers(flags, config)
    if found is None:
        raise Unexplained("rope", f"layers that rotate: {flags}, and no config field says so")
    return found


def _rope(rotating: list[Fit], config: PretrainedConfig) -> dict[str, Any] | None:
    angles = [(fit, fit.setting.angles) for fit in rotating if fit.setting.angles]
    if not angles or not rotating[0].setting.rotation:
        return None
    tables = [
        table_difference(one, fit.evidence.table) or 0.0 if fit.evidence.table else fit.difference
        for fit, one in angles
    ]
    first = angles[0][1]
    parameters = read(config, "rope_parameters")
    return {
        "types": sorted({one.rope_type for _, one in angles}),
        "per_layer_type": bool(parameters) and is_nested(parameters),
        "partial": any(one.partial for _, one in angles),
        "dim": first.dim[0].text if first.dim else None,
        "theta": first.theta,
        "reversed": rotating[0].setting.rotation.reversed,
        "difference": max(tables),
    }


def _windowed(fields: dict[str, Any]) -> dict[str, Any] | None:
    """The tiny config with a sliding window on, where the class has one; None where it is on already or unknown."""
    if "sliding_window" not in fields or fields["sliding_window"] is not None:
        return None
    on = {**fields, "sliding_window": WINDOW}
    if "use_sliding_window" in on:
        on["use_sliding_window"] = True
    if on.get("layer_types"):
        kinds = ("sliding_attention", "full_attention")
        on["layer_types"] = [kinds[index % 2] for index in range(on["num_hidden_layers"])]
    return on


def _window(fits: list[Fit], config: PretrainedConfig) -> dict[str, Any]:
    windows = [fit.setting.window for fit in fits]
    keys = {window.key for window in windows if window}
    if not keys:
        return {"window_key": None, "window_layers": None}
    if len(keys) > 1:
        raise Unexplained("attention", f"layers have windows by different fields: {', '.join(sorted(keys))}")
    flags = [window is not None for window in windows]
    found = expression_of_layers(flags, config)
    if found is None and all(flags):
        found = "True"
    if found is None:
        raise Unexplained("attention", f"layers with a window: {flags}, and no config field says so")
    return {"window_key": keys.pop(), "window_layers": found}


def _served(
    cls: type[PreTrainedModel], fields: dict[str, Any], roles: Roles, input_ids: torch.Tensor
) -> dict[str, Any]:
    """Other static scalings that the reference takes, each with the ``rope_parameters`` that were tried.

    Where layer types have parameters of their own, those of the full attention are scaled, as published models do.
    """
    rope = fields.get("rope_parameters")
    if not rope:
        return {}
    nested = isinstance(rope.get("full_attention"), dict)
    base = rope["full_attention"] if nested else rope
    kept = {name: base[name] for name in ("rope_theta", "partial_rotary_factor") if name in base}
    served = {}
    for rope_type, extra in STATIC_SCALINGS.items():
        if rope_type == base["rope_type"]:
            continue
        parameters: dict[str, Any] = {"rope_type": rope_type, **kept, **extra}
        if nested:
            parameters = {**rope, "full_attention": parameters}
        try:
            model = build(cls, {**fields, "rope_parameters": parameters})
            if model.config.rope_parameters != parameters:
                continue  # the config class makes another scaling of it
            fit_layers(model, roles, record(model, input_ids=input_ids)[0])
        except Exception:
            continue
        served[rope_type] = parameters
    return served


def _modules(fit: Fit, roles: Roles, config: PretrainedConfig) -> list[dict[str, Any]]:
    """Which module of the reference became which native one."""
    setting, evidence = fit.setting, fit.evidence
    prefix = f"{roles.layers}.{{layer}}.{roles.attention}"
    layout, groups = setting.layout, _groups(fit, config)
    rows = []
    for name, parts in layout.parts:
        native = [f"{NATIVE}.{part}_proj" for part in parts]
        module = evidence.attention.get_submodule(name)
        rows.append(_row(f"{prefix}.{name}", native, isinstance(module, Conv1D), groups if len(parts) > 1 else "1"))
    first = f"{roles.layer(0)}."
    out = f"{roles.layers}.{{layer}}.{evidence.linears.out_path.removeprefix(first)}"
    rows.append(_row(out, [f"{NATIVE}.o_proj"], evidence.transposed_out))
    if setting.qk_norm and setting.qk_norm.q.weight is not None:
        for call, native_name in zip(setting.qk_norm.calls, ("q_norm", "k_norm"), strict=True):
            rows.append(_row(f"{prefix}.{call.name}", [f"{NATIVE}.{native_name}"]))
    if evidence.output_norm and any(True for _ in evidence.output_norm.module.parameters()):
        rows.append(_row(f"{prefix}.{evidence.output_norm.name}", [f"{NATIVE}.output_norm"]))
    if evidence.sinks:
        rows.append(_row(f"{prefix}.{evidence.sinks[0]}", [f"{NATIVE}.sinks"]))
    return rows


def _row(reference: str, native: list[str], transposed: bool = False, groups: str = "1") -> dict[str, Any]:
    return {"reference": reference, "native": native, "transposed": transposed, "groups": groups}


def _groups(fit: Fit, config: PretrainedConfig) -> str:
    """Expression of the number of groups."""
    groups = fit.setting.layout.groups
    candidates = [
        expressions.constant("1", 1),
        *expressions.num_key_value_heads(config),
        *expressions.num_heads(config),
    ]
    return next((one.text for one in candidates if one.value == groups), str(groups))
