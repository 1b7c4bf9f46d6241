"""The checkpoint's headers against the key map: every tensor that is published has a row, and every row its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from onboard.spec.arch import ArchSpec, ReviewItem

_SHOWN = 5


def compare_headers(spec: ArchSpec, names: Iterable[str], biases_on: Sequence[str] = ()) -> tuple[ReviewItem, ...]:
    """What a checkpoint holds that the key map does not, and the other way round.

    Args:
        spec: the architecture, with its key map.
        names: of the checkpoint's tensors, from its headers.
        biases_on: config fields that are true, of those that a row of the key map depends on.

    Returns:
        One item for each kind of tensor that is not accounted for; empty where all are.
    """
    ignored = [re.escape(item.disk).replace(r"\{layer\}", r"\d+") for item in spec.checkpoint.ignored]
    published = {name for name in names if not any(re.fullmatch(pattern, name) for pattern in ignored)}
    tied, layers = spec.tying.tied, spec.dimensions.num_hidden_layers
    head = next((row.disk for row in spec.checkpoint.rows if row.native == ("lm_head.weight",)), None)
    expected = {
        row.disk.replace("{layer}", str(layer))
        for row in spec.checkpoint.rows
        if not row.only_if or row.only_if in biases_on
        for layer in (range(layers) if "{layer}" in row.disk else (0,))
    }
    if tied and head in published:
        expected.discard(head or "")
        published.discard(head or "")
        items = [
            ReviewItem(
                f"tie_word_embeddings is true, but the checkpoint stores {head}.",
                "The adapter refuses it unless it equals the embedding; look which of the two is right.",
            )
        ]
    else:
        items = []
        if tied and head:
            expected.discard(head)
    items += [
        ReviewItem(
            f"The checkpoint has {kind}, which KEY_MAP does not map.",
            "Loading is refused by name until it is mapped or dropped on purpose.",
        )
        for kind in _kinds(published - expected)
    ]
    items += [
        ReviewItem(f"KEY_MAP expects {kind}, which the checkpoint does not have.", "Loading is refused by name.")
        for kind in _kinds(expected - published)
    ]
    return tuple(items)


def _kinds(names: set[str]) -> list[str]:
    """Patterns of tensor names, each layer index replaced, the first few and how many more."""
    kinds = sorted({re.sub(r"\.\d+(?=\.|$)", ".{layer}", name, count=1) for name in names})
    shown = kinds[:_SHOWN]
    return shown + ([f"{len(kinds) - _SHOWN} more kinds of tensors"] if len(kinds) > _SHOWN else [])
