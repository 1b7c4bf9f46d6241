"""ArchSpec: a frozen, typed description of a decoder's architecture.

The spec says *what* the model computes, in the field's own terms, and which config.json key each number comes from.
It never
says how the code looks. Every leaf has a :class:`Provenance`, kept beside the tree (see :attr:`ArchSpec.provenance`)
so that
templates and rules read plain values.

Names of config keys are those of transformers' config *class* (``rms_norm_eps``), which generated code reads as
``config.<key>``; where the file spells a key otherwise, the provenance says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

LayerKind = Literal["full_attention", "sliding_attention"]
"""The kind of one decoder layer, in the words of transformers' ``layer_types``."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a field of the spec comes from.

    Args:
        source: ``config.json``, ``transformers <class>``, ``checkpoint header`` or ``measured``.
        detail: the key, tensor or rule, and for a measurement its largest absolute difference.
    """

    source: str
    detail: str

    def __str__(self) -> str:
        return f"{self.source}: {self.detail}" if self.detail else self.source


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Sizes of the real model. Generated code reads them from its config; here they are for people."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int | None


@dataclass(frozen=True, slots=True)
class Norm:
    """One normalisation formula, shared by all norms of the decoder.

    Args:
        kind: ``rms``: ``x / sqrt(mean(x^2) + eps) * (offset + weight)`` (arXiv:1910.07467).
        offset: 0.0, or 1.0 where the stored weight is centred on zero (Gemma).
        eps_key: config key of eps.
    """

    kind: Literal["rms"]
    offset: float
    eps_key: str


@dataclass(frozen=True, slots=True)
class Bias:
    """Whether a projection has a bias, and the boolean config key that decides (None: fixed by the architecture)."""

    present: bool
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query softmax attention.

    Args:
        name: attribute of the layer that holds the module (``self_attn``).
        fused_qkv: name of the one projection whose output is ``[q | k | v]``, or None where q, k and v are separate.
        q_proj, k_proj, v_proj: names of the separate projections (unused where fused).
        qk_norm: None; ``head``: over ``head_dim`` of each head; ``width``: over the whole projection before the split
            into heads.
        scale: Python expression of ``config`` for the softmax scale.
        window_key: config key of the sliding window, None where no layer has one.
        window_layers: ``all``: every layer where the key is set; ``by_layer_type``: where ``layer_types`` says
            ``sliding_attention``.
        dropout_key: config key of the dropout on attention weights, or None.
        rope_layers_key: config key of a per-layer list that is truthy where the layer rotates, None where every layer
            does.
    """

    name: str
    fused_qkv: str | None
    q_proj: str
    k_proj: str
    v_proj: str
    o_proj: str
    qkv_bias: Bias
    o_bias: Bias
    qk_norm: Literal["head", "width"] | None
    q_norm: str | None
    k_norm: str | None
    scale: str
    window_key: str | None
    window_layers: Literal["all", "by_layer_type"] | None
    dropout_key: str | None
    rope_layers_key: str | None
    head_dim_key: str | None


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (arXiv:2104.09864), half-split layout: dimension i is rotated with i + rotary_dim / 2.

    Args:
        types: the distinct ``rope_type`` values in use (``default``, ``llama3``, ``linear``, ``longrope`` ...).
        served: other ``rope_type`` values that the reference takes and the generated code computes as it does.
        per_layer_type: True where ``config.rope_parameters`` holds one set of parameters per layer type.
        partial: True where only ``partial_rotary_factor`` of the head is rotated.
        parameters: ``config.rope_parameters`` of the real model, for people.
    """

    types: tuple[str, ...]
    served: tuple[str, ...]
    per_layer_type: bool
    partial: bool
    parameters: Mapping[str, Any] = field(hash=False)

    @property
    def length_dependent(self) -> tuple[str, ...]:
        """The types in use whose frequencies follow the longest position of a batch."""
        return tuple(name for name in self.types if name in ("dynamic", "longrope"))


@dataclass(frozen=True, slots=True)
class Mlp:
    """The gated feed-forward network ``down(act(gate(x)) * up(x))`` (arXiv:2002.05202).

    Args:
        fused: name of the one projection whose output is ``[gate | up]``, or None where they are separate.
        activation_key: config key of the activation's name in transformers' ``ACT2FN``.
    """

    name: str
    fused: str | None
    gate_proj: str
    up_proj: str
    down_proj: str
    bias: Bias
    activation: str
    activation_key: str


@dataclass(frozen=True, slots=True)
class Block:
    """Order of one decoder layer. A name of None means that there is no norm at that place.

    ``h = x + post_attention(attention(pre_attention(x)))``, then ``y = h + post_mlp(mlp(pre_mlp(h)))``.
    """

    pre_attention_norm: str | None
    post_attention_norm: str | None
    pre_mlp_norm: str | None
    post_mlp_norm: str | None
    dropout_key: str | None
    attention_dropout: str | None
    mlp_dropout: str | None

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of the layer's norms, in the order in which they run."""
        places = (self.pre_attention_norm, self.post_attention_norm, self.pre_mlp_norm, self.post_mlp_norm)
        return tuple(name for name in places if name is not None)


