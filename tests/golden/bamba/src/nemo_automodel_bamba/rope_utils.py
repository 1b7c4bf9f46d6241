"""Rotary position embedding of Bamba: only a part of the head rotates."""

from __future__ import annotations

import torch
from torch import nn
from transformers import BambaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class BambaRotaryEmbedding(nn.Module):
    """Cosines and sines of the rotation angles (arXiv:2104.09864).

    The frequencies are recomputed from the config instead of kept in a buffer, so that neither a cast to bf16 nor
    construction on the meta device can damage them.
    """

    def __init__(self, config: BambaConfig) -> None:
        super().__init__()
        self.config = config

    def _inverse_frequencies(self, length: int | None, device: torch.device) -> tuple[torch.Tensor, float]:
        """Frequencies ``[rotary dims / 2]`` in fp32, and the factor on cosine and sine."""
        parameters = self.config.rope_parameters
        if parameters["rope_type"] != "default":
            return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](self.config, device, seq_len=length)
        head_dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads
        rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
        return 1.0 / parameters["rope_theta"] ** exponents, 1.0

    @torch.no_grad()
    def forward(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotation of each position.

        Args:
            hidden_states: Only its device is used.
            position_ids: Positions ``[B, S]`` or packed ``[T]``.

        Returns:
            Cosine and sine, each ``[B, S, rotary dims]`` or ``[T, rotary dims]`` in fp32.
        """
        inv_freq, factor = self._inverse_frequencies(None, hidden_states.device)
        angles = position_ids.unsqueeze(-1).float() * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * factor, angles.sin() * factor


def apply_rotary_pos_emb(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys, computed in fp32 and returned in their own dtype.

    Args:
        query: ``[B, N, S, D]`` or packed ``[T, N, D]``.
        key: ``[B, K, S, D]`` or packed ``[T, K, D]``.
        cos: ``[B, S, rotary dims]`` or ``[T, rotary dims]``.
        sin: Like ``cos``.

    Returns:
        Rotated query and key, shaped as they came; dimensions past the rotary ones are unchanged.
    """
    return _rotate(query, cos.unsqueeze(1), sin.unsqueeze(1)), _rotate(key, cos.unsqueeze(1), sin.unsqueeze(1))


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotary, rest = states[..., : cos.shape[-1]].float(), states[..., cos.shape[-1] :]
    first, second = rotary.chunk(2, dim=-1)
    rotated = rotary * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated.type_as(states), rest), dim=-1)
