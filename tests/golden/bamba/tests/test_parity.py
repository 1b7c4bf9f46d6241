"""Contract: logits, loss and gradients are those of transformers, at every position, for every setting served."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import BambaForCausalLM as HFBambaForCausalLM

TOLERANCE = 1e-4  # of the largest value, where that is above one


def test_no_memory_is_shared(pair):
    """The two sides of the comparison have weights of their own."""
    storages = {parameter.data_ptr() for parameter in pair.reference.parameters()}
    assert not storages & {parameter.data_ptr() for parameter in pair.native.parameters()}


@torch.no_grad()
def test_fp32_logits_at_every_position(any_pair, difference, record_property):
    """Longer than a window and than a RoPE scaling's original length."""
    ids = any_pair.inputs()
    expected = any_pair.reference(ids).logits
    actual = any_pair.native(ids).logits
    record_property("max_abs_logit_diff", (actual - expected).abs().max().item())
    record_property("max_abs_logit", expected.abs().max().item())
    assert difference(actual, expected) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(pair, difference, side):
    """Real tokens of a padded batch get the reference's logits."""
    ids = pair.inputs()
    mask = torch.ones_like(ids)
    padded = slice(0, 5) if side == "left" else slice(ids.shape[1] - 5, None)
    mask[1, padded] = 0
    options = {"attention_mask": mask}
    options["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    expected, actual = pair.reference(ids, **options).logits, pair.native(ids, **options).logits
    assert difference(actual[mask.bool()], expected[mask.bool()]) < TOLERANCE
    if side == "left":
        assert difference(pair.native(ids).logits[mask.bool()], expected[mask.bool()]) > TOLERANCE, "the mask counts"


@torch.no_grad()
def test_bf16_is_as_exact_as_the_reference(make_pair):
    """Against the fp32 reference, this model in bf16 errs no more than transformers in bf16 does."""
    exact = make_pair()
    low = make_pair(dtype=torch.bfloat16)
    ids = exact.inputs()
    truth = exact.reference(ids).logits
    reference_error = (low.reference(ids).logits.float() - truth).abs().mean()
    native_error = (low.native(ids).logits.float() - truth).abs().mean()
    assert native_error < 1.5 * reference_error


def test_bf16_keeps_the_references_dtypes(make_pair):
    """Every parameter and every table that is computed from the config has the reference's dtype and values."""
    low = make_pair(dtype=torch.bfloat16)
    expected = {name: tensor for name, tensor in low.reference.named_buffers()}
    actual = {name: tensor for name, tensor in low.native.named_buffers()}
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name
    dtypes = sorted(str(parameter.dtype) for parameter in low.reference.parameters())
    assert sorted(str(parameter.dtype) for parameter in low.native.parameters()) == dtypes


def test_loss_and_all_gradients(any_pair, to_native_name, difference):
    """Same loss, and the same gradient for every parameter; none where the reference has none."""
    ids = any_pair.inputs()
    labels = ids.clone()
    labels[0, :4] = -100
    expected = any_pair.reference(ids, labels=labels, use_cache=False)
    actual = any_pair.native(ids, labels=labels, use_cache=False)
    assert abs(actual.loss.item() - expected.loss.item()) < TOLERANCE * max(1.0, expected.loss.item())
    expected.loss.backward()
    actual.loss.backward()
    gradients = {to_native_name(name): parameter.grad for name, parameter in any_pair.reference.named_parameters()}
    compared = 0
    for name, parameter in any_pair.native.named_parameters():
        if gradients[name] is None:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, f"{name} gets no gradient"
        assert difference(parameter.grad, gradients[name]) < TOLERANCE, name
        compared += 1
    assert compared > 0


@torch.no_grad()
def test_exported_checkpoint_loads_in_transformers(any_pair, tmp_path, difference):
    """What the adapter writes is a checkpoint that transformers loads completely, to the same logits."""
    from safetensors.torch import save_file

    exported = any_pair.native.state_dict_adapter.to_hf(any_pair.native.state_dict())
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in exported.items()},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    copy.deepcopy(any_pair.reference.config).save_pretrained(tmp_path)
    loaded, report = HFBambaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = any_pair.inputs()
    assert difference(loaded.eval()(ids).logits, any_pair.reference(ids).logits) < TOLERANCE
