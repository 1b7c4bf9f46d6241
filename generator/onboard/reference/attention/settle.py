"""Which of several expressions of equal value is meant: the tiny config is changed until one is left.

A run at another config is a measurement as the first one is. Every choice keeps the expressions that were right in each
run; where no config that the reference takes tells them apart, the first one stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from onboard.reference.attention import expressions
from onboard.reference.attention.expressions import Expression, constant
from onboard.reference.attention.fit import Fit, fit_layers
from onboard.reference.attention.layers import layer_choices
from onboard.reference.build import build
from onboard.reference.meanings import read, size, spelling
from onboard.reference.record import record
from onboard.reference.roles import Roles, Unexplained
from onboard.reference.tiny import WINDOW
from onboard.spec.keys import ALIASES

Choices = dict[str, dict[str, tuple[str, ...]]]
"""For each thing to be said, the expressions that say it, in order, each with the config fields in it."""


@dataclass
class Reference:
    """The reference, to be run at any config.

    Args:
        cls: its class.
        roles: the parts of its model.
        input_ids: ``[1, S]``, longer than the tiny window.
        implementation: name of the attention implementation in transformers.
    """

    cls: type[PreTrainedModel]
    roles: Roles
    input_ids: torch.Tensor
    implementation: str = "eager"
    _runs: dict[str, Run | None] = field(default_factory=dict)

    def run(self, fields: Mapping[str, Any], like: Fit | None = None) -> Run:
        """Build, run and explain the reference at a config.

        Raises:
            Unexplained: a layer that no setting reproduces, or several do.
        """
        model = build(self.cls, fields, attention=self.implementation)
        recording, _ = record(model, input_ids=self.input_ids)
        return Run(model.config, fit_layers(model, self.roles, recording, like.setting if like else None))

    def run_if_built(self, fields: Mapping[str, Any]) -> Run | None:
        """The same, None where the reference takes no such config.

        Raises:
            Unexplained: it takes it, and a layer is not explained.
        """
        try:
            return self.run(fields)
        except Unexplained:
            raise
        except Exception:
            return None

    def try_run(self, fields: Mapping[str, Any]) -> Run | None:
        """The same, None where the reference cannot be built, run or explained so."""
        key = str(sorted(fields.items(), key=str))
        if key not in self._runs:
            try:
                self._runs[key] = self.run(fields)
            except Exception:
                self._runs[key] = None
        return self._runs[key]


@dataclass(frozen=True)
class Run:
    """What explains every layer of the reference at one config."""

    config: PretrainedConfig
    fits: list[Fit]

    @property
    def depth(self) -> int:
        """How many layers there are, with and without an attention."""
        return size(self.config, "num_hidden_layers") or len(self.fits)

    def numbers(self) -> Choices:
        """Choices of the numbers that all layers share."""
        setting, config = self.fits[0].setting, self.config
        heads = setting.layout.heads
        found = {
            "num_heads": _equal(expressions.num_heads(config), heads.queries),
            "num_key_value_heads": _equal(expressions.num_key_value_heads(config), heads.keys),
            "head_dim": _equal(expressions.head_dim(config), heads.dim),
            "scale": setting.scale,
        }
        if any(len(parts) > 1 for _, parts in setting.layout.parts):
            found["groups"] = _equal(_group_counts(config, setting.layout.groups), setting.layout.groups)
        if setting.soft_cap:
            found["softcap"] = setting.soft_cap
        if setting.alibi:
            found["bias_max"] = setting.alibi.bias_max
        if setting.qk_norm:
            found["qk_norm_eps"] = setting.qk_norm.q.eps
        rotating = [fit.setting.angles for fit in self.fits if fit.setting.angles]
        if rotating and rotating[0].dim:
            found["rope_dim"] = rotating[0].dim
        return {name: {one.text: one.keys for one in candidates} for name, candidates in found.items()}

    def rotating_layers(self) -> Choices:
        """Choices of the layers that rotate."""
        flags = {fit.index: fit.setting.rotation is not None for fit in self.fits}
        return {"rope_layers": {one.text: one.keys for one in layer_choices(flags, self.depth, self.config)}}

    def biased_layers(self) -> Choices:
        """Choices of the layers whose output projection has a bias."""
        flags = {fit.index: fit.evidence.biases[""] for fit in self.fits}
        return {"o_bias_layers": {one.text: one.keys for one in layer_choices(flags, self.depth, self.config)}}

    def windowed_layers(self) -> Choices:
        """Choices of the layers that have a window."""
        flags = {fit.index: fit.setting.window is not None for fit in self.fits}
        choices = [one for one in layer_choices(flags, self.depth, self.config) if " is None or " not in one.text]
        return {"window_layers": {one.text: one.keys for one in choices}}


def settle(choices: list[Choices]) -> Choices:
    """The expressions that were right in every run, in the order of the first."""
    first, *others = choices
    return {
        name: {text: keys for text, keys in texts.items() if all(text in other.get(name, {text}) for other in others)}
        for name, texts in first.items()
    }


def variants(choices: Choices, fields: Mapping[str, Any], config: PretrainedConfig) -> Iterator[list[dict[str, Any]]]:
    """For each field that could tell expressions apart, changes of it, the most telling first.

    Args:
        choices: of one run.
        fields: constructor arguments of its config.
        config: the config.
    """
    done: set[str] = set()
    for texts in choices.values():
        keys = [frozenset(own) for own in texts.values()]
        for key in sorted(frozenset[str]().union(*keys).difference(frozenset.intersection(*keys)) if keys else ()):
            if key not in done:
                done.add(key)
                yield [{**fields, **change} for change in _changes(key, fields, config)]


def _changes(key: str, fields: Mapping[str, Any], config: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """Other values of a field, each with what must change along."""
    value = fields.get(key, read(config, key))
    hidden, heads = (spelling(config, name) or "" for name in ("hidden_size", "num_attention_heads"))
    if key in ALIASES["head_dim"]:
        if value is not None and key in fields:
            yield {key: None}
        share = (read(config, hidden) or 0) // (read(config, heads) or 1)
        yield from ({key: other} for other in (16, 24, 32) if other not in (value, share))
    elif key in ALIASES["sliding_window"]:
        yield {key: None if value is not None else WINDOW}
        kinds = fields.get("layer_types")
        if value is not None and kinds:  # no kind of layer is left that would need it
            yield {key: None, "layer_types": ["full_attention"] * len(kinds)}
    elif isinstance(value, list):
        yield from ({key: other} for other in _other_lists(value))
    elif isinstance(value, bool):
        return
    elif isinstance(value, int):
        for other in (value // 2, 2 * value, value + 2):
            if other > 0:
                yield {key: other}
                if key == heads and hidden in fields:
                    yield {key: other, hidden: fields[hidden] * other // value}
    elif isinstance(value, float):
        yield from ({key: factor * value} for factor in (1.5, 0.5))


def _other_lists(value: list[Any]) -> Iterator[list[Any]]:
    """The same kinds in other layers; where all are of one kind, every second layer is of another one."""
    if len(set(map(str, value))) > 1:
        turned = value[1:] + value[:1]
        yield turned if turned != value else value[::-1]
        return
    if not value:
        return
    others: dict[Any, Any] = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}
    first = value[0]
    other = (
        others.get(first) if isinstance(first, str) else (type(first)(not first) if isinstance(first, int) else None)
    )
    if other is not None:
        yield [other if index % 2 else item for index, item in enumerate(value)]


def _equal(candidates: list[Expression], value: float) -> tuple[Expression, ...]:
    found = tuple(one for one in candidates if one.value == value)
    if not found:
        raise Unexplained("attention", f"no expression of the config has the value {value}")
    return found


def _group_counts(config: PretrainedConfig, groups: int) -> list[Expression]:
    """Groups of a fused projection: one, by key/value head, by head, or a number of the architecture's own."""
    found = [
        constant("1", 1),
        *(one for one in expressions.num_key_value_heads(config) if one.keys),
        *expressions.num_heads(config),
    ]
    if groups > 1:
        found.append(constant(str(groups), groups))
    return list({one.text: one for one in found}.values())
