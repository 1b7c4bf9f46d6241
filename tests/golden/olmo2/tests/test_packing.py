"""Contract: documents packed into one row are what they are alone: no document sees another, positions restart."""

from __future__ import annotations

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

LENGTHS = [9, 24, 2, 13]
"""Tokens of the packed documents, one of them longer than a window."""


def documents(pair):
    """One row of token ids ``[n]`` for each document."""
    return [pair.inputs(batch=1, length=length, seed=length)[0] for length in LENGTHS]


def pack(rows, multiple=1):
    """Packed ids ``[T]``, positions ``[T]``, labels ``[T]`` and the lengths, logical and with padding counted in."""
    ids, positions, labels, real, padded = [], [], [], [0], [0]
    for row in rows:
        rest = -len(row) % multiple
        ids.append(torch.cat((row, torch.full((rest,), 3))))
        positions.append(torch.arange(len(row) + rest))
        labels.append(torch.cat((row, torch.full((rest,), -100))))
        labels[-1][0] = -100  # the shift must not predict a document's first token from the one before
        real.append(real[-1] + len(row))
        padded.append(padded[-1] + len(row) + rest)
    lengths = {"cu_seqlens": torch.tensor(real, dtype=torch.int32), "max_seqlen": torch.tensor(max(LENGTHS))}
    if multiple > 1:
        lengths["cu_seqlens_padded"] = torch.tensor(padded, dtype=torch.int32)
    return torch.cat(ids), torch.cat(positions), torch.cat(labels), lengths


@torch.no_grad()
@pytest.mark.parametrize("multiple", [1, 4], ids=["tight", "padded"])
def test_packed_equals_unpacked(any_pair, difference, multiple):
    """Each document's logits are the reference's for the document alone."""
    rows = documents(any_pair)
    ids, positions, _, lengths = pack(rows, multiple)
    logits = any_pair.native(ids, position_ids=positions, qkv_format="thd", **lengths).logits[0]
    starts = lengths.get("cu_seqlens_padded", lengths["cu_seqlens"])
    for row, start in zip(rows, starts, strict=False):
        expected = any_pair.reference(row.unsqueeze(0)).logits[0]
        assert difference(logits[start : start + len(row)], expected) < 1e-4


@torch.no_grad()
def test_collated_batch(pair, difference):
    """Collators add a batch dimension of one and fill ``cu_seqlens`` with -1000."""
    ids, positions, _, lengths = pack(documents(pair))
    expected = pair.native(ids, position_ids=positions, qkv_format="thd", **lengths).logits
    filled = torch.cat((lengths["cu_seqlens"], torch.full((2,), -1000, dtype=torch.int32)))
    actual = pair.native(
        ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        qkv_format="thd",
        cu_seqlens=filled.unsqueeze(0),
        max_seqlen=lengths["max_seqlen"],
    ).logits
    assert difference(actual, expected) == 0.0


@torch.no_grad()
def test_block_causal_mask_equals_unpacked(any_pair, difference):
    """Collators that pack without THD give the mask ``[1, 1, T, T]``; a window still holds within each document."""
    rows = documents(any_pair)
    ids, positions, _, lengths = pack(rows)
    mask = torch.block_diag(*(torch.ones(len(row), len(row)).tril() for row in rows)).bool()
    logits = any_pair.native(
        ids.unsqueeze(0), position_ids=positions.unsqueeze(0), attention_mask=mask[None, None]
    ).logits[0]
    for row, start in zip(rows, lengths["cu_seqlens"], strict=False):
        expected = any_pair.reference(row.unsqueeze(0)).logits[0]
        assert difference(logits[start : start + len(row)], expected) < 1e-4


def test_packed_loss_and_gradients(pair, as_native, difference):
    """The loss over a packed row is the mean over its documents' tokens; padding counts for nothing."""
    rows = documents(pair)
    ids, positions, labels, lengths = pack(rows, multiple=4)
    packed = pair.native(ids, position_ids=positions, labels=labels, qkv_format="thd", **lengths).loss
    sums = [pair.reference(row.unsqueeze(0), labels=row.unsqueeze(0)).loss * (len(row) - 1) for row in rows]
    unpacked = sum(sums) / sum(len(row) - 1 for row in rows)
    assert abs(packed.item() - unpacked.item()) < 1e-4 * max(1.0, unpacked.item())
    packed.backward()
    unpacked.backward()
    expected = as_native(pair.native, pair.reference, {name: p.grad for name, p in pair.reference.named_parameters()})
    for name, parameter in pair.native.named_parameters():
        assert difference(parameter.grad, expected[name]) < 1e-4, name


