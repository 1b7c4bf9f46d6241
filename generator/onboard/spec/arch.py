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

LayerKind = str
"""The kind of one decoder layer, in the words of transformers' ``layer_types``: ``full_attention``, ``conv`` ..."""


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
class Bias:
    """Whether a projection has a bias, and the boolean config key that decides (None: fixed by the architecture)."""

    present: bool
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Norm:
    """One normalisation formula over the last dimension.

    Args:
        kind: ``rms``: ``x / sqrt(mean(x^2) + eps)`` (arXiv:1910.07467); ``layer``: ``(x - mean) / sqrt(var + eps)``
            (arXiv:1607.06450).
        weight: whether the result is multiplied by ``offset + weight``.
        bias: whether a bias is added.
        offset: 0.0, or 1.0 where the stored weight is centred on zero (Gemma).
        eps: Python expression of ``config`` (``config.rms_norm_eps``) or a number.
    """

    kind: Literal["rms", "layer"]
    weight: bool
    bias: Bias
    offset: float
    eps: str


@dataclass(frozen=True, slots=True)
class QKNorm:
    """Normalisation of queries and keys.

    Args:
        norm: the formula.
        over: ``head``: over ``head_dim``, one weight ``[D]`` for all heads; ``heads``: over ``head_dim``, a weight
            for each head, ``[N, D]`` and ``[K, D]``; ``width``: over the whole projection, before the split into heads.
        after_rope: whether they are normalised after the rotation instead of before it.
    """

    norm: Norm
    over: Literal["head", "heads", "width"]
    after_rope: bool


