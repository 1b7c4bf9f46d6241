"""Bamba for NeMo AutoModel, tested against transformers' ``BambaForCausalLM``.

Pre-norm decoder: RMS norm; grouped-query attention with rotary positions on a part of the head;
silu gated MLP; transformers' BambaMixer in the layers of kind linear_attention.

Shapes: ``B`` batch, ``S`` sequence, ``T`` packed tokens, ``H`` hidden_size, ``N`` query heads, ``K`` key/value heads,
``D`` head_dim, ``F`` intermediate_size, ``V`` vocab_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import BambaConfig
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import (
    create_causal_mask,
    create_recurrent_attention_mask,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.bamba.modeling_bamba import BambaPreTrainedModel as HFBambaPreTrainedModel
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.utils import can_return_tuple

from nemo_automodel.components.models.common import (
    BackendConfig,
    compute_lm_head_logits,
    initialize_rms_norm_module,
)
from nemo_automodel.components.models.common.hf_checkpointing_mixin import HFCheckpointingMixin
from nemo_automodel.components.models.common.tie_word_embeddings import (
    TieSupport,
    reject_unsupported_tie_word_embeddings,
)
from nemo_automodel.components.models.common.utils import cast_model_to_dtype
from nemo_automodel.shared.import_utils import get_check_model_inputs_decorator
from nemo_automodel_bamba.rope_utils import BambaRotaryEmbedding, apply_rotary_pos_emb
from nemo_automodel_bamba.state_dict_adapter import BambaStateDictAdapter

__all__ = ["BambaForCausalLM"]

SERVED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

check_model_inputs = get_check_model_inputs_decorator()


class BambaAttention(nn.Module):
    """Grouped-query attention with rotary positions on a part of the head."""

    def __init__(self, config: BambaConfig, layer_idx: int, backend: BackendConfig) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        q_width = config.num_attention_heads * self.head_dim
        kv_width = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_width, config.hidden_size, bias=config.attention_bias)
        if backend.attn == "te":
            raise NotImplementedError(
                "TE takes packed batches alone, which this model refuses; use BackendConfig(attn='sdpa')."
            )

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend over hidden states.

        Args:
            hidden_states: ``[B, S, H]``.
            position_embeddings: RoPE ``(cos, sin)``, each ``[B, S, rotary dims]``, fp32.
            attention_mask: Mask ``[B, 1, S, S]``, None where plain causality is enough.
            past_key_values: Key/value cache of earlier tokens.
            **kwargs: Options of the attention interface.

        Returns:
            Output shaped like ``hidden_states``; attention weights ``[B, N, S, S]`` where the interface gives them.
        """
        head_shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(head_shape)
        key = self.k_proj(hidden_states).view(head_shape)
        value = self.v_proj(hidden_states).view(head_shape)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attn_output, attn_weights = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(attn_output.flatten(-2)), attn_weights


class BambaMLP(nn.Module):
    """Gated feed-forward network."""

    def __init__(self, config: BambaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map hidden states ``[..., H]`` to ``[..., H]``."""
        gate = self.act_fn(self.gate_proj(hidden_states))
        return self.down_proj(gate * self.up_proj(hidden_states))


class BambaDecoderLayer(GradientCheckpointingLayer):
    """Decoder layer with norms before attention and MLP."""

    def __init__(self, config: BambaConfig, layer_idx: int, backend: BackendConfig) -> None:
        super().__init__()
        self.attention_type = config.layer_types[layer_idx]
        if self.attention_type == "linear_attention":
            self.mamba = BambaMixer(config=config, layer_idx=layer_idx)
        else:
            self.self_attn = BambaAttention(config, layer_idx, backend)
        self.mlp = BambaMLP(config)
        self.input_layernorm = initialize_rms_norm_module(
            backend.rms_norm, config.hidden_size, eps=config.rms_norm_eps, dtype=torch.get_default_dtype()
        )
        self.post_attention_layernorm = initialize_rms_norm_module(
            backend.rms_norm, config.hidden_size, eps=config.rms_norm_eps, dtype=torch.get_default_dtype()
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Map hidden states ``[B, S, H]`` to the same shape."""
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        if self.attention_type == "linear_attention":
            hidden_states = self.mamba(
                hidden_states=hidden_states, cache_params=past_key_values, attention_mask=attention_mask
            )
        else:
            hidden_states, _ = self.self_attn(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        hidden_states = residual + hidden_states

        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states

        return hidden_states


class BambaPreTrainedModel(HFBambaPreTrainedModel):
    """What transformers' loading, sharding and output capturing need to know about Bamba.

    transformers' own class initialises the mixers, which are its own too.
    """

    config_class = BambaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["BambaDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _is_stateful = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "hidden_states": BambaDecoderLayer,
        "attentions": BambaAttention,
    }


class BambaModel(BambaPreTrainedModel):
    """Token embedding, decoder layers and final norm."""

    def __init__(self, config: BambaConfig, backend: BackendConfig) -> None:
        super().__init__(config)
        self.backend = backend
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            [BambaDecoderLayer(config, layer_idx, backend) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = initialize_rms_norm_module(
            backend.rms_norm, config.hidden_size, eps=config.rms_norm_eps, dtype=torch.get_default_dtype()
        )
        self.rotary_emb = BambaRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @check_model_inputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run the decoder.

        Args:
            input_ids: Token ids ``[B, S]``.
            attention_mask: Padding mask ``[B, S]``, 1 where a token is real; or masks that ``generate`` prepared.
            position_ids: Positions ``[B, S]``.
            past_key_values: Keys, values and states of earlier tokens.
            inputs_embeds: Embeddings ``[B, S, H]`` in place of ``input_ids``.
            use_cache: Whether to keep keys, values and states for later tokens.
            **kwargs: Options of the attention interface.

        Returns:
            Hidden states ``[B, S, H]`` after the final norm, and the cache.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)

        _refuse_packed(kwargs, None if past_key_values is not None else attention_mask)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device).unsqueeze(0) + seen

        attention_masks = self._attention_masks(inputs_embeds, attention_mask, position_ids, past_key_values)

        hidden_states = inputs_embeds
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                attention_mask=attention_masks[layer.attention_type],
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                past_key_values=past_key_values,
                **kwargs,
            )
        hidden_states = self.norm(hidden_states)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, past_key_values=past_key_values)

    def _attention_masks(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | dict[str, torch.Tensor | None] | None,
        position_ids: torch.Tensor,
        past_key_values: Cache | None,
    ) -> dict[str, torch.Tensor | None]:
        """Build the mask of each layer type.

        Args:
            inputs_embeds: Embeddings ``[B, S, H]``.
            attention_mask: Padding mask ``[B, S]``, or masks that ``generate`` prepared.
            position_ids: Positions ``[B, S]``.
            past_key_values: Key/value cache of earlier tokens.

        Returns:
            Layer type to mask: ``[B, 1, S, S]`` for attention, ``[B, S]`` for a mixer; None where none is needed.
        """
        if isinstance(attention_mask, dict):
            return attention_mask
        mask_kwargs: dict[str, Any] = {
            "config": self.config,
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            "past_key_values": past_key_values,
            "position_ids": position_ids,
        }
        masks = {
            "full_attention": create_causal_mask,
            "linear_attention": create_recurrent_attention_mask,
        }
        return {layer_type: masks[layer_type](**mask_kwargs) for layer_type in dict.fromkeys(self.config.layer_types)}


