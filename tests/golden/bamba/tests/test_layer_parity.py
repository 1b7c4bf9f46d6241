"""Contract: every layer's output is the reference's, so that a difference is found where it begins."""

from __future__ import annotations

import torch


@torch.no_grad()
def test_output_of_every_layer_and_its_parts(any_pair, layers_of, difference, record_property):
    """Each decoder layer and each module in it, on the same token ids."""
    ids = any_pair.inputs()
    outputs: dict[str, dict[str, torch.Tensor]] = {"reference": {}, "native": {}}
    for side, model in (("reference", any_pair.reference), ("native", any_pair.native)):
        for index, layer in enumerate(layers_of(model)):
            for name, module in layer.named_modules():

                def keep(_module, _args, output, side=side, place=f"layer {index} {name}"):
                    first = output[0] if isinstance(output, tuple) and output else output
                    if isinstance(first, torch.Tensor):
                        outputs[side].setdefault(place, first)

                module.register_forward_hook(keep)
        model(ids)
    assert outputs["native"].keys() == outputs["reference"].keys()
    assert len(outputs["native"]) >= len(layers_of(any_pair.native))
    differences = {
        place: difference(output, outputs["reference"][place])
        for place, output in outputs["native"].items()
        if torch.isfinite(outputs["reference"][place]).all()
    }
    record_property("layer_diffs", max(differences.values()))
    assert max(differences.values()) < 1e-4, f"first different: {next(p for p, d in differences.items() if d >= 1e-4)}"


@torch.no_grad()
def test_hidden_states(any_pair, difference):
    """What ``output_hidden_states`` gives, at every position."""
    ids = any_pair.inputs()
    expected = any_pair.reference(ids, output_hidden_states=True).hidden_states
    actual = any_pair.native(ids, output_hidden_states=True).hidden_states
    assert len(actual) == len(expected)
    for index, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert difference(mine, theirs) < 1e-4, f"first different: {index}"
