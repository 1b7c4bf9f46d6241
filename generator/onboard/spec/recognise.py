"""A model that transformers has no class for, and that is one of its classes under another name.

It is compared with every dense decoder of transformers by what its config.json declares and by the tensors of its
checkpoint (``layouts.json``, made by ``scripts/make_layout_table.py``). A class fits when

- the checkpoint holds exactly the tensors of that class, in shapes that follow from the config's own sizes, and
- config.json gives every size that the class needs, and has no key that the class does not know and that may matter.

Where no checkpoint was seen the second condition stands alone, and the inference is as weak as that; everything that is
inferred is listed, as :class:`Unproven`, for the reviewer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onboard.errors import Unsupported
from onboard.facts._facts import TensorHeader
from onboard.facts._text import few, shown
from onboard.spec._names import words
from onboard.spec.arch import IgnoredKey
from onboard.spec.keys import ALIASES, find
from onboard.spec.layouts import Kinds, header_fit, kinds_of, layouts
from onboard.spec.review import HARMLESS, unknown_keys
from onboard.spec.unproven import Unproven, ambiguous, left_out, overridden, remote_class, switched_off, unseen, whole

# Keys of a config.json that every class with rotary parameters reads into them.
_IN_ROPE = frozenset(("rope_theta", "rope_scaling", "partial_rotary_factor"))

_LINEAR_BIASES = frozenset((*ALIASES["attention_bias"], *ALIASES["mlp_bias"]))
_PROJECTIONS = frozenset(
    ("add", "use", "enable", "has", "with", "no", "bias", "attention", "attn", "self", "linear")
).union(
    (
        "q",
        "k",
        "v",
        "o",
        "qkv",
        "query",
        "key",
        "value",
        "out",
        "output",
        "proj",
        "projection",
        "mlp",
        "ffn",
        "fc",
        "dense",
    )
)


@dataclass(frozen=True, slots=True)
class Recognised:
    """The class that an architecture was recognised as.

    Attributes:
        architecture, model_type, config_class: transformers' names.
        why: how it was recognised, a sentence without its full stop.
        overrides: fields that the class needs and that config.json spells otherwise, or that the checkpoint shows.
        respelt: keys of config.json whose values those fields have.
        ignored: tensors of its checkpoint that the class has not and that no forward pass needs.
        unproven: what the inference rests on.
    """

    architecture: str
    model_type: str
    config_class: str
    why: str
    overrides: Mapping[str, Any]
    respelt: tuple[str, ...]
    ignored: tuple[IgnoredKey, ...]
    unproven: tuple[Unproven, ...]


@dataclass(frozen=True, slots=True)
class _Fit:
    """How one class compares.

    Attributes:
        names: why the tensors differ; empty where they are the same, or where no checkpoint was seen.
        switches: fields that config.json does not give and whose values the tensors show.
        against: fields that config.json gives, and the tensors show other values.
        seen: whether there is a checkpoint to tell by.
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
    against: Mapping[str, bool]
    seen: bool
    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    respelt: Mapping[str, str]
    off: tuple[str, ...]
    aside: tuple[str, ...]
    distance: int
    rank: tuple[Any, ...]

    @property
    def fits(self) -> bool:
        differs = self.names or self.against or self.missing or self.unknown
        # Other spellings are guesses, which only a checkpoint's tensors make good.
        return not differs and (self.seen or not self.respelt)


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
    header = kinds_of(tensors) if tensors is not None else None
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
    overrides = {**best.switches, **{own: config[key] for key, own in best.respelt.items()}}
    unproven = (
        whole(architecture, entry, config, why),
        *unseen(header is not None, no_tensors_because, entry),
        *ambiguous(entry, [layouts()[fit.model_type]["architecture"] for fit in others], header is not None),
        *overridden(overrides, best.respelt, entry),
        *switched_off(best.off, entry, config),
        *left_out(best.aside),
    )
    dropped = tuple(IgnoredKey(name, "predicts further tokens; the model does not") for name in ignored)
    return Recognised(
        architecture=entry["architecture"],
        model_type=best.model_type,
        config_class=entry["config_class"],
        why=why,
        overrides=overrides,
        respelt=tuple(best.respelt),
        ignored=dropped,
        unproven=unproven,
    )


def _predicts_more(name: str) -> bool:
    """Whether a tensor belongs to layers of multi-token prediction, by its name."""
    return "mtp" in re.split(r"[._]", name.lower())


def _says_it_predicts_more(config: Mapping[str, Any]) -> bool:
    return bool((found := find(config, "num_nextn_predict_layers")) and found.value)


