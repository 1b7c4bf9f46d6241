"""Where each dropout stands: in training every one is caught with what it is given, and gives it back whole.

Nothing is dropped so, and what a dropout is given is compared with what was recorded of the layers' parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 -- its usual name
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from onboard.reference.blocks import Branches, branches, multipliers
from onboard.reference.build import build
from onboard.reference.record import Recording, close, record
from onboard.reference.roles import LINEAR, Roles, is_norm

PLACES = ("embedding", "attention_weights", "attention_output", "mlp_activation", "mlp_output")
_DROPOUTS = (F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)


class Caught(TorchFunctionMode):  # type: ignore[misc]
    """Catches the dropouts that act: the probability and the input of each, whose output is then its input.

    Attributes:
        calls: probability and input; None for dropout on the weights of a fused attention.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[float, torch.Tensor | None]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, or keep what a dropout is given."""
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            named = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
            probability = named.get("p", 0.5)
            if named.get("training", True) and probability:
                self.calls.append((probability, named["input"].clone()))
            return named["input"]
        if func is F.scaled_dot_product_attention and kwargs.get("dropout_p"):
            self.calls.append((kwargs["dropout_p"], None))
            kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


@torch.no_grad()
def explain_dropouts(
    cls: type[PreTrainedModel],
    fields: Mapping[str, Any],
    roles: Roles,
    blocks: Mapping[str, Any],
    ids: torch.Tensor,
) -> dict[str, str | None]:
    """Config key of the dropout at each place; None where there is none.

    A field counts only where all that it drops is at known places, once in every layer, and no other field's. Any other
    stays unplaced: it is live in training and read by nothing, so that only zero is served.
    """
    keys = [
        name
        for name, value in fields.items()
        if "drop" in name and isinstance(value, (int, float)) and not isinstance(value, bool) and "layer" not in name
    ]
    found: dict[str, str | None] = dict.fromkeys(PLACES)
    for key, places in _placed(cls, fields, roles, blocks, ids, keys).items():
        if places and all(found[place] is None for place in places):
            found |= dict.fromkeys(places, key)
    return found


def _placed(
    cls: type[PreTrainedModel],
    fields: Mapping[str, Any],
    roles: Roles,
    blocks: Mapping[str, Any],
    ids: torch.Tensor,
    keys: list[str],
) -> dict[str, list[str]]:
    """Places of each field; told apart by their probabilities where the class takes them all, else one by one."""
    probabilities = {key: 0.125 + index / 64 for index, key in enumerate(keys)}
    try:
        return _caught(cls, {**fields, **probabilities}, roles, blocks, ids, probabilities)
    except Exception:  # the class takes no such probability for one of them
        placed: dict[str, list[str]] = {}
        for key in keys:
            one = {**fields, **dict.fromkeys(keys, 0.0), key: probabilities[key]}
            try:
                placed |= _caught(cls, one, roles, blocks, ids, {key: probabilities[key]})
            except Exception:
                continue
        return placed


def _caught(
    cls: type[PreTrainedModel],
    fields: Mapping[str, Any],
    roles: Roles,
    blocks: Mapping[str, Any],
    ids: torch.Tensor,
    probabilities: Mapping[str, float],
) -> dict[str, list[str]]:
    model = build(cls, dict(fields)).train()
    with Caught() as caught:
        recording, _ = record(model, input_ids=ids)
    depth = len(model.get_submodule(roles.layers))
    layers = []
    for index in range(depth):
        block = blocks["block" if index in roles.attention_layers else "mixer_block"]
        factor = multipliers(model.config)[block["multiplier"]] if block["multiplier"] else 1.0
        layers.append(_Layer.of(model, roles, recording, index, block, factor))
    placed: dict[str, list[str]] = {}
    for key, probability in probabilities.items():
        counts: Counter[str] = Counter()
        for given in (given for one, given in caught.calls if abs(one - probability) < 1e-6):
            counts.update(_places(given, layers))
        times = {"embedding": 1, "attention_weights": len(roles.attention_layers)}
        expected = {place: times.get(place, depth) for place in PLACES if place in counts}
        placed[key] = list(expected) if counts == expected else []
    return placed


@dataclass(frozen=True)
class _Layer:
    """What the dropouts of one layer may be given.

    Args:
        x: the layer's input.
        attention, mlp: the branches, as they are added to the residual stream.
        hidden: the activations before the MLP's last projection, and before a norm there.
        first: whether it is the first layer.
    """

    x: torch.Tensor
    attention: torch.Tensor
    mlp: torch.Tensor
    hidden: torch.Tensor
    factor: float
    first: bool

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        roles: Roles,
        recording: Recording,
        index: int,
        block: Mapping[str, Any],
        factor: float,
    ) -> _Layer:
        layer = branches(model, roles, recording, index)
        path = roles.layer(index)
        hidden = recording[f"{path}.{roles.mlp_linears[-1]}"].x
        for name, call in recording.items():
            inside = name.startswith(f"{path}.") and not isinstance(model.get_submodule(name), LINEAR)
            if inside and torch.equal(call.output, hidden) and is_norm(model.get_submodule(name), call.x, call.output):
                hidden = call.x
        return cls(
            layer.x,
            _added(layer, "post_attention_norm", layer.attention_out, block),
            _added(layer, "post_mlp_norm", layer.mlp_out, block),
            hidden,
            factor,
            index == 0,
        )

    def candidates(self) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
        """Places, and what a dropout there is given."""
        if self.first:
            yield ("embedding",), self.x
        for factor in {1.0, self.factor}:
            yield ("attention_output",), factor * self.attention
            yield ("mlp_output",), factor * self.mlp
        # One dropout on the sum of parallel branches: each value is dropped as often as by one on each branch.
        yield ("attention_output", "mlp_output"), self.attention + self.mlp
        yield ("mlp_activation",), self.hidden


def _added(layer: Branches, place: str, state: torch.Tensor, block: Mapping[str, Any]) -> torch.Tensor:
    """A branch after its norm, unless that norm stands after the addition."""
    if block["norm_after_residual"] or not block[place]:
        return state
    return next((out for x, out in layer.norms.values() if close(x, state) is not None), state)


def _places(given: torch.Tensor | None, layers: list[_Layer]) -> tuple[str, ...]:
    """Where a dropout stands that is given a tensor; ``unknown`` where that is at no known place."""
    if given is None or _is_attention(given, layers[0].x.shape[-2]):
        return ("attention_weights",)
    for layer in layers:
        for places, tensor in layer.candidates():
            if given.numel() == tensor.numel() and close(given.reshape(tensor.shape), tensor) is not None:
                return places
    return ("unknown",)


def _is_attention(given: torch.Tensor, length: int) -> bool:
    """Whether rows are causal weights that sum to one, or to less where a sink takes the rest."""
    if given.ndim < 3 or given.shape[-2:] != (length, length):
        return False
    sums = given.sum(-1)
    causal = not given.triu(1).any()
    return causal and bool((given >= 0).all()) and bool((sums <= 1 + 1e-4).all()) and bool((sums > 0).any())
