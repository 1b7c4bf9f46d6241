"""A decoder of which something is not explained: transformers' own modules, and what surrounds them.

``measured`` is the JSON of :func:`onboard.reference.probe.reuse`. Nothing is guessed here either: what is not
understood is
not described, it is reused as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from onboard.errors import Unsupported
from onboard.facts._text import shown
from onboard.spec.arch import Provenance, ReviewItem, Tying
from onboard.spec.keys import ALIASES
from onboard.spec.review import not_built, unknown_keys

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the real model, for people; None where its config has no such field."""

    hidden_size: int | None
    num_hidden_layers: int | None
    num_attention_heads: int | None
    num_key_value_heads: int | None
    vocab_size: int | None
    max_position_embeddings: int | None


@dataclass(frozen=True, slots=True)
class Postprocess:
    """What happens to the head's output: ``cap`` (tanh), ``multiply`` or ``divide``, by the config field ``key``."""

    operation: Literal["cap", "multiply", "divide"]
    key: str


@dataclass(frozen=True, slots=True)
class RenamedKey:
    """One kind of tensor: its name on disk and in the model, ``{layer}`` for a layer's index, and its real shape."""

    disk: str
    native: str
    shape: str
    only_if: str


@dataclass(frozen=True, slots=True)
class JoinedKey:
    """One kind of tensor that is stored in parts, or that holds several of the model's: see :class:`.joins.Join`."""

    disk: tuple[str, ...]
    native: tuple[str, ...]
    operation: Literal["join", "split"]
    dim: int
    leading: int
    rows_of: tuple[str, ...]
    shape: str
    only_if: str


@dataclass(frozen=True, slots=True)
class IgnoredPattern:
    """A regular expression for names on disk that the model does not need, and why."""

    pattern: str
    reason: str


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """Parameters that transformers does not initialise: how their names end, and the number that fills them or None."""

    ending: str
    value: float | None


@dataclass(frozen=True, slots=True)
class ReusedModule:
    """A part of the model: where it lies, its origin, and why it has that origin."""

    path: str
    origin: Literal["native", "reused", "novel"]
    why: str


@dataclass(frozen=True, slots=True)
class ReusedSpec:
    """A model whose decoder is transformers' own.

    Args:
        level: ``decoder``: the base model is reused, head and loss are native; ``model``: the whole class is reused.
        why_whole: for ``model``, why the head could not be cut off.
        reference_module: module of the reference's class.
        attribute: name of the base model in the reference and in the generated model.
        base_class, base_module: the base model's class, for ``decoder``.
        family_class, family_module: the class that reference and base model have in common, for ``decoder``.
        head_width: config field that is the head's input width, for ``decoder``.
        embedding, head, layers: paths in the reference.
        keep_in_fp32: parts of names of parameters that transformers keeps in fp32 whatever the dtype.
        head_stored: whether a checkpoint with a tied head has the head, and the embedding is left out.
        created_in_fp32: whether the class creates a parameter in fp32 whatever the dtype.
        left_alone: parameters that transformers leaves as a constructor made them, and the package initialises.
        block_mask: whether a mask of documents keeps them apart in every layer.
        real_names: names on disk of the real model's tensors, None where that is not known.
        unproven: what the reference itself cannot do, and why.
    """

    architecture: str
    model_type: str
    reference_class: str
    reference_module: str
    config_class: str
    level: Literal["decoder", "model"]
    why_whole: str | None
    attribute: str
    base_class: str | None
    base_module: str | None
    family_class: str | None
    family_module: str | None
    postprocess: Postprocess | None
    head_width: str | None
    head_bias: bool
    embedding: str | None
    head: str | None
    layers: str | None
    takes_positions: bool
    state_argument: str | None
    block_mask: bool
    keeps_logits: bool
    tie_support: Literal["BOTH", "TIED_ONLY", "UNTIED_ONLY"]
    head_stored: bool
    tying: Tying
    dimensions: Sizes
    rows: tuple[RenamedKey, ...]
    joins: tuple[JoinedKey, ...]
    ignored: tuple[IgnoredPattern, ...]
    keep_in_fp32: tuple[str, ...]
    created_in_fp32: bool
    left_alone: tuple[LeftAlone, ...]
    real_names: tuple[str, ...] | None
    modules: tuple[ReusedModule, ...]
    unproven: Mapping[str, str] = field(hash=False)
    review: tuple[ReviewItem, ...]
    provenance: Mapping[str, Provenance] = field(hash=False)

    @property
    def native_head(self) -> str | None:
        """Path of the head in the generated model."""
        return "lm_head" if self.level == "decoder" else self.head

    @property
    def ignores_tying(self) -> bool:
        """Whether the config asks for a tied head and the class has one of its own all the same."""
        return self.tying.tied and self.tie_support == "UNTIED_ONLY"

    @property
    def has_parts(self) -> bool:
        """Whether a tensor has several parts: a join of one alone only adds dimensions."""
        return any(len(row.disk) + len(row.native) > 2 for row in self.joins)

    @property
    def real_size(self) -> bool:
        """Whether the full-size model can be built without memory."""
        return self.real_names is not None

    @property
    def lora_row(self) -> RenamedKey | None:
        """The name of one matrix in the first decoder layer that has one, to show where LoRA tensors go."""
        for row in self.rows:
            if (
                "{layer}" in row.native
                and row.native.endswith(".weight")
                and not row.only_if
                and row.shape.count(",") == 1
            ):
                return row
        return None

    @property
    def novel(self) -> tuple[ReusedModule, ...]:
        """What nothing explains."""
        return tuple(module for module in self.modules if module.origin == "novel")


