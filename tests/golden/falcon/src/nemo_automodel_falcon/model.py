"""Falcon for NeMo AutoModel, tested against transformers' ``FalconForCausalLM``.

Parallel decoder: layer norm; grouped-query attention; gelu MLP.

Shapes: ``B`` batch, ``S`` sequence, ``T`` packed tokens, ``H`` hidden_size, ``N`` query heads, ``K`` key/value heads,
``D`` head_dim, ``F`` intermediate_size, ``V`` vocab_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import FalconConfig
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import (
    create_causal_mask,
    packed_sequence_mask_function,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.utils import can_return_tuple

from nemo_automodel.components.attention.utils import (
    initialize_attn_module_and_func,
    postprocess_output_for_attn,
    preprocess_args_and_kwargs_for_attn,
)
from nemo_automodel.components.models.common import (
    BackendConfig,
    compute_lm_head_logits,
)
from nemo_automodel.components.models.common.hf_checkpointing_mixin import HFCheckpointingMixin
from nemo_automodel.components.models.common.tie_word_embeddings import (
    TieSupport,
    reject_unsupported_tie_word_embeddings,
)
from nemo_automodel.components.models.common.utils import cast_model_to_dtype
from nemo_automodel.components.models.llama.rope_utils import LlamaRotaryEmbedding, apply_rotary_pos_emb
from nemo_automodel.components.utils.model_utils import squeeze_input_for_thd
from nemo_automodel.shared.import_utils import get_check_model_inputs_decorator
from nemo_automodel_falcon.state_dict_adapter import FalconStateDictAdapter

__all__ = ["FalconForCausalLM"]

SERVED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

check_model_inputs = get_check_model_inputs_decorator()


class FalconAttention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, config: FalconConfig, layer_idx: int, backend: BackendConfig) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_kv_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        q_width = config.num_attention_heads * self.head_dim
        kv_width = config.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_width, bias=config.bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.bias)
        self.o_proj = nn.Linear(q_width, config.hidden_size, bias=config.bias)
        if backend.attn == "te":
            # TE takes packed THD batches only; padded ones keep transformers' attention interface.
            self._te_thd_only = True
            self.attn_module, _ = initialize_attn_module_and_func(
                attn_impl="te",
                num_attention_heads=config.num_attention_heads,
                num_qk_channels=self.head_dim,
                num_v_channels=self.head_dim,
                softmax_scale=self.scaling,
                num_gqa_groups=config.num_kv_heads,
            )

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend over padded or packed hidden states.

        Args:
            hidden_states: ``[B, S, H]``; packed for TE: ``[T, H]``.
            position_embeddings: RoPE ``(cos, sin)``, each ``[B, S, rotary dims]`` or ``[T, rotary dims]``, fp32.
            attention_mask: Mask ``[B, 1, S, S]``, None where plain causality is enough.
            past_key_values: Key/value cache of earlier tokens; padded batches only.
            **kwargs: Packing metadata for TE, options of the attention interface otherwise.

        Returns:
            Output shaped like ``hidden_states``; attention weights ``[B, N, S, S]`` where the interface gives them.
        """
        head_shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(head_shape)
        key = self.k_proj(hidden_states).view(head_shape)
        value = self.v_proj(hidden_states).view(head_shape)
        if kwargs.get("qkv_format") == "thd":
            return self._packed_attention(query, key, value, position_embeddings, **kwargs), None

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
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(attn_output.flatten(-2)), attn_weights

    def _packed_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend within packed documents through TE's variable-length kernel.

        Args:
            query: ``[T, N, D]``.
            key: ``[T, K, D]``.
            value: ``[T, K, D]``.
            position_embeddings: RoPE ``(cos, sin)``, each ``[T, rotary dims]``.
            **kwargs: ``cu_seqlens`` ``[documents + 1]`` and the other packing metadata.

        Returns:
            Output ``[T, H]``.
        """
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        query, key, value, te_kwargs = preprocess_args_and_kwargs_for_attn(
            query,
            key,
            value,
            None,
            "te",
            **kwargs,
        )
        attn_output = postprocess_output_for_attn(self.attn_module(query, key, value, **te_kwargs), "te")
        return self.o_proj(attn_output.flatten(1))


class FalconMLP(nn.Module):
    """Feed-forward network."""

    def __init__(self, config: FalconConfig) -> None:
        super().__init__()
        intermediate_size = config.ffn_hidden_size
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=config.bias)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=config.bias)
        self.act_fn = ACT2FN[config.activation]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map hidden states ``[..., H]`` to ``[..., H]``."""
        hidden_states = self.act_fn(self.up_proj(hidden_states))
        return self.down_proj(hidden_states)


