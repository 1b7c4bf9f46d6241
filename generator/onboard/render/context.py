"""What templates are given: the spec, and the few words and questions that several templates share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from onboard.spec.arch import ArchSpec

# Rotation tables that the framework's own LlamaRotaryEmbedding computes as transformers does. The others depend on the
# length of the batch, or rotate a part of the head, or differ by layer type.
_FRAMEWORK_ROPES = frozenset(("default", "llama3"))


def model_context(spec: ArchSpec, *, prefix: str, package: str, header: str) -> dict[str, Any]:
    """Context of the templates below ``package/``.

    Args:
        spec: the architecture.
        prefix: prefix of every class name, a checked identifier (``Qwen3``).
        package: import path of the package (``nemo_automodel_qwen3``).
        header: licence header with its newline, or empty.
    """
    own_norm = spec.norm.offset != 0.0
    own_rope = spec.rope.per_layer_type or spec.rope.partial or not set(spec.rope.types) <= _FRAMEWORK_ROPES
    has_sliding = spec.attention.window_key is not None
    return {
        "spec": spec,
        "prefix": prefix,
        "package": package,
        "header": header,
        "class_name": f"{prefix}ForCausalLM",
        "own_norm": own_norm,
        "own_rope": own_rope,
        "has_sliding": has_sliding,
        "by_layer_type": spec.has_layer_types and (has_sliding or spec.rope.per_layer_type),
        "served_rope_types": sorted({*spec.rope.types, *spec.rope.served}),
        "length_dependent_rope": spec.rope.length_dependent,
        "summary": summary(spec),
        "attention_summary": attention_summary(spec),
        "block_summary": block_summary(spec),
        "layer_reasons": layer_reasons(spec),
        "rope_reason": rope_reason(spec),
    }


def summary(spec: ArchSpec) -> str:
    """A few words on each part of the architecture, for the module's docstring."""
    norm = "RMS norm" + (" with weights stored as an offset from one" if spec.norm.offset else "")
    attention = attention_summary(spec)[0].lower() + attention_summary(spec)[1:-1]
    parts = [norm, attention, f"{spec.mlp.activation} gated MLP"]
    if spec.embedding.scale:
        parts.append("scaled embeddings")
    return f"{_block_order(spec)} decoder: {'; '.join(parts)}."


def attention_summary(spec: ArchSpec) -> str:
    """One line on the attention."""
    a = spec.attention
    extras = []
    if a.fused_qkv:
        extras.append("one projection for q, k and v")
    if a.qk_norm:
        extras.append({"head": "q/k norm on each head", "width": "q/k norm over the whole projection"}[a.qk_norm])
    if spec.rope.partial:
        extras.append("rotary positions on a part of the head")
    if a.rope_layers_key:
        extras.append("rotary positions on some layers")
    if a.window_key:
        where = "where layer_types says so" if a.window_layers == "by_layer_type" else f"where {a.window_key} is set"
        extras.append(f"a sliding window {where}")
    if not extras:
        return "Grouped-query attention."
    listed = f"{', '.join(extras[:-1])} and {extras[-1]}" if len(extras) > 2 else " and ".join(extras)
    return f"Grouped-query attention with {listed}."


def block_summary(spec: ArchSpec) -> str:
    """One line on the order of a layer."""
    return {
        "Pre-norm": "Decoder layer with norms before attention and MLP.",
        "Post-norm": "Decoder layer with norms after attention and MLP, before the residual additions.",
        "Sandwich-norm": "Decoder layer with norms before and after attention and MLP.",
        "Norm-free": "Decoder layer without norms.",
        "Mixed-norm": f"Decoder layer with the norms {', '.join(spec.block.norms)}.",
    }[_block_order(spec)]


def _block_order(spec: ArchSpec) -> str:
    b = spec.block
    before = (b.pre_attention_norm is not None, b.pre_mlp_norm is not None)
    after = (b.post_attention_norm is not None, b.post_mlp_norm is not None)
    orders = {
        ((True, True), (False, False)): "Pre-norm",
        ((False, False), (True, True)): "Post-norm",
        ((True, True), (True, True)): "Sandwich-norm",
        ((False, False), (False, False)): "Norm-free",
    }
    return orders.get((before, after), "Mixed-norm")


def layer_reasons(spec: ArchSpec) -> list[str]:
    """Why layers.py is needed; empty where it is not."""
    reasons = []
    if spec.norm.offset:
        reasons.append("a norm whose weight is an offset")
    if spec.embedding.scale:
        reasons.append("a scaled embedding")
    return reasons


def rope_reason(spec: ArchSpec) -> str:
    """Why rope_utils.py is needed; empty where it is not."""
    reasons = []
    if spec.rope.per_layer_type:
        reasons.append("frequencies differ by layer type")
    if spec.rope.partial:
        reasons.append("only a part of the head rotates")
    scaled = [name for name in spec.rope.types if name not in _FRAMEWORK_ROPES]
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
    biases = (spec.attention.qkv_bias, spec.attention.o_bias, spec.mlp.bias)
    for key in sorted({bias.key for bias in biases if bias.key}):
        out[key if not tiny[key] else f"no_{key}"] = {key: not tiny[key]}
    windowed = measured["attention"]["windowed_fields"]
    if windowed is not None:
        out["sliding_window"] = {name: value for name, value in windowed.items() if value != tiny.get(name)}
    out["other_values"] = _other_values(spec, tiny)
    for rope_type, parameters in measured["rope"]["served"].items():
        out[f"{rope_type}_rope"] = {"rope_parameters": parameters}
    if spec.head.softcap_key and tiny.get(spec.head.softcap_key) is None:
        out[spec.head.softcap_key] = {spec.head.softcap_key: 2.0}
    return out


def _other_values(spec: ArchSpec, tiny: Mapping[str, Any]) -> dict[str, Any]:
    """Another value for each number and name that the code must read from the config instead of knowing it."""
    scalars = {spec.norm.eps_key, *re.findall(r"config\.(\w+)", f"{spec.attention.scale} {spec.embedding.scale}")}
    changed: dict[str, Any] = {
        name: 10 * tiny[name] if tiny[name] < 1 else tiny[name] + 8
        for name in sorted(scalars)
        if name in tiny and name not in ("hidden_size", "head_dim")
    }
    changed[spec.mlp.activation_key] = "relu" if tiny[spec.mlp.activation_key] != "relu" else "silu"
    return changed


def origins(spec: ArchSpec, measured: Mapping[str, Any]) -> list[dict[str, str]]:
    """Origin of each submodule: its path in the generated model, ``native``, and the number that confirmed it."""
    layer = "model.layers.*"

    def native(path: str, section: str, what: str) -> dict[str, str]:
        difference = measured[section]["difference"]
        return {"path": path, "origin": "native", "why": f"{what}, max difference {difference:.1e}"}

    return [
        native(
            "model.embed_tokens", "embedding", "embedding" + (" with a constant factor" if spec.embedding.scale else "")
        ),
        native("model.rotary_emb", "rope", f"{' and '.join(spec.rope.types)} rotation"),
        native(f"{layer}.{spec.attention.name}", "attention", attention_summary(spec)[:-1]),
        native(f"{layer}.{spec.mlp.name}", "mlp", f"gated MLP with {spec.mlp.activation}"),
        *(native(f"{layer}.{name}", "norm", "RMS norm") for name in spec.block.norms),
        native("model.norm", "norm", "RMS norm"),
        native("lm_head", "head", "linear head"),
    ]
