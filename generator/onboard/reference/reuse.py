"""What a package needs that reuses transformers' own modules: where they are cut off, and what they can do.

Two levels, told apart by measuring. ``decoder``: the logits are the head's product with the base model's output,
scaled or
capped where the config says so, and the loss is that of the next token; then the base model is reused and everything
around
it is native. ``model``: anything else; then the whole class with its head is reused.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from onboard.reference.build import build
from onboard.reference.explained import explain_each
from onboard.reference.joins import rows_of
from onboard.reference.layout import Layout, Table, aliases, layout, real_names, tabulate
from onboard.reference.mistakes import find_mistakes
from onboard.reference.record import close
from onboard.reference.roles import Unexplained
from onboard.reference.support import left_alone, measure_support
from onboard.reference.tiny import SEQUENCE

# What a class may define beside __init__ and forward and still be no more than its base model and a head.
_PLAIN = frozenset(
    f"{verb}_{what}" for verb in ("get", "set") for what in ("input_embeddings", "output_embeddings", "decoder")
)
_TAKEN = ("input_ids", "attention_mask", "past_key_values", "inputs_embeds", "use_cache")
_TELLING = 2.0
"""A scale or cap on the logits that shows."""


def measure_reuse(
    cls: type[PreTrainedModel],
    real: PretrainedConfig,
    fields: Mapping[str, Any],
    problem: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Measure what a package that reuses transformers' modules needs to know.

    Args:
        cls: the reference's class.
        real: the real config.
        fields: constructor arguments of the tiny config.
        problem: what no hypothesis explains (``part``, ``what``, ``nearest``), None where reuse was asked for.

    Raises:
        Unexplained: the checkpoint stores tensors in another form than memory does.
    """
    input_ids = torch.randint(3, fields["vocab_size"], (1, SEQUENCE), generator=torch.Generator().manual_seed(7))
    model = build(cls, fields)
    paths = {id(module): path for path, module in model.named_modules()}
    head_module = model.get_output_embeddings()
    head = paths.get(id(head_module)) if head_module is not None else None
    layers = _layers(model)
    variants = _variants(cls, fields, input_ids)
    output: dict[str, Any] = {}
    why_whole: str | None = None
    try:
        output = _cut(cls, fields, model, input_ids)
    except Unexplained as error:
        why_whole = error.what
    if output.get("postprocess"):
        key = output["postprocess"]["key"]
        if fields[key] in (None, 1.0):
            variants[key] = {key: _TELLING}
    base = getattr(model, cls.base_model_prefix, None) if cls.base_model_prefix else None
    table, names = _table(cls, real, fields, variants, layers, input_ids)
    return {
        "level": "model" if why_whole else "decoder",
        "why_whole": why_whole,
        "module": cls.__module__,
        "attribute": cls.base_model_prefix,
        "base_class": type(base).__name__ if base is not None else None,
        "base_module": type(base).__module__ if base is not None else None,
        "family": output.get("family"),
        "postprocess": output.get("postprocess"),
        "head_difference": output.get("difference"),
        "head_width": output.get("head_width"),
        "embedding": paths.get(id(model.get_input_embeddings())),
        "head": head,
        "can_tie": isinstance(head_module, nn.Linear)
        and head_module.weight.shape == model.get_input_embeddings().weight.shape,
        "head_bias": getattr(head_module, "bias", None) is not None,
        "layers": layers,
        "tie_support": _tie_support(cls, fields, head),
        "head_stored": _head_stored(cls, fields, head),
        "variants": variants,
        "keep_in_fp32": sorted(model._keep_in_fp32_modules_strict or ()),
        "rows": table.rows,
        "joins": table.joins,
        "real_names": names,
        "supports": measure_support(cls, fields, variants, input_ids),
        "left_alone": left_alone(cls, fields),
        "mistakes": find_mistakes(model, input_ids, layers, head),
        "modules": explain_each(model, fields, input_ids, layers, problem),
    }


