"""What a model is held against: transformers' class of its name, or the class that it is recognised as."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from onboard.facts.remote_code import RemoteCode, names_code, read_remote_code
from onboard.pipeline.reading import Read
from onboard.reference.ask import NoClass
from onboard.spec._model_types import listed_as
from onboard.spec.arch import ArchSpec
from onboard.spec.derive import read_keys
from onboard.spec.keys import ALIASES
from onboard.spec.layouts import header_fit, kinds_of, layouts
from onboard.spec.recognise import Recognised, recognise
from onboard.spec.reused import ReusedSpec
from onboard.spec.unproven import Unproven, by_model_type, defaults_used


@dataclass(frozen=True, slots=True)
class Reference:
    """What a model is held against.

    Attributes:
        source: the model; where it was recognised, with the decoder's fields as the class spells them.
        measured: the reference's measurement.
        recognised: the class that it was recognised as; None where it has its own.
        code: its own code, where that is the reference.
        warnings: about options without effect.
    """

    source: Read
    measured: Mapping[str, Any]
    recognised: Recognised | None = None
    code: RemoteCode | None = None
    warnings: tuple[str, ...] = ()


def find_reference(
    source: Read, style: str, ask: Callable[..., Mapping[str, Any]], *, trust_remote_code: bool = False
) -> Reference:
    """Measure the model's own class in transformers, its own code where it is trusted, or what it is recognised as.

    Args:
        source: the model.
        style: what to measure of a class of its own; of another all parts have to be explained.
        ask: :func:`onboard.reference.ask.ask_reference`.
        trust_remote_code: whether the model's own code may run.

    Raises:
        OnboardError: as :func:`onboard.reference.ask.ask_reference`; transformers has no class for it, and none fits.
    """
    architecture, model_type = source.architecture, source.kind.model_type
    measured = _own_class(source, style, ask)
    warnings: tuple[str, ...] = ()
    if measured is not None and not _is_another(source, measured, trust_remote_code):
        if trust_remote_code:
            warnings = ("--trust-remote-code has no effect: transformers has a class, which is the reference",)
        return Reference(source, measured, warnings=warnings)
    if trust_remote_code and names_code(source.facts.config):
        code = read_remote_code(source.facts)
        measured = ask(source.decoder, architecture, model_type, "native", None, code)
        return Reference(source, measured, code=code)
    if trust_remote_code:
        warnings = ("--trust-remote-code has no effect: config.json names no code (auto_map)",)
    found = recognise_source(source)
    source = as_recognised(source, found)
    measured = ask(source.decoder, found.architecture, found.model_type, "native")
    return Reference(source, measured, found, warnings=warnings)


def _own_class(source: Read, style: str, ask: Callable[..., Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The measurement of transformers' class for the architecture or its ``model_type``; None where it has neither."""
    try:
        return ask(source.decoder, source.architecture, source.kind.model_type, style)
    except NoClass:
        return None


def _is_another(source: Read, measured: Mapping[str, Any], trust_remote_code: bool) -> bool:
    """Whether a model that was measured by its ``model_type`` alone is not that type's class.

    Forks keep the ``model_type`` of what they were forked from. Where the architecture has a name of its own, its own
    code counts if it is trusted, and tensors that the class has not speak against the class.
    """
    if measured["reference_class"].lower() == source.architecture.lower():
        return False
    return (trust_remote_code and names_code(source.facts.config)) or _has_other_tensors(source)


def _has_other_tensors(source: Read) -> bool:
    """Whether the checkpoint's tensors are not those of the ``model_type``'s class; False where nothing is known."""
    entry = layouts().get(source.kind.model_type or "")
    if entry is None or source.facts.tensors is None:
        return False
    names, switches, _ = header_fit(entry, source.decoder, kinds_of(source.facts.tensors))
    return bool(names or switches)


def has_class(source: Read) -> bool:
    """Whether transformers has a class for the architecture, as far as the shipped tables say; it is not imported."""
    listed = listed_as(source.kind.model_type)
    names = {entry["architecture"].lower() for entry in layouts().values()}
    if (source.kind.architecture or "").lower() in names:
        return True
    return listed is not None and not listed.from_hub and not _has_other_tensors(source)


def recognise_source(source: Read) -> Recognised:
    """The class of transformers that a model without a class of its own is.

    Raises:
        Unsupported: none fits.
    """
    facts = source.facts
    return recognise(source.decoder, source.architecture, facts.tensors, facts.no_tensors_because)


def as_recognised(source: Read, found: Recognised) -> Read:
    """The model with the decoder's fields as the class that it was recognised as spells them."""
    kept = {key: value for key, value in source.decoder.items() if key not in found.respelt}
    return replace(source, decoder={**kept, **found.overrides})


def unproven(spec: ArchSpec | ReusedSpec, reference: Reference) -> tuple[Unproven, ...]:
    """Everything that had no reference; nothing where transformers has the model's own class."""
    source, found, real = reference.source, reference.recognised, reference.measured["real"]
    if reference.code is not None:
        return ()
    if found is None or isinstance(spec, ReusedSpec):
        return tuple(by_model_type(source.architecture, spec.reference_class, source.decoder))
    read = {*read_keys(spec, real.get("attribute_map", {})), *(base := _rotation_base(source, real))}
    return (*found.unproven, *defaults_used(source.decoder, found.config_class, read, {**real["values"], **base}))


def _rotation_base(source: Read, real: Mapping[str, Any]) -> dict[str, Any]:
    """The base of the rotation, where config.json gives none among its rotary parameters; empty where it does."""
    given = [source.decoder.get(key) for key in ALIASES["rope_scaling"]]
    sets = [one for outer in given if isinstance(outer, Mapping) for one in (outer, *outer.values())]
    parameters = real.get("rope_parameters") or {}
    theta = parameters.get("rope_theta", parameters.get("full_attention", {}).get("rope_theta"))
    stated = any(isinstance(one, Mapping) and one.get("rope_theta") is not None for one in sets)
    return {} if theta is None or stated else {"rope_theta": theta}


def with_ignored(spec: ArchSpec, reference: Reference) -> ArchSpec:
    """The spec, with what a recognised checkpoint holds besides as ignored tensors."""
    if reference.recognised is None:
        return spec
    ignored = (*spec.checkpoint.ignored, *reference.recognised.ignored)
    return replace(spec, checkpoint=replace(spec.checkpoint, ignored=ignored))
