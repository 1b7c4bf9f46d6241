"""Contract: packed documents never see each other; what the reused modules cannot keep apart is refused."""

from __future__ import annotations

import pytest
import torch

LENGTHS = [9, 11, 4]
"""Tokens of the packed documents."""


def documents(pair):
    """One row of token ids ``[n]`` for each document."""
    return [pair.inputs(batch=1, length=length, seed=length)[0] for length in LENGTHS]


def pack(rows):
    """Packed ids ``[1, T]``, positions ``[1, T]``, and the cumulative lengths ``[documents + 1]``."""
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    lengths = torch.tensor([0, *(len(row) for row in rows)], dtype=torch.int32).cumsum(0)
    return torch.cat(rows).unsqueeze(0), positions.unsqueeze(0), lengths


def test_thd_is_refused(pair):
    """With the framework's packing metadata, in either form, and the error says what to do."""
    ids, positions, lengths = pack(documents(pair))
    with pytest.raises(ValueError, match="packed_sequence_size: 0"):
        pair.native(ids, position_ids=positions, qkv_format="thd", cu_seqlens=lengths)
    with pytest.raises(ValueError, match="packed_sequence_size: 0"):
        pair.native(ids, qkv_format="thd")
    with pytest.raises(ValueError, match="packed_sequence_size: 0"):
        pair.native(ids, cu_seqlens=lengths)


def block_mask(rows):
    """Causal within each document ``[1, 1, T, T]``, as collators make it that pack without THD."""
    return torch.block_diag(*(torch.ones(len(row), len(row)).tril() for row in rows)).bool()[None, None]


def test_block_causal_mask_is_refused(pair):
    """The reused modules do not heed such a mask in every layer."""
    rows = documents(pair)
    ids, _, _ = pack(rows)
    with pytest.raises(ValueError, match="packed_sequence_size: 0"):
        pair.native(ids, attention_mask=block_mask(rows))
