"""From what was measured on the reference to an ArchSpec with the provenance of every field.

``measured`` is the JSON of :mod:`onboard.reference.probe`: of this very model (``onboard new``), or of the
architecture's
defaults as shipped in ``measured/`` (``onboard inspect``, which must not import torch). Nothing is guessed here: a
field that neither
config.json nor a measurement gives is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from onboard.errors import Unsupported
from onboard.facts._text import shown
from onboard.spec.arch import (
    ArchSpec,
    Attention,
    Bias,
    Block,
    Checkpoint,
    Dimensions,
    Embedding,
    FixedField,
    Head,
    IgnoredKey,
    KeyRow,
    LayerKind,
    Mlp,
    Norm,
    Provenance,
    ReviewItem,
    Rope,
    Tying,
)
from onboard.spec.keys import ALIASES
from onboard.spec.review import unknown_keys


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
    attention = _attention(found)
    mlp = _mlp(found)
    block = Block(**{name: found["block"][name] for name in Block.__dataclass_fields__})
    norm = Norm(found["norm"]["kind"], found["norm"]["offset"], found["norm"]["eps_key"])
    rope = Rope(
        types=tuple(found["rope"]["types"]),
        served=tuple(found["rope"]["served"]),
        per_layer_type=found["rope"]["per_layer_type"],
        partial=found["rope"]["partial"],
        parameters=real["rope_parameters"],
    )
    head = Head(found["head"]["bias"], found["head"]["softcap_key"])
    dimensions = Dimensions(
        **{name: real[name] for name in Dimensions.__dataclass_fields__ if name != "head_dim"},
        head_dim=real["head_dim"] or real["hidden_size"] // real["num_attention_heads"],
    )
    spec = ArchSpec(
        architecture=architecture,
        model_type=model_type,
        reference_class=found["reference_class"],
        config_class=found["config_class"],
        dimensions=dimensions,
        embedding=Embedding(found["embedding"]["scale"]),
        layer_kinds=_layer_kinds(real, attention),
        has_layer_types=real["layer_types"] is not None,
        norm=norm,
        attention=attention,
        rope=rope,
        mlp=mlp,
        block=block,
        head=head,
        tying=Tying(bool(real["tie_word_embeddings"])),
        checkpoint=Checkpoint(_rows(found), _ignored(found)),
        fixed=(),
        review=(),
        provenance={},
    )
    fixed = _fixed(spec, found)
    review = (
        *_length_dependent(spec),
        *_unknown(spec, raw, found),
        *_normalised(raw, found),
        *_unvaried(spec, found),
        *(_fixed_review(item) for item in fixed),
    )
    spec = replace(spec, fixed=fixed, review=review)
    return replace(spec, provenance=_provenance(spec, raw, found))


def _attention(found: Mapping[str, Any]) -> Attention:
    a, live, layer = found["attention"], found["live"], f"{found['roles']['layers']}.0.{found['roles']['attention']}"
    first = a["fused_qkv"] or a["q_proj"]
    return Attention(
        name=found["roles"]["attention"],
        **{
            name: a[name]
            for name in (
                "fused_qkv",
                "q_proj",
                "k_proj",
                "v_proj",
                "o_proj",
                "qk_norm",
                "q_norm",
                "k_norm",
                "scale",
                "window_key",
                "window_layers",
                "rope_layers_key",
            )
        },
        qkv_bias=_bias(a["qkv_bias"], f"{layer}.{first}.bias", found),
        o_bias=_bias(a["o_bias"], f"{layer}.{a['o_proj']}.bias", found),
        dropout_key="attention_dropout" if live.get("attention_dropout", {}).get("effect") == "training" else None,
        head_dim_key="head_dim" if found["real"]["head_dim"] is not None else None,
    )


def _mlp(found: Mapping[str, Any]) -> Mlp:
    m = found["mlp"]
    layer = f"{found['roles']['layers']}.0.{found['roles']['mlp']}"
    names = ("fused", "gate_proj", "up_proj", "down_proj", "activation", "activation_key")
    return Mlp(
        name=found["roles"]["mlp"],
        **{name: m[name] for name in names},
        bias=_bias(m["bias"], f"{layer}.{m['down_proj']}.bias", found),
    )


def _bias(present: bool, parameter: str, found: Mapping[str, Any]) -> Bias:
    """A bias, and the boolean field that makes its parameter come or go; the config's value of that field decides."""
    for key, effect in found["live"].items():
        if parameter in effect["added"] or parameter in effect["removed"]:
            return Bias(bool(found["real"]["values"].get(key, present)), key)
    return Bias(present)


