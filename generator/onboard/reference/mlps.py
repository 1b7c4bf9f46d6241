"""Hypotheses on the feed-forward network: gated or plain, separate or fused projections, activation, inner norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from onboard.reference.build import build
from onboard.reference.meanings import spelling
from onboard.reference.norms import explain_norms, settle_eps
from onboard.reference.record import Recording, close
from onboard.reference.roles import Roles, Unexplained, is_norm

# Of functions that are equal, the name to write down where no field of the config gives one.
_PREFERRED = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu")
_LARGE = 8.0
"""Factor on the first projections' outputs that shows what a function does to large values: a clamp, a cap."""


@torch.no_grad()
def explain_mlps(
    cls: type[PreTrainedModel],
    fields: dict[str, Any],
    model: PreTrainedModel,
    roles: Roles,
    recording: Recording,
    input_ids: torch.Tensor,
) -> dict[str, Any]:
    """Find the formula that reproduces every layer's MLP.

    Returns:
        ``mlp`` and ``modules`` of the measurement.

    Raises:
        Unexplained: none or several candidates fit, or layers differ.
    """
    found = []
    for index in range(len(model.get_submodule(roles.layers))):
        found.append(explain_mlp(model, roles, recording, index))
    if len({str({**one, "difference": 0}) for one in found}) > 1:
        raise Unexplained("mlp", "layers differ in their MLPs")
    mlp = {**found[0], "difference": max(one["difference"] for one in found)}
    modules = mlp.pop("modules")
    if mlp["inner_norm"]:
        inner = next(row["reference"] for row in modules if row["native"][0].endswith(".inner_norm"))
        paths = [inner.replace("{layer}", str(index)) for index in range(len(model.get_submodule(roles.layers)))]
        mlp["inner_norm"] = settle_eps(cls, fields, mlp["inner_norm"], paths, mlp["width"])
    size = size_expression(model.config, mlp.pop("width"))
    mlp = {"gated": mlp["gated"], "intermediate_size": size, **mlp}
    key = mlp["activation_key"]
    if key and not _reads_activation(cls, fields, key, input_ids):
        mlp["activation_key"] = None
    return {"mlp": mlp, "modules": modules}


def explain_mlp(model: PreTrainedModel, roles: Roles, recording: Recording, index: int) -> dict[str, Any]:
    """Find the formula that reproduces one MLP, at what its last projection takes: of values as they are, and large.

    Returns:
        ``mlp`` of the measurement with its ``modules``, and its ``width`` in place of the expression of it.

    Raises:
        Unexplained: none or several candidates fit.
    """
    layer = roles.layer(index)
    paths = [f"{layer}.{name}" for name in roles.mlp_linears]
    linears = {path: model.get_submodule(path) for path in paths}
    *ins, down = paths
    if not ins or any(not torch.equal(recording[path].x, recording[ins[0]].x) for path in ins):
        raise Unexplained("mlp", f"{len(paths)} projections in {layer} are no MLP of one step")
    target, inner = _inner_norm(model, roles, recording, layer, recording[down].x)
    width = target.shape[-1]
    config = model.config
    as_is = {path: recording[path].output for path in ins}
    large, large_target = _large(model, recording, layer, ins, inner or down)
    fits: list[dict[str, Any]] = []
    nearest: list[tuple[float, str]] = []
    for (parts, *states), (_, *large_states) in zip(_gates(as_is, width), _gates(large, width), strict=True):
        for name, key, act in activations(config, model.get_submodule(layer)):
            pairs = ((_mixed(act, *states), target), (_mixed(act, *large_states), large_target))
            differences = [close(mine, theirs.reshape(mine.shape)) for mine, theirs in pairs]
            if any(difference is None for difference in differences):
                misses = [(mine - theirs.reshape(mine.shape)).abs().max().item() for mine, theirs in pairs]
                kind = "plain" if states[1] is None else "gated"
                nearest.append((misses[0], f"{kind} {name}: {misses[0]:.2g}, of large values {misses[1]:.2g}"))
                continue
            difference = max(difference for difference in differences if difference is not None)
            fits.append({"parts": parts, "activation": name, "activation_key": key, "difference": difference})
    if not fits:
        raise Unexplained(
            "mlp", f"no candidate reproduces the MLP of {layer}", tuple(text for _, text in sorted(nearest)[:3])
        )
    fit = _choose(fits)
    biases = {path: getattr(module, "bias", None) is not None for path, module in linears.items()}
    if len({biases[path] for path in ins}) > 1:
        raise Unexplained("mlp", f"of gate and up one has a bias: {biases}")
    native = "model.layers.{layer}.mlp"
    pattern = f"{roles.layers}.{{layer}}"
    modules = [
        _module(path.replace(layer, pattern, 1), [f"{native}.{part}" for part in parts], linears[path])
        for path, parts in fit.pop("parts").items()
    ]
    modules.append(_module(down.replace(layer, pattern, 1), [f"{native}.down_proj"], linears[down]))
    inner_norm = None
    if inner is not None:
        inner_norm = explain_norms({inner: model.get_submodule(inner)}, width, config)
        inner_norm.pop("difference")
        modules.append(_module(inner.replace(layer, pattern, 1), [f"{native}.inner_norm"], nn.Identity()))
    own = _parametric(model, layer, fit["activation"])
    if own is not None:
        modules.append(_module(own.replace(layer, pattern, 1), [f"{native}.act_fn"], nn.Identity()))
    gated = any("gate_proj" in name for entry in modules for name in entry["native"])
    return {
        "gated": gated,
        "width": width,
        "biases": {"up": biases[ins[0]], "down": biases[down]},
        **fit,
        "activation_parameters": own is not None,
        "inner_norm": inner_norm,
        "modules": modules,
    }


