"""What templates are given: the spec, and the few words and questions that several templates share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from onboard.render.adapter import adapter_context
from onboard.spec.arch import ArchSpec, Block, Norm

# Rotation tables that the framework's own LlamaRotaryEmbedding computes as transformers does. The others depend on the
# length of the batch, or rotate a part of the head, or differ by layer type.
_FRAMEWORK_ROPES = frozenset(("default", "llama3"))
# Changing one of these in a variant would need others to follow.
_SIZES = frozenset(("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"))


def model_context(spec: ArchSpec, *, prefix: str, package: str, header: str) -> dict[str, Any]:
    """Context of the templates below ``package/``.

    Args:
        spec: the architecture.
        prefix: prefix of every class name, a checked identifier (``Qwen3``).
        package: import path of the package (``nemo_automodel_qwen3``).
        header: licence header with its newline, or empty.
    """
    rope, attention = spec.rope, spec.attention
    has_sliding = attention.window_key is not None
    by_type = "config.layer_types[" in (attention.window_layers or "") or bool(rope and rope.per_layer_type)
    te_lacks = _te_lacks(spec)
    norms = spec.norms
    offset = next((_CLASSES[norm.kind] for norm in norms if norm.weight and norm.offset), None)
    positions = spec.embedding.positions
    # Kernels that take neither a bias, a cap nor sinks would silently leave them out.
    plain = not (attention.alibi or attention.softcap or attention.sinks)
    return {
        "spec": spec,
        "prefix": prefix,
        "package": package,
        "header": header,
        "class_name": f"{prefix}ForCausalLM",
        "framework_norm": any(norm.kind == "rms" and norm.weight and not norm.offset for norm in norms),
        "offset_norm_class": offset,
        "head_norms": "HeadNorm" in layer_classes(spec),
        "layer_classes": layer_classes(spec),
        "layer_names": [prefix + name for name in layer_classes(spec)] + ["alibi_slopes"] * bool(attention.alibi),
        "own_rope": own_rope(spec),
        "interleaved": attention.rotary == "interleaved",
        "checks_rope": rope is not None and rope.dim is None,
        "has_sliding": has_sliding,
        "by_layer_type": spec.has_layer_types and (by_type or spec.mixer is not None),
        # A state that runs from token to token does not stop where a document ends.
        "packs": spec.mixer is None,
        "partial_layers": any((spec.mixer, attention.o_bias_layers, spec.block.pre_attention_layers)),
        "two_layer_classes": spec.mixer is not None and spec.mixer.block != spec.block,
        # transformers' window mask and static caches read the window and the layer types from these fields alone.
        "window_from_config": attention.window_key == "sliding_window",
        "scale_key": next(iter(re.findall(r"config\.(\w+)", spec.head.scale or "")), None),
        "positions_matter": rope is not None or positions is not None,
        # nn.LayerNorm is torch's own to keep exact.
        "weighted_norms": any(norm.weight and (norm.kind == "rms" or norm.offset) for norm in norms),
        "fp32_places": _fp32_places(spec, norms),
        "served_rope_types": sorted({*rope.types, *rope.served}) if rope else [],
        "length_dependent_rope": rope.length_dependent if rope else (),
        "learned_positions": positions is not None and positions.kind == "learned",
        "position_rows": f"{positions.size} + {positions.offset}"
        if positions and positions.offset
        else positions and positions.size,
        "te_supported": not te_lacks and spec.mixer is None and attention.latent is None,
        "te_lacks": te_lacks,
        "supports_flash": not (attention.alibi or attention.sinks or attention.latent),
        "supports_sdpa": not (attention.softcap or attention.sinks),
        "supports_flex": plain,
        **adapter_context(spec),
        "summary": summary(spec),
        "attention_summary": attention_summary(spec),
        "block_summary": block_summary(spec, spec.block),
        "mixer_block_summary": block_summary(spec, spec.mixer.block) if spec.mixer else "",
        "layer_reasons": layer_reasons(spec),
        "rope_reason": rope_reason(spec),
    }


def _fp32_places(spec: ArchSpec, norms: tuple[Norm, ...]) -> str:
    """What is computed in fp32 whatever the model's dtype, as the begin of a sentence that ends in embeddings."""
    normed = any(norm.weight and (norm.kind == "rms" or norm.offset) for norm in norms)
    if spec.rope:
        return f"Rotation tables stay in fp32{' and norms compute in it' if normed else ''}; e"
    return "Norms compute in fp32; e" if normed else "E"


