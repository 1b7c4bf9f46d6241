"""What the probe says of attention and rotation: the setting that fits, in expressions of the config."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from onboard.reference.attention.fit import Fit, fit_layers
from onboard.reference.attention.latent import explain_latent_attention, find_latents
from onboard.reference.attention.layers import EVERY
from onboard.reference.attention.modules import module_rows
from onboard.reference.attention.qk_norms import fit_norm_call
from onboard.reference.attention.rotations import STATIC_SCALINGS, is_nested, table_difference
from onboard.reference.attention.settle import Choices, Reference, Run, settle, variants
from onboard.reference.meanings import read, spelling
from onboard.reference.norms import settle_eps
from onboard.reference.record import Recording
from onboard.reference.roles import Roles, Unexplained
from onboard.reference.tiny import WINDOW
from onboard.spec.keys import ALIASES


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
    path = f"{roles.first_attention_layer}.{roles.attention}"
    if find_latents(model.get_submodule(path), path, recording):
        return explain_latent_attention(cls, fields, model, roles, recording, input_ids)
    reference, run = _first_run(cls, fields, model, roles, recording, input_ids)
    windowed_fields = _windowed(fields, model.config)
    windowed = reference.run_if_built(windowed_fields) if windowed_fields else None
    if windowed is None:
        windowed_fields, windowed = None, run
    texts = _settled(reference, run, fields, [windowed] if windowed_fields else [])
    attention = _attention(run, texts)
    if output_norm := run.fits[0].evidence.output_norm:
        paths = [f"{roles.layer(index)}.{roles.attention}.{output_norm.name}" for index in roles.attention_layers]
        width = output_norm.x.shape[-1]
        attention["output_norm"] = settle_eps(cls, fields, attention["output_norm"], paths, width)
    attention |= _window(reference, windowed, windowed_fields or fields)
    attention |= {"windowed_fields": windowed_fields, "implementation": reference.implementation}
    rope = _rope(run, texts)
    if rope is not None:
        rope["served"] = _served(reference, run, fields)
    if run.fits[0].setting.alibi:
        _check_slopes(reference, fields, model.config)
    return {"attention": attention, "rope": rope, "modules": module_rows(run.fits, roles, texts)}


def _first_run(
    cls: type[PreTrainedModel],
    fields: dict[str, Any],
    model: PreTrainedModel,
    roles: Roles,
    recording: Recording,
    input_ids: torch.Tensor,
) -> tuple[Reference, Run]:
    """Explain the recorded run; where that fails, one with the attention that users of the class get by default.

    The two are meant to be the same, and in some classes are not: Falcon's eager attention adds its bias twice.
    """
    try:
        return Reference(cls, roles, input_ids), Run(model.config, fit_layers(model, roles, recording))
    except Unexplained:
        default = cls(cls.config_class(**fields)).config._attn_implementation
        if default == model.config._attn_implementation:
            raise
        reference = Reference(cls, roles, input_ids, default)
        run = reference.try_run(fields)
        if run is None:
            raise
        return reference, run


def _settled(reference: Reference, run: Run, fields: dict[str, Any], more: list[Run]) -> dict[str, str]:
    """The expression of each thing, after as many other runs as it takes."""
    biased = any(fit.evidence.biases[""] for fit in run.fits)
    rotates = any(fit.setting.rotation for one in (run, *more) for fit in one.fits)

    def said(one: Run) -> Choices:
        found = one.numbers() | (one.rotating_layers() if rotates else {})
        return found | (one.biased_layers() if biased else {})

    choices = settle([said(run), *map(said, more)])
    for changes in variants(choices, fields, run.config):
        other = next((found for change in changes if (found := reference.try_run(change))), None)
        if other is not None:
            choices = settle([choices, said(other)])
    return _first(choices)


def _first(choices: Choices) -> dict[str, str]:
    for name, texts in choices.items():
        if not texts:
            raise Unexplained(
                "rope" if name == "rope_layers" else "attention",
                f"no expression of the config gives {name.replace('_', ' ')} at every tiny config",
            )
    return {name: next(iter(texts)) for name, texts in choices.items()}


def _attention(run: Run, texts: dict[str, str]) -> dict[str, Any]:
    first, evidence = run.fits[0].setting, run.fits[0].evidence
    gate = first.layout.gate
    rotation = next((fit.setting.rotation for fit in run.fits if fit.setting.rotation), None)
    bias = {part: evidence.biases[name] for name, parts in first.layout.parts for part in parts}
    output_norm = evidence.output_norm
    rope_layers = texts["rope_layers"] if rotation else EVERY
    o_bias_layers = texts.get("o_bias_layers", EVERY)
    return {
        **{name: texts[name] for name in ("num_heads", "num_key_value_heads", "head_dim", "scale")},
        "biases": {**{part: bias[part] for part in ("q", "k", "v")}, "o": "o_bias_layers" in texts},
        "o_bias_layers": None if o_bias_layers == EVERY else o_bias_layers,
        "differential": output_norm is not None and bool(first.lambdas),
        "gate": gate and {"over": gate.over, "activation": gate.activation, "bias": bias["g"]},
        "qk_norm": _qk_norm(run.fits[0], texts),
        "output_norm": fit_norm_call(evidence, output_norm, run.config).formula() if output_norm else None,
        "rotary": rotation.style if rotation else None,
        "rope_layers": None if rope_layers == EVERY else rope_layers,
        "softcap": texts.get("softcap"),
        "sinks": evidence.sinks is not None,
        "alibi": {"bias_max": texts["bias_max"], "scaled": first.alibi.scaled} if first.alibi else None,
        "query_scale": first.query_scale and first.query_scale.described(),
        "difference": max(fit.difference for fit in run.fits),
    }


def _qk_norm(fit: Fit, texts: dict[str, str]) -> dict[str, Any] | None:
    norm = fit.setting.qk_norm
    if norm is None:
        return None
    if norm.q.formula() != norm.k.formula():
        raise Unexplained("attention", "queries and keys are normalised by different formulas")
    formula = norm.q.formula() | {"eps": texts["qk_norm_eps"]}
    return {"over": norm.over, "after_rope": norm.after_rope, "norm": formula}


def _rope(run: Run, texts: dict[str, str]) -> dict[str, Any] | None:
    rotating = [fit for fit in run.fits if fit.setting.rotation]
    if len({str(fit.setting.rotation) for fit in rotating}) > 1:
        raise Unexplained("rope", "layers rotate in different ways")
    angles = [fit.setting.angles for fit in rotating if fit.setting.angles]
    if not angles or not rotating[0].setting.rotation:
        return None
    parameters = read(run.config, "rope_parameters")
    return {
        "types": sorted({one.rope_type for one in angles}),
        "per_layer_type": bool(parameters) and is_nested(parameters),
        "partial": any(one.partial for one in angles),
        "dim": texts.get("rope_dim"),
        "theta": angles[0].theta,
        "sections_apart": angles[0].sections_apart,
        "reversed": rotating[0].setting.rotation.reversed,
        "difference": max(_angle_difference(fit) for fit in rotating),
    }


def _angle_difference(fit: Fit) -> float:
    """Of the tables where the layer is given one, else of what the rotation leads to."""
    angles, table = fit.setting.angles, fit.evidence.table
    found = table_difference(angles, table) if angles and table else None
    return fit.difference if found is None else found


def _windowed(fields: dict[str, Any], config: PretrainedConfig) -> dict[str, Any] | None:
    """The tiny config with a sliding window on, where the class has one; None where it is on already or unknown."""
    key = spelling(config, "sliding_window")
    if key is None or key not in fields or fields[key] is not None:
        return None
    on = {**fields, key: WINDOW}
    if "use_sliding_window" in on:
        on["use_sliding_window"] = True
    if on.get("layer_types"):
        kinds = ("sliding_attention", "full_attention")
        on["layer_types"] = [kinds[index % 2] for index in range(len(on["layer_types"]))]
    return on


def _window(reference: Reference, run: Run, fields: dict[str, Any]) -> dict[str, Any]:
    """The window's field and its layers.

    Args:
        reference: the reference.
        run: at a config with the window on.
        fields: of that config.
    """
    keys = {fit.setting.window.key for fit in run.fits if fit.setting.window}
    if not keys:
        return {"window_key": None, "window_layers": None}
    if len(keys) > 1:
        raise Unexplained("attention", f"layers have windows by different fields: {', '.join(sorted(keys))}")
    choices = run.windowed_layers()
    for changes in variants(choices, fields, run.config):
        other = next((found for change in changes if (found := reference.try_run(change))), None)
        if other is not None:
            choices = settle([choices, other.windowed_layers()])
    return {"window_key": keys.pop(), **_first(choices)}


def _served(reference: Reference, run: Run, fields: dict[str, Any]) -> dict[str, Any]:
    """Other static scalings that the reference takes, each with the ``rope_parameters`` that were tried.

    Where layer types have parameters of their own, those of the full attention are scaled, as published models do.
    """
    rope = fields.get("rope_parameters")
    if not rope:
        return {}
    nested = isinstance(rope.get("full_attention"), dict)
    base = rope["full_attention"] if nested else rope
    growth = run.fits[0].setting.query_scale
    also = growth.names if growth else ()
    kept = {name: base[name] for name in ("rope_theta", "partial_rotary_factor", *also) if name in base}
    served = {}
    for rope_type, extra in STATIC_SCALINGS.items():
        if rope_type == base.get("rope_type"):
            continue
        parameters: dict[str, Any] = {"rope_type": rope_type, **extra, **kept}
        if nested:
            parameters = {**rope, "full_attention": parameters}
        try:
            other = reference.run({**fields, "rope_parameters": parameters}, run.fits[0])
        except Exception:
            continue
        if other.config.rope_parameters == parameters:  # else the config class makes another scaling of it
            served[rope_type] = parameters
    return served


def _check_slopes(reference: Reference, fields: dict[str, Any], config: PretrainedConfig) -> None:
    """Run the reference with a number of heads that is no power of two, where it takes one.

    Raises:
        Unexplained: it gives such heads other slopes.
    """
    heads, hidden = (spelling(config, name) for name in ("num_attention_heads", "hidden_size"))
    if heads not in fields or hidden not in fields or hidden is None or heads is None:
        return
    other = {**fields, heads: 6, hidden: 6 * fields[hidden] // fields[heads]}
    for key in ALIASES["num_key_value_heads"]:
        if fields.get(key) == fields[heads]:
            other[key] = 6
    run = reference.run_if_built(other)
    if run is not None and run.fits[0].setting.alibi is None:
        raise Unexplained("attention", "six heads have no linear bias on their scores")