class FalconDecoderLayer(GradientCheckpointingLayer):
    """Decoder layer whose attention and MLP run side by side."""

    def __init__(self, config: FalconConfig, layer_idx: int, backend: BackendConfig) -> None:
        super().__init__()
        self.attention_type = "full_attention"
        self.self_attn = FalconAttention(config, layer_idx, backend)
        self.mlp = FalconMLP(config)
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.attention_output_dropout = nn.Dropout(config.hidden_dropout)
        self.mlp_output_dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Map hidden states ``[B, S, H]`` (packed for TE: ``[T, H]``) to the same shape."""
        residual = hidden_states
        attn_output, _ = self.self_attn(
            self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        mlp_output = self.mlp(self.post_attention_layernorm(residual))
        return residual + self.attention_output_dropout(attn_output) + self.mlp_output_dropout(mlp_output)


class FalconPreTrainedModel(PreTrainedModel):
    """What transformers' loading, sharding and output capturing need to know about Falcon."""

    config_class = FalconConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FalconDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "hidden_states": FalconDecoderLayer,
        "attentions": FalconAttention,
    }


class FalconModel(FalconPreTrainedModel):
    """Token embedding, decoder layers and final norm."""

    def __init__(self, config: FalconConfig, backend: BackendConfig) -> None:
        super().__init__(config)
        self.backend = backend
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [FalconDecoderLayer(config, layer_idx, backend) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.rotary_emb = LlamaRotaryEmbedding(config)
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
            input_ids: Token ids ``[B, S]``, or ``[T]`` with ``qkv_format="thd"``.
            attention_mask: Padding mask ``[B, S]``, 1 where a token is real; or masks that ``generate`` prepared.
            position_ids: Positions ``[B, S]`` or ``[T]``; packed documents restart at 0.
            past_key_values: Key/value cache of earlier tokens; padded batches only.
            inputs_embeds: Embeddings ``[B, S, H]`` or ``[T, H]`` in place of ``input_ids``.
            use_cache: Whether to fill a key/value cache.
            **kwargs: ``qkv_format="thd"`` with ``cu_seqlens`` ``[documents + 1]`` (and ``cu_seqlens_padded`` where
                documents are padded) selects packed sequences.

        Returns:
            Hidden states ``[B, S, H]`` or ``[T, H]`` after the final norm, and the cache.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)

        is_thd = kwargs.get("qkv_format") == "thd"
        if is_thd and past_key_values is not None:
            raise ValueError("Packed sequences cannot use a key/value cache.")
        if is_thd and kwargs.get("cu_seqlens") is None:
            raise ValueError("Packed sequences need cu_seqlens.")
        if use_cache and not is_thd and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            if is_thd:
                raise ValueError("Packed sequences need position_ids that restart in every document.")
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device).unsqueeze(0) + seen

        # Without TE's variable-length kernel a packed batch is one row under a block-diagonal mask. Flash attention
        # takes no such mask and finds the documents by the positions that restart.
        document_ids = None
        pack_as_one_row = is_thd and self.backend.attn != "te"
        if pack_as_one_row:
            document_ids = _document_ids(kwargs.pop("cu_seqlens"), kwargs.pop("cu_seqlens_padded", None), position_ids)
            kwargs = {name: value for name, value in kwargs.items() if name not in ("qkv_format", "max_seqlen")}
            inputs_embeds, position_ids = inputs_embeds.unsqueeze(0), position_ids.unsqueeze(0)

        attention_masks = self._attention_masks(
            inputs_embeds, attention_mask, position_ids, past_key_values, document_ids
        )

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
        if pack_as_one_row:
            hidden_states = hidden_states.squeeze(0)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, past_key_values=past_key_values)

    def _attention_masks(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | dict[str, torch.Tensor | None] | None,
        position_ids: torch.Tensor,
        past_key_values: Cache | None,
        document_ids: torch.Tensor | None,
    ) -> dict[str, torch.Tensor | None]:
        """Build the mask of each layer type.

        Args:
            inputs_embeds: Embeddings ``[B, S, H]``, or ``[T, H]`` for TE, which masks by itself.
            attention_mask: Padding mask ``[B, S]``, a packed row's mask ``[B, 1, S, S]``, or masks that ``generate``
                prepared.
            position_ids: Positions ``[B, S]``.
            past_key_values: Key/value cache of earlier tokens.
            document_ids: Document of each token ``[1, T]`` of a packed row.

        Returns:
            Layer type to mask ``[B, 1, S, S]``; None where the attention needs none.
        """
        if isinstance(attention_mask, dict):
            return attention_mask
        if inputs_embeds.ndim == 2:
            return {"full_attention": None}
        mask_kwargs: dict[str, Any] = {
            "config": self.config,
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            "past_key_values": past_key_values,
            "position_ids": position_ids,
        }
        if document_ids is not None:
            mask_kwargs["and_mask_function"] = packed_sequence_mask_function(document_ids)
        return {"full_attention": create_causal_mask(**mask_kwargs)}


def _check_rope(config: FalconConfig) -> None:
    """Refuse a rotation that this package does not compute as the reference does.

    Args:
        config: Its ``rope_parameters`` say how the frequencies are scaled.

    Raises:
        NotImplementedError: Another ``rope_type``, or a partial rotation.
    """
    parameters = config.rope_parameters
    if parameters["rope_type"] not in SERVED_ROPE_TYPES:
        raise NotImplementedError(f"rope_type {parameters['rope_type']!r} is not one of {SERVED_ROPE_TYPES}.")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise NotImplementedError("partial_rotary_factor: only the rotation of the whole head is served.")