def _module(reference: str, native: list[str], module: nn.Module) -> dict[str, Any]:
    return {"reference": reference, "native": native, "transposed": isinstance(module, Conv1D), "groups": "1"}


def _mixed(act: Callable[[torch.Tensor], torch.Tensor], gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    return act(gate) if up is None else act(gate) * up


def _large(
    model: PreTrainedModel, recording: Recording, layer: str, ins: list[str], end: str
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What the first projections give and what the module at the end takes, when the former is large."""
    outputs: dict[str, torch.Tensor] = {}
    taken: list[torch.Tensor] = []

    def enlarge(path: str) -> Callable[..., torch.Tensor]:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            outputs[path] = _LARGE * output
            return outputs[path].clone()

        return hook

    handles = [model.get_submodule(path).register_forward_hook(enlarge(path)) for path in ins]
    handles.append(model.get_submodule(end).register_forward_pre_hook(lambda _, args: taken.append(args[0].clone())))
    try:
        model.get_submodule(layer)(**recording[layer].inputs)
    finally:
        for handle in handles:
            handle.remove()
    return outputs, taken[0]


def _gates(
    outputs: dict[str, torch.Tensor], width: int
) -> Iterator[tuple[dict[str, tuple[str, ...]], torch.Tensor, torch.Tensor | None]]:
    """Ways to read the projections: which parts each holds, what the activation takes, what it is multiplied with."""
    ins = list(outputs)
    if len(ins) == 2 and all(output.shape[-1] == width for output in outputs.values()):
        for gate, up in (ins, ins[::-1]):
            yield {gate: ("gate_proj",), up: ("up_proj",)}, outputs[gate], outputs[up]
    elif len(ins) == 1 and outputs[ins[0]].shape[-1] == 2 * width:
        first, second = outputs[ins[0]].chunk(2, dim=-1)
        yield {ins[0]: ("gate_proj", "up_proj")}, first, second
        yield {ins[0]: ("up_proj", "gate_proj")}, second, first
    elif len(ins) == 1 and outputs[ins[0]].shape[-1] == width:
        yield {ins[0]: ("up_proj",)}, outputs[ins[0]], None
    else:
        widths = [output.shape[-1] for output in outputs.values()]
        raise Unexplained("mlp", f"projections of widths {widths} into {width}")


def _inner_norm(
    model: PreTrainedModel, roles: Roles, recording: Recording, layer: str, taken: torch.Tensor
) -> tuple[torch.Tensor, str | None]:
    """What stands before the last projection, without the norm between, and the norm's path."""
    for path, call in recording.items():
        if not path.startswith(f"{layer}.") or not is_norm(model.get_submodule(path), call.x, call.output):
            continue
        if call.output.shape == taken.shape and torch.equal(call.output, taken):
            return call.x, path
    return taken, None


def activations(
    config: PretrainedConfig, layer: nn.Module
) -> Iterator[tuple[str, str | None, Callable[[torch.Tensor], torch.Tensor]]]:
    """Name, config key and function: those that the config names, then all that transformers has.

    One with parameters of its own (xIELU, arXiv:2411.13010) is taken from the layer.
    """
    named = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, str) and value in ACT2FN and not name.startswith("_")
    }
    for key, value in named.items():
        act = ACT2FN[value]
        own = next((module for module in layer.modules() if type(module) is type(act)), act)
        yield value, key, own if any(True for _ in own.parameters()) else act
    for name in (*_PREFERRED, *(name for name in ACT2FN if name not in _PREFERRED)):
        try:
            act = ACT2FN[name]
        except Exception:  # one that needs arguments or a package
            continue
        if isinstance(act, nn.Module) and any(True for _ in act.parameters()):
            continue
        yield name, None, act


