"""Which config fields the reference really honours: change one, and see whether its output or its parameters change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from onboard.reference.build import build

# Their effect is what the hypotheses explain: sizes, and what has a structure of its own.
_EXPLAINED = frozenset(
    (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "num_hidden_layers",
        "vocab_size",
        "head_dim",
        "max_position_embeddings",
        "original_max_position_embeddings",
        "rope_parameters",
        "layer_types",
        "tie_word_embeddings",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
    )
)


def live_fields(
    cls: type[PreTrainedModel], fields: Mapping[str, Any], input_ids: torch.Tensor
) -> dict[str, dict[str, Any]]:
    """Vary every field by itself.

    Args:
        cls: the reference's class.
        fields: constructor arguments of the tiny config.
        input_ids: ``[1, S]``.

    Returns:
        Field name to ``{"effect", "added", "removed", "other"}`` for those with an effect, ``other`` the value that
        showed it: ``logits`` (the output changes),
        ``parameters`` (parameters appear or vanish), ``training`` (only in training mode: a dropout) or ``unvaried``
        (the reference took no other value that was tried, so nothing is known).
    """
    renamed = cls.config_class.attribute_map
    explained = _EXPLAINED | {renamed[name] for name in _EXPLAINED if name in renamed}
    base_parameters, base_logits = _run(cls, fields, input_ids)
    live: dict[str, dict[str, Any]] = {}
    dropouts = {name: 0.0 for name, value in fields.items() if _is_dropout(name) and isinstance(value, (int, float))}
    for name, value in fields.items():
        if name in explained:
            continue
        if _is_dropout(name):
            if _drops(cls, {**fields, **dropouts, name: 0.5}, input_ids, base_logits):
                live[name] = {"effect": "training", "added": [], "removed": [], "other": 0.5}
            continue
        varied = False
        for other in _others(value):
            try:
                parameters, logits = _run(cls, {**fields, name: other}, input_ids)
            except Exception:
                continue
            varied = True
            added, removed = sorted(parameters - base_parameters), sorted(base_parameters - parameters)
            if added or removed:
                live[name] = {"effect": "parameters", "added": added, "removed": removed, "other": other}
            elif not torch.equal(logits, base_logits):
                live[name] = {"effect": "logits", "added": [], "removed": [], "other": other}
            break
        if not varied:
            live[name] = {"effect": "unvaried", "added": [], "removed": []}
    return live


def _is_dropout(name: str) -> bool:
    return "dropout" in name or "pdrop" in name or name.endswith(("_drop", "layerdrop"))


def _others(value: Any) -> list[Any]:
    """Values to try in place of one; a field that holds a list, a dict or a name has a hypothesis of its own."""
    if isinstance(value, bool):
        return [not value]
    if value is None:
        return [2.0, 3, True]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [1.5 * value if value else 0.5]
    return []


@torch.no_grad()
def _run(
    cls: type[PreTrainedModel], fields: Mapping[str, Any], input_ids: torch.Tensor
) -> tuple[set[str], torch.Tensor]:
    model = build(cls, fields)
    return {name for name, _ in model.named_parameters()}, model(input_ids, use_cache=False).logits


@torch.no_grad()
def _drops(cls: type[PreTrainedModel], fields: Mapping[str, Any], input_ids: torch.Tensor, base: torch.Tensor) -> bool:
    torch.manual_seed(0)
    try:
        model = build(cls, fields)
    except ValueError:  # a dropout that the class itself refuses: whoever sets it expects one
        return True
    return not torch.allclose(model.train()(input_ids, use_cache=False).logits, base)
