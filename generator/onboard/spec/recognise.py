"""A model that transformers has no class for, and that is one of its classes under another name.

It is compared with every dense decoder of transformers by what its config.json declares and by the tensors of its
checkpoint (``layouts.json``, made by ``scripts/make_layout_table.py``). A class fits when

- the checkpoint holds exactly the tensors of that class, in shapes that follow from the config's own sizes, and
- config.json gives every size that the class needs, and has no key that the class does not know and that may matter.

Where no checkpoint was seen the second condition stands alone, and the inference is as weak as that; everything that is
inferred is listed, as :class:`Unproven`, for the reviewer.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from onboard.errors import Unsupported
from onboard.facts._facts import TensorHeader
from onboard.facts._text import few, shown
from onboard.spec.arch import IgnoredKey
from onboard.spec.keys import ALIASES, find
from onboard.spec.review import HARMLESS, unknown_keys

TABLE = Path(__file__).parent / "layouts.json"
# Buffers that old checkpoints hold: computed from the config, not learned.
_BUFFERS = re.compile(r".*\.(rotary_emb|rotary_embedding)\.inv_freq")
# Keys of a config.json that every class with rotary parameters reads into them.
_IN_ROPE = frozenset(("rope_theta", "rope_scaling", "partial_rotary_factor"))
_MOST_SWITCHES = 2


@dataclass(frozen=True, slots=True)
class Unproven:
    """Something that had no reference to be held against: what, why, and what a reviewer can do about it."""

    what: str
    why: str
    do: str

    def as_json(self) -> dict[str, str]:
        """An entry of ``unproven`` in the JSON of ``onboard new``."""
        return {"what": self.what, "why": self.why, "do": self.do}


@dataclass(frozen=True, slots=True)
class Recognised:
    """The class that an architecture was recognised as.

    Attributes:
        architecture, model_type, config_class: transformers' names.
        why: how it was recognised, a sentence without its full stop.
        ignored: tensors of its checkpoint that the class has not and that no forward pass needs.
        unproven: what the inference rests on.
    """

    architecture: str
    model_type: str
    config_class: str
    why: str
    ignored: tuple[IgnoredKey, ...]
    unproven: tuple[Unproven, ...]


@dataclass(frozen=True, slots=True)
class _Fit:
    """How one class compares.

    Attributes:
        names: why the tensors differ; empty where they are the same, or where no checkpoint was seen.
        switches: fields that would have to be added to config.json for the tensors to be the same.
        missing: sizes that config.json does not give.
        unknown: its keys that the class does not know and that may matter.
        respelt: its keys that the class has under another name, and that name.
        off: its keys that the class does not know and that are switched off.
        aside: its keys about further layers that predict more tokens, which no forward pass needs.
        distance: number of kinds of tensors that differ.
        rank: what decides between classes that fit; the smallest wins.
    """

    model_type: str
    names: str
    switches: Mapping[str, bool]
    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    respelt: Mapping[str, str]
    off: tuple[str, ...]
    aside: tuple[str, ...]
    distance: int
    rank: tuple[Any, ...]

    @property
    def fits(self) -> bool:
        return not (self.names or self.switches or self.missing or self.unknown or self.respelt)


@cache
def layouts() -> Mapping[str, Any]:
    """Model type to what transformers' class of it declares and how its checkpoint looks."""
    found: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))["classes"]
    return found


def recognise(
    config: Mapping[str, Any], architecture: str, tensors: Sequence[TensorHeader] | None, no_tensors_because: str | None
) -> Recognised:
    """The class of transformers that a model is, by its config and its checkpoint's header.

    Args:
        config: the decoder's part of config.json.
        architecture: its name, for messages and for spellings that differ in case alone.
        tensors: the checkpoint's tensors, None where none was seen.
        no_tensors_because: why.

    Raises:
        Unsupported: none fits, with what came nearest and what speaks against it.
    """
    header = _patterns(tensors) if tensors is not None else None
    ignored = [name for name in header or () if _predicts_more(name)] if _says_it_predicts_more(config) else []
    if header is not None:
        header = {name: kind for name, kind in header.items() if name not in ignored}
    fits = [_compare(name, entry, config, architecture, header) for name, entry in layouts().items()]
    found = sorted((fit for fit in fits if fit.fits), key=lambda fit: fit.rank)
    if not found:
        raise _refusal(fits, architecture, config, header)
    best, others = found[0], found[1:]
    entry = layouts()[best.model_type]
    if header is not None:
        how = f"its checkpoint holds exactly the {len(header)} kinds of tensors of {entry['architecture']}"
        why = f"{how}, in the shapes that its config.json gives, and config.json has no key that speaks against it"
    else:
        why = f"the keys of config.json are those of {entry['config_class']}; no checkpoint was seen"
    unproven = (
        _whole(architecture, entry, config, why),
        *_unseen(header, no_tensors_because, entry),
        *_ambiguous(entry, others, header is not None),
        *_switched_off(best, entry, config),
        *_left_out(best),
    )
    dropped = tuple(IgnoredKey(name, "predicts further tokens; the model does not") for name in ignored)
    return Recognised(entry["architecture"], best.model_type, entry["config_class"], why, dropped, unproven)