def _check_rope(config: BambaConfig) -> None:
    """Refuse a rotation that this package does not compute as the reference does.

    Args:
        config: Its ``rope_parameters`` say how the frequencies are scaled.

    Raises:
        NotImplementedError: Another ``rope_type``.
    """
    parameters = config.rope_parameters
    if parameters["rope_type"] not in SERVED_ROPE_TYPES:
        raise NotImplementedError(f"rope_type {parameters['rope_type']!r} is not one of {SERVED_ROPE_TYPES}.")


def _refuse_packed(kwargs: dict[str, Any], attention_mask: Any) -> None:
    """Refuse packed batches: the state of the mamba layers would run from one document into the next.

    Args:
        kwargs: What the model is called with.
        attention_mask: Padding mask ``[B, S]``; a mask ``[B, 1, S, S]`` separates packed documents, which those layers
            do not heed.
    """
    is_block_mask = isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 4
    if is_block_mask or kwargs.get("qkv_format") == "thd" or kwargs.get("cu_seqlens") is not None:
        raise ValueError(
            "Bamba carries a state from token to token, which does not keep packed documents apart: "
            "train on padded batches (packed_sequence_size: 0 in the recipe)."
        )


class BambaForCausalLM(HFCheckpointingMixin, BambaPreTrainedModel, GenerationMixin):
    """Bamba with a language-modelling head."""

    tie_word_embeddings_support: TieSupport = TieSupport.BOTH
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_rep"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}

    @property
    def _uses_hf_attention(self) -> bool:
        """Padded batches go through transformers' attention interface, TE takes only packed ones."""
        return True

    @dataclass(frozen=True)
    class ModelCapabilities:
        """Parallelism that was verified; what has not been measured yet is False."""

        supports_tp: bool = False
        supports_cp: bool = False
        supports_pp: bool = False
        supports_ep: bool = False

    def __init__(self, config: BambaConfig, backend: BackendConfig | None = None) -> None:
        reject_unsupported_tie_word_embeddings(type(self), config)
        _check_rope(config)
        super().__init__(config)
        self.backend = backend or BackendConfig()
        self.model = BambaModel(config, self.backend)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if self.backend.enable_hf_state_dict_adapter:
            self.state_dict_adapter = BambaStateDictAdapter(config)
        self.post_init()
        if config.dtype is not None:
            cast_model_to_dtype(self, config.dtype)

    def get_input_embeddings(self) -> nn.Module:
        """Token embedding ``[V, H]``."""
        return self.model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        self.model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module:
        """Language-modelling head ``[V, H]``."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the language-modelling head."""
        self.lm_head = new_embeddings

    def tie_weights(self, *_args: Any, **_kwargs: Any) -> None:
        """Share the embedding's weight with the head where the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Run the decoder and project to the vocabulary.

        Args:
            input_ids: Token ids ``[B, S]``.
            attention_mask: Padding mask ``[B, S]``, 1 where a token is real; or masks that ``generate`` prepared.
            position_ids: Positions ``[B, S]``.
            past_key_values: Keys, values and states of earlier tokens.
            inputs_embeds: Embeddings ``[B, S, H]`` in place of ``input_ids``.
            labels: Targets ``[B, S]``, -100 where a token does not count.
            use_cache: Whether to keep keys, values and states for later tokens.
            logits_to_keep: Project only the last positions, or the given ones; 0 projects all.
            **kwargs: Handed to the layers.

        Returns:
            Logits ``[B, S, V]``, the loss where ``labels`` are given, and the cache.

        Raises:
            ValueError: The batch is packed.
        """
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = compute_lm_head_logits(self.lm_head, outputs.last_hidden_state, logits_to_keep).logits

        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


ModelClass = BambaForCausalLM
