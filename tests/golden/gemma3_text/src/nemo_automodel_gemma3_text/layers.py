"""Modules of Gemma3 that the framework does not have: a norm whose weight is an offset; a scaled embedding."""

from __future__ import annotations

import torch
from torch import nn


class Gemma3RMSNorm(nn.Module):
    """Root-mean-square norm whose stored weight is an offset from one (arXiv:1910.07467).

    Args:
        dim: Width of the normalised dimension.
        eps: Added to the mean square.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise ``[..., dim]``, computed in fp32 and returned in the input's dtype."""
        normed = hidden_states.float()
        normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.float())).type_as(hidden_states)

    def reset_parameters(self) -> None:
        """Start as the identity scale."""
        nn.init.zeros_(self.weight)


class Gemma3ScaledEmbedding(nn.Embedding):
    """Token embedding times a constant.

    Args:
        num_embeddings: Size of the vocabulary ``V``.
        embedding_dim: Width ``H``.
        padding_idx: Row that gets no gradient, or None.
        scale: The constant; rounded to the embedding's dtype before it is used, as the reference does.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None, *, scale: float) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        self.scale = scale

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embed token ids ``[...]`` as ``[..., H]``."""
        embeddings = super().forward(input_ids)
        return embeddings * torch.tensor(self.scale, dtype=embeddings.dtype)