@dataclass(frozen=True, slots=True)
class Alibi:
    """Bias on the scores that grows with the distance (arXiv:2108.12409): ``-slope[head] * (i - j)``.

    Args:
        bias_max: expression of 8 in the slopes ``2 ** (-8 * (h + 1) / n)`` of ``n`` heads, ``n`` a power of two; other
            numbers of heads take every second slope of the next power for the rest.
        scaled: whether the bias is multiplied by the softmax scale as the scores are (Falcon).
    """

    bias_max: str
    scaled: bool


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Queries that grow with their position: ``q * (1 + beta * log(1 + floor(position / length)))`` (Ministral 3).

    Args:
        beta: expression of the factor on the logarithm.
        length: expression of the number of positions that one step takes.
    """

    beta: str
    length: str


@dataclass(frozen=True, slots=True)
class OutputGate:
    """A gate from the attention's input on the heads' outputs, before the output projection.

    Args:
        over: ``element``: each number of a head's output has one; ``head``: each head has one.
        activation: what it goes through: ``sigmoid`` or ``softplus``.
        bias: of its projection.
    """

    over: Literal["element", "head"]
    activation: Literal["sigmoid", "softplus"]
    bias: Bias


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (arXiv:2405.04434): keys and values come from a narrow latent.

    ``c, k_rope = split(W_a x)``; ``k_nope, v = split(W_b norm(c))`` for each head; its key is ``[k_nope, k_rope]`` with
    one rotated ``k_rope`` for all heads. ``k_bias`` of the attention is that of ``W_a``, ``v_bias`` that of ``W_b``.

    Args:
        q_rank: expression of the rank of the queries' own latent; None where they come straight from ``x``.
        kv_rank: expression of the rank of the latent.
        nope_dim, rope_dim: expressions of the parts of a head that do not rotate and that do.
        value_dim: expression of the size of a value.
        q_norm: norm of the queries' latent, None where they have none.
        kv_norm: norm of the latent.
        q_up_bias: of the projection from the queries' latent.
        rotary_first: whether the part of a query that rotates stands before the other one.
        value_first: whether values stand before keys in what ``W_b`` gives.
        latent_first: whether the latent stands before ``k_rope`` in what ``W_a`` gives.
        mscale: whether the softmax scale has the square of YaRN's factor by ``mscale_all_dim``.
    """

    q_rank: str | None
    kv_rank: str
    nope_dim: str
    rope_dim: str
    value_dim: str
    q_norm: Norm | None
    kv_norm: Norm
    q_up_bias: Bias
    rotary_first: bool
    value_first: bool
    latent_first: bool
    mscale: bool


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention over grouped queries (``num_key_value_heads`` of 1: multi-query; as many as heads: multi-head).

    Expressions are Python, of ``config`` and ``layer_idx``.

    Args:
        num_heads, num_key_value_heads, head_dim: expressions of ``N``, ``K`` and ``D``.
        q_bias, k_bias, v_bias, o_bias: of each projection by itself.
        qk_norm: None where queries and keys are not normalised.
        output_norm: norm of the heads' joined outputs before the output projection (BitNet), or None; of each pair of
            heads where the attention is ``differential``.
        rotary: ``half``: dimension i of the rotary part is rotated with i + rotary_dim / 2; ``interleaved``: with
            i + 1; None: no rotation.
        rope_layers: expression that is true where a layer rotates, None where every layer does.
        scale: expression of the softmax scale.
        softcap: expression of the cap ``cap * tanh(scores / cap)``, None where there is none.
        sinks: whether each head has a learned logit that takes part in the softmax and has no value.
        alibi: None where there is no such bias.
        window_key: config key of the sliding window, None where no layer has one.
        window_layers: expression that is true where a layer has the window, ``True`` where every layer has it whenever
            the key is set; None without a window.
        dropout_key: config key of the dropout on attention weights, or None.
        query_scale: growth of the queries with their position, after the rotation; None where there is none.
        gate: None where the heads' outputs are not gated.
        differential: whether half of the heads is subtracted from the other half (arXiv:2410.05258).
        latent: None where keys and values are projected straight from the input.
        o_bias_layers: expression that is true in the layers whose output projection has its bias, None where all have.
    """

    num_heads: str
    num_key_value_heads: str
    head_dim: str
    q_bias: Bias
    k_bias: Bias
    v_bias: Bias
    o_bias: Bias
    qk_norm: QKNorm | None
    output_norm: Norm | None
    rotary: Literal["half", "interleaved"] | None
    rope_layers: str | None
    scale: str
    softcap: str | None
    sinks: bool
    alibi: Alibi | None
    window_key: str | None
    window_layers: str | None
    dropout_key: str | None
    query_scale: QueryScale | None = None
    gate: OutputGate | None = None
    differential: bool = False
    latent: Latent | None = None
    o_bias_layers: str | None = None


@dataclass(frozen=True, slots=True)
class Rope:
    """The table of cosines and sines (arXiv:2104.09864).

    Args:
        types: the distinct ``rope_type`` values in use (``default``, ``llama3``, ``linear``, ``longrope`` ...).
        served: other ``rope_type`` values that the reference takes and the generated code computes as it does.
        per_layer_type: True where ``config.rope_parameters`` holds one set of parameters per layer type.
        partial: True where only a part of the head is rotated.
        dim: expression of the number of rotated dimensions, where ``config.rope_parameters`` does not say it (GPT-J);
            else None.
        theta: the base, where ``config.rope_parameters`` does not say it; else None.
        reversed: whether the rotation runs the other way round (sine negated).
        sections_apart: whether the first frequencies, which belong to height and width in turns where positions have
            three dimensions (``mrope_section``), are sorted into those of height and those of width (Cohere Compass).
        parameters: ``config.rope_parameters`` of the real model, for people.
    """

    types: tuple[str, ...]
    served: tuple[str, ...]
    per_layer_type: bool
    partial: bool
    dim: str | None
    theta: float | None
    reversed: bool
    parameters: Mapping[str, Any] = field(hash=False)
    sections_apart: bool = False

    @property
    def length_dependent(self) -> tuple[str, ...]:
        """The types in use whose frequencies follow the longest position of a batch."""
        return tuple(name for name in self.types if name in ("dynamic", "longrope"))


@dataclass(frozen=True, slots=True)
class Mlp:
    """The feed-forward network: gated ``down(act(gate(x)) * up(x))`` (arXiv:2002.05202) or plain ``down(act(up(x)))``.

    Args:
        gated: whether there is a gate.
        intermediate_size: expression of ``F``.
        up_bias: of gate and up, or of up alone.
        down_bias: of down.
        activation: its name in transformers' ``ACT2FN``.
        activation_key: config key that names it, None where the architecture fixes it.
        activation_parameters: whether the activation has parameters of its own (xIELU).
        inner_norm: norm of the activations before ``down`` (BitNet), or None.
    """

    gated: bool
    intermediate_size: str
    up_bias: Bias
    down_bias: Bias
    activation: str
    activation_key: str | None
    activation_parameters: bool
    inner_norm: Norm | None


@dataclass(frozen=True, slots=True)
class Block:
    """Order of one decoder layer. A name of None means that there is no norm at that place.

    Sequential: ``h = x + m * post_attention(attention(pre_attention(x)))``, then
    ``y = h + m * post_mlp(mlp(pre_mlp(h)))``. Parallel:
    ``y = x + m * post_attention(attention(pre_attention(x))) + m * post_mlp(mlp(pre_mlp(x)))``; without a ``pre_mlp``
    of its own the MLP takes what the attention takes. ``norm_after_residual``: the two post norms stand after the
    additions (GPT-1).

    Args:
        multiplier: expression of ``m``, None for 1.
        pre_attention_layers: expression that is true in the layers that have the norm before the attention, None where
            all have it.
    """

    parallel: bool
    norm_after_residual: bool
    pre_attention_norm: str | None
    post_attention_norm: str | None
    pre_mlp_norm: str | None
    post_mlp_norm: str | None
    multiplier: str | None
    pre_attention_layers: str | None = None

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of the layer's norms, in the order in which they run."""
        places = (self.pre_attention_norm, self.post_attention_norm, self.pre_mlp_norm, self.post_mlp_norm)
        return tuple(name for name in places if name is not None)


