"""Contract: logits, loss and gradients are those of transformers, at every position, for every setting served."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import BambaForCausalLM as HFBambaForCausalLM

TOLERANCE = 1e-4  # of the largest value, where that is above one


def test_no_module_is_the_references_own(pair):
    """The two sides of the comparison share no memory, and no code below their top class but the mixers'."""
    mixers = [layer.mamba for layer in pair.native.model.layers if hasattr(layer, "mamba")]
    reused = {module for mixer in mixers for module in mixer.modules()}
    assert {type(mixer).__name__ for mixer in mixers} == {"BambaMixer"}
    own = {type(module).__module__ for module in pair.native.modules() if module not in reused}
    assert not {name for name in own if name.startswith("transformers.models.")}
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
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    options = {"attention_mask": mask, "position_ids": positions}
    expected, actual = pair.reference(ids, **options).logits, pair.native(ids, **options).logits
    assert difference(actual[mask.bool()], expected[mask.bool()]) < TOLERANCE


@torch.no_grad()
def test_eager_attention(pair, difference):
    """The attention interface of transformers is really used: eager and sdpa agree with the reference."""
    ids = pair.inputs()
    expected = pair.reference(ids).logits
    pair.native.set_attn_implementation("eager")
    assert difference(pair.native(ids).logits, expected) < TOLERANCE


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


@torch.no_grad()
def test_bf16_keeps_fp32_where_it_matters(make_pair):
    """Rotation tables stay in fp32 and norms compute in it; embeddings round as the reference's do."""
    exact, low = make_pair(), make_pair(dtype=torch.bfloat16)
    ids = exact.inputs()
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    tables = [pair.native.model.rotary_emb(pair.native.model.embed_tokens(ids), positions) for pair in (exact, low)]
    for fp32, bf16 in zip(*tables, strict=True):
        assert torch.equal(bf16, fp32)
    generator = torch.Generator().manual_seed(1)
    norms = [
        module
        for name, module in low.native.named_modules()
        if ".mamba." not in name and "RMSNorm" in type(module).__name__ and module.weight is not None
    ]
    for norm in norms:
        states = torch.randn((4, *norm.weight.shape), generator=generator).bfloat16()
        assert torch.equal(norm(states), copy.deepcopy(norm).float()(states.float()).bfloat16())
    assert norms
    embedded = low.reference.get_input_embeddings()(ids)
    assert torch.equal(low.native.get_input_embeddings()(ids), embedded)


def test_loss_and_all_gradients(any_pair, as_native, difference):
    """Same loss, and the same gradient for every parameter; none where the reference has none."""
    ids = any_pair.inputs()
    labels = ids.clone()
    labels[0, :4] = -100
    expected = any_pair.reference(ids, labels=labels)
    actual = any_pair.native(ids, labels=labels)
    assert abs(actual.loss.item() - expected.loss.item()) < TOLERANCE * max(1.0, expected.loss.item())
    expected.loss.backward()
    actual.loss.backward()
    gradients = as_native(
        any_pair.native, any_pair.reference, {name: p.grad for name, p in any_pair.reference.named_parameters()}
    )
    for name, parameter in any_pair.native.named_parameters():
        assert parameter.grad is not None, f"{name} gets no gradient"
        assert difference(parameter.grad, gradients[name]) < TOLERANCE, name


@torch.no_grad()
def test_exported_checkpoint_loads_in_transformers(any_pair, tmp_path, difference):
    """What the adapter writes is a checkpoint that transformers loads completely, to the same logits."""
    from safetensors.torch import save_file

    exported = any_pair.native.state_dict_adapter.to_hf(any_pair.native.state_dict())
    save_file({name: tensor.contiguous().clone() for name, tensor in exported.items()}, tmp_path / "model.safetensors")
    copy.deepcopy(any_pair.reference.config).save_pretrained(tmp_path)
    loaded, report = HFBambaForCausalLM.from_pretrained(tmp_path, output_loading_info=True, attn_implementation="sdpa")
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = any_pair.inputs()
    assert difference(loaded.eval()(ids).logits, any_pair.reference(ids).logits) < TOLERANCE
