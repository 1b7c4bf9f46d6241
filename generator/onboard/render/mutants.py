"""Which mistakes the generated test_mutants.py plants: those that this architecture makes possible.

Each is one line of Python that the reviewer reads in the generated file. A mutant that a model cannot show (a swap of
norms
where there is one norm) is not listed, instead of being listed and skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from onboard.spec.arch import ArchSpec, Latent


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted mistake: its name, the Python expression that plants it, and the variant in which it shows."""

    name: str
    change: str
    variant: str = "base"


def mutants(spec: ArchSpec, tiny: Mapping[str, Any], variants: Mapping[str, Mapping[str, Any]]) -> list[Mutant]:
    """List the mutants of one model.

    Args:
        spec: the architecture.
        tiny: fields of the tiny config.
        variants: name to the fields in which a variant differs.
    """
    out = [
        *_attention(spec),
        *_norms(spec),
        *_mlp(spec),
        *_block(spec),
        *_mixer(spec),
        Mutant("two layers swapped", "swap_layers"),
        *_rope(spec, tiny, variants),
        *_windows(spec, tiny, variants),
        *_biases(spec, tiny, variants),
        *_ends(spec, tiny, variants),
    ]
    names = [mutant.name for mutant in out]
    if len(set(names)) != len(names):
        raise ValueError(f"two mutants of one name in {names}")
    return out


def _attention(spec: ArchSpec) -> list[Mutant]:
    a = spec.attention
    if a.latent:
        return _latent(a.latent)
    out = [
        Mutant("k and v projections swapped", 'swap("self_attn.k_proj.weight", "self_attn.v_proj.weight")'),
        Mutant("q heads in reverse order", "reverse_q_heads"),
        Mutant("softmax scale off", 'set_attribute("self_attn", "scaling", lambda module, _: module.scaling * 1.5)'),
        Mutant("output projection transposed", 'edit("self_attn.o_proj.weight", lambda w: w.t().reshape(w.shape))'),
    ]
    if a.qk_norm and a.qk_norm.norm.weight:
        # After the rotation scores hold the product of both weights, which a swap does not change.
        if a.qk_norm.over == "head" and not a.qk_norm.after_rope:
            out.append(Mutant("q and k norms swapped", 'swap("self_attn.q_norm.weight", "self_attn.k_norm.weight")'))
        ones = "torch.zeros_like" if a.qk_norm.norm.offset else "torch.ones_like"
        out.append(Mutant("q norm without its weight", f'edit("self_attn.q_norm.weight", {ones})'))
    elif a.qk_norm:
        out.append(Mutant("q norm left out", 'set_attribute("self_attn", "q_norm", lambda *_: nn.Identity())'))
    if a.differential:
        out += [
            Mutant("nothing subtracted", 'set_attribute("self_attn", "_lambda", lambda *_: lambda: torch.zeros(()))'),
            Mutant("lambda of the first layer", 'set_attribute("self_attn", "lambda_init", lambda *_: 0.2)'),
            Mutant("lambda vectors of the two halves swapped", 'swap("self_attn.lambda_q1", "self_attn.lambda_q2")'),
            Mutant("norm of the pairs left out", 'set_attribute("self_attn", "pair_norm", lambda *_: nn.Identity())'),
        ]
    elif a.output_norm:
        out.append(
            Mutant("output norm left out", 'set_attribute("self_attn", "output_norm", lambda *_: nn.Identity())')
        )
    if a.gate:
        out.append(Mutant("output gate left out", 'edit("self_attn.g_proj.weight", torch.zeros_like)'))
        if a.gate.over == "element":
            out.append(
                Mutant("queries and gates swapped", 'swap("self_attn.q_proj.weight", "self_attn.g_proj.weight")')
            )
    if a.query_scale:
        out.append(Mutant("queries that do not grow", "constant_queries"))
    if a.softcap:
        out.append(Mutant("cap on the scores dropped", 'set_attribute("self_attn", "softcap", lambda *_: None)'))
    if a.sinks:
        out.append(Mutant("sinks ignored", 'edit("self_attn.sinks", lambda s: torch.full_like(s, -1e4))'))
    if a.alibi:
        out.append(Mutant("position bias ignored", "no_position_bias"))
    return out