def _layers(model: PreTrainedModel) -> str | None:
    """Path of the list of decoder layers: the one as long as the model is deep, else the longest."""
    lists = {path: len(module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    depth = getattr(model.config, "num_hidden_layers", None)
    exact = [path for path, length in lists.items() if length == depth]
    return exact[0] if exact else max(lists, key=lambda path: lists[path], default=None)


def _cut(
    cls: type[PreTrainedModel], fields: Mapping[str, Any], model: PreTrainedModel, input_ids: torch.Tensor
) -> dict[str, Any]:
    """How the logits and the loss come from the base model's output.

    Raises:
        Unexplained: the class is more than a base model with a linear head.
    """
    base, head = getattr(model, cls.base_model_prefix, None), model.get_output_embeddings()
    if not isinstance(base, PreTrainedModel) or type(head) is not nn.Linear:
        raise Unexplained("head", "it is no linear layer on top of a base model")
    outside = [
        name
        for name, child in model.named_children()
        if child is not base and child is not head and any(True for _ in child.parameters())
    ]
    if outside:
        raise Unexplained("head", f"the class has modules beside base model and head: {', '.join(outside)}")
    family = next((parent for parent in cls.__mro__[1:] if parent in type(base).__mro__), None)
    if family is None or not issubclass(family, PreTrainedModel):
        raise Unexplained("head", "class and base model have no class in common")
    if own := _own_methods(cls, family):
        raise Unexplained("head", f"the class has methods of its own: {', '.join(own)}")
    parameters = inspect.signature(type(base).forward).parameters
    lacking = [name for name in _TAKEN if name not in parameters]
    if lacking or not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        raise Unexplained("head", f"the base model does not take {', '.join(lacking) or 'further arguments'}")
    try:
        keeps = "past_key_values" in base(input_ids, use_cache=True)
    except Exception as error:  # a state that transformers cannot make for these layers
        raise Unexplained("head", f"the base model keeps no state: {type(error).__name__}: {error}") from error
    if not keeps:
        raise Unexplained("head", "the base model returns no past_key_values")
    if set(type(base)(model.config).state_dict()) != set(base.state_dict()):
        raise Unexplained("head", "the base model is built with other arguments than its config")
    postprocess, difference = _postprocess(cls, fields, input_ids)
    labels = input_ids.clone()
    labels[0, :4] = -100
    with torch.no_grad():
        result = model(input_ids, labels=labels)
    logits = result.logits.float()
    expected = functional.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100)
    if close(expected, result.loss) is None:
        raise Unexplained("head", "the loss is not the mean cross entropy of the next token")
    return {
        "family": [family.__module__, family.__name__],
        "postprocess": postprocess,
        "difference": difference,
        "head_width": _head_width(model.config, head),
    }


def _head_width(config: PretrainedConfig, head: nn.Linear) -> str:
    """The config field that is the head's input width.

    Raises:
        Unexplained: no field is, or the vocabulary is another one.
    """
    if head.out_features != config.vocab_size:
        raise Unexplained("head", "the head does not give one logit a token of the vocabulary")
    names = ["hidden_size", *(name for name, value in vars(config).items() if value == head.in_features)]
    for name in names:
        if getattr(config, name, None) == head.in_features:
            return f"config.{name}"
    raise Unexplained("head", f"no config field is the head's width {head.in_features}")


def _own_methods(cls: type[PreTrainedModel], family: type) -> list[str]:
    """Methods and properties of the class, and of its parents below the one that it shares with its base model."""
    names = set()
    for parent in cls.__mro__[: cls.__mro__.index(family)]:
        for name, value in vars(parent).items():
            if name in _PLAIN or (name.startswith("__") and name.endswith("__")) or name == "forward":
                continue
            is_method = inspect.isroutine(value) or isinstance(value, (property, staticmethod, classmethod))
            if is_method:
                names.add(name)
    return sorted(names)


def _postprocess(
    cls: type[PreTrainedModel], fields: Mapping[str, Any], input_ids: torch.Tensor
) -> tuple[dict[str, str] | None, float]:
    """What happens to the head's output before it is the logits: nothing, or a scale or cap from one config field.

    A hypothesis has to hold at the tiny config and wherever one of the fields has another value.

    Raises:
        Unexplained: none does, or several.
    """
    keys = [
        name
        for name, value in fields.items()
        if any(word in name for word in ("logit", "lm_head", "softcap"))
        and isinstance(value, (int, float, type(None)))
        and not isinstance(value, bool)
    ]
    settings = [dict(fields), *({**fields, name: _TELLING} for name in keys)]
    worst: dict[tuple[str, str] | None, float] | None = None
    for setting in settings:
        try:
            model = build(cls, setting)
            fits = _fits(model, input_ids, {name: setting[name] for name in keys})
        except Exception:  # a field that takes no number
            continue
        before = dict.fromkeys(fits, 0.0) if worst is None else worst
        worst = {one: max(before[one], difference) for one, difference in fits.items() if one in before}
    if not worst:
        raise Unexplained("head", "the logits are not the head's product with the base model's output", tuple(keys))
    if len(worst) > 1:
        raise Unexplained("head", f"{len(worst)} formulas give the logits", tuple(map(str, worst)))
    ((hypothesis, difference),) = worst.items()
    return (None if hypothesis is None else {"operation": hypothesis[0], "key": hypothesis[1]}), difference


@torch.no_grad()
def _fits(
    model: PreTrainedModel, input_ids: torch.Tensor, values: Mapping[str, Any]
) -> dict[tuple[str, str] | None, float]:
    """Hypotheses ``(operation, key)`` that give the logits, with their differences; None is the head's plain output."""
    base: Any = getattr(model, type(model).base_model_prefix)
    logits = model(input_ids, use_cache=False).logits
    plain = model.get_output_embeddings()(base(input_ids, use_cache=False).last_hidden_state)
    tried: dict[tuple[str, str] | None, torch.Tensor] = {None: plain}
    for key, value in values.items():
        tried["cap", key] = plain if value is None else value * torch.tanh(plain / value)
        if value is not None:
            tried["multiply", key] = plain * value
            tried["divide", key] = plain / value
    differences = {one: close(candidate, logits) for one, candidate in tried.items()}
    return {one: difference for one, difference in differences.items() if difference is not None}


def _tie_support(cls: type[PreTrainedModel], fields: Mapping[str, Any], head: str | None) -> str:
    """Which values of ``tie_word_embeddings`` the class honours: ``BOTH``, ``TIED_ONLY`` or ``UNTIED_ONLY``."""
    if head is None:
        return "UNTIED_ONLY"
    shared = {}
    for tied in (True, False):
        model = build(cls, {**fields, "tie_word_embeddings": tied})
        shared[tied] = model.get_submodule(head).weight is model.get_input_embeddings().weight
    if shared[True] and not shared[False]:
        return "BOTH"
    return "TIED_ONLY" if shared[False] else "UNTIED_ONLY"


def _head_stored(cls: type[PreTrainedModel], fields: Mapping[str, Any], head: str | None) -> bool:
    """Whether a checkpoint with a tied head has the head and lacks the embedding, instead of the other way round."""
    model = build(cls, {**fields, "tie_word_embeddings": True})
    return f"{head}.weight" in model.all_tied_weights_keys.values()


def _variants(
    cls: type[PreTrainedModel], fields: Mapping[str, Any], input_ids: torch.Tensor
) -> dict[str, dict[str, Any]]:
    """Boolean fields whose other value makes parameters come or go, in settings that the reference can run."""
    own = _names(build(cls, fields))
    variants = {}
    for name, value in fields.items():
        if not isinstance(value, bool) or name == "tie_word_embeddings":
            continue
        try:
            model = build(cls, {**fields, name: not value})
            if _names(model) == own:
                continue
            model(input_ids, labels=input_ids).loss.backward()
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                cls.from_pretrained(folder)(input_ids)
        except Exception:  # a combination that the reference cannot build, train or load
            continue
        variants[name if not value else f"no_{name}"] = {name: not value}
    return variants


def _names(model: PreTrainedModel) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def _table(
    cls: type[PreTrainedModel],
    real: PretrainedConfig,
    fields: Mapping[str, Any],
    variants: Mapping[str, Mapping[str, Any]],
    layers: str | None,
    input_ids: torch.Tensor,
) -> tuple[Table, list[str] | None]:
    """The key map, and the names on disk of the real model's tensors (None where it cannot be built without memory)."""
    untied = {**fields, "tie_word_embeddings": False}
    base = layout(cls, untied)
    model = build(cls, untied)
    joins = {join.native: replace(join, rows_of=rows_of(model, join, input_ids)) for join in base.joins}
    pairs = dict(base.names)
    pairs |= {disk: native for disk, native in layout(cls, fields).names.items() if native not in pairs.values()}
    own = set(pairs.values()) | {name for names in joins for name in names}
    known = set(own)
    only_if: dict[str, str] = {}
    for change in variants.values():
        key = next(iter(change))
        with_it = layout(cls, {**untied, **change})
        after = set(with_it.names.values()) | {name for join in with_it.joins for name in join.native}
        # Against the base alone: what another field brings is not taken away by this one.
        only_if |= dict.fromkeys(after - own if change[key] else own - after, key)
        pairs |= {disk: native for disk, native in with_it.names.items() if native not in known}
        new = [join for join in with_it.joins if join.native[0] not in known]
        if new:
            other = build(cls, {**untied, **change})
            joins |= {join.native: replace(join, rows_of=rows_of(other, join, input_ids)) for join in new}
        known |= after
    sizes = _real_shapes(cls, real)
    table = tabulate(Layout(pairs, list(joins.values())), layers, only_if, sizes)
    return table, None if sizes is None else real_names(table, layers, sizes)


def _real_shapes(cls: type[PreTrainedModel], real: PretrainedConfig) -> dict[str, list[int]] | None:
    """Name to shape of every tensor that the real model stores; None where it cannot be built without memory."""
    try:
        with torch.device("meta"):
            model = cls(real)
            tied = model.all_tied_weights_keys
            shared = {*tied, *(name for name, first in aliases(model).items() if first not in tied)}
            return {name: list(tensor.shape) for name, tensor in model.state_dict().items() if name not in shared}
    except Exception:  # a constructor that computes with values
        return None