def _position_rows(spec: ArchSpec) -> str:
    """Expression of the rows of the table of positions."""
    positions = spec.embedding.positions
    if positions is None:
        return ""
    return f"{positions.size} + {positions.offset}" if positions.offset else positions.size


_CLASSES = {"rms": "RMSNorm", "layer": "LayerNorm"}


def own_rope(spec: ArchSpec) -> bool:
    """Whether the rotation needs code of its own; the framework's covers the plain ones."""
    return bool(rope_reason(spec))


def layer_classes(spec: ArchSpec) -> list[str]:
    """Classes of layers.py, without their prefix."""
    a = spec.attention
    over_heads = a.qk_norm is not None and a.qk_norm.over == "heads"
    names = [_CLASSES[norm.kind] for norm in spec.norms if norm.weight and norm.offset]
    if over_heads:
        names.append("HeadNorm")
    if spec.embedding.scale and not spec.embedding.scales_inputs:
        names.append("ScaledEmbedding")
    if spec.embedding.positions and spec.embedding.positions.kind == "sinusoidal":
        names.append("SinusoidalPositions")
    return list(dict.fromkeys(names))


def _te_lacks(spec: ArchSpec) -> str:
    """What of this attention TE's kernel, as the framework calls it, cannot do; empty where it can all."""
    a = spec.attention
    lacks = {
        "position bias": a.alibi,
        "cap on the scores": a.softcap,
        "sinks": a.sinks,
        "scale by layer": "layer_idx" in a.scale,
        "subtraction of heads": a.differential,
    }
    return " and ".join(name for name, there in lacks.items() if there)


def norm_words(norm: Norm) -> str:
    """A few words on a norm."""
    kind = {"rms": "RMS norm", "layer": "layer norm"}[norm.kind]
    if not norm.weight:
        return f"{kind} without weight"
    return kind + (" with weights stored as an offset from one" if norm.offset else "")


def summary(spec: ArchSpec) -> str:
    """A few words on each part of the architecture, for the module's docstring."""
    attention = attention_summary(spec)[0].lower() + attention_summary(spec)[1:-1]
    parts = [norm_words(spec.norm), attention, f"{spec.mlp.activation} {'gated ' if spec.mlp.gated else ''}MLP"]
    if spec.embedding.scale:
        parts.append("scaled embeddings")
    if spec.embedding.positions:
        parts.append(f"{spec.embedding.positions.kind} positions")
    if spec.block.multiplier:
        parts.append("scaled residual branches")
    if spec.head.scale:
        parts.append("scaled logits")
    if spec.mixer:
        parts.append(f"transformers' {spec.mixer.class_name} in the layers of kind {spec.mixer.kind}")
    return f"{_block_order(spec.block)} decoder: {'; '.join(parts)}."