def _latent(latent: Latent) -> list[Mutant]:
    out = [
        Mutant("q heads in reverse order", "reverse_q_heads"),
        Mutant("keys and values exchanged", "exchange_keys_and_values"),
        Mutant("softmax scale off", 'set_attribute("self_attn", "scaling", lambda module, _: module.scaling * 1.5)'),
        Mutant(
            "scale of the part that does not rotate",
            'set_attribute("self_attn", "scaling", lambda module, _: module.nope_dim**-0.5)',
        ),
        Mutant("output projection transposed", 'edit("self_attn.o_proj.weight", lambda w: w.t().reshape(w.shape))'),
        Mutant("rotary part at the other end", "rotary_part_first"),
        Mutant("norm of the latent without its weight", 'edit("self_attn.kv_a_layernorm.weight", torch.ones_like)'),
    ]
    if latent.q_rank:
        out.append(
            Mutant(
                "norm of the q latent left out", 'set_attribute("self_attn", "q_a_layernorm", lambda *_: nn.Identity())'
            )
        )
    return out


def _norms(spec: ArchSpec) -> list[Mutant]:
    names = spec.block.norms
    out = []
    if spec.norm.weight:
        out += [
            Mutant(f"{first} and {second} swapped", f'swap("{first}.weight", "{second}.weight")')
            for first, second in pairwise(names)
        ]
    out.append(Mutant("norm eps off", "larger_eps"))
    if not spec.norm.weight or not names:
        return out
    if spec.norm.offset:
        out.append(Mutant("norm weight without its offset", f'edit("{names[0]}.weight", lambda w: w - 1)'))
    else:
        out.append(Mutant("norm weight with an offset", f'edit("{names[0]}.weight", lambda w: w + 1)'))
    return out


def _mlp(spec: ArchSpec) -> list[Mutant]:
    m = spec.mlp
    other = "nn.SiLU()" if m.activation != "silu" else "nn.GELU()"
    near = {"gelu_pytorch_tanh": "nn.GELU()", "gelu_new": "nn.GELU()", "gelu": 'nn.GELU("tanh")'}.get(m.activation)
    out = [Mutant("another activation", f'set_attribute("mlp", "act_fn", lambda *_: {other})')]
    if m.gated:
        out.insert(0, Mutant("gate and up swapped", 'swap("mlp.gate_proj.weight", "mlp.up_proj.weight")'))
    if m.inner_norm:
        out.append(Mutant("inner norm left out", 'set_attribute("mlp", "inner_norm", lambda *_: nn.Identity())'))
    if near:
        out.append(Mutant("gelu of the other kind", f'set_attribute("mlp", "act_fn", lambda *_: {near})'))
    return out


def _block(spec: ArchSpec) -> list[Mutant]:
    if spec.block.multiplier is None:
        return []
    return [Mutant("residual branches unscaled", 'set_attribute("", "residual_multiplier", lambda *_: 1.0)')]


def _mixer(spec: ArchSpec) -> list[Mutant]:
    if spec.mixer is None:
        return []
    return [
        Mutant("mixers left out", "no_mixers"),
        Mutant("mixers see the next token", "mixers_look_ahead"),
    ]


def _rope(spec: ArchSpec, tiny: Mapping[str, Any], variants: Mapping[str, Mapping[str, Any]]) -> list[Mutant]:
    if spec.rope is None:
        return []
    if spec.rope.dim:
        return [Mutant("interleaved rotation" if spec.attention.rotary == "half" else "half rotation", "other_pairs")]
    out = [Mutant("rope theta off", "other_theta")]
    parameters = tiny["rope_parameters"]
    sets = [value for value in parameters.values() if isinstance(value, Mapping)] or [parameters]
    if len(sets) > 1 and sets[0] != sets[1]:
        out.append(Mutant("rope parameters of the layer types exchanged", "exchange_rope_parameters"))
    # MiniCPM3 publishes the same factors under both names.
    if any(one.get("long_factor") != one.get("short_factor") for one in sets):
        out.append(Mutant("long and short factors exchanged", "exchange_factors"))
    if any(one.get("rope_type") != "default" for one in sets):
        out.append(Mutant("rope scaling ignored", "default_rope"))
    if spec.attention.latent and spec.attention.latent.mscale and "yarn_rope" in variants:
        scale = 'set_attribute("self_attn", "scaling", lambda module, _: module.head_dim**-0.5)'
        out.append(Mutant("scale without YaRN's factor", scale, "yarn_rope"))
    if spec.rope.partial:
        out.append(Mutant("rotary part at the end of the head", "rotate_the_end"))
    name = "interleaved rotation" if spec.attention.rotary == "half" else "half rotation"
    out.append(Mutant(name, "other_pairs"))
    if spec.attention.rope_layers and not spec.rope.per_layer_type:  # else such a layer has no table to rotate by
        shifted = "lambda module, index: not module.use_rope if index > 1 else module.use_rope"
        out.append(Mutant("every layer rotates", 'set_attribute("self_attn", "use_rope", lambda *_: True)'))
        out.append(Mutant("layers that rotate shifted", f'set_attribute("self_attn", "use_rope", {shifted})'))
    return out