def describe(
    raw: Mapping[str, Any],
    architecture: str,
    model_type: str,
    measured: Mapping[str, Any],
    published: Collection[str] | None,
) -> ReusedSpec:
    """Build the spec of a model that reuses transformers' decoder.

    Args:
        raw: the parsed config.json (the decoder's level).
        architecture: name of the architecture, already checked to be an identifier.
        model_type: ``model_type``, already checked.
        measured: what the probe found.
        published: names of the checkpoint's tensors from its headers, None where no checkpoint was seen.

    Raises:
        Unsupported: what surrounds the decoder is not understood either.
    """
    real, found = measured["real"], measured["reuse"]
    supports = found["supports"]
    level = found["level"]
    family_module, family_class = found["family"] or (None, None)
    head = found["head"]
    native_head = "lm_head" if level == "decoder" else head
    table = tuple(
        RenamedKey(
            row["disk"],
            _native(row["native"], head, native_head),
            _shape(row["shape"]),
            row["only_if"],
        )
        for row in found["rows"]
    )
    joins = tuple(
        JoinedKey(
            disk=tuple(row["disk"]),
            native=tuple(_native(name, head, native_head) for name in row["native"]),
            rows_of=tuple(row["rows_of"]),
            shape=_shape(row["shape"]),
            **{name: row[name] for name in ("operation", "dim", "leading", "only_if")},
        )
        for row in found["joins"]
    )
    if not table:
        raise Unsupported(
            f"The checkpoint of {measured['reference_class']} is empty.",
            "Its tiny model stores no tensor.",
            "Report the architecture.",
            code="unsupported.layout",
        )
    tied = bool(real["tie_word_embeddings"])
    support = found["tie_support"]
    spec_modules = tuple(ReusedModule(module["path"], module["origin"], module["why"]) for module in found["modules"])
    return ReusedSpec(
        architecture=architecture,
        model_type=model_type,
        reference_class=measured["reference_class"],
        reference_module=found["module"],
        config_class=measured["config_class"],
        level=level,
        why_whole=found["why_whole"],
        attribute=found["attribute"],
        base_class=found["base_class"],
        base_module=found["base_module"],
        family_class=family_class,
        family_module=family_module,
        postprocess=Postprocess(**found["postprocess"]) if found["postprocess"] else None,
        head_width=found["head_width"],
        head_bias=found["head_bias"],
        embedding=found["embedding"],
        head=head,
        layers=found["layers"],
        takes_positions="position_ids" in supports["arguments"],
        state_argument=supports["state_argument"],
        block_mask=supports["block_mask"] is True,
        keeps_logits=level == "decoder" or supports["logits_to_keep"] is True,
        tie_support=support,
        head_stored=level == "model" and found["head_stored"],
        tying=Tying(tied),
        dimensions=Sizes(**{name: _size(real.get(name)) for name in Sizes.__dataclass_fields__}),
        rows=table,
        joins=joins,
        ignored=_ignored(table),
        keep_in_fp32=tuple(found["keep_in_fp32"]),
        created_in_fp32=supports["created_in_fp32"],
        left_alone=tuple(LeftAlone(**one) for one in found["left_alone"]),
        real_names=None if found["real_names"] is None else tuple(found["real_names"]),
        modules=(*spec_modules, _head_module(found, native_head)),
        unproven={name: supports[name] for name in _ABILITIES if isinstance(supports[name], str)},
        review=(
            *_novel_review(spec_modules),
            *not_built(measured),
            *_joins_review(joins),
            *_published_review(found, table, published, tied, head),
            *_config_review(raw, measured),
        ),
        provenance=_provenance(raw, measured),
    )


_ABILITIES = {
    "padding": "Padded batches",
    "generation": "Generation",
    "bf16": "bf16",
    "gradient_checkpointing": "Activation checkpointing",
    "hidden_states": "`output_hidden_states`",
    "inputs_embeds": "`inputs_embeds`",
}