def _compare(
    model_type: str,
    entry: Mapping[str, Any],
    config: Mapping[str, Any],
    architecture: str,
    header: Mapping[str, Kinds] | None,
) -> _Fit:
    known = {*entry["fields"], *entry["attribute_map"]} | (_IN_ROPE if "rope_parameters" in entry["fields"] else set())
    # Of those that are harmless otherwise: a class that does not rotate has no use for these.
    keys = [key for key in {*unknown_keys(config, known), *(_IN_ROPE - known)} if config.get(key) is not None]
    keys = sorted(key for key in keys if not _is_note(key))
    respelt: dict[str, str] = {}
    unknown, off, aside = [], [], []
    for key in keys:
        value = config[key]
        own = _own_spelling(key, entry)
        if key in ALIASES["num_nextn_predict_layers"]:
            aside.append(key)
        elif _is_of_projections(key) and isinstance(value, bool):
            # The checkpoint's tensors say which biases there are, unless the file speaks of some and it has none.
            there = _has_bias(entry) if header is None else any(name.endswith(".bias") for name in header)
            wanted = value != ("no" in words(key))
            if wanted != there and (wanted or header is None):
                unknown.append(key)
        elif (own and config.get(own) == value) or _is_computed(key, value, config):
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
    if header is None:
        # Without a checkpoint nothing says whether a size of the class's own is there at all.
        own_sizes = [name for name in _silent(entry, config) if type(size := entry["fields"][name]) is int and size > 1]
        missing = (*missing, *(name for name in own_sizes if name not in (*missing, *respelt.values())))
    shown_by_tensors: dict[str, bool] = {}
    names, distance = "", 0
    if header is not None:
        names, shown_by_tensors, distance = header_fit(entry, config, header)
    told = {**config, **{own: config[key] for key, own in respelt.items()}}
    switches = {name: value for name, value in shown_by_tensors.items() if name not in config}
    by_rank = _rank(model_type, entry, told, architecture)
    return _Fit(
        model_type=model_type,
        names=names,
        switches=switches,
        against={name: value for name, value in shown_by_tensors.items() if name in config},
        seen=header is not None,
        missing=missing,
        unknown=tuple(unknown),
        respelt=respelt,
        off=tuple(off),
        aside=tuple(aside),
        distance=distance,
        rank=(by_rank[0], len(respelt), len(switches), *by_rank[1:3], len(off), *by_rank[3:]),
    )


def _rank(model_type: str, entry: Mapping[str, Any], config: Mapping[str, Any], architecture: str) -> tuple[Any, ...]:
    """What decides between classes that fit, in this order.

    The same name but for case; the activation that the class has by default; few features that are on by default and
    that the file does not mention; a formula that many classes share; few kinds of tensors; many of the file's keys.
    """
    fields = entry["fields"]
    silent = _silent(entry, config)
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
        -sharing,
        len(weights),
        len(entry["tensors"]),
        -mentioned,
        len(silent),
        model_type,
    )


def _silent(entry: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Fields of a class that a config does not give and that may matter."""
    return [
        name
        for name in entry["fields"]
        if name not in config and name not in HARMLESS and name not in entry["computed"] and not _is_note(name)
    ]


def _is_computed(key: str, value: Any, config: Mapping[str, Any]) -> bool:
    """Whether a key says the head size that a class without such a field computes."""
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    numbers = all(isinstance(one, int) for one in (value, width, heads))
    return key == "head_dim" and numbers and value * heads == width


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


def _is_of_projections(key: str) -> bool:
    """Whether a key switches biases of linear layers, which are tensors; ALiBi and biases of positions are none."""
    said = words(key)
    return (said[-1:] == ("bias",) and _PROJECTIONS.issuperset(said)) or key in _LINEAR_BIASES


def _has_bias(entry: Mapping[str, Any]) -> bool:
    return any(name.endswith("_proj.bias") for name in entry["tensors"])


def _refusal(
    fits: Sequence[_Fit], architecture: str, config: Mapping[str, Any], header: Mapping[str, Kinds] | None
) -> Unsupported:
    def against(fit: _Fit) -> tuple[Any, ...]:
        hopeless = bool(fit.names)
        open_ = len(fit.unknown) + len(fit.missing) + len(fit.against)
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
    if near.against:
        values = ", ".join(f"{name}: {str(value).lower()}" for name, value in near.against.items())
        reasons.append(f"the checkpoint's tensors fit {values}, and config.json says otherwise")
        cures.append(f"If the tensors are right, write {values} into a copy of config.json.")
    if near.respelt:
        listed = ", ".join(f"{shown(key)} as {name}" for key, name in near.respelt.items())
        reasons.append(f"config.json spells otherwise what it reads ({few(near.respelt)})")
        cures.append(f"If it is that class, write {listed} in a copy of config.json.")
    code = remote_class(config)
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