@dataclass(frozen=True, slots=True)
class Embedding:
    """Token embedding.

    Args:
        scale: Python expression of ``config`` by which embeddings are multiplied, None for 1.
    """

    scale: str | None


@dataclass(frozen=True, slots=True)
class Head:
    """Language-modelling head.

    Args:
        softcap_key: config key of the cap ``cap * tanh(logits / cap)``, None where there is none.
    """

    bias: bool
    softcap_key: str | None


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One kind of tensor of the checkpoint.

    Args:
        disk: pattern of its name on disk; ``{layer}`` stands for a layer index.
        native: pattern of its name in the generated model.
        operation: ``rename`` (issue by issue, more operations come with the architectures that need them).
        shape: the shape in the letters of the generated code's legend, for people.
        only_if: boolean config field without which the tensor does not exist; empty where it always does.
    """

    disk: str
    native: str
    operation: Literal["rename"]
    shape: str
    only_if: str = ""


@dataclass(frozen=True, slots=True)
class IgnoredKey:
    """A kind of tensor that some checkpoints hold and the model does not need: its pattern on disk, and why."""

    disk: str
    reason: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The checkpoint's layout on disk."""

    rows: tuple[KeyRow, ...]
    ignored: tuple[IgnoredKey, ...]


@dataclass(frozen=True, slots=True)
class Tying:
    """Whether the head shares the embedding's weight in this model."""

    tied: bool


@dataclass(frozen=True, slots=True)
class FixedField:
    """A config field that the reference honours at other values but the generated code does not: it refuses them."""

    key: str
    value: Any


@dataclass(frozen=True, slots=True)
class ReviewItem:
    """Something that a reviewer should look at: what, and what to do about it."""

    what: str
    do: str


@dataclass(frozen=True, slots=True)
class ArchSpec:
    """A dense decoder-only language model.

    Args:
        architecture: the name in config.json's ``architectures``; the registry's key.
        reference_class: transformers' class that is the oracle.
        config_class: transformers' config class.
        layer_kinds: the kind of every layer of the real model.
        has_layer_types: whether the config class lists them as ``layer_types``.
        fixed: config fields whose other values the generated code refuses.
        provenance: dotted field path -> where its value comes from; has an entry for every leaf.
    """

    architecture: str
    model_type: str
    reference_class: str
    config_class: str
    dimensions: Dimensions
    embedding: Embedding
    layer_kinds: tuple[LayerKind, ...]
    has_layer_types: bool
    norm: Norm
    attention: Attention
    rope: Rope
    mlp: Mlp
    block: Block
    head: Head
    tying: Tying
    checkpoint: Checkpoint
    fixed: tuple[FixedField, ...]
    review: tuple[ReviewItem, ...]
    provenance: Mapping[str, Provenance] = field(hash=False)

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Yield ``(dotted path, value)`` of every leaf that must have provenance."""
        for item in dataclasses.fields(self):
            if item.name in ("provenance", "review"):
                continue
            yield from _leaves(item.name, getattr(self, item.name))

    def as_json(self) -> dict[str, Any]:
        """The ``spec`` object of ``onboard inspect --json``: each leaf with its value and provenance."""
        out: dict[str, Any] = {}
        for path, value in self.leaves():
            node = out
            *parents, last = path.split(".")
            for name in parents:
                node = node.setdefault(name, {})
            node[last] = {"value": _plain(value), "provenance": str(self.provenance[path])}
        return out


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from _leaves(f"{path}.{item.name}", getattr(value, item.name))
    else:
        yield path, value


def _plain(value: Any) -> Any:
    """JSON-ready copy of a leaf."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value
