"""Contract: what REVIEW.md calls reused is transformers' own code, unchanged, and nothing else is."""

from __future__ import annotations

from transformers.models.bamba.modeling_bamba import BambaForCausalLM as HFBambaForCausalLM

from nemo_automodel_bamba.model import BambaForCausalLM

NOVEL = ["model.layers.*.mamba", "model.layers.*.self_attn"]
"""Parts that no formula of onboard explains, `*` stands for a layer's index: where a review begins."""


def test_the_whole_model_is_transformers_own(pair):
    """Every module, and the forward pass below the check for packed batches."""
    assert issubclass(BambaForCausalLM, HFBambaForCausalLM)
    own = {type(module) for name, module in pair.native.named_modules() if name}
    assert own == {type(module) for name, module in pair.reference.named_modules() if name}
    assert BambaForCausalLM.forward.__wrapped__ is HFBambaForCausalLM.forward


def test_the_novel_parts_exist(pair):
    """The report names modules that the model has."""
    names = {name for name, _ in pair.native.named_modules()}
    for path in NOVEL:
        first, star, rest = path.partition("*")
        assert any(name.startswith(first) and name.endswith(rest) for name in names), path
