"""Key names that drift between configs: one canonical name, the spellings that published configs use for it.

The canonical names are those that transformers uses today. A table's order is its priority: the canonical name first,
then the spellings from the most specific to the most general, because a config may hold two of them (``n_head`` beside
``num_attention_heads``, ``d_model`` beside ``hidden_size``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

SIZES: Final = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
"""Fields that hold the sizes of a decoder, by their canonical names."""

ALIASES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        # Size of the decoder.
        "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model", "model_dim", "embed_dim", "hidden_dim", "dim"),
        "num_hidden_layers": (
            "num_hidden_layers",
            "num_layers",
            "n_layer",
            "n_layers",
            "decoder_layers",
            "layers",
            "depth",
        ),
        "num_attention_heads": (
            "num_attention_heads",
            "num_heads",
            "n_head",
            "n_heads",
            "decoder_attention_heads",
            "attention_heads",
            "heads",
        ),
        "num_key_value_heads": (
            "num_key_value_heads",
            "num_kv_heads",
            "n_kv_heads",
            "n_head_kv",
            "n_kv_head",
            "multi_query_group_num",
            "num_attention_groups",
            "num_query_groups",
            "kv_n_heads",
        ),
        "head_dim": (
            "head_dim",
            "attention_head_dim",
            "attention_head_size",
            "kv_channels",
            "dim_head",
            "d_head",
            "head_size",
            "d_kv",
        ),
        "intermediate_size": (
            "intermediate_size",
            "ffn_hidden_size",
            "ff_intermediate_size",
            "n_inner",
            "d_ff",
            "dff",
            "dim_ff",
            "ffn_dim",
            "ffn_hidden_dim",
            "decoder_ffn_dim",
            "block_ff_dim",
            "mlp_hidden_size",
            "d_inner",
            "inner_hidden_size",
        ),
        "vocab_size": ("vocab_size", "padded_vocab_size", "embedding_size", "text_vocab_size", "n_words", "n_token"),
        "max_position_embeddings": (
            "max_position_embeddings",
            "n_positions",
            "max_sequence_length",
            "max_seq_len",
            "max_seq_length",
            "seq_length",
            "n_ctx",
            "context_length",
            "model_max_length",
        ),
        # Norms and activation.
        "rms_norm_eps": (
            "rms_norm_eps",
            "layer_norm_eps",
            "layer_norm_epsilon",
            "layernorm_epsilon",
            "norm_epsilon",
            "norm_eps",
            "block_norm_eps",
            "layernorm_eps",
            "ln_eps",
            "eps",
        ),
        "hidden_act": (
            "hidden_act",
            "hidden_activation",
            "activation_function",
            "mlp_hidden_act",
            "activation_type",
            "activation",
            "afn",
        ),
        # Position.
        "rope_theta": (
            "rope_theta",
            "rotary_emb_base",
            "rope_embedding_base",
            "rotary_base",
            "rope_base",
            "rotary_embedding_base",
        ),
        "rope_scaling": ("rope_scaling", "rope_parameters"),
        "partial_rotary_factor": (
            "partial_rotary_factor",
            "rotary_pct",
            "rope_pct",
            "rotary_percent",
            "rotary_emb_fraction",
        ),
        "rotary_dim": ("rotary_dim", "rotary_ndims", "attn_rotary_emb", "qk_rope_head_dim"),
        "sliding_window": ("sliding_window", "sliding_window_size", "attention_window_size", "window_size"),
        "layer_types": ("layer_types", "layers_block_type", "block_types", "attn_type_list", "hybrid_override_pattern"),
        # Flags.
        "tie_word_embeddings": ("tie_word_embeddings", "tie_embeddings", "weight_tying", "use_embedding_sharing"),
        "attention_bias": ("attention_bias", "use_qkv_bias", "add_qkv_bias", "qkv_bias", "use_attention_bias"),
        "mlp_bias": ("mlp_bias", "use_mlp_bias", "add_bias_linear", "use_bias", "bias"),
        "use_qk_norm": (
            "use_qk_norm",
            "qk_norm",
            "qk_layernorm",
            "attention_layer_norm",
            "qk_ln",
            "use_query_key_norm",
        ),
        # Mixture of experts.
        "num_experts": (
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "num_routed_experts",
            "moe_num_experts",
            "num_moe_experts",
            "moe_num_routed_experts",
            "moe_n_experts",
            "n_experts",
            "expert_num",
            "num_total_experts",
        ),
        "num_experts_per_tok": (
            "num_experts_per_tok",
            "num_experts_per_token",
            "experts_per_token",
            "num_selected_experts",
            "num_selects",
            "moe_top_k",
            "moe_topk",
            "moe_k",
            "num_activated_experts",
            "n_activated_experts",
            "moe_router_topk",
            "top_k_experts",
            "router_top_k",
        ),
        "moe_intermediate_size": (
            "moe_intermediate_size",
            "expert_hidden_dim",
            "expert_ffn_hidden_size",
            "moe_ffn_hidden_size",
            "expert_intermediate_size",
            "expert_dim",
        ),
        "num_shared_experts": (
            "num_shared_experts",
            "n_shared_experts",
            "num_shared_expert",
            "moe_num_shared_experts",
            "n_shared_expert",
        ),
        "shared_expert_intermediate_size": (
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_intermediate_size",
            "share_expert_dim",
        ),
        "router_aux_loss_coef": (
            "router_aux_loss_coef",
            "aux_loss_alpha",
            "moe_aux_loss_coef",
            "moe_aux_loss_lambda",
            "moe_aux_loss_coeff",
        ),
        "first_k_dense_replace": (
            "first_k_dense_replace",
            "moe_layer_start_index",
            "num_dense_layers",
            "n_dense_layers",
            "num_dense_replace",
        ),
        # Multi-token prediction.
        "num_nextn_predict_layers": (
            "num_nextn_predict_layers",
            "mtp_num_hidden_layers",
            "num_mtp_layers",
            "_num_mtp_layers",
            "num_mtp_modules",
        ),
    }
)
"""Canonical field name -> the spellings seen in published configs, in order of priority."""


@dataclass(frozen=True, slots=True)
class Found:
    """A field that a config has: the spelling that matched, and its value."""

    key: str
    value: Any


def find(config: Mapping[str, Any], name: str) -> Found | None:
    """The first spelling of a field that the config gives a value to.

    A key that is present with the value ``null`` counts as absent: configs write ``"n_inner": null`` to mean "the
    default of the class". Only the given object is read, not objects nested in it.

    Args:
        config: the JSON object that should hold the field.
        name: the canonical name, a key of :data:`ALIASES`.

    Returns:
        The spelling and the value, or None where the config does not say.

    Raises:
        KeyError: ``name`` is not a canonical name.
    """
    for key in ALIASES[name]:
        value = config.get(key)
        if value is not None:
            return Found(key, value)
    return None


# Not fields of a model: code to load, kernels to fetch, how the weights are packed.
_NOT_DATA: Final = frozenset(("attn_implementation", "auto_map", "experts_implementation", "quantization_config"))


def data_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without the keys that tell a loader what to fetch or to run instead of describing the model.

    Names with a leading underscore (``_attn_implementation``, ``_name_or_path``) are transformers' own notes. A number
    that JSON has not, which transformers writes as ``{"__float__": "Infinity"}``, is that number.
    """
    return {
        key: _with_special_floats(value)
        for key, value in config.items()
        if key not in _NOT_DATA and not key.startswith("_")
    }


def _with_special_floats(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_special_floats(item) for item in value]
    if isinstance(value, dict):
        if list(value) == ["__float__"] and value["__float__"] in ("Infinity", "-Infinity"):
            return float(value["__float__"])
        return {key: _with_special_floats(item) for key, item in value.items()}
    return value
