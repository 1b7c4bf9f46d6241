"""Bamba for NeMo AutoModel: transformers' ``BambaForCausalLM`` with its checkpointing.

The model is transformers' own BambaForCausalLM; native state dict adapter. Novel, and the reason why it is
reused: model.layers.*.mamba (BambaMixer), model.layers.*.self_attn (BambaAttention).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from transformers import BambaConfig
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype
from transformers.models.bamba.modeling_bamba import BambaForCausalLM as HFBambaForCausalLM

from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.common.hf_checkpointing_mixin import HFCheckpointingMixin
from nemo_automodel.components.models.common.tie_word_embeddings import (
    TieSupport,
    reject_unsupported_tie_word_embeddings,
)
from nemo_automodel_bamba.state_dict_adapter import BambaStateDictAdapter

__all__ = ["BambaForCausalLM"]


class BambaForCausalLM(HFCheckpointingMixin, HFBambaForCausalLM):
    """transformers' ``BambaForCausalLM``, head and loss included."""

    tie_word_embeddings_support: TieSupport = TieSupport.BOTH

    @dataclass(frozen=True)
    class ModelCapabilities:
        """Parallelism that was verified; what has not been measured yet is False."""

        supports_tp: bool = False
        supports_cp: bool = False
        supports_pp: bool = False
        supports_ep: bool = False

    def __init__(self, config: BambaConfig, backend: BackendConfig | None = None) -> None:
        reject_unsupported_tie_word_embeddings(type(self), config)
        # Built under the dtype instead of cast, and initialised outside of it: tables keep the precision that
        # transformers gives them.
        with local_torch_dtype(config.dtype or torch.get_default_dtype()), no_init_weights():
            super().__init__(config)
        self.init_weights()
        self.backend = backend or BackendConfig()
        # The framework ties `lm_head.weight` after loading; whatever else transformers shares is tied here.
        self.register_load_state_dict_post_hook(lambda model, _: model.tie_weights())
        if self.backend.enable_hf_state_dict_adapter:
            self.state_dict_adapter = BambaStateDictAdapter(
                config, self.state_dict(), self.all_tied_weights_keys, self._keys_to_ignore_on_load_unexpected
            )

    @functools.wraps(HFBambaForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run transformers' forward pass.

        Args:
            *args: As ``BambaForCausalLM.forward`` takes them.
            **kwargs: As above.

        Returns:
            What ``BambaForCausalLM.forward`` returns: logits ``[B, S, V]``, and the loss where ``labels``
            are given.

        Raises:
            ValueError: The batch is packed.
        """
        _refuse_packed(kwargs, None if "past_key_values" in kwargs else kwargs.get("attention_mask"))
        if self.training:
            kwargs.setdefault("use_cache", False)  # no later token asks for the state
        return super().forward(*args, **kwargs)


def _refuse_packed(kwargs: dict[str, Any], attention_mask: Any) -> None:
    """Refuse packed batches: the reused decoder would let one document see another.

    Args:
        kwargs: What the model is called with.
        attention_mask: Padding mask ``[B, S]``; a mask ``[B, 1, S, S]`` separates packed documents, which not every
            mixer of this decoder heeds.
    """
    is_block_mask = isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 4
    if is_block_mask or kwargs.get("qkv_format") == "thd" or kwargs.get("cu_seqlens") is not None:
        raise ValueError(
            "Bamba reuses transformers' modules, which do not keep packed documents apart: "
            "train on padded batches (packed_sequence_size: 0 in the recipe)."
        )


ModelClass = BambaForCausalLM
