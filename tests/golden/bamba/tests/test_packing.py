"""Contract: packed documents never see each other: the state of a mixer would run on, so packed batches are refused."""

from __future__ import annotations

import pytest
import torch

LENGTHS = [9, 24, 2, 13]
"""Tokens of the packed documents."""


def pack(pair):
    """Packed ids ``[1, T]``, positions ``[1, T]``, and the cumulative lengths ``[documents + 1]``."""
    ids = torch.cat([pair.inputs(batch=1, length=length, seed=length) for length in LENGTHS], dim=1)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)
    return ids, positions, torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0)


@pytest.mark.parametrize("form", ["qkv_format", "cu_seqlens"])
def test_thd_is_refused(pair, form):
    """With the framework's packing metadata, and the error says what to do."""
    ids, positions, lengths = pack(pair)
    metadata = {"qkv_format": "thd", "cu_seqlens": lengths}
    with pytest.raises(ValueError, match="packed_sequence_size: 0"):
        pair.native(ids, position_ids=positions, **{form: metadata[form]})


def test_block_causal_mask_is_refused(pair):
    """Collators that pack without THD give the mask ``[1, 1, T, T]``, which a mixer does not heed."""
    ids, positions, _ = pack(pair)
    mask = torch.block_diag(*(torch.ones(length, length).tril() for length in LENGTHS)).bool()[None, None]
    with pytest.raises(ValueError, match="packed_sequence_size: 0"):
        pair.native(ids, position_ids=positions, attention_mask=mask)