def _predicts_more(name: str) -> bool:
    """Whether a tensor belongs to layers of multi-token prediction, by its name."""
    return "mtp" in re.split(r"[._]", name.lower())


def _says_it_predicts_more(config: Mapping[str, Any]) -> bool:
    return bool((found := find(config, "num_nextn_predict_layers")) and found.value)


def defaults_used(
    config: Mapping[str, Any], config_class: str, read: Iterable[str], values: Mapping[str, Any]
) -> list[Unproven]:
    """Fields that generated code reads and config.json does not give: the recognised class's default is a guess.

    Args:
        config: the decoder's part of config.json.
        config_class: of the recognised class.
        read: fields that the generated code reads.
        values: what the config class made of the file.
    """
    absent = [name for name in sorted(set(read)) if name not in config and values.get(name) is not None]
    # Old files say these under other names, which the config class reads.
    absent = [name for name in absent if not any(config.get(key) is not None for key in ALIASES.get(name, ()))]
    if not absent:
        return []
    given = ", ".join(f"{name}={shown(repr(values[name]), 40)}" for name in absent)
    return [
        Unproven(
            f"Values that config.json does not give: {given}.",
            f"They are defaults of {config_class}; the original code may have others.",
            "Look them up in the original configuration class, and write them into config.json where they differ.",
        )
    ]


def by_model_type(architecture: str, reference_class: str, config: Mapping[str, Any]) -> list[Unproven]:
    """What is unproven where transformers has no class of the name, but one of the ``model_type``."""
    if architecture.lower() == reference_class.lower():
        return []
    code = _remote_class(config)
    return [
        Unproven(
            f"That {architecture} computes what {reference_class} computes.",
            f"transformers has no class of this name; its model_type {config.get('model_type')!r} is that class's.",
            f"Compare its logits with those of {code or 'the original code'} on a few prompts.",
        )
    ]


def _compare(
    model_type: str,
    entry: Mapping[str, Any],
    config: Mapping[str, Any],
    architecture: str,
    header: Mapping[str, Any] | None,
) -> _Fit:
    known = {*entry["fields"], *entry["attribute_map"]} | (_IN_ROPE if "rope_parameters" in entry["fields"] else set())
    keys = [key for key in unknown_keys(config, known) if not _is_note(key)]
    respelt, unknown, off, aside = {}, [], [], []
    for key in keys:
        value = config[key]
        own = _own_spelling(key, entry)
        if key in ALIASES["num_nextn_predict_layers"]:
            aside.append(key)
        elif (
            (key.endswith("bias") and isinstance(value, bool) and value == _has_bias(entry))
            or (own and config.get(own) == value)
            or _is_computed(key, value, config)
        ):
            continue
        elif _is_off(key, value):
            off.append(key)
        elif own and config.get(own) is None:
            respelt[key] = own
        else:
            unknown.append(key)
    missing = tuple(
        key
        for name, key in entry["sizes"].items()
        if config.get(key) is None and config.get(name) is None and name not in entry["computed"]
        if key not in respelt.values()
    )
    names, switches, distance = "", {}, 0
    if header is not None:
        names, switches, distance = _header_fit(entry, config, header)
    rank = _rank(model_type, entry, config, architecture, len(off))
    return _Fit(model_type, names, switches, missing, tuple(unknown), respelt, tuple(off), tuple(aside), distance, rank)