def attention_summary(spec: ArchSpec) -> str:
    """One line on the attention."""
    a = spec.attention
    if a.latent:
        return f"Multi-head latent attention{' with a latent of the queries too' if a.latent.q_rank else ''}."
    extras = []
    if a.qk_norm:
        over = {
            "head": "on each head",
            "heads": "on each head, with weights of its own",
            "width": "over the whole projection",
        }
        extras.append(f"q/k norm {over[a.qk_norm.over]}" + (" after the rotation" if a.qk_norm.after_rope else ""))
    if a.gate:
        extras.append(f"a {a.gate.activation} gate on {'the outputs' if a.gate.over == 'element' else 'each head'}")
    if a.differential:
        extras.append("half of the heads subtracted from the other half")
    elif a.output_norm:
        extras.append("a norm before the output projection")
    if a.alibi:
        extras.append("a linear position bias")
    if spec.rope and spec.rope.partial:
        extras.append("rotary positions on a part of the head")
    if a.rope_layers:
        extras.append("rotary positions on some layers")
    if a.query_scale:
        extras.append("queries that grow with their position")
    if a.softcap:
        extras.append("capped scores")
    if a.sinks:
        extras.append("a sink for each head")
    if a.window_key:
        if a.window_layers == "True":
            where = f"where {a.window_key} is set"
        else:
            where = "where layer_types says so" if "config.layer_types" in (a.window_layers or "") else "on some layers"
        extras.append(f"a sliding window {where}")
    kind = {"1": "Multi-query", a.num_heads: "Multi-head"}.get(a.num_key_value_heads, "Grouped-query")
    if not extras:
        return f"{kind} attention."
    listed = f"{', '.join(extras[:-1])} and {extras[-1]}" if len(extras) > 2 else " and ".join(extras)
    return f"{kind} attention with {listed}."


def block_summary(spec: ArchSpec, block: Block) -> str:
    """One line on the order of a layer."""
    return {
        "Pre-norm": "Decoder layer with norms before attention and MLP.",
        "Post-norm": "Decoder layer with norms after attention and MLP, before the residual additions.",
        "Late-norm": "Decoder layer with norms after the residual additions.",
        "Sandwich-norm": "Decoder layer with norms before and after attention and MLP.",
        "Norm-free": "Decoder layer without norms.",
        "Mixed-norm": f"Decoder layer with the norms {', '.join(block.norms)}.",
        "Parallel": "Decoder layer whose attention and MLP run side by side.",
    }[_block_order(block)]


def _block_order(b: Block) -> str:
    if b.parallel:
        return "Parallel"
    before = (b.pre_attention_norm is not None, b.pre_mlp_norm is not None)
    after = (b.post_attention_norm is not None, b.post_mlp_norm is not None)
    orders = {
        ((True, True), (False, False)): "Pre-norm",
        ((False, False), (True, True)): "Late-norm" if b.norm_after_residual else "Post-norm",
        ((True, True), (True, True)): "Sandwich-norm",
        ((False, False), (False, False)): "Norm-free",
    }
    return orders.get((before, after), "Mixed-norm")


def layer_reasons(spec: ArchSpec) -> list[str]:
    """Why layers.py is needed; empty where it is not."""
    words = {
        "RMSNorm": "a norm whose weight is an offset",
        "LayerNorm": "a norm whose weight is an offset",
        "HeadNorm": "a norm with weights for each head",
        "ScaledEmbedding": "a scaled embedding",
        "SinusoidalPositions": "sinusoidal positions",
    }
    reasons = [words[name] for name in layer_classes(spec)]
    return [*reasons, "a linear position bias"] if spec.attention.alibi else reasons


def rope_reason(spec: ArchSpec) -> str:
    """Why rope_utils.py is needed; empty where it is not."""
    rope = spec.rope
    if rope is None:
        return ""
    reasons = []
    if spec.attention.latent:
        reasons.append("the part of a head that rotates has a size of its own")
    if rope.per_layer_type:
        reasons.append("frequencies differ by layer type")
    if rope.partial or rope.dim:
        reasons.append("only a part of the head rotates" if rope.partial else "the config does not describe it")
    if spec.attention.rotary == "interleaved":
        reasons.append("neighbouring dimensions rotate together")
    if rope.sections_apart:
        reasons.append("frequencies of height and width stand apart")
    if rope.reversed:
        reasons.append("the rotation runs the other way round")
    scaled = [name for name in rope.types if name not in _FRAMEWORK_ROPES]
    if scaled:
        reasons.append(f"{' and '.join(scaled)} scaling")
    return ", ".join(reasons)