def _parametric(model: PreTrainedModel, layer: str, activation: str) -> str | None:
    """Path of a layer's activation, where it has parameters of its own."""
    kind = type(ACT2FN[activation])
    for name, module in model.get_submodule(layer).named_modules():
        if type(module) is kind and any(True for _ in module.parameters()):
            return f"{layer}.{name}"
    return None


def _choose(fits: list[dict[str, Any]]) -> dict[str, Any]:
    """The first fit; the others must be the same function under another name."""
    names = tuple(fit["activation"] for fit in fits)
    if len({str(fit["parts"]) for fit in fits}) > 1:
        raise Unexplained("mlp", "gate and up are not told apart by the input", names)
    x = torch.linspace(-6.0, 6.0, 601)
    functions = [ACT2FN[name](x) for name in names if len(fits) > 1]
    if any(close(one, functions[0], 2e-5) is None for one in functions):
        raise Unexplained("mlp", "several activations fit", names)
    return dict(fits[0])


def size_expression(config: PretrainedConfig, width: int) -> str:
    """Expression of the width of the hidden layer.

    Raises:
        Unexplained: no field of the config gives it.
    """
    own = spelling(config, "intermediate_size")
    hidden = config.hidden_size
    candidates = {f"config.{own}": getattr(config, own, None)} if own else {}
    numbers = {
        f"config.{name}": value
        for name, value in vars(config).items()
        if isinstance(value, int) and not isinstance(value, bool) and not name.startswith("_")
    }
    candidates |= {
        f"{text} * config.hidden_size": value * hidden
        for text, value in numbers.items()
        if any(word in text for word in ("ratio", "multiple"))
    }
    candidates["4 * config.hidden_size"] = 4 * hidden
    candidates |= {text: value for text, value in numbers.items() if any(word in text for word in ("ff", "inner"))}
    candidates |= _rounded(config, own)
    for text, value in candidates.items():
        if value == width:
            return text
    raise Unexplained("mlp", f"no field of the config gives its width {width}")


def _rounded(config: PretrainedConfig, key: str | None) -> dict[str, int]:
    """Two thirds of a width, times a factor, rounded up to a multiple (Llama's first code; arXiv:2002.05202)."""
    width = getattr(config, key, None) if key else None
    if type(width) is not int:
        return {}
    named = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    factors = {name: value for name, value in named.items() if "multiplier" in name and type(value) is float}
    multiples = {name: value for name, value in named.items() if "multiple_of" in name and type(value) is int and value}
    third = f"int(2 * config.{key} / 3)"
    scaled = {f"int(config.{name} * {third})": int(value * int(2 * width / 3)) for name, value in factors.items()}
    scaled |= {third: int(2 * width / 3)}
    rounded = {
        f"config.{name} * (({text} + config.{name} - 1) // config.{name})": multiple
        * ((value + multiple - 1) // multiple)
        for name, multiple in multiples.items()
        for text, value in scaled.items()
    }
    return rounded | scaled


def _reads_activation(cls: type[PreTrainedModel], fields: dict[str, Any], key: str, input_ids: torch.Tensor) -> bool:
    """Whether another name in that field changes the output; an architecture may fix what its config also names."""
    if key not in fields:
        return False
    other = "relu" if fields[key] != "relu" else "silu"
    try:
        logits = [build(cls, one)(input_ids, use_cache=False).logits for one in (fields, {**fields, key: other})]
    except Exception:  # the class takes only its own
        return False
    return not torch.equal(*logits)
