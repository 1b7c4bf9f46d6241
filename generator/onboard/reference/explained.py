"""What is known about each module of a reused decoder: those that a hypothesis explains, and those that are new.

One part that nothing explains makes its neighbours reused, too. A report that said nothing about them would hide what
is new among what is not.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from onboard.reference.attention.explain import explain_attentions
from onboard.reference.ends import explain_embedding
from onboard.reference.mlps import explain_mlp
from onboard.reference.norms import explain_norms
from onboard.reference.record import Recording, close, record
from onboard.reference.roles import LINEAR, Roles, Unexplained, find_roles, is_norm


def explain_each(
    model: PreTrainedModel,
    fields: Mapping[str, Any],
    input_ids: torch.Tensor,
    layers: str | None,
    problem: Mapping[str, Any] | None,
) -> list[dict[str, str]]:
    """Try every hypothesis on every module of the decoder by itself.

    Args:
        model: the tiny reference.
        fields: constructor arguments of its config.
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
    evidence = _Evidence(model, dict(fields), input_ids, recording, roles, layers)
    stacks = _stacks(model, layers)
    modules = [_embedding(evidence)]
    for path in stacks:
        modules += _stack(replace(evidence, layers=path))
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{stack}.") for stack in stacks)
        if is_norm(module) and path in recording and not inside and path.startswith(f"{model.base_model_prefix}."):
            modules.append(evidence.entry(path, path, 0))
    modules += _beside(model, stacks, {module["path"] for module in modules})
    return _with_problem(modules, layers, problem)


def _stacks(model: PreTrainedModel, layers: str | None) -> list[str]:
    """Paths of the lists of layers, first that of the decoder; a list inside of a layer belongs to that."""
    found = [layers] if layers else []
    for path, module in model.named_modules():
        inside = any(path == stack or path.startswith(f"{stack}.") for stack in found)
        if isinstance(module, nn.ModuleList) and not inside and any(True for _ in _parts(module)):
            found.append(path)
    return found


def _parts(layers: nn.ModuleList) -> Iterator[tuple[int, str, nn.Module]]:
    """Index of the layer, name and module of what the layers consist of; a name is empty for a layer by itself."""
    for index, layer in enumerate(layers):
        children = [(name, child) for name, child in layer.named_children() if any(True for _ in child.parameters())]
        if children and _mixes(layer) and not any(_mixes(child) for _, child in children):
            yield index, "", layer
            continue
        for name, child in children:
            yield index, name, child


def _stack(evidence: _Evidence) -> list[dict[str, str]]:
    """The report on each kind of module in a list of layers."""
    layers = str(evidence.layers)
    modules = []
    seen: set[tuple[str, type[nn.Module]]] = set()
    stack: Any = evidence.model.get_submodule(layers)
    for index, name, child in _parts(stack):
        if (name, type(child)) not in seen:
            seen.add((name, type(child)))
            shown, path = (f"{layers}.{place}.{name}".removesuffix(".") for place in ("*", index))
            modules.append(evidence.entry(shown, path, index))
    return modules


@dataclass(frozen=True)
class _Evidence:
    """What the hypotheses are tried on; ``roles`` is None where they are not known."""

    model: PreTrainedModel
    fields: dict[str, Any]
    input_ids: torch.Tensor
    recording: Recording
    roles: Roles | None
    layers: str | None

    def entry(self, shown: str, path: str, index: int) -> dict[str, str]:
        """The report on one module, of which `index` is the decoder layer."""
        kind = type(self.model.get_submodule(path)).__name__
        try:
            what, difference = self._explain(path, index)
        except Unexplained as error:
            nearest = f"; tried: {', '.join(error.nearest[:3])}" if error.nearest else ""
            return {"path": shown, "origin": "novel", "why": f"{kind}: {error.what}{nearest}"}
        except Exception as error:  # a module that is built or called in another way than the hypotheses know
            why = f"no hypothesis can be tried on it ({type(error).__name__}: {str(error)[:80]})"
            return {"path": shown, "origin": "novel", "why": f"{kind}: {why}"}
        why = f"explained as {what} (max difference {difference:.1e}), reused with the decoder"
        return {"path": shown, "origin": "reused", "why": f"{kind}: {why}"}

    def _explain(self, path: str, index: int) -> tuple[str, float]:
        module = self.model.get_submodule(path)
        if self.roles is not None and path == self.roles.mixes(index) and index in self.roles.attention_layers:
            parts = (self.fields, self.model, self.roles, self.recording, self.input_ids)
            attention = explain_attentions(type(self.model), *parts)["attention"]
            return "softmax attention", attention["difference"]
        if is_norm(module):
            found = explain_norms({path: module}, module.weight.shape[0], self.model.config)
            return {"rms": "RMS norm", "layer": "layer norm"}[found["kind"]], found["difference"]
        if isinstance(module, LINEAR):
            raise Unexplained("mlp", "a projection at a place that no hypothesis knows")
        if _mixes(module):
            raise Unexplained("attention", "no hypothesis is about a layer with such a mixer")
        return self._explain_mlp(path, index)

    def _explain_mlp(self, path: str, index: int) -> tuple[str, float]:
        layer = f"{self.layers}.{index}."
        linears = tuple(
            inner.removeprefix(layer)
            for inner in self.recording
            if inner.startswith(f"{path}.") and isinstance(self.model.get_submodule(inner), LINEAR)
        )
        if len(linears) < 2:
            raise Unexplained("mlp", f"no hypothesis is about a module with {len(linears)} projections that run")
        # Taken for the MLP of its layer, whatever its neighbours are.
        roles = Roles("", str(self.layers), None, "", "", path.removeprefix(layer), linears, (index,))
        found = explain_mlp(self.model, roles, self.recording, index)
        call, last = self.recording[path], self.recording[layer + linears[-1]].output
        added = [
            value for value in call.inputs.values() if isinstance(value, torch.Tensor) and value.shape == last.shape
        ]
        if all(close(last + value, call.output) is None for value in (torch.zeros(()), *added)):
            raise Unexplained("mlp", "it gives something else than its last projection, with or without a residual")
        return f"{'gated' if found['gated'] else 'plain'} MLP with {found['activation']}", found["difference"]


def _beside(model: PreTrainedModel, stacks: Sequence[str], named: set[str]) -> list[dict[str, str]]:
    """What else the base model has: tables of positions and the like, which no hypothesis is tried on by itself."""
    base = getattr(model, model.base_model_prefix, None)
    beside = []
    for name, child in base.named_children() if isinstance(base, nn.Module) else ():
        path = f"{model.base_model_prefix}.{name}"
        holds = any(other == path or other.startswith(f"{path}.") for other in (*named, *stacks))
        if not holds and not isinstance(child, nn.Dropout):
            beside.append({"path": path, "origin": "reused", "why": f"{type(child).__name__}, reused with the decoder"})
    return beside


def _embedding(evidence: _Evidence) -> dict[str, str]:
    model = evidence.model
    embedding = model.get_input_embeddings()
    path = next((name for name, module in model.named_modules() if module is embedding), "the embedding")
    try:
        if evidence.roles is None:
            raise Unexplained("embedding", "where it ends is not known")
        found = explain_embedding(model, evidence.input_ids, evidence.roles, evidence.recording)["embedding"]
    except Unexplained as error:
        return {"path": path, "origin": "reused", "why": f"{type(embedding).__name__}; {error.what}"}
    scale = f" times {found['scale']}" if found["scale"] else ""
    return {"path": path, "origin": "reused", "why": f"explained as token embedding{scale}, reused with the decoder"}


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
