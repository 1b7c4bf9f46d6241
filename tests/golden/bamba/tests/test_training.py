"""Contract: the model trains, with and without activation checkpointing, and every parameter takes part."""

from __future__ import annotations

import pytest
import torch

DROPOUTS = ["attention_dropout"]


def test_training_follows_the_reference(pair):
    """A few steps on one batch: the loss falls, step by step as the reference's does."""
    ids = pair.inputs()
    losses: dict[str, list[float]] = {"reference": [], "native": []}
    for side, model in (("reference", pair.reference), ("native", pair.native)):
        # An eps that hides the sign of gradients that are rounding errors.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
        for _ in range(6):
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[side].append(loss.item())
    assert losses["native"][-1] < losses["native"][0]
    # Rounding differences grow from step to step; that the gradients are equal is for test_parity.
    torch.testing.assert_close(losses["native"], losses["reference"], rtol=0.02, atol=0.02)


def test_every_parameter_gets_a_gradient(any_pair):
    """No parameter is cut off from the loss."""
    ids = any_pair.inputs()
    any_pair.native(ids, labels=ids).loss.backward()
    without = [
        name
        for name, parameter in any_pair.native.named_parameters()
        if parameter.grad is None or parameter.grad.abs().max() == 0
    ]
    assert without == []


@torch.no_grad()
@pytest.mark.parametrize("key", DROPOUTS)
def test_dropout_stands_where_the_references_does(make_pair, difference, key):
    """With a probability of one everything at its place is zero, which leaves nothing to chance."""
    pair = make_pair(**{**dict.fromkeys(DROPOUTS, 0.0), key: 1.0})
    ids = pair.inputs()
    outputs = []
    for model in (pair.reference, pair.native):
        model.set_attn_implementation("eager")
        outputs.append(model.train()(ids, use_cache=False).logits)
    assert difference(outputs[1], outputs[0]) < 1e-4
    assert difference(outputs[1], pair.native.eval()(ids, use_cache=False).logits) > 1e-2


def test_activation_checkpointing_changes_nothing(make_pair, difference):
    """Recomputed activations give the same gradients."""
    plain, checkpointed = make_pair().native.train(), make_pair().native.train()
    checkpointed.gradient_checkpointing_enable()
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, plain.config.vocab_size, (2, 12), generator=generator)
    for model in (plain, checkpointed):
        torch.manual_seed(0)  # the same dropout for both
        model(ids, labels=ids, use_cache=False).loss.backward()
    expected = dict(plain.named_parameters())
    for name, parameter in checkpointed.named_parameters():
        assert difference(parameter.grad, expected[name].grad) < 1e-5, name