def _rank(
    model_type: str, entry: Mapping[str, Any], config: Mapping[str, Any], architecture: str, off: int
) -> tuple[Any, ...]:
    """What decides between classes that fit, in this order.

    The same name but for case; the activation that the class has by default; few features that are on by default and
    that the file does not mention; few kinds of tensors; a formula that many classes share; many of the file's keys.
    """
    fields = entry["fields"]
    silent = [
        name
        for name in fields
        if name not in config and name not in HARMLESS and name not in entry["computed"] and not _is_note(name)
    ]
    on = [name for name in silent if fields[name] not in (None, False, 0, 0.0, 1, 1.0) and name != "rope_parameters"]
    act = _own_spelling("hidden_act", entry)
    stated = find(config, "hidden_act")
    other_act = act is not None and stated is not None and stated.value != fields[act]
    weights = [name for name in entry["tensors"] if not name.endswith(".bias")]
    sharing = sum(one["formula"] == entry["formula"] for one in layouts().values()) if entry["formula"] else 0
    mentioned = sum(name in fields for name in config)
    return (
        architecture.lower() != entry["architecture"].lower(),
        other_act,
        len(on),
        off,
        len(weights),
        len(entry["tensors"]),
        -sharing,
        -mentioned,
        len(silent),
        model_type,
    )


def _is_computed(key: str, value: Any, config: Mapping[str, Any]) -> bool:
    """Whether a key says the head size that a class without such a field computes."""
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return key == "head_dim" and isinstance(width, int) and isinstance(heads, int) and value * heads == width


def _is_note(key: str) -> bool:
    """Whether a key is a note of some program, or names a token of the vocabulary."""
    return key.startswith("_") or key.endswith(("token", "token_id", "token_ids"))


def _is_off(key: str, value: Any) -> bool:
    """Whether a key's value says that there is nothing to do: a switch, a factor of one."""
    factor = set(re.split(r"[_.]", key)) & {"factor", "scale", "multiplier", "scaling"}
    return value in (False, 0, "", [], {}) or bool(factor and value == 1)


def _own_spelling(key: str, entry: Mapping[str, Any]) -> str | None:
    """The name that a class has for what a key means, None where the key has no known meaning or the class no field."""
    for spellings in ALIASES.values():
        if key in spellings:
            own = entry["fields"].keys() | (_IN_ROPE if "rope_parameters" in entry["fields"] else frozenset())
            return next((name for name in spellings if name in own), None)
    return None


def _has_bias(entry: Mapping[str, Any]) -> bool:
    return any(name.endswith("_proj.bias") for name in entry["tensors"])


def _header_fit(
    entry: Mapping[str, Any], config: Mapping[str, Any], header: Mapping[str, Any]
) -> tuple[str, dict[str, bool], int]:
    """Why the tensors differ, the fields of config.json that would make them the same, and by how many they differ."""
    given = {name: bool(config.get(name, switch["is"])) for name, switch in entry["switches"].items()}
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
    expected: Mapping[str, list[str]], header: Mapping[str, Any], config: Mapping[str, Any], entry: Mapping[str, Any]
) -> tuple[str, int]:
    extra, absent = sorted(header.keys() - expected.keys()), sorted(expected.keys() - header.keys())
    if extra or absent:
        parts = [f"the checkpoint has {few(extra)}"] if extra else []
        parts += [f"it lacks {few(absent)}"] if absent else []
        return " and ".join(parts), len(extra) + len(absent)
    sizes = _sizes(config, entry)
    depth = sizes.get("layers")
    for name, found in header.items():
        if found.layers and depth is not None and found.layers != set(range(depth)):
            return f"{name} is there for {len(found.layers)} layers, and config.json has {depth}", 1
        wanted = [_number(word, sizes) for word in expected[name]]
        for shape in found.shapes:
            if len(shape) != len(wanted) or any(w is not None and w != s for w, s in zip(wanted, shape, strict=True)):
                words = ", ".join(expected[name])
                return f"{name} has the shape {list(shape)}, which is not [{words}] by config.json", 1
    return "", 0


@dataclass(frozen=True, slots=True)
class _Kind:
    """One kind of tensor in a checkpoint: the layers that have it and the shapes that it has."""

    layers: set[int]
    shapes: set[tuple[int, ...]]


def _patterns(tensors: Sequence[TensorHeader]) -> dict[str, _Kind]:
    out: dict[str, _Kind] = {}
    for tensor in tensors:
        if _BUFFERS.fullmatch(tensor.name):
            continue
        layer = re.search(r"\.(\d{1,6})\.", tensor.name)
        pattern = re.sub(r"\.\d+\.", ".{layer}.", tensor.name, count=1)
        kind = out.setdefault(pattern, _Kind(set(), set()))
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


