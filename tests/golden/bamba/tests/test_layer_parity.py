"""Contract: every layer's hidden states are the reference's, so that a difference is found where it begins."""

from __future__ import annotations

import torch

ENDS = {
    "reference": [
        "model.layers.{layer}.self_attn.o_proj",
        "model.layers.{layer}.feed_forward.down_proj",
        "model.layers.{layer}.mamba",
    ],
    "native": [
        "model.layers.{layer}.self_attn.o_proj",
        "model.layers.{layer}.mlp.down_proj",
        "model.layers.{layer}.mamba",
    ],
}
"""The last projection of a layer's attention and of its MLP, and its mixer, on each side."""


@torch.no_grad()
def test_hidden_states_of_every_layer(any_pair, difference, record_property):
    """Embedding, each layer and the final norm, at every position."""
    ids = any_pair.inputs()
    expected = any_pair.reference(ids, output_hidden_states=True).hidden_states
    actual = any_pair.native(ids, output_hidden_states=True).hidden_states
    assert len(actual) == len(expected) == any_pair.native.config.num_hidden_layers + 1
    differences = [difference(mine, theirs) for mine, theirs in zip(actual, expected, strict=True)]
    record_property("hidden_state_diffs", differences)
    assert max(differences) < 1e-4, f"first different: {next(i for i, d in enumerate(differences) if d >= 1e-4)}"


@torch.no_grad()
def test_attention_and_mlp_of_every_layer(pair, difference):
    """What each attention and each MLP gives, before the residual additions."""
    ids = pair.inputs()
    outputs: dict[str, list[torch.Tensor]] = {"reference": [], "native": []}
    for side, model in (("reference", pair.reference), ("native", pair.native)):

        def keep(_module, _args, output, side=side):
            outputs[side].append(output.clone())

        for path in ENDS[side]:
            for layer in range(model.config.num_hidden_layers):
                if path.format(layer=layer) in dict(model.named_modules()):  # a layer has one of attention and mixer
                    model.get_submodule(path.format(layer=layer)).register_forward_hook(keep)
        model(ids, use_cache=False)
    assert len(outputs["native"]) == len(outputs["reference"]) == 2 * pair.native.config.num_hidden_layers
    for index, (mine, theirs) in enumerate(zip(outputs["native"], outputs["reference"], strict=True)):
        part = ("attention or mixer", "MLP")[index % 2]
        assert difference(mine.flatten(0, -2), theirs.flatten(0, -2)) < 1e-4, f"layer {index // 2} {part}"
