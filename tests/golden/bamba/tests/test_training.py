"""Contract: the model trains, with and without activation checkpointing, and the reference's parameters take part."""

from __future__ import annotations

import torch


def test_loss_falls(pair):
    """A few steps on one batch."""
    model = pair.native.train()
    ids = pair.inputs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(10):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0], losses


def test_parameters_without_a_gradient(any_pair, to_native_name):
    """The loss reaches every parameter that it reaches in the reference."""
    ids = any_pair.inputs()
    without = {}
    for side, model in (("reference", any_pair.reference), ("native", any_pair.native)):
        model(ids, labels=ids, use_cache=False).loss.backward()
        without[side] = {
            to_native_name(name) if side == "reference" else name
            for name, parameter in model.named_parameters()
            if parameter.grad is None or parameter.grad.abs().max() == 0
        }
    assert without["native"] == without["reference"]
    assert len(without["native"]) < len(dict(any_pair.native.named_parameters()))


@torch.no_grad()
def test_dropout_equals_the_reference(make_pair, difference):
    """In training the same random numbers drop the same values, at the same places."""
    pair = make_pair(attention_dropout=0.5)
    ids = pair.inputs()
    outputs = []
    for model in (pair.reference, pair.native):
        torch.manual_seed(0)
        outputs.append(model.train()(ids).logits)
    assert difference(outputs[1], outputs[0]) < 1e-4
    assert difference(outputs[1], pair.native.eval()(ids).logits) > 1e-2


def test_activation_checkpointing_changes_nothing(make_pair, difference):
    """Recomputed activations give the same gradients."""
    plain, checkpointed = make_pair().native.train(), make_pair().native.train()
    checkpointed.gradient_checkpointing_enable()
    assert checkpointed.is_gradient_checkpointing
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, plain.config.vocab_size, (2, 12), generator=generator)
    for model in (plain, checkpointed):
        torch.manual_seed(0)  # the same dropout for both
        model(ids, labels=ids, use_cache=False).loss.backward()
    expected = dict(plain.named_parameters())
    for name, parameter in checkpointed.named_parameters():
        if expected[name].grad is None:
            assert parameter.grad is None, name
            continue
        assert difference(parameter.grad, expected[name].grad) < 1e-5, name