def _layer_kinds(real: Mapping[str, Any], attention: Attention) -> tuple[LayerKind, ...]:
    depth: int = real["num_hidden_layers"]
    kinds: list[LayerKind]
    if attention.window_key is None or real["sliding_window"] is None:
        kinds = ["full_attention"] * depth
    elif attention.window_layers == "all":
        kinds = ["sliding_attention"] * depth
    else:
        kinds = real["layer_types"]
    return tuple(kinds)


def _rows(found: Mapping[str, Any]) -> tuple[KeyRow, ...]:
    """One row a kind of tensor: its pattern on disk, in the generated model, and the field that it depends on."""
    optional = {
        name: (key, name in effect["added"])
        for key, effect in found["live"].items()
        if effect["effect"] == "parameters"
        for name in (*effect["added"], *effect["removed"])
    }
    rows: dict[str, KeyRow] = {}
    unmapped = sorted(set(found["disk"]) - set(found["native"]))
    if unmapped:
        raise Unsupported(
            f"The checkpoint's layout of {found['reference_class']} is not understood yet.",
            f"{len(unmapped)} tensors have other names on disk than in memory, the first is {unmapped[0]}.",
            "Report the architecture; renamed and regrouped checkpoints are the next thing that onboard learns.",
            code="unsupported.layout",
        )
    for name in (*found["disk"], *(name for name in optional if name not in found["disk"])):
        disk = re.sub(r"\.\d+\.", ".{layer}.", name, count=1)
        if disk in rows:
            continue
        key, _ = optional.get(name, ("", False))
        shape = found["disk"].get(name) or found["disk"].get(re.sub(r"bias$", "weight", name), [])[:1]
        rows[disk] = KeyRow(disk, _native(disk, found["roles"]), "rename", _shape(shape, found), key)
    order = {"embedding": 0, "layers": 1, "final_norm": 2, "head": 3}

    def place(row: KeyRow) -> tuple[int, str]:
        role = next(name for name in order if row.disk.startswith(found["roles"][name]))
        return order[role], ""

    return tuple(sorted(rows.values(), key=place))


def _ignored(found: Mapping[str, Any]) -> tuple[IgnoredKey, ...]:
    """Old checkpoints store the frequencies of each layer's rotation, which today's models compute from the config."""
    roles = found["roles"]
    name = f"{roles['layers']}.{{layer}}.{roles['attention']}.rotary_emb.inv_freq"
    return (IgnoredKey(name, "computed from the config; old files store it"),)


def _native(disk: str, roles: Mapping[str, str]) -> str:
    """The generated model keeps the names inside a layer; its trunk is named as upstream's."""
    trunk = {"embedding": "model.embed_tokens", "layers": "model.layers", "final_norm": "model.norm", "head": "lm_head"}
    for role, native in trunk.items():
        if disk.startswith(roles[role] + "."):
            return native + disk[len(roles[role]) :]
    raise Unsupported(
        "The checkpoint has a tensor outside of the decoder.",
        f"{disk} belongs to neither embedding, layers, final norm nor head.",
        "Report the architecture.",
        code="unsupported.layout",
    )


def _shape(shape: list[int], found: Mapping[str, Any]) -> str:
    """The tiny shape in the letters of the generated code, which its sizes give, since they all differ."""
    tiny = found["tiny"]
    head_dim = tiny.get("head_dim") or tiny["hidden_size"] // tiny["num_attention_heads"]
    heads, kv_heads = tiny["num_attention_heads"], tiny["num_key_value_heads"]
    words = {
        (heads + 2 * kv_heads) * head_dim: "(N + 2K)D",
        kv_heads * head_dim: "KD",
        heads * head_dim: "ND",
        2 * tiny["intermediate_size"]: "2F",
        head_dim: "D",
        tiny["intermediate_size"]: "F",
        tiny["vocab_size"]: "V",
        tiny["hidden_size"]: "H",
    }
    return "[" + ", ".join(words.get(size, str(size)) for size in shape) + "]"