def variants(spec: ArchSpec, measured: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Other settings of config fields that the class serves, each of which the generated tests prove too.

    Returns:
        Name to the fields in which the variant differs from the tiny config.
    """
    tiny: Mapping[str, Any] = measured["tiny"]
    out: dict[str, dict[str, Any]] = {}
    tied = bool(tiny.get("tie_word_embeddings"))
    out["untied" if tied else "tied"] = {"tie_word_embeddings": not tied}
    for key in sorted({bias.key for bias in spec.biases if bias.key}):
        out[key if not tiny[key] else f"no_{key}"] = {key: not tiny[key]}
    windowed = measured["attention"]["windowed_fields"]
    if windowed is not None:
        out["sliding_window"] = {name: value for name, value in windowed.items() if value != tiny.get(name)}
    out["other_values"] = _other_values(spec, tiny)
    for rope_type, parameters in (measured["rope"] or {"served": {}})["served"].items():
        out[f"{rope_type}_rope"] = {"rope_parameters": parameters}
    if spec.head.softcap_key and tiny.get(spec.head.softcap_key) is None:
        out[spec.head.softcap_key] = {spec.head.softcap_key: 2.0}
    return out


def _other_values(spec: ArchSpec, tiny: Mapping[str, Any]) -> dict[str, Any]:
    """Another value for each number and name that the code must read from the config instead of knowing it."""
    expressions = " ".join(spec.scalar_expressions)
    changed: dict[str, Any] = {
        # An epsilon shows only where it is large.
        name: 0.01
        if "eps" in name.split("_") or name.endswith("epsilon")
        else 10 * tiny[name]
        if tiny[name] < 1
        else tiny[name] + 8
        for name in sorted(set(re.findall(r"config\.(\w+)", expressions)))
        if isinstance(tiny.get(name), (int, float)) and not isinstance(tiny[name], bool)
        if name not in _SIZES
    }
    key = spec.mlp.activation_key
    if key and not spec.mlp.activation_parameters:
        changed[key] = "relu" if tiny[key] != "relu" else "silu"
    return changed


def origins(spec: ArchSpec, measured: Mapping[str, Any]) -> list[dict[str, str]]:
    """Origin of each submodule: its path in the generated model, ``native``, and the number that confirmed it."""
    layer = "model.layers.*"

    def native(path: str, section: str, what: str) -> dict[str, str]:
        difference = measured[section]["difference"]
        return {"path": path, "origin": "native", "why": f"{what}, max difference {difference:.1e}"}

    norm = norm_words(spec.norm)
    embedding = "embedding" + (" with a constant factor" if spec.embedding.scale else "")
    mixed = spec.mixer.block.norms if spec.mixer else ()
    mlp = f"{'gated ' if spec.mlp.gated else ''}MLP with {spec.mlp.activation}"
    out = [native("model.embed_tokens", "embedding", embedding)]
    if spec.embedding.positions:
        out.append(native("model.embed_positions", "embedding", f"{spec.embedding.positions.kind} positions"))
    if spec.embedding.norm:
        out.append(native("model.embed_norm", "norm", norm))
    if spec.rope:
        out.append(native("model.rotary_emb", "rope", f"{' and '.join(spec.rope.types) or 'default'} rotation"))
    out += [
        native(f"{layer}.self_attn", "attention", attention_summary(spec)[:-1]),
        native(f"{layer}.mlp", "mlp", mlp),
        *(native(f"{layer}.{name}", "norm", norm) for name in dict.fromkeys((*spec.block.norms, *mixed))),
    ]
    if spec.mixer:
        difference = measured["mixer"]["difference"]
        why = f"transformers' {spec.mixer.class_name}, which carries a state from token to token, is built and called "
        why += f"as in the reference, max difference {difference:.1e}"
        out.append({"path": f"{layer}.{spec.mixer.name}", "origin": "reused", "why": why})
    if spec.final_norm:
        out.append(native("model.norm", "norm", norm))
    if spec.head.transform:
        out.append(native("head_dense", "head", f"dense layer with {spec.head.transform.activation} before the head"))
        out.append(native("head_norm", "head", norm_words(spec.head.transform.norm)))
    return [*out, native("lm_head", "head", "linear head")]
