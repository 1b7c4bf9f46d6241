"""Contract: the model trains, with and without activation checkpointing, and every parameter takes part."""

from __future__ import annotations

import torch


def test_loss_falls(pair):
    """A few steps on one batch."""
    model = pair.native.train()
    ids = pair.inputs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(6):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses


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
def test_dropout_equals_the_reference(make_pair, difference):
    """In training the same random numbers drop the same values, at the same places."""
    pair = make_pair(attention_dropout=0.5)
    ids = pair.inputs()
    outputs = []
    for model in (pair.reference, pair.native):
        model.set_attn_implementation("eager")
        torch.manual_seed(0)
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
