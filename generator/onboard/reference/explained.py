"""What is known about each module of a reused decoder: those that a hypothesis explains, and those that are new.

One part that nothing explains makes its neighbours reused, too. A report that said nothing about them would hide what
is new among what is not.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from onboard.reference.attention.fit import fit_layers
from onboard.reference.ends import explain_embedding
from onboard.reference.mlps import explain_mlp
from onboard.reference.norms import explain_norms
from onboard.reference.record import Recording, record
from onboard.reference.roles import LINEAR, Roles, Unexplained, find_roles, is_norm


def explain_each(
    model: PreTrainedModel, input_ids: torch.Tensor, layers: str | None, problem: Mapping[str, Any] | None
) -> list[dict[str, str]]:
    """Try every hypothesis on every module of the decoder by itself.

    Args:
        model: the tiny reference.
        input_ids: ``[1, S]``, longer than the tiny window.
        layers: path of the list of decoder layers, or None where there is none.
        problem: what the probe of the whole model could not explain: ``part``, ``what``, ``nearest``.

    Returns:
        ``path``, ``origin`` (``reused`` or ``novel``) and ``why`` of each kind of module; at least one is novel where
        there is a problem.
    """
    recording, _ = record(model, input_ids=input_ids)
    try:
        roles: Roles | None = find_roles(model, recording)
    except Exception:  # an order of modules that no hypothesis knows
        roles = None
    modules = [_embedding(model, input_ids, roles, recording)]
    stack = model.get_submodule(layers) if layers else nn.ModuleList()
    seen: set[tuple[str, type[nn.Module]]] = set()
    for index, layer in enumerate(stack):
        for name, child in layer.named_children():
            if (name, type(child)) in seen or not any(True for _ in child.parameters()):
                continue
            seen.add((name, type(child)))
            why, origin = _explain(child, f"{layers}.{index}.{name}", name, model, roles, recording)
            modules.append({"path": f"{layers}.*.{name}", "origin": origin, "why": f"{type(child).__name__}: {why}"})
    inside = f"{layers}." if layers else ""
    for path, module in model.named_modules():
        if is_norm(module) and path in recording and not (inside and path.startswith(inside)) and _below(path, model):
            why, origin = _explain(module, path, path, model, roles, recording)
            modules.append({"path": path, "origin": origin, "why": f"{type(module).__name__}: {why}"})
    modules += _beside(model, layers, {module["path"] for module in modules})
    return _with_problem(modules, layers, problem)


def _beside(model: PreTrainedModel, layers: str | None, named: set[str]) -> list[dict[str, str]]:
    """What else the base model has: tables of positions and the like, which no hypothesis is tried on by itself."""
    base = getattr(model, model.base_model_prefix, None)
    beside = []
    for name, child in base.named_children() if isinstance(base, nn.Module) else ():
        path = f"{model.base_model_prefix}.{name}"
        holds = any(other == path or other.startswith(f"{path}.") for other in (*named, layers or ""))
        if not holds and not isinstance(child, nn.Dropout):
            beside.append({"path": path, "origin": "reused", "why": f"{type(child).__name__}, reused with the decoder"})
    return beside


def _below(path: str, model: PreTrainedModel) -> bool:
    return path.startswith(f"{model.base_model_prefix}.")


def _embedding(
    model: PreTrainedModel, input_ids: torch.Tensor, roles: Roles | None, recording: Recording
) -> dict[str, str]:
    embedding = model.get_input_embeddings()
    path = next((name for name, module in model.named_modules() if module is embedding), "the embedding")
    try:
        if roles is None:
            raise Unexplained("embedding", "where it ends is not known")
        found = explain_embedding(model, input_ids, roles, recording)["embedding"]
    except Unexplained as error:
        return {"path": path, "origin": "reused", "why": f"{type(embedding).__name__}; {error.what}"}
    scale = f" times {found['scale']}" if found["scale"] else ""
    return {"path": path, "origin": "reused", "why": f"explained as token embedding{scale}, reused with the decoder"}


def _explain(
    module: nn.Module, path: str, name: str, model: PreTrainedModel, roles: Roles | None, recording: Recording
) -> tuple[str, str]:
    """Why a module is what it is, and its origin."""
    config = model.config
    try:
        if is_norm(module):
            found = explain_norms({path: module}, config.hidden_size, config)
            what = {"rms": "RMS norm", "layer": "layer norm"}.get(found["kind"], str(found["kind"]))
        elif roles is not None and name == roles.attention:
            fits = fit_layers(model, roles, recording)
            what, found = "softmax attention", {"difference": max(fit.difference for fit in fits)}
        elif isinstance(module, LINEAR):
            return "a projection at a place that no hypothesis knows", "novel"
        elif _mixes(module):
            return "no hypothesis is about a layer with such a mixer", "novel"
        elif roles is not None and name == roles.mlp:
            found = explain_mlp(model, roles, recording, int(path.split(".")[-2]))
            what = f"MLP with {found['activation']}"
        else:
            return "no hypothesis is about such a module", "novel"
    except Unexplained as error:
        nearest = f"; tried: {', '.join(error.nearest[:3])}" if error.nearest else ""
        return f"{error.what}{nearest}", "novel"
    except Exception as error:  # a module that is called in another way than the hypothesis calls it
        return f"no hypothesis can be tried on it ({type(error).__name__}: {str(error)[:80]})", "novel"
    return f"explained as {what} (max difference {found['difference']:.1e}), reused with the decoder", "reused"


def _mixes(module: nn.Module) -> bool:
    """Whether a module lets tokens see each other: it is told which, or keeps a state of earlier ones."""
    return bool(
        {"attention_mask", "past_key_values", "cache_params"} & set(inspect.signature(module.forward).parameters)
    )


def _with_problem(
    modules: Sequence[dict[str, str]], layers: str | None, problem: Mapping[str, Any] | None
) -> list[dict[str, str]]:
    if problem is None or any(module["origin"] == "novel" for module in modules):
        return list(modules)
    nearest = f"; tried: {', '.join(problem['nearest'][:3])}" if problem["nearest"] else ""
    why = f"{problem['part']}: {problem['what']}{nearest}"
    return [*modules, {"path": f"{layers}.*" if layers else "the decoder", "origin": "novel", "why": why}]