def _windows(spec: ArchSpec, tiny: Mapping[str, Any], variants: Mapping[str, Mapping[str, Any]]) -> list[Mutant]:
    a = spec.attention
    if a.window_key is None:
        return []
    variant = "base" if tiny.get(a.window_key) is not None else "sliding_window"
    if variant not in ("base", *variants):
        return []
    out = [
        Mutant("window one token short", "shorter_window", variant),
        Mutant("window ignored", "no_window", variant),
    ]
    types = {**tiny, **variants.get(variant, {})}.get("layer_types")
    by_kind = spec.rope is not None and spec.rope.per_layer_type and a.rope_layers is not None
    if types and len(set(types)) > 1 and not by_kind:
        out.append(Mutant("layer pattern shifted by one", "shift_layer_types", variant))
    return out


def _biases(spec: ArchSpec, tiny: Mapping[str, Any], variants: Mapping[str, Mapping[str, Any]]) -> list[Mutant]:
    a, m = spec.attention, spec.mlp
    latent = a.latent
    places = (
        (a.q_bias, "self_attn.q_a_proj" if latent and latent.q_rank else "self_attn.q_proj", "q bias"),
        (a.v_bias, "self_attn.kv_b_proj" if latent else "self_attn.v_proj", "v bias"),
        *([(a.k_bias, "self_attn.kv_a_proj_with_mqa", "latent bias")] if latent else []),
        (a.o_bias, "self_attn.o_proj", "attention output bias"),
        (m.up_bias, "mlp.up_proj", "MLP input bias"),
        (m.down_bias, "mlp.down_proj", "MLP output bias"),
        (spec.norm.bias, next(iter(spec.block.norms), ""), "norm bias"),
    )
    out = []
    for bias, path, name in places:
        variant = "base" if bias.present else bias.key
        if not path or variant is None or (variant != "base" and variant not in variants):
            continue
        out.append(Mutant(f"{name} dropped", f'edit("{path}.bias", torch.zeros_like)', variant))
    return out


def _ends(spec: ArchSpec, tiny: Mapping[str, Any], variants: Mapping[str, Mapping[str, Any]]) -> list[Mutant]:
    out = []
    if spec.final_norm and spec.norm.weight:
        out.append(Mutant("final norm without its weight", "plain_final_norm"))
    if spec.embedding.positions:
        out.append(Mutant("positions one too far", "shift_positions"))
    if spec.head.scale and "config." in spec.head.scale:
        out.append(Mutant("logits unscaled", "unscaled_logits"))
    if spec.head.transform:
        out.append(Mutant("what stands before the head left out", "no_head_transform"))
        out.append(Mutant("activation before the head left out", "no_head_activation"))
    if spec.head.bias:
        out.append(Mutant("head bias dropped", "no_head_bias"))
    untied = "base" if not tiny.get("tie_word_embeddings") else "untied"
    out.append(Mutant("head tied where it is its own", "tie_head", untied))
    if spec.embedding.scale and not spec.embedding.scales_inputs:
        out.append(Mutant("embeddings unscaled", "unscaled_embeddings"))
    elif spec.embedding.scale:
        out.append(Mutant("embeddings halved", "halved_embeddings"))
    cap = spec.head.softcap_key
    if cap:
        variant = "base" if tiny.get(cap) is not None else cap
        if variant in ("base", *variants):
            out.append(Mutant("logit cap dropped", "no_softcap", variant))
    return out
