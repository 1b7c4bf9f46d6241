"""From what was measured on the reference to an ArchSpec.

``measured`` is the JSON of :mod:`onboard.reference.probe`: of this very model (``onboard new``), or of the
architecture's defaults as shipped in ``measured/`` (``onboard inspect``, which must not import torch). Nothing is
guessed here: a field that neither config.json nor a measurement gives is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from onboard.errors import Unsupported
from onboard.facts._text import shown
from onboard.spec._provenance import provenance
from onboard.spec.arch import (
    Alibi,
    ArchSpec,
    Attention,
    Bias,
    Block,
    Checkpoint,
    Dimensions,
    Dropouts,
    Embedding,
    FixedField,
    Head,
    HeadTransform,
    Latent,
    LayerKind,
    Mixer,
    Mlp,
    Norm,
    OutputGate,
    Positions,
    QKNorm,
    QueryScale,
    ReviewItem,
    Rope,
    Tying,
)
from onboard.spec.expressions import evaluate
from onboard.spec.keys import SIZES
from onboard.spec.review import not_built, unknown_keys
from onboard.spec.rows import base_prefix, ignored_keys, key_rows, only_a_bias, reference_parameter


def derive(raw: Mapping[str, Any], architecture: str, model_type: str, measured: Mapping[str, Any]) -> ArchSpec:
    """Build the spec of a dense decoder.

    Args:
        raw: the parsed config.json (the decoder's level).
        architecture: name of the architecture, already checked to be an identifier.
        model_type: ``model_type``, already checked.
        measured: what the probe found.

    Raises:
        Unsupported: a field of the config changes the reference's output and no part of the spec reads it.
    """
    real, found = measured["real"], measured
    found = {**found, "letters": _letters(found)}
    attention, mlp = _attention(found), _mlp(found)
    drops = found["dropouts"]
    spec = ArchSpec(
        architecture=architecture,
        model_type=model_type,
        reference_class=found["reference_class"],
        config_class=found["config_class"],
        dimensions=_dimensions(found),
        embedding=_embedding(found),
        layer_kinds=_layer_kinds(found, attention),
        has_layer_types=real["layer_types"] is not None,
        norm=_norm(found["norm"], _norm_bias(found)),
        final_norm=found["final_norm"],
        attention=attention,
        rope=_rope(found),
        mlp=mlp,
        block=_block(found["block"]),
        mixer=_mixer(found),
        head=_head(found),
        dropouts=Dropouts(**{name: drops[name] for name in Dropouts.__dataclass_fields__}),
        tying=Tying(bool(real["tie_word_embeddings"])),
        checkpoint=Checkpoint(key_rows(found), ignored_keys(found), base_prefix(found)),
        fixed=(),
        review=(),
        provenance={},
    )
    fixed = _fixed(spec, found)
    review = (
        *_length_dependent(spec),
        *not_built(found),
        *_unknown(spec, raw, found),
        *_normalised(raw, found),
        *_unvaried(spec, found),
        *(_fixed_review(item) for item in fixed),
    )
    spec = replace(spec, fixed=fixed, review=review)
    return replace(spec, provenance=provenance(spec, raw, found))


def config_values(found: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the real config by name, those that ``attribute_map`` renames by both, for :func:`evaluate`."""
    real = found["real"]
    values = {**real["values"], **real.get("lists", {}), **{name: real[name] for name in SIZES if name in real}}
    values |= {name: real[name] for name in ("layer_types", "sliding_window") if name in real}
    return values


def _dimensions(found: Mapping[str, Any]) -> Dimensions:
    real, a = found["real"], found["attention"]
    values = config_values(found)
    return Dimensions(
        hidden_size=real["hidden_size"],
        num_hidden_layers=real["num_hidden_layers"],
        num_attention_heads=evaluate(a["num_heads"], values),
        num_key_value_heads=evaluate(a["num_key_value_heads"], values),
        head_dim=evaluate(a["head_dim"], values),
        intermediate_size=evaluate(found["mlp"]["intermediate_size"], values),
        vocab_size=real["vocab_size"],
        max_position_embeddings=real["max_position_embeddings"],
    )


def _attention(found: Mapping[str, Any]) -> Attention:
    a = found["attention"]
    layer = "model.layers.{layer}.self_attn"
    copied = (
        "num_heads",
        "num_key_value_heads",
        "head_dim",
        "rotary",
        "rope_layers",
        "scale",
        "softcap",
        "sinks",
        "window_key",
        "window_layers",
    )
    qk_norm, latent = a["qk_norm"], a.get("latent")
    q, k, v = ("q_proj", "k_proj", "v_proj")
    if latent:
        q, k, v = "q_a_proj" if latent["q_rank"] else "q_proj", "kv_a_proj_with_mqa", "kv_b_proj"
    return Attention(
        **{name: a[name] for name in copied},
        q_bias=_bias(a["biases"]["q"], f"{layer}.{q}.bias", found),
        k_bias=_bias(a["biases"]["k"], f"{layer}.{k}.bias", found),
        v_bias=_bias(a["biases"]["v"], f"{layer}.{v}.bias", found),
        o_bias=_bias(a["biases"]["o"], f"{layer}.o_proj.bias", found),
        qk_norm=qk_norm and QKNorm(_norm(qk_norm["norm"]), qk_norm["over"], qk_norm["after_rope"]),
        output_norm=a["output_norm"] and _norm(a["output_norm"]),
        alibi=a["alibi"] and Alibi(a["alibi"]["bias_max"], a["alibi"]["scaled"]),
        dropout_key=found["dropouts"]["attention_weights"],
        query_scale=QueryScale(**a["query_scale"]) if a["query_scale"] else None,
        differential=a.get("differential", False),
        o_bias_layers=a.get("o_bias_layers"),
        latent=latent and _latent(latent, f"{layer}.q_b_proj.bias", found),
        gate=_gate(a.get("gate"), f"{layer}.g_proj.bias", found),
    )


def _latent(latent: Mapping[str, Any], q_up_bias: str, found: Mapping[str, Any]) -> Latent:
    norms = {name: latent[name] and _norm(latent[name]) for name in ("q_norm", "kv_norm")}
    return Latent(**{**latent, **norms, "q_up_bias": _bias(latent["q_up_bias"], q_up_bias, found)})


def _gate(gate: Mapping[str, Any] | None, native_bias: str, found: Mapping[str, Any]) -> OutputGate | None:
    if gate is None:
        return None
    return OutputGate(gate["over"], gate["activation"], _bias(gate["bias"], native_bias, found))


def _norm(found: Mapping[str, Any], bias: Bias | None = None) -> Norm:
    own = bias or Bias(found["bias"])
    return Norm(found["kind"], found["weight"], own, found["offset"], found["eps"])


def _norm_bias(found: Mapping[str, Any]) -> Bias:
    return _bias(found["norm"]["bias"], f"model.layers.{{layer}}.{_first_norm(found)}.bias", found)


def _first_norm(found: Mapping[str, Any]) -> str:
    places = ["pre_attention_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm"]
    if found["block"].get("pre_attention_layers"):
        places = places[1:]  # not every layer has the first one
    return next((found["block"][place] for place in places if found["block"][place]), "")


def _rope(found: Mapping[str, Any]) -> Rope | None:
    rope = found["rope"]
    if rope is None:
        return None
    return Rope(
        types=tuple(rope["types"]),
        served=tuple(rope["served"]),
        per_layer_type=rope["per_layer_type"],
        partial=rope["partial"],
        dim=rope["dim"],
        theta=rope["theta"],
        reversed=rope["reversed"],
        parameters=found["real"]["rope_parameters"] or {},
        sections_apart=rope.get("sections_apart", False),
    )


def _mlp(found: Mapping[str, Any]) -> Mlp:
    m = found["mlp"]
    layer = "model.layers.{layer}.mlp"
    return Mlp(
        gated=m["gated"],
        intermediate_size=m["intermediate_size"],
        up_bias=_bias(m["biases"]["up"], f"{layer}.up_proj.bias", found),
        down_bias=_bias(m["biases"]["down"], f"{layer}.down_proj.bias", found),
        activation=m["activation"],
        activation_key=m["activation_key"],
        activation_parameters=m["activation_parameters"],
        inner_norm=m["inner_norm"] and _norm(m["inner_norm"]),
    )


def _mixer(found: Mapping[str, Any]) -> Mixer | None:
    m = found.get("mixer")
    if m is None:
        return None
    names = {what: name for name, what in m["call"].items()}
    return Mixer(
        **{name: m[name] for name in ("name", "module", "family", "family_module", "returns_tuple", "layers", "kind")},
        class_name=m["class"],
        arguments=tuple(m["arguments"].items()),
        hidden_states=names["hidden_states"],
        padding_mask=names["attention_mask"],
        cache=names["past_key_values"],
        block=_block(m["block"]),
        reads=tuple(m["reads"]),
    )


def _block(block: Mapping[str, Any]) -> Block:
    values: dict[str, Any] = {name: block.get(name) for name in Block.__dataclass_fields__}
    return Block(**values)


def _head(found: Mapping[str, Any]) -> Head:
    h = found["head"]
    bias = _bias(h["bias"], "lm_head.bias", found)
    transform = h.get("transform")
    if transform:
        transform = HeadTransform(
            _bias(transform["bias"], "head_dense.bias", found),
            transform["activation"],
            transform["activation_key"],
            _norm(transform["norm"], _bias(transform["norm"]["bias"], "head_norm.bias", found)),
        )
    return Head(bias.present, h["scale"], h["softcap_key"], transform, bias.key)


def _embedding(found: Mapping[str, Any]) -> Embedding:
    e = found["embedding"]
    positions = Positions(**e["positions"]) if e["positions"] else None
    return Embedding(
        e["padding"], e["scale"], e["scales_inputs"], e["rounds_scale"], positions, e["norm"], e.get("initial_std")
    )


def _bias(present: bool, native: str, found: Mapping[str, Any]) -> Bias:
    """A bias, and the boolean field that makes its parameter come or go; the config's value of that field decides."""
    parameter = reference_parameter(found, native)
    for key, effect in found["live"].items():
        changed = (*effect["added"], *effect["removed"])
        if parameter in changed and only_a_bias(str(parameter), effect):
            value = found["real"]["values"].get(key)
            if isinstance(value, bool) and isinstance(found["tiny"].get(key), bool):
                # Some fields take a bias away instead of adding it: `disable_bias`.
                flipped = found["tiny"][key] != present
                return Bias(value != flipped, None if flipped else key)
    return Bias(present)


def _layer_kinds(found: Mapping[str, Any], attention: Attention) -> tuple[LayerKind, ...]:
    depth: int = found["real"]["num_hidden_layers"]
    values = config_values(found)
    if found.get("mixer"):
        return tuple(values["layer_types"])
    if attention.window_key is None or attention.window_layers is None or values.get(attention.window_key) is None:
        return ("full_attention",) * depth
    kinds: list[LayerKind] = []
    for index in range(depth):
        slides = evaluate(attention.window_layers, values, index)
        kinds.append("sliding_attention" if slides else "full_attention")
    return tuple(kinds)


def _letters(found: Mapping[str, Any]) -> dict[str, str]:
    """Sizes of the tiny model in the letters of the generated code."""
    tiny = found["tiny_sizes"] if "tiny_sizes" in found else found["tiny"]
    a, values = found["attention"], {**found["tiny"], **tiny}
    heads, kv_heads, head_dim = (evaluate(a[name], values) for name in ("num_heads", "num_key_value_heads", "head_dim"))
    width = evaluate(found["mlp"]["intermediate_size"], values)
    words = {
        (heads + 2 * kv_heads) * head_dim: "(N + 2K)D",
        2 * heads * head_dim: "2ND",
        kv_heads * head_dim: "KD",
        heads * head_dim: "ND",
        2 * width: "2F",
        head_dim: "D",
        width: "F",
        values["vocab_size"]: "V",
        values["hidden_size"]: "H",
    }
    return {str(size): word for size, word in words.items()}


def read_keys(spec: ArchSpec, attribute_map: Mapping[str, str]) -> set[str]:
    """Config fields that generated code reads, by the names that the config class declares.

    Args:
        spec: the architecture.
        attribute_map: other name of a field to the declared one.
    """
    named: set[str] = set()
    for path, value in spec.leaves():
        if path.split(".")[0] not in _SECTIONS or not isinstance(value, str):
            continue
        named.update(re.findall(r"config\.(\w+)", value))
        if path.endswith("key") or path.startswith("dropouts."):
            named.add(value)
    return {attribute_map.get(name, name) for name in named}


_SECTIONS = frozenset(("embedding", "norm", "attention", "rope", "mlp", "block", "head", "dropouts"))


def _fixed(spec: ArchSpec, found: Mapping[str, Any]) -> tuple[FixedField, ...]:
    """Fields that the reference honours and generated code does not: it refuses any value but this model's.

    This model's value has no effect, or the hypotheses would not hold; only a dropout, which shows in training alone,
    has
    to be looked at here.

    Raises:
        Unsupported: the model trains with a dropout that generated code does not have.
    """
    values = found["real"]["values"]
    unread = [name for name in _unread(spec, found) if found["live"][name]["effect"] != "unvaried"]
    for name in unread:
        if found["live"][name]["effect"] == "training" and values.get(name):
            raise Unsupported(
                "A dropout of this architecture is not explained yet.",
                f"{found['reference_class']} honours {name}={values[name]} at a place that no hypothesis covers.",
                f"Set {name} to 0 in a copy of config.json if you train without it, or report the architecture.",
                code="unsupported.dropout",
            )
    return tuple(_fixed_field(name, found) for name in sorted(unread))


def _fixed_field(name: str, found: Mapping[str, Any]) -> FixedField:
    real, tiny, sizes = found["real"], found["tiny"], found.get("tiny_sizes", {})
    value = real["values"].get(name)
    # A size that the tiny model shrinks is held to the field that it shrinks with.
    same = [key for key in SIZES if sizes.get(key) == tiny.get(name) and real.get(key) == value]
    shrunk = isinstance(value, int) and value != tiny.get(name)
    return FixedField(name, value, same[0] if shrunk and same else None)


def _unread(spec: ArchSpec, found: Mapping[str, Any]) -> list[str]:
    """Fields that are live, or of which nothing is known, and that generated code does not read."""
    read = read_keys(spec, found["real"].get("attribute_map", {}))
    by_mixer = set(spec.mixer.reads) if spec.mixer else set()
    return [name for name in found["live"] if name not in read | by_mixer]


def _unvaried(spec: ArchSpec, found: Mapping[str, Any]) -> list[ReviewItem]:
    return [
        ReviewItem(
            f"Whether config.{name} changes the reference is not known: it took no other value that was tried.",
            "Look whether the reference reads it; the generated code does not.",
        )
        for name in _unread(spec, found)
        if found["live"][name]["effect"] == "unvaried"
    ]


def _fixed_review(item: FixedField) -> ReviewItem:
    served = item.equals or repr(item.value)
    return ReviewItem(
        f"config.{item.key} changes the reference; the generated code serves only {item.key}={served}.",
        "The model refuses other values. Extend it where a checkpoint of this family needs one.",
    )


def _unknown(spec: ArchSpec, raw: Mapping[str, Any], found: Mapping[str, Any]) -> list[ReviewItem]:
    known = set(found["real"]["fields"])
    if not any(bias.present for bias in spec.biases):
        # A switch for a bias that is off agrees with what was measured: there is none.
        known |= {key for key, value in raw.items() if key.endswith("bias") and value is False}
    return [
        ReviewItem(
            f"config.json has {shown(repr(key))}, which {found['config_class']} does not know.",
            "The reference ignores it. If the original code reads it, transformers computes something else too.",
        )
        for key in unknown_keys(raw, known)
    ]


def _length_dependent(spec: ArchSpec) -> list[ReviewItem]:
    types = spec.rope.length_dependent if spec.rope else ()
    if not types:
        return []
    return [
        ReviewItem(
            f"{types[0]} rotation follows the longest position of a batch, so a key/value cache goes stale "
            "when generation crosses the original length.",
            "Training is not affected. transformers' own cached and uncached tokens differ there too; "
            "generation is proven up to that length.",
        )
    ]


def _normalised(raw: Mapping[str, Any], found: Mapping[str, Any]) -> list[ReviewItem]:
    return [
        ReviewItem(
            f"config.json says {key}={shown(repr(raw.get(key)))}, "
            f"{found['config_class']} reads it as {shown(repr(value))}.",
            "The package follows the reference; test_config holds it to exactly this.",
        )
        for key, value in found["real"]["normalised"].items()
    ]
