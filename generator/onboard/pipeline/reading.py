"""From SOURCE to facts and kind: what every command begins with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onboard import __version__
from onboard.errors import Unsupported, UsageError
from onboard.facts import Facts, read_facts
from onboard.plan.names import check_identifier, class_prefix, package_name
from onboard.spec.arch import ArchSpec, ReviewItem
from onboard.spec.headers import compare_headers
from onboard.spec.kind import Kind, classify


@dataclass(frozen=True, slots=True)
class Read:
    """A source that was read and classified.

    Attributes:
        decoder: the level of config.json that holds the decoder's fields.
    """

    facts: Facts
    kind: Kind
    decoder: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        """The architecture, checked to be a name that may stand in code."""
        return check_identifier(self.kind.architecture, "architectures[0]")

    @property
    def model_type(self) -> str:
        """The model type, checked; it becomes part of paths."""
        value = self.kind.model_type or self.architecture
        package_name(value)
        return value


def read(given: str, *, revision: str | None) -> Read:
    """Read a source and say what it is.

    Raises:
        OnboardError: as :func:`onboard.facts.read_facts`.
    """
    facts = read_facts(given, revision=revision)
    kind = classify(facts.config)
    decoder: Any = facts.config
    for key in kind.text_config:
        decoder = decoder[key]
    return Read(facts, kind, decoder)


def require_dense(source: Read) -> None:
    """Refuse what onboard cannot write yet.

    Raises:
        Unsupported: the model is not a dense decoder, with the reason.
    """
    kind = source.kind
    if kind.kind == "unsupported":
        raise Unsupported(
            f"This is not a decoder language model: {kind.is_}.",
            kind.reason or "its config.json describes something else.",
            "`onboard inspect` shows the evidence. onboard writes decoder language models.",
            is_=kind.is_,
        )
    if kind.kind != "dense":
        name = {"moe": "a mixture-of-experts model", "vlm": "a vision-language model"}[kind.kind]
        raise Unsupported(
            f"{kind.architecture} is {name}, which onboard cannot write yet.",
            "Only dense decoders are generated in this version.",
            "`onboard inspect` shows what is known about it.",
            code=f"unsupported.{kind.kind}",
        )
    if not kind.architecture:
        raise UsageError(
            "config.json names no architecture.",
            "the registry is keyed by the entry of `architectures`.",
            'add "architectures": ["...ForCausalLM"] to a copy of the config.json and give that file as the source',
            code="config.no_architecture",
        )


def class_names(source: Read, name: str | None) -> tuple[str, str]:
    """Package name and class prefix.

    Args:
        source: what was read.
        name: the user's ``--name``, or None for the model type.

    Raises:
        UsageError: no safe name can be made of it.
    """
    return package_name(name) if name else package_name(source.model_type), class_prefix(source.architecture)


def published_tensors(source: Read, spec: ArchSpec) -> tuple[ReviewItem, ...]:
    """What the checkpoint's headers say against the key map; nothing where no checkpoint was seen."""
    if source.facts.tensors is None:
        return ()
    on = [row.only_if for row in spec.checkpoint.rows if row.only_if and source.decoder.get(row.only_if)]
    return compare_headers(spec, (tensor.name for tensor in source.facts.tensors), on)


def versions() -> dict[str, str | None]:
    """Versions of what a package is made and proven with, read without importing any of it."""
    from importlib import metadata  # not at the top: it costs `onboard inspect` a tenth of its time

    found: dict[str, str | None] = {"onboard": __version__}
    for key, distribution in (
        ("transformers", "transformers"),
        ("nemo_automodel", "nemo-automodel"),
        ("torch", "torch"),
    ):
        try:
            found[key] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            found[key] = None
    return found