@dataclass(frozen=True, slots=True)
class Mixer:
    """Transformers' own module, which mixes tokens in layers without softmax attention and carries a state.

    Args:
        name: its attribute of the layer.
        class_name, module: the class, and the module of transformers that defines it.
        family, family_module: transformers' class of the models that have it, which knows how to initialise it.
        arguments: constructor arguments by name: ``config``, ``layer_idx`` or a literal.
        hidden_states, padding_mask, cache: names of the three arguments that it is called with.
        returns_tuple: whether its output is the first of several.
        layers: expression that is true in the layers that have it.
        kind: what ``config.layer_types`` calls such a layer.
        block: the order of such a layer.
        reads: config fields that it reads by itself.
    """

    name: str
    class_name: str
    module: str
    family: str
    family_module: str
    arguments: tuple[tuple[str, str], ...]
    hidden_states: str
    padding_mask: str
    cache: str
    returns_tuple: bool
    layers: str
    kind: str
    block: Block
    reads: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Dropouts:
    """Config key of each dropout's probability, None where there is none.

    Args:
        embedding: on the embeddings, positions added.
        attention_output: on the attention's branch, before the residual addition.
        mlp_activation: on the activations, before ``down``.
        mlp_output: on the MLP's branch.
    """

    embedding: str | None
    attention_output: str | None
    mlp_activation: str | None
    mlp_output: str | None


@dataclass(frozen=True, slots=True)
class Positions:
    """Absolute positions, added to the token embeddings.

    Args:
        kind: ``learned``: a table; ``sinusoidal``: sines, then cosines (arXiv:1706.03762).
        offset: rows of the table before that of position 0.
        size: expression of the number of rows without them.
        reaches_base: of sines: whether the exponents of the wavelengths run from 0 to 1 (fairseq) instead of ending one
            step before (the paper).
    """

    kind: Literal["learned", "sinusoidal"]
    offset: int
    size: str
    reaches_base: bool


@dataclass(frozen=True, slots=True)
class Embedding:
    """Token embedding, and what happens before the first layer.

    Args:
        padding: whether the row of ``config.pad_token_id`` gets no gradient.
        scale: Python expression of ``config`` by which token embeddings are multiplied, None for 1.
        scales_inputs: whether the model scales whatever embeddings it is given, not only those that it looks up.
        rounds_scale: whether the scale is rounded to the embeddings' dtype before it is used.
        positions: None where positions are not added here.
        norm: whether a norm stands between the embedding and the first layer.
        initial_std: expression of the deviation of fresh embeddings, None where it is ``config.initializer_range``.
    """

    padding: bool
    scale: str | None
    scales_inputs: bool
    rounds_scale: bool
    positions: Positions | None
    norm: bool
    initial_std: str | None = None


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """What the head takes instead of the last hidden states: ``norm(act(W x + b))``, as BERT's head (arXiv:1810.04805).

    Args:
        bias: whether there is a ``b``.
        activation: its name in transformers' ``ACT2FN``.
        activation_key: config key that names it, None where the architecture fixes it.
        norm: the norm.
    """

    bias: Bias
    activation: str
    activation_key: str | None
    norm: Norm