def _whole(architecture: str, entry: Mapping[str, Any], config: Mapping[str, Any], why: str) -> Unproven:
    code = _remote_class(config)
    return Unproven(
        f"That {architecture} computes what {entry['architecture']} computes.",
        f"transformers has no class for it. It was recognised: {why}.",
        f"Compare its logits with those of {code or 'the original code'} on a few prompts"
        + (", or run onboard again with --trust-remote-code." if code else "."),
    )


def _unseen(header: Mapping[str, Any] | None, because: str | None, entry: Mapping[str, Any]) -> list[Unproven]:
    if header is not None:
        return []
    return [
        Unproven(
            "The names, the layout and the biases of the checkpoint's tensors.",
            f"No header of a checkpoint was read ({because or 'none was given'}); KEY_MAP has the names of "
            f"{entry['architecture']}. Other names are refused when loading.",
            "Give onboard the Hub id or the directory of the checkpoint instead of a config.json.",
        )
    ]


def _ambiguous(entry: Mapping[str, Any], others: Sequence[_Fit], seen: bool) -> list[Unproven]:
    if not others:
        return []
    names = [layouts()[fit.model_type]["architecture"] for fit in others]
    what = "tensors and config keys" if seen else "config keys"
    return [
        Unproven(
            f"Which of the classes with the same {what} it is: also {few(names)}.",
            f"{entry['architecture']} was taken because config.json says least that is particular to the others: it is "
            "the plainest whose fields it gives.",
            "Look in the original code for what those others do differently.",
        )
    ]


def _switched_off(fit: _Fit, entry: Mapping[str, Any], config: Mapping[str, Any]) -> list[Unproven]:
    if not fit.off:
        return []
    listed = ", ".join(f"{shown(key)}={shown(repr(config[key]), 20)}" for key in fit.off)
    return [
        Unproven(
            f"That these keys of config.json mean nothing at their values: {listed}.",
            f"{entry['config_class']} does not know them; they were read as switches that are off.",
            "Look what the original code does with them.",
        )
    ]


def _left_out(fit: _Fit) -> list[Unproven]:
    if not fit.aside:
        return []
    return [
        Unproven(
            f"The layers that predict more tokens than the next ({few(fit.aside)}): they are left out.",
            "The class has none; a forward pass without them gives the same logits.",
            "Train without them, or add them by hand.",
        )
    ]


def _refusal(
    fits: Sequence[_Fit], architecture: str, config: Mapping[str, Any], header: Mapping[str, Any] | None
) -> Unsupported:
    def against(fit: _Fit) -> tuple[Any, ...]:
        hopeless = bool(fit.names)
        open_ = len(fit.unknown) + len(fit.missing) + len(fit.switches)
        return (hopeless, fit.distance, open_, len(fit.respelt), fit.rank)

    near = min(fits, key=against)
    entry = layouts()[near.model_type]
    reasons, cures = [], []
    if near.names:
        reasons.append(near.names)
    if near.missing:
        reasons.append(f"config.json does not give {few(near.missing)}")
    if near.unknown:
        keys = [f"{key}={shown(repr(config[key]), 20)}" for key in near.unknown]
        reasons.append(f"{entry['config_class']} does not know {few(keys)}")
    if near.switches:
        values = ", ".join(f"{name}: {str(value).lower()}" for name, value in near.switches.items())
        reasons.append(f"the checkpoint's tensors fit {values}, which config.json does not say")
        cures.append(f"If that is right, write {values} into a copy of config.json.")
    if near.respelt:
        listed = ", ".join(f"{shown(key)} as {name}" for key, name in near.respelt.items())
        reasons.append(f"config.json spells otherwise what it reads ({few(near.respelt)})")
        cures.append(f"If it is that class, write {listed} in a copy of config.json.")
    code = _remote_class(config)
    if code:
        cures.append(f"--trust-remote-code runs {code} as the reference, in a process of its own.")
    if header is None:
        cures.append("A Hub id or a directory with the checkpoint tells more than a config.json.")
    return Unsupported(
        f"transformers has no class for {shown(architecture)}, and it is not one of its classes under another name.",
        f"{entry['architecture']} comes nearest, but {'; '.join(reasons)}.",
        " ".join(cures) or "If a newer transformers has the class, upgrade it.",
        code="unsupported.no_reference",
    )


def _remote_class(config: Mapping[str, Any]) -> str | None:
    """The class of the model's own code, as ``auto_map`` names it, for messages."""
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, Mapping):
        return None
    for key in ("AutoModelForCausalLM", "AutoModel"):
        if isinstance(name := auto_map.get(key), str):
            return shown(name)
    return None