def _size(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _shape(shape: Sequence[int] | None) -> str:
    return "" if shape is None else f"[{', '.join(map(str, shape))}]"


def _native(name: str, head: str | None, native_head: str | None) -> str:
    """A name of the reference in the generated model, which differs in the head's name alone."""
    if head and native_head and name.startswith(f"{head}."):
        return native_head + name[len(head) :]
    return name


def _ignored(table: Iterable[RenamedKey]) -> tuple[IgnoredPattern, ...]:
    """The frequencies of a rotation, which old files store."""
    if any("inv_freq" in row.disk for row in table):
        return ()
    return (IgnoredPattern(r"rotary_emb\.inv_freq$", "computed from the config; old files store it"),)


def _head_module(found: Mapping[str, Any], native_head: str | None) -> ReusedModule:
    if found["level"] == "model":
        why = f"the whole class is reused: {found['why_whole']}"
        return ReusedModule(native_head or "the head", "reused", why)
    post = found["postprocess"]
    extra = f", then {post['operation']} by config.{post['key']}" if post else ""
    return ReusedModule("lm_head", "native", f"linear head{extra}, max difference {found['head_difference']:.1e}")


def _novel_review(modules: Iterable[ReusedModule]) -> list[ReviewItem]:
    return [
        ReviewItem(
            f"{module.path} is novel: {module.why}.",
            "It is transformers' own code, unchanged; look whether it trains as you need it, and how it shards.",
        )
        for module in modules
        if module.origin == "novel"
    ]


def _joins_review(joins: Iterable[JoinedKey]) -> list[ReviewItem]:
    """Parts whose sizes a saved checkpoint does not show."""
    return [
        ReviewItem(
            f"{', '.join(join.disk)} are written with as many rows as {', '.join(join.rows_of)}, to which they belong; "
            "transformers itself writes parts of one size, and reads both.",
            "Compare with the header of the published checkpoint.",
        )
        for join in joins
        if join.rows_of
    ]


def _published_review(
    found: Mapping[str, Any],
    table: Iterable[RenamedKey],
    published: Collection[str] | None,
    tied: bool,
    head: str | None,
) -> list[ReviewItem]:
    """The published checkpoint's names against those that the real-size model stores."""
    if published is None or found["real_names"] is None:
        return []
    import re

    patterns = [re.compile(item.pattern) for item in _ignored(table)]
    there = {name for name in published if not any(pattern.search(name) for pattern in patterns)}
    if tied and head:
        there.discard(f"{found['embedding'] if found['head_stored'] else head}.weight")
    expected = set(found["real_names"])
    return [
        *(
            ReviewItem(
                f"The checkpoint has {kind}, which KEY_MAP does not map.",
                "Loading is refused by name until it is mapped or dropped on purpose.",
            )
            for kind in _kinds(there - expected)
        ),
        *(
            ReviewItem(f"KEY_MAP expects {kind}, which the checkpoint does not have.", "Loading is refused by name.")
            for kind in _kinds(expected - there)
        ),
    ]


def _kinds(names: set[str]) -> list[str]:
    import re

    kinds = sorted({re.sub(r"\.\d+(?=\.|$)", ".{layer}", name, count=1) for name in names})
    rest = [f"{len(kinds) - _SHOWN} more kinds of tensors"] if len(kinds) > _SHOWN else []
    return kinds[:_SHOWN] + rest


def _config_review(raw: Mapping[str, Any], measured: Mapping[str, Any]) -> list[ReviewItem]:
    known = set(measured["real"]["fields"])
    config_class = measured["config_class"]
    return [
        *(
            ReviewItem(
                f"config.json has {shown(repr(key))}, which {config_class} does not know.",
                "The reference ignores it. If the original code reads it, transformers computes something else too.",
            )
            for key in unknown_keys(raw, known)
        ),
        *(
            ReviewItem(
                f"config.json says {key}={shown(repr(raw.get(key)))}, {config_class} reads it as {shown(repr(value))}.",
                "The package follows the reference; test_config holds it to exactly this.",
            )
            for key, value in measured["real"]["normalised"].items()
        ),
    ]


def _provenance(raw: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Provenance]:
    """Where each size comes from; all else was measured on the tiny reference."""
    reference = f"transformers {measured['transformers']}"
    fields = set(measured["real"]["fields"])
    out = {}
    for name in (*Sizes.__dataclass_fields__, "tie_word_embeddings"):
        spellings = [key for key in ALIASES.get(name, (name,)) if key == name or key in fields]
        used = next((key for key in spellings if raw.get(key) is not None), None)
        default = Provenance(reference, f"default of {measured['config_class']}")
        out[name] = Provenance("config.json", used) if used else default
    return out
