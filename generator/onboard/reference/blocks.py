"""Hypotheses on the order of a decoder layer: sequential or parallel branches, where their norms stand, multipliers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from onboard.reference.attention.evidence import late_bias
from onboard.reference.attention.layers import layer_choices
from onboard.reference.record import Recording, close
from onboard.reference.roles import LINEAR, Roles, Unexplained, is_norm

PLACES = ("pre_attention_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm")


@dataclass(frozen=True)
class Branches:
    """What was recorded of one layer: its input and output, and the two branches at their projections' own ends.

    So it does not matter which module adds the residual, or where a dropout stands.

    Args:
        x, y: the layer's input and output ``[B, S, H]``.
        attention_in, attention_out: what the first projection of the attention takes, what the last gives.
        mlp_in, mlp_out: the same of the MLP.
        norms: the layer's other norms: path within the layer, input, output.
    """

    x: torch.Tensor
    y: torch.Tensor
    attention_in: torch.Tensor
    attention_out: torch.Tensor
    mlp_in: torch.Tensor
    mlp_out: torch.Tensor
    norms: dict[str, tuple[torch.Tensor, torch.Tensor]]


def branches(model: PreTrainedModel, roles: Roles, recording: Recording, index: int) -> Branches:
    """Sort what was recorded of a layer.

    Raises:
        Unexplained: the layer has no such branches.
    """
    layer = roles.layer(index)
    x = recording[layer].x
    mixes = roles.mixes(index)
    linears = [
        path for path in recording if path.startswith(f"{mixes}.") and isinstance(model.get_submodule(path), LINEAR)
    ]
    mlp = [f"{layer}.{name}" for name in roles.mlp_linears]
    if not linears or any(path not in recording for path in mlp):
        what = f"{mixes.removeprefix(f'{layer}.')} and {', '.join(roles.mlp_linears)}"
        raise Unexplained("block", f"{layer} is not built as the first layer, of {what}")
    if index in roles.attention_layers:
        taken, given = recording[linears[0]].x, recording[linears[-1]].output
        attention = model.get_submodule(mixes)
        if bias := late_bias(attention, model.get_submodule(linears[-1])):
            given = given + attention.get_parameter(bias)
    else:
        taken, given = recording[mixes].x, recording[mixes].output
    ends = (taken, given, recording[mlp[0]].x, recording[mlp[-1]].output)
    if any(end.numel() != x.numel() for end in ends):
        shapes = ", ".join(str(tuple(end.shape)) for end in ends)
        raise Unexplained("block", f"the branches of {layer} take and give {shapes}, the layer {tuple(x.shape)}")
    attention_in, attention_out, mlp_in, mlp_out = (end.reshape(x.shape) for end in ends)
    norms = {
        path.removeprefix(f"{layer}."): (call.x, call.output)
        for path, call in recording.items()
        if path.startswith(f"{layer}.")
        and not path.startswith(f"{mixes}.")
        and is_norm(model.get_submodule(path), call.x, call.output)
        and call.output.numel() == x.numel()
        and not torch.equal(call.output.reshape(-1), recording[mlp[-1]].x.reshape(-1))
    }
    return Branches(
        x=x,
        y=recording[layer].output,
        attention_in=attention_in,
        attention_out=attention_out,
        mlp_in=mlp_in,
        mlp_out=mlp_out,
        norms={name: (a.reshape(x.shape), b.reshape(x.shape)) for name, (a, b) in norms.items()},
    )


def explain_blocks(model: PreTrainedModel, roles: Roles, recording: Recording) -> dict[str, Any]:
    """The order of the layers, the same for all that mix tokens in the same way.

    Returns:
        ``block``, ``mixer_block`` (of the layers without an attention, None where there are none) and ``modules`` of
        the measurement.

    Raises:
        Unexplained: layers of a kind differ, or are none of the orders that are known.
    """
    depth = len(model.get_submodule(roles.layers))
    others = [index for index in range(depth) if index not in roles.attention_layers]
    modules: dict[str, dict[str, Any]] = {}
    blocks: list[dict[str, Any] | None] = []
    for indices in (roles.attention_layers, others):
        found = [
            explain_block(branches(model, roles, recording, index), roles.layer(index), model.config)
            for index in indices
        ]
        if not found:
            blocks.append(None)
            continue
        block = _common(dict(zip(indices, found, strict=True)), depth, model.config)
        for place, name in block.pop("reference_norms").items():
            reference, native = f"{roles.layers}.{{layer}}.{name}", [f"model.layers.{{layer}}.{block[place]}"]
            row = {"reference": reference, "native": native, "transposed": False, "groups": "1"}
            if modules.setdefault(reference, row) != row:
                raise Unexplained("block", f"{name} stands at several places, depending on what the layer mixes with")
        blocks.append(block)
    return {"block": blocks[0], "mixer_block": blocks[1], "modules": list(modules.values())}


def _common(found: dict[int, dict[str, Any]], depth: int, config: PretrainedConfig) -> dict[str, Any]:
    """The one order of layers that may differ in whether they have the norm before their attention.

    Raises:
        Unexplained: they differ in anything else, or no expression says which have that norm.
    """
    place = "pre_attention_norm"
    have = {index: block[place] is not None for index, block in found.items()}
    full = next((block for block in found.values() if block[place]), next(iter(found.values())))
    left_out = {"difference": 0, place: None, "reference_norms": None}
    if len({str({**block, **left_out}) for block in found.values()}) > 1:
        raise Unexplained("block", "layers differ in the order of their norms")
    layers = None
    if len(set(have.values())) > 1:
        choices = layer_choices(have, depth, config)
        if not choices:
            raise Unexplained("block", "no expression of the config says which layers have a norm before the attention")
        layers = choices[0].text
    difference = max(block["difference"] for block in found.values())
    return {**full, "pre_attention_layers": layers, "difference": difference}


def explain_block(layer: Branches, path: str, config: PretrainedConfig) -> dict[str, Any]:
    """Place each norm by what it takes and what takes its output, then check the additions.

    Raises:
        Unexplained: no order fits, or a norm stands at no known place.
    """
    nearest: list[tuple[float, str]] = []
    unplaced: list[tuple[int, str]] = []
    for multiplier, value in multipliers(config).items():
        for parallel, late in ((False, False), (False, True), (True, False)):
            places = _places(layer, value, parallel, late)
            order = "parallel" if parallel else "sequential, late norms" if late else "sequential"
            missing = Counter(layer.norms.keys()) - Counter(name for name in places.values() if name)
            again = Counter(name for name in places.values() if name) - Counter(layer.norms.keys())
            if missing or again:
                at = [f"{name} is at no place" for name in missing] + [f"{name} is at several" for name in again]
                text = f"{order}, branches times {multiplier}: {', '.join(at)}"
                unplaced.append((len(at), text))
                continue
            difference, miss = _check(layer, places, value, parallel, late)
            if difference is not None:
                names = native_norms(places)
                return {
                    "parallel": parallel,
                    "norm_after_residual": late,
                    **names,
                    "multiplier": None if multiplier == "1.0" else multiplier,
                    "reference_norms": {place: name for place, name in places.items() if name},
                    "difference": difference,
                }
            nearest.append((miss, f"{order}, branches times {multiplier}: {miss:.2g}"))
    if not nearest:
        texts = tuple(text for _, text in sorted(unplaced)[:3])
        raise Unexplained("block", f"norms {sorted(layer.norms)} of {path} do not all stand at known places", texts)
    raise Unexplained(
        "block", f"{path} is none of the orders that are known", tuple(text for _, text in sorted(nearest)[:3])
    )


def native_norms(places: dict[str, str | None]) -> dict[str, str | None]:
    """Native name of the norm at each place; see the naming in ``spec/arch.py``."""
    names: dict[str, str | None] = dict.fromkeys(PLACES)
    if places["pre_attention_norm"]:
        names["pre_attention_norm"] = "input_layernorm"
    if places["post_attention_norm"]:
        names["post_attention_norm"] = "post_attention_layernorm"
    if places["pre_mlp_norm"]:
        taken = places["post_attention_norm"] is not None
        names["pre_mlp_norm"] = "pre_feedforward_layernorm" if taken else "post_attention_layernorm"
    if places["post_mlp_norm"]:
        names["post_mlp_norm"] = "post_feedforward_layernorm"
    return names


def multipliers(config: PretrainedConfig) -> dict[str, float]:
    """Python expression to factor on the branches, one first."""
    numbers = {
        f"config.{name}": float(value)
        for name, value in vars(config).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value and not name.startswith("_")
    }
    depth = config.num_hidden_layers
    scaled = {
        f"{text} / config.num_hidden_layers**0.5": value / depth**0.5
        for text, value in numbers.items()
        if isinstance(value, float) and "scale" in text
    }
    named = {text: value for text, value in numbers.items() if any(word in text for word in ("multiplier", "scal"))}
    first: dict[float, str] = {}
    for text, value in ({"1.0": 1.0} | named | scaled).items():
        first.setdefault(value, text)
    return {text: value for value, text in first.items()}


def _places(layer: Branches, factor: float, parallel: bool, late: bool) -> dict[str, str | None]:
    def feeding(target: torch.Tensor, source: torch.Tensor) -> str | None:
        return next(
            (
                name
                for name, (x, out) in layer.norms.items()
                if close(out, target) is not None and close(x, source) is not None
            ),
            None,
        )

    def fed_by(source: torch.Tensor) -> str | None:
        return next((name for name, (x, _) in layer.norms.items() if close(x, source) is not None), None)

    pre_attention = feeding(layer.attention_in, layer.x)
    if late:
        post_attention = fed_by(layer.x + factor * layer.attention_out)
        middle = layer.norms[post_attention][1] if post_attention else layer.x + factor * layer.attention_out
        pre_mlp = feeding(layer.mlp_in, middle)
        post_mlp = fed_by(middle + factor * layer.mlp_out)
    else:
        post_attention = fed_by(layer.attention_out)
        branch = layer.norms[post_attention][1] if post_attention else layer.attention_out
        middle = layer.x if parallel else layer.x + factor * branch
        pre_mlp = feeding(layer.mlp_in, middle)
        post_mlp = fed_by(layer.mlp_out)
    if parallel and pre_mlp == pre_attention:
        pre_mlp = None
    return {
        "pre_attention_norm": pre_attention,
        "post_attention_norm": post_attention,
        "pre_mlp_norm": pre_mlp,
        "post_mlp_norm": post_mlp,
    }


def _check(
    layer: Branches, places: dict[str, str | None], factor: float, parallel: bool, late: bool
) -> tuple[float | None, float]:
    """The largest difference of this order to what was recorded, None where it does not fit; and how far it misses."""

    def after(place: str, state: torch.Tensor) -> torch.Tensor:
        name = places[place]
        return layer.norms[name][1] if name else state

    first = after("pre_attention_norm", layer.x)
    if late:
        middle = after("post_attention_norm", layer.x + factor * layer.attention_out)
        end = after("post_mlp_norm", middle + factor * layer.mlp_out)
    else:
        branch = factor * after("post_attention_norm", layer.attention_out)
        middle = layer.x + branch
        end = (layer.x + branch if parallel else middle) + factor * after("post_mlp_norm", layer.mlp_out)
    source = first if parallel and places["pre_mlp_norm"] is None else after("pre_mlp_norm", middle)
    pairs = ((first, layer.attention_in), (source, layer.mlp_in), (end, layer.y))
    differences = [close(mine, theirs) for mine, theirs in pairs]
    miss = max((mine - theirs).abs().max().item() for mine, theirs in pairs)
    if any(difference is None for difference in differences):
        return None, miss
    return max(difference for difference in differences if difference is not None), miss
