"""What had no reference to be held against, in words for the reviewer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onboard.facts._text import few, shown
from onboard.spec.keys import ALIASES, SIZES


@dataclass(frozen=True, slots=True)
class Unproven:
    """Something that had no reference to be held against: what, why, and what a reviewer can do about it."""

    what: str
    why: str
    do: str

    def as_json(self) -> dict[str, str]:
        """An entry of ``unproven`` in the JSON of ``onboard new``."""
        return {"what": self.what, "why": self.why, "do": self.do}


def whole(architecture: str, entry: Mapping[str, Any], config: Mapping[str, Any], why: str) -> Unproven:
    """The inference itself."""
    code = remote_class(config)
    return Unproven(
        f"That {architecture} computes what {entry['architecture']} computes.",
        f"transformers has no class for it. It was recognised: {why}.",
        f"Compare its logits with those of {code or 'the original code'} on a few prompts"
        + (", or run onboard again with --trust-remote-code." if code else "."),
    )


def unseen(seen: bool, because: str | None, entry: Mapping[str, Any]) -> list[Unproven]:
    """The layout of a checkpoint that was not seen."""
    if seen:
        return []
    return [
        Unproven(
            "The names, the layout and the biases of the checkpoint's tensors.",
            f"No header of a checkpoint was read ({because or 'none was given'}); KEY_MAP has the names of "
            f"{entry['architecture']}. Other names are refused when loading.",
            "Give onboard the Hub id or the directory of the checkpoint instead of a config.json.",
        )
    ]


def ambiguous(entry: Mapping[str, Any], others: Sequence[str], seen: bool) -> list[Unproven]:
    """Classes that fit as well."""
    if not others:
        return []
    what = "tensors and config keys" if seen else "config keys"
    return [
        Unproven(
            f"Which of the classes with the same {what} it is: also {few(others)}.",
            f"{entry['architecture']} was taken because config.json says least that is particular to the others: it is "
            "the plainest whose fields it gives.",
            "Look in the original code for what those others do differently.",
        )
    ]


def switched_off(keys: Sequence[str], entry: Mapping[str, Any], config: Mapping[str, Any]) -> list[Unproven]:
    """Keys that were read as switches that are off."""
    if not keys:
        return []
    listed = ", ".join(f"{shown(key)}={shown(repr(config[key]), 20)}" for key in keys)
    return [
        Unproven(
            f"That these keys of config.json mean nothing at their values: {listed}.",
            f"{entry['config_class']} does not know them; they were read as switches that are off.",
            "Look what the original code does with them.",
        )
    ]


def left_out(keys: Sequence[str]) -> list[Unproven]:
    """Layers of multi-token prediction."""
    if not keys:
        return []
    return [
        Unproven(
            f"The layers that predict more tokens than the next ({few(keys)}): they are left out.",
            "The class has none; a forward pass without them gives the same logits.",
            "Train without them, or add them by hand.",
        )
    ]


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
    absent = [name for name in sorted(set(read)) if config.get(name) is None and values.get(name) is not None]
    # Old files say these under other names, which the config class reads.
    absent = [
        name
        for name in absent
        if name not in SIZES and not any(config.get(key) is not None for key in ALIASES.get(name, ()))
    ]
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
    code = remote_class(config)
    return [
        Unproven(
            f"That {architecture} computes what {reference_class} computes.",
            f"transformers has no class of this name; its model_type {config.get('model_type')!r} is that class's.",
            f"Compare its logits with those of {code or 'the original code'} on a few prompts.",
        )
    ]


def remote_class(config: Mapping[str, Any]) -> str | None:
    """The class of the model's own code, as ``auto_map`` names it, for messages."""
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, Mapping):
        return None
    for key in ("AutoModelForCausalLM", "AutoModel"):
        if isinstance(name := auto_map.get(key), str):
            return shown(name)
    return None


def overridden(overrides: Mapping[str, Any], respelt: Mapping[str, str], entry: Mapping[str, Any]) -> list[Unproven]:
    """Fields that config.json does not give in the class's own words."""
    if not overrides:
        return []
    other = {own: key for key, own in respelt.items()}
    listed = ", ".join(
        f"{name}={shown(repr(value), 40)} ({f'its {shown(other[name])}' if name in other else 'by the tensors'})"
        for name, value in overrides.items()
    )
    return [
        Unproven(
            f"What {entry['config_class']} is told beside config.json: {listed}.",
            "config.json spells it otherwise or leaves it to the original class; the README shows how to load it so.",
            "Compare it with the original configuration class.",
        )
    ]