def read_keys(spec: ArchSpec) -> set[str]:
    """Config fields that generated code reads."""
    a, m, b = spec.attention, spec.mlp, spec.block
    named: Iterable[str | None] = (
        spec.norm.eps_key,
        a.qkv_bias.key,
        a.o_bias.key,
        a.window_key,
        a.dropout_key,
        a.rope_layers_key,
        a.head_dim_key,
        m.bias.key,
        m.activation_key,
        b.dropout_key,
        spec.head.softcap_key,
        *re.findall(r"config\.(\w+)", f"{a.scale} {spec.embedding.scale}"),
    )
    return {name for name in named if name}


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
    return tuple(FixedField(name, found["real"]["values"].get(name)) for name in sorted(unread))


def _unread(spec: ArchSpec, found: Mapping[str, Any]) -> list[str]:
    """Fields that are live, or of which nothing is known, and that generated code does not read."""
    return [name for name in found["live"] if name not in read_keys(spec)]


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
    return ReviewItem(
        f"config.{item.key} changes the reference; the generated code serves only {item.key}={item.value!r}.",
        "The model refuses other values. Extend it where a checkpoint of this family needs one.",
    )


def _unknown(spec: ArchSpec, raw: Mapping[str, Any], found: Mapping[str, Any]) -> list[ReviewItem]:
    known = set(found["real"]["fields"])
    if not any(bias.present for bias in (spec.attention.qkv_bias, spec.attention.o_bias, spec.mlp.bias)):
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
    types = spec.rope.length_dependent
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


def _provenance(spec: ArchSpec, raw: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Provenance]:
    """Where each leaf comes from: a key of config.json, the reference's config class, or a measurement."""
    reference = f"transformers {found['transformers']}"
    out: dict[str, Provenance] = {}
    for path, _ in spec.leaves():
        section, _, leaf = path.partition(".")
        if section == "dimensions":
            out[path] = _from_config(leaf, raw, found)
        elif section in ("architecture", "model_type"):
            key = "architectures" if section == "architecture" else "model_type"
            out[path] = Provenance("config.json", key)
        elif section in ("reference_class", "config_class"):
            out[path] = Provenance(reference, "class look-up by architecture, then model_type")
        elif section in ("layer_kinds", "has_layer_types"):
            out[path] = Provenance("config.json", "layer pattern as read by " + found["config_class"])
        elif section == "tying":
            out[path] = _from_config("tie_word_embeddings", raw, found)
        elif section == "checkpoint":
            out[path] = Provenance(reference, "safetensors that save_pretrained of the tiny model writes")
        elif section == "fixed":
            out[path] = Provenance("measured", "each config field varied by itself on the tiny reference")
        elif path == "rope.parameters":
            out[path] = _from_config("rope_parameters", raw, found)
        elif leaf.endswith(".key") or leaf.endswith("bias.present"):
            out[path] = Provenance("measured", "parameters that appear when the field is flipped")
        else:
            difference = found.get(section, {}).get("difference")
            number = "" if difference is None else f"max difference {difference:.1e}"
            on_defaults = found["origin"] if found["origin"].startswith("defaults") else ""
            out[path] = Provenance("measured", ", ".join(part for part in (on_defaults, number) if part))
    return out


def _from_config(name: str, raw: Mapping[str, Any], found: Mapping[str, Any]) -> Provenance:
    # Of other spellings the class reads only those that it declares; it ignores the rest.
    spellings = tuple(key for key in ALIASES.get(name, (name,)) if key == name or key in found["real"]["fields"])
    if name == "rope_parameters":
        spellings = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "rotary_emb_base")
    used = [spelling for spelling in spellings if raw.get(spelling) is not None]
    if used:
        return Provenance("config.json", ", ".join(used) if name == "rope_parameters" else used[0])
    return Provenance(f"transformers {found['transformers']}", f"default of {found['config_class']}")
