"""What transformers' dense decoders declare and how their checkpoints look, and whether a checkpoint looks like one.

``layouts.json`` is made by ``scripts/make_layout_table.py``.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from onboard.facts._facts import TensorHeader
from onboard.facts._text import few

TABLE = Path(__file__).parent / "layouts.json"
# Buffers that old checkpoints hold: computed from the config, not learned.
_BUFFERS = re.compile(r".*\.(rotary_emb|rotary_embedding)\.inv_freq")
_MOST_SWITCHES = 2


@cache
def layouts() -> Mapping[str, Any]:
    """Model type to what transformers' class of it declares and how its checkpoint looks."""
    found: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))["classes"]
    return found


def header_fit(
    entry: Mapping[str, Any], config: Mapping[str, Any], header: Mapping[str, Kinds]
) -> tuple[str, dict[str, bool], int]:
    """Why the tensors differ, the fields of config.json that would make them the same, and by how many they differ."""
    given = {name: bool(config.get(name, switch["is"])) for name, switch in entry["switches"].items()}
    if given.get("tie_word_embeddings"):
        # Tied checkpoints may hold the head as well.
        header = {name: kind for name, kind in header.items() if name not in entry["tied_leaves_out"]}
    wrong, distance = _difference(_expected(entry, given), header, config, entry)
    if not wrong:
        return "", {}, 0
    # A checkpoint that fits another value of a switch says what config.json should have said.
    for count in range(1, _MOST_SWITCHES + 1):
        for flipped in itertools.combinations(given, count):
            other = {**given, **{name: not given[name] for name in flipped}}
            if not _difference(_expected(entry, other), header, config, entry)[0]:
                return "", {name: other[name] for name in flipped}, distance
    return wrong, {}, distance


def _expected(entry: Mapping[str, Any], given: Mapping[str, bool]) -> dict[str, list[str]]:
    """The tensors of a class with these values of its switches."""
    out = dict(entry["tensors"])
    for name, switch in entry["switches"].items():
        if given[name] != switch["is"]:
            out |= switch["adds"]
    for name, switch in entry["switches"].items():
        if given[name] != switch["is"]:
            for key in switch["removes"]:
                out.pop(key, None)
    return out


def _difference(
    expected: Mapping[str, list[str]], header: Mapping[str, Kinds], config: Mapping[str, Any], entry: Mapping[str, Any]
) -> tuple[str, int]:
    extra, absent = sorted(header.keys() - expected.keys()), sorted(expected.keys() - header.keys())
    if extra or absent:
        parts = [f"the checkpoint has {few(extra)}"] if extra else []
        parts += [f"it lacks {few(absent)}"] if absent else []
        return " and ".join(parts), len(extra) + len(absent)
    sizes = _sizes(config, entry)
    depth = sizes.get("layers")
    for name, found in header.items():
        if found.layers and depth is not None and (len(found.layers) != depth or max(found.layers) != depth - 1):
            return f"{name} is there for {len(found.layers)} layers, and config.json has {depth}", 1
        wanted = [_number(word, sizes) for word in expected[name]]
        for shape in found.shapes:
            if len(shape) != len(wanted) or any(w is not None and w != s for w, s in zip(wanted, shape, strict=True)):
                words = ", ".join(expected[name])
                return f"{name} has the shape {list(shape)}, which is not [{words}] by config.json", 1
    return "", 0


@dataclass(frozen=True, slots=True)
class Kinds:
    """One kind of tensor in a checkpoint: the layers that have it and the shapes that it has."""

    layers: set[int]
    shapes: set[tuple[int, ...]]


def kinds_of(tensors: Sequence[TensorHeader]) -> dict[str, Kinds]:
    """The kinds of tensors of a checkpoint, by the pattern of their names."""
    out: dict[str, Kinds] = {}
    for tensor in tensors:
        if _BUFFERS.fullmatch(tensor.name):
            continue
        layer = re.search(r"\.(\d{1,6})\.", tensor.name)
        pattern = re.sub(r"\.\d+\.", ".{layer}.", tensor.name, count=1)
        kind = out.setdefault(pattern, Kinds(set(), set()))
        kind.shapes.add(tuple(tensor.shape))
        if layer:
            kind.layers.add(int(layer[1]))
    return out


def _sizes(config: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, int]:
    """Sizes by letter, as the class reads them from config.json; those that it cannot know are left out."""

    def of(name: str) -> int | None:
        value = config.get(entry["sizes"].get(name, name))
        value = config.get(name) if value is None else value
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    hidden, heads = of("hidden_size"), of("num_attention_heads")
    found = {
        "V": of("vocab_size"),
        "H": hidden,
        "N": heads,
        "K": of("num_key_value_heads") or heads,
        "D": of("head_dim") or (hidden // heads if hidden and heads else None),
        "F": of("intermediate_size"),
        "layers": of("num_hidden_layers"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _number(word: str, s: Mapping[str, int]) -> int | None:
    """The value of a shape's letters; None where the table's tiny number is all there is, or a size is not given."""
    terms = {
        "2F": lambda: 2 * s["F"],
        "ND": lambda: s["N"] * s["D"],
        "KD": lambda: s["K"] * s["D"],
        "ND+2KD": lambda: (s["N"] + 2 * s["K"]) * s["D"],
        "3ND": lambda: 3 * s["N"] * s["D"],
        "4H": lambda: 4 * s["H"],
    }
    try:
        return terms[word]() if word in terms else s.get(word)
    except KeyError:
        return None