def _document_ids(
    cu_seqlens: torch.Tensor, cu_seqlens_padded: torch.Tensor | None, position_ids: torch.Tensor
) -> torch.Tensor:
    """Number of the document that each packed token belongs to.

    Args:
        cu_seqlens: Cumulative document lengths ``[documents + 1]``.
        cu_seqlens_padded: The same with each document's padding counted in, where documents are padded.
        position_ids: Packed positions ``[T]``, for the length and the device.

    Returns:
        Document numbers ``[1, T]``. A document's padding follows its tokens, so causality hides it from them.
    """
    ends = (cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded)[1:].to(position_ids.device)
    token = torch.arange(position_ids.shape[0], device=position_ids.device)
    return torch.searchsorted(ends, token, right=True).unsqueeze(0)


class FalconForCausalLM(HFCheckpointingMixin, FalconPreTrainedModel, GenerationMixin):
    """Falcon with a language-modelling head."""

    tie_word_embeddings_support: TieSupport = TieSupport.BOTH
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_rep"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _keep_in_fp32_modules = ["rotary_emb"]

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

    def __init__(self, config: FalconConfig, backend: BackendConfig | None = None) -> None:
        reject_unsupported_tie_word_embeddings(type(self), config)
        if config.alibi is not False:
            raise NotImplementedError(f"{type(self).__name__} serves alibi=False, not {config.alibi!r}.")
        if config.new_decoder_architecture is not True:
            raise NotImplementedError(
                f"{type(self).__name__} serves new_decoder_architecture=True, not {config.new_decoder_architecture!r}."
            )
        _check_rope(config)
        super().__init__(config)
        self.backend = backend or BackendConfig()
        self.model = FalconModel(config, self.backend)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if self.backend.enable_hf_state_dict_adapter:
            self.state_dict_adapter = FalconStateDictAdapter(config)
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
            input_ids: Token ids ``[B, S]``; packed ``[1, T]`` or ``[T]`` with ``qkv_format="thd"``.
            attention_mask: Padding mask ``[B, S]``; packed batches use ``cu_seqlens`` instead.
            position_ids: Positions ``[B, S]``, ``[1, T]`` or ``[T]``.
            past_key_values: Key/value cache of earlier tokens; padded batches only.
            inputs_embeds: Embeddings ``[B, S, H]`` or ``[T, H]`` in place of ``input_ids``.
            labels: Targets ``[B, S]`` or ``[1, T]``, -100 where a token does not count.
            use_cache: Whether to fill a key/value cache.
            logits_to_keep: Project only the last positions, or the given ones; 0 projects all.
            **kwargs: Packing metadata (``qkv_format``, ``cu_seqlens``, ``max_seqlen`` ...), handed to the layers.

        Returns:
            Logits ``[B, S, V]`` (``[1, T, V]`` when packed), the loss where ``labels`` are given, and the cache.
        """
        is_thd = kwargs.get("qkv_format") == "thd"
        if is_thd:
            input_ids, position_ids, inputs_embeds, kwargs = _squeeze_packed(
                input_ids, position_ids, inputs_embeds, kwargs
            )
            attention_mask = None
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = compute_lm_head_logits(self.lm_head, outputs.last_hidden_state, logits_to_keep, is_thd=is_thd).logits

        loss = None
        if labels is not None:
            labels = labels.unsqueeze(0) if labels.ndim == 1 else labels
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def _squeeze_packed(
    input_ids: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None, dict[str, Any]]:
    """Drop the batch dimension of one that collators put before packed tensors.

    Args:
        input_ids: Token ids ``[1, T]`` or ``[T]``.
        position_ids: Positions ``[1, T]`` or ``[T]``.
        inputs_embeds: Embeddings ``[1, T, H]`` or ``[T, H]``.
        kwargs: Packing metadata, ``cu_seqlens`` ``[1, documents + 1]`` padded with -1000.

    Returns:
        The same, without the leading dimension and the padding.
    """
    if position_ids is None:
        raise ValueError("Packed sequences need position_ids that restart in every document.")
    kwargs = {name: value for name, value in kwargs.items() if name != "padding_mask"}
    if position_ids.ndim == 1:
        position_ids = position_ids.unsqueeze(0)
        input_ids = input_ids.unsqueeze(0) if input_ids is not None and input_ids.ndim == 1 else input_ids
    input_ids, position_ids, _, kwargs = squeeze_input_for_thd(input_ids, position_ids, None, kwargs)
    if inputs_embeds is not None and inputs_embeds.ndim > 2:
        inputs_embeds = inputs_embeds.squeeze(0)
    return input_ids, position_ids, inputs_embeds, kwargs


ModelClass = FalconForCausalLM