def test_packing_needs_positions_and_no_cache(pair):
    """What cannot be right is refused."""
    ids, positions, _, lengths = pack(documents(pair))
    with pytest.raises(ValueError, match="position_ids"):
        pair.native(ids, qkv_format="thd", **lengths)
    with pytest.raises(ValueError, match="cu_seqlens"):
        pair.native(ids, position_ids=positions, qkv_format="thd")
    cache = pair.native(pair.inputs(), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="cache"):
        pair.native(ids, position_ids=positions, past_key_values=cache, qkv_format="thd", **lengths)


def flash_attention(module, query, key, value, attention_mask, *, scaling, sliding_window=None, **kwargs):
    """Plain torch in place of flash attention, which needs a GPU: no mask, documents by the positions that restart."""
    assert attention_mask is None
    length = query.shape[2]
    document = (kwargs["position_ids"][0] == 0).cumsum(-1)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    visible = (distance >= 0) & (document[:, None] == document)
    if sliding_window is not None:
        visible &= distance < sliding_window
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling)
    return output.transpose(1, 2), None


@torch.no_grad()
def test_flash_path_equals_unpacked(any_pair, difference, monkeypatch):
    """Flash attention takes no mask; it is told the positions, so that no document sees another."""
    rows = documents(any_pair)
    expected = [any_pair.reference(row.unsqueeze(0)).logits[0] for row in rows]
    ids, positions, _, lengths = pack(rows)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", flash_attention)
    any_pair.native.config._attn_implementation = "flash_attention_2"
    packed = any_pair.native(ids, position_ids=positions, qkv_format="thd", **lengths).logits[0]
    as_row = any_pair.native(ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False).logits[0]
    for logits in (packed, as_row):
        for row, start, alone in zip(rows, lengths["cu_seqlens"], expected, strict=False):
            assert difference(logits[start : start + len(row)], alone) < 1e-4


class VariableLengthAttention(torch.nn.Module):
    """Plain torch in place of TE's variable-length kernel, which needs a GPU; same arguments, same meaning."""

    def __init__(self, softmax_scale: float) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query, key, value, *, cu_seqlens_q, window_size=(-1, 0), cu_seqlens_q_padded=None, **kwargs):
        """Attend within each document; ``window_size`` counts the tokens before the current one."""
        assert kwargs["qkv_format"] == "thd"
        assert kwargs["attn_mask_type"] == "padding_causal"
        starts = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
        output = torch.zeros_like(query)
        for start, length in zip(starts.tolist(), cu_seqlens_q.diff().tolist(), strict=False):
            part = slice(start, start + length)
            groups = query.shape[1] // key.shape[1]
            q, k, v = query[part], key[part].repeat_interleave(groups, 1), value[part].repeat_interleave(groups, 1)
            scores = torch.einsum("qnd,knd->nqk", q, k) * self.softmax_scale
            distance = torch.arange(length)[:, None] - torch.arange(length)
            hidden = (distance < 0) | ((distance > window_size[0]) if window_size[0] >= 0 else False)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            output[part] = torch.einsum("nqk,knd->qnd", weights, v)
        return output


@torch.no_grad()
@pytest.mark.parametrize("multiple", [1, 4], ids=["tight", "padded"])
def test_te_path_equals_unpacked(any_pair, difference, multiple):
    """The calls to TE carry the right lengths, scale and window; the kernel itself is TE's to prove."""
    any_pair.native.model.backend.attn = "te"
    for layer in any_pair.native.model.layers:
        attention = layer.self_attn
        attention.attn_module = VariableLengthAttention(attention.scaling)
    rows = documents(any_pair)
    ids, positions, _, lengths = pack(rows, multiple)
    logits = any_pair.native(ids, position_ids=positions, qkv_format="thd", **lengths).logits[0]
    starts = lengths.get("cu_seqlens_padded", lengths["cu_seqlens"])
    for row, start in zip(rows, starts, strict=False):
        expected = any_pair.reference(row.unsqueeze(0)).logits[0]
        assert difference(logits[start : start + len(row)], expected) < 1e-4
