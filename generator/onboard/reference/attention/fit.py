"""The search: which setting of all hypotheses reproduces an attention, layer by layer.

What is compared is what the output projection takes, as recorded: neither a residual nor a dropout after it matters.
What layers share (projections, norms, scale ...) must be the same in every layer; whether a layer rotates and whether
it has a window is its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig, PreTrainedModel

from onboard.reference.attention import expressions
from onboard.reference.attention.evidence import Evidence, read_layer
from onboard.reference.attention.expressions import Expression
from onboard.reference.attention.projections import GATE, Heads, Layout, first_value_fits, layouts
from onboard.reference.attention.qk_norms import QKNormFit, qk_norm_candidates
from onboard.reference.attention.rotations import (
    ROTATIONS,
    Frequencies,
    Rotation,
    frequencies,
    table_difference,
)
from onboard.reference.attention.scores import (
    AlibiFit,
    QueryScale,
    Window,
    alibi_candidates,
    mask,
    mix,
    products,
    query_scale_candidates,
    window_candidates,
)
from onboard.reference.meanings import read
from onboard.reference.record import Recording, close
from onboard.reference.roles import Roles, Unexplained, attention_layers


@dataclass(frozen=True)
class Setting:
    """One combination of hypotheses; expressions of equal value stand together."""

    layout: Layout
    qk_norm: QKNormFit | None
    rotation: Rotation | None
    angles: Frequencies | None
    scale: tuple[Expression, ...]
    soft_cap: tuple[Expression, ...]
    alibi: AlibiFit | None
    query_scale: QueryScale | None
    window: Window | None

    @property
    def shared(self) -> tuple[str, ...]:
        """What must be the same in all layers, as text."""
        return (
            str(self.layout),
            self.qk_norm.described() if self.qk_norm else "",
            self.scale[0].text,
            self.soft_cap[0].text if self.soft_cap else "",
            f"{self.alibi.bias_max[0].text} {self.alibi.scaled}" if self.alibi else "",
            self.query_scale.text if self.query_scale else "",
        )

    @property
    def own(self) -> tuple[str, str]:
        """What may differ between layers, as text."""
        turned = f"{self.rotation} {self.angles.dim}" if self.rotation and self.angles else ""
        return turned, str(self.window)


@dataclass(frozen=True)
class Fit:
    """What reproduced the attention of the layer `index`, to which difference."""

    setting: Setting
    evidence: Evidence
    difference: float
    index: int


@torch.no_grad()
def fit_layers(model: PreTrainedModel, roles: Roles, recording: Recording, like: Setting | None = None) -> list[Fit]:
    """Find the setting of every layer.

    Args:
        model: the tiny reference.
        roles: its parts.
        recording: of a run longer than its window.
        like: a setting of the same model with another rotation, window or pattern of layers.

    Raises:
        Unexplained: a layer that no setting reproduces, or several do.
    """
    depth = len(model.get_submodule(roles.layers))
    layers = attention_layers(model.config, depth)
    allowed: set[tuple[str, ...]] | None = {like.shared} if like else None
    found: list[list[Fit]] = []
    for index in layers:
        search = Search(model.config, read_layer(model, roles, recording, index), index, layers, depth)
        fits = search.run(allowed)
        if not fits:
            raise Unexplained("attention", search.failure(allowed is not None), search.nearest())
        allowed = {fit.setting.shared for fit in fits}
        found.append(fits)
    return [_only(fits, found, allowed or set()) for fits in found]


def _only(fits: list[Fit], all_fits: list[list[Fit]], allowed: set[tuple[str, ...]]) -> Fit:
    """The one fit of a layer that agrees with all layers."""
    left = [fit for fit in fits if fit.setting.shared in allowed]
    if not any(fit.setting.rotation for others in all_fits for fit in others):
        # Where nothing rotates there is no before and after.
        left = [fit for fit in left if not (fit.setting.qk_norm and fit.setting.qk_norm.after_rope)]
    if len(left) != 1:
        differing = sorted({" ".join((*fit.setting.shared[1:], *fit.setting.own)) for fit in left})
        raise Unexplained(
            "attention",
            f"{len(left)} candidates fit {left[0].evidence.path}, the input does not tell them apart",
            tuple(differing[:4]),
        )
    return left[0]


class Search:
    """All settings against one layer.

    Args:
        config: the tiny config.
        evidence: what was recorded of the layer.
        index: the layer's number.
        layers: the layers that have an attention.
        depth: how many layers there are.
    """

    def __init__(
        self, config: PretrainedConfig, evidence: Evidence, index: int, layers: tuple[int, ...], depth: int
    ) -> None:
        self.config, self.evidence, self.index, self.layers = config, evidence, index, layers
        types = read(config, "layer_types")
        self.layer_type = types[index] if isinstance(types, list) and len(types) == depth else None
        self.length = evidence.mixed.shape[1]
        self._near: list[tuple[float, str]] = []
        self._values_fit = False

    def run(self, allowed: set[tuple[str, ...]] | None) -> list[Fit]:
        """The settings that fit.

        Args:
            allowed: what earlier layers share; None where this is the first.
        """
        fits = []
        for setting, scores, states in self._scores(allowed):
            sinks = self.evidence.sinks[1] if self.evidence.sinks else None
            mixed = mix(scores, states["v"], mask(self.length, setting.window), sinks)
            if setting.layout.gate:
                mixed = setting.layout.gate(mixed, states[GATE])
            difference = close(mixed, self.evidence.mixed)
            if difference is not None:
                fits.append(Fit(setting, self.evidence, difference, self.index))
            elif not fits:
                self._note(setting, (mixed - self.evidence.mixed).abs().max().item())
        return fits

    def failure(self, others: bool) -> str:
        """Why nothing fits, in one line."""
        path = self.evidence.path
        if not self._values_fit:
            return f"no projection of {path} gives the first position's output as its value"
        if others:
            return f"nothing that explains the layers before it reproduces {path}"
        return f"no candidate reproduces {path}"

    def nearest(self) -> tuple[str, ...]:
        """The candidates that came nearest."""
        return tuple(f"{text}: {difference:.2g}" for difference, text in sorted(self._near)[:3])

    def _note(self, setting: Setting, difference: float) -> None:
        self._near.append((difference, ", ".join(part for part in (*setting.shared[1:], *setting.own) if part)))
        self._near = sorted(self._near)[:3]

    def _scores(
        self, allowed: set[tuple[str, ...]] | None
    ) -> Iterator[tuple[Setting, torch.Tensor, dict[str, torch.Tensor]]]:
        """Every setting with its scores ``[B, N, S, S]``, and its values and gates."""
        for layout, qk_norm, rotation, angles in self._projected():
            states = self._states(layout, qk_norm, rotation, angles)
            if states is None:
                continue
            raw = products(states["q"], states["k"])
            for scale, soft_cap, alibi, query_scale in self._score_options(layout.heads, rotation):
                for window in (None, *window_candidates(self.config)):
                    setting = Setting(layout, qk_norm, rotation, angles, scale, soft_cap, alibi, query_scale, window)
                    if allowed is None or setting.shared in allowed:
                        yield setting, self._scaled(raw, setting), states

    def _projected(self) -> Iterator[tuple[Layout, QKNormFit | None, Rotation | None, Frequencies | None]]:
        evidence = self.evidence
        for heads in self._heads():
            found = [
                layout
                for layout in layouts(evidence.linears, evidence.widths, heads)
                if first_value_fits(layout, evidence.outputs, evidence.mixed, evidence.sinks is not None)
            ]
            if not found:
                continue
            self._values_fit = True
            norms = qk_norm_candidates(evidence, self.config, heads)
            angles = self._angles(heads.dim)
            turns = [(None, None), *itertools.product(ROTATIONS, angles)]
            for layout, norm, (rotation, angle) in itertools.product(found, norms, turns):
                yield layout, norm, rotation, angle

    def _heads(self) -> list[Heads]:
        numbers = itertools.product(
            *(
                sorted({int(one.value) for one in candidates(self.config)})
                for candidates in (expressions.num_heads, expressions.num_key_value_heads, expressions.head_dim)
            )
        )
        width = self.evidence.mixed.shape[-1]
        found = [Heads(n, k, d) for n, k, d in numbers if n * d == width and n % k == 0]
        if self.evidence.sinks is None:
            return found
        return [heads for heads in found if heads.queries == len(self.evidence.sinks[1])]

    def _angles(self, head_dim: int) -> list[Frequencies]:
        found = frequencies(self.config, head_dim, self.length, self.layer_type)
        table = self.evidence.table
        if table is None:
            return found
        fitting = [one for one in found if table_difference(one, table) is not None]
        if not fitting:
            raise Unexplained(
                "rope",
                f"{', '.join(one.rope_type for one in found) or 'nothing'} with {read(self.config, 'rope_parameters')} "
                f"does not give the table that {self.evidence.path} gets",
            )
        return fitting

    def _states(
        self, layout: Layout, norm: QKNormFit | None, rotation: Rotation | None, angles: Frequencies | None
    ) -> dict[str, torch.Tensor] | None:
        """Queries and keys as the scores take them, and values, ``[B, S, heads, D]``.

        None where the norms took something else: the products alone do not tell the weights of two norms apart.
        """
        states = layout.split(self.evidence.outputs)
        table = angles.table(self.length) if angles else None
        for part in ("q", "k"):
            x = states[part]
            if rotation and table and (norm is None or norm.after_rope):
                x = rotation(x, table)
            if norm:
                if not norm.takes(part, x):
                    return None
                x = norm(part, x)
            if rotation and table and norm and not norm.after_rope:
                x = rotation(x, table)
            states[part] = x
        return states

    def _score_options(
        self, heads: Heads, rotation: Rotation | None
    ) -> Iterator[tuple[tuple[Expression, ...], tuple[Expression, ...], AlibiFit | None, QueryScale | None]]:
        scales = expressions.by_value(expressions.scales(self.config, heads.dim), self.layers).values()
        caps = expressions.by_value(expressions.soft_caps(self.config)).values()
        alibis = [None] if rotation else [None, *alibi_candidates(self.config)]
        options = itertools.product(scales, [[], *caps], alibis, [None, *query_scale_candidates(self.config)])
        for scale, cap, alibi, query_scale in options:
            yield tuple(scale), tuple(cap), alibi, query_scale

    def _scaled(self, raw: torch.Tensor, setting: Setting) -> torch.Tensor:
        scale = setting.scale[0].of_layer(self.index)
        scores = raw * scale
        if setting.query_scale:
            scores = scores * setting.query_scale.factors(self.length)[:, None]
        if setting.soft_cap:
            cap = setting.soft_cap[0].value
            scores = cap * torch.tanh(scores / cap)
        if setting.alibi:
            bias = setting.alibi.bias(setting.layout.heads.queries, self.length)
            scores = scores + (bias * scale if setting.alibi.scaled else bias)
        return scores