@dataclass(frozen=True, slots=True)
class Head:
    """Language-modelling head: ``cap * tanh(scale * (W x + b) / cap)``.

    Args:
        bias: whether there is a ``b``.
        scale: expression of the factor on the logits, None for 1.
        softcap_key: config key of the cap, None where there is none.
        transform: of the hidden states before it, None where there is none.
        bias_key: boolean config key that decides on the bias, None where the architecture does.
    """

    bias: bool
    scale: str | None
    softcap_key: str | None
    transform: HeadTransform | None = None
    bias_key: str | None = None


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One kind of tensor of the checkpoint.

    Args:
        disk: pattern of its name on disk; ``{layer}`` stands for a layer index.
        native: patterns of its names in the generated model; several where the tensor on disk is a fused one.
        operation: ``rename``; ``transpose`` (Conv1D); ``split``: along dimension 0; ``transpose, split``.
        shape: the shape on disk in the letters of the generated code's legend, for people.
        groups: for a split: expression of the number of groups; each group holds its share of every native tensor, in
            order. ``1``: ``[q | k | v]``; ``config.num_attention_heads``: q, k and v of each head beside each other.
        only_if: boolean config field without which the tensor does not exist; empty where it always does.
        layers: expression of ``config`` and ``layer_idx`` that is true in the layers that have the tensor; empty where
            all have it.
    """

    disk: str
    native: tuple[str, ...]
    operation: Literal["rename", "transpose", "split", "transpose, split"]
    shape: str
    groups: str = "1"
    only_if: str = ""
    layers: str = ""


@dataclass(frozen=True, slots=True)
class IgnoredKey:
    """A kind of tensor that some checkpoints hold and the model does not need: its pattern on disk, and why."""

    disk: str
    reason: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The checkpoint's layout on disk.

    Args:
        rows: every kind of tensor.
        ignored: what some checkpoints hold besides.
        base_prefix: prefix, with its dot, that names of the base model's tensors have here and lack in a checkpoint of
            the base model alone, as some are published (``transformer.`` of GPT-2); None where all files have it.
    """

    rows: tuple[KeyRow, ...]
    ignored: tuple[IgnoredKey, ...]
    base_prefix: str | None = None


@dataclass(frozen=True, slots=True)
class Tying:
    """Whether the head shares the embedding's weight in this model."""

    tied: bool


@dataclass(frozen=True, slots=True)
class FixedField:
    """A config field that the reference honours at other values but the generated code does not: it refuses them.

    Args:
        value: this model's.
        equals: another field that it must equal, where this model's value is only that.
    """

    key: str
    value: Any
    equals: str | None = None


@dataclass(frozen=True, slots=True)
class ReviewItem:
    """Something that a reviewer should look at: what, and what to do about it."""

    what: str
    do: str


@dataclass(frozen=True, slots=True)
class ArchSpec:
    """A dense decoder-only language model.

    Args:
        norm: the formula of the layers' norms, the final norm and the embedding's norm.
        final_norm: whether a norm stands between the last layer and the head.
        mixer: what mixes tokens in the layers without an attention; None where all have one.
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
    final_norm: bool
    attention: Attention
    rope: Rope | None
    mlp: Mlp
    block: Block
    head: Head
    tying: Tying
    checkpoint: Checkpoint
    dropouts: Dropouts
    fixed: tuple[FixedField, ...]
    review: tuple[ReviewItem, ...]
    provenance: Mapping[str, Provenance] = field(hash=False)
    mixer: Mixer | None = None

    @property
    def biases(self) -> tuple[Bias, ...]:
        """Every bias that a projection or a norm may have."""
        a = self.attention
        more = (a.gate.bias,) if a.gate else (a.latent.q_up_bias,) if a.latent else ()
        transform = self.head.transform
        head = (Bias(self.head.bias, self.head.bias_key), *((transform.bias, transform.norm.bias) if transform else ()))
        inside = (self.mlp.up_bias, self.mlp.down_bias, self.norm.bias)
        return (a.q_bias, a.k_bias, a.v_bias, a.o_bias, *more, *inside, *head)

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Every formula of a norm in the model."""
        a = self.attention
        latent = (a.latent.q_norm, a.latent.kv_norm) if a.latent else ()
        head = self.head.transform.norm if self.head.transform else None
        inner = (a.qk_norm.norm if a.qk_norm else None, a.output_norm, self.mlp.inner_norm, *latent, head)
        return (self.norm, *(norm for norm in inner if norm is not None))

    @property
    def scalar_expressions(self) -> tuple[str, ...]:
        """Expressions of numbers that generated code reads from the config."""
        a, norms = self.attention, self.norms
        alibi = a.alibi.bias_max if a.alibi else None
        found = (a.scale, a.softcap, alibi, self.embedding.scale, self.block.multiplier, self.head.scale)
        return tuple(expression for expression in (*(norm.eps for norm in norms), *found) if expression)

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
