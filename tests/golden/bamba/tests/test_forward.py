"""Contract: the model takes the inputs that the framework and ``generate`` give it, on any device and in any dtype."""

from __future__ import annotations

import pytest
import torch

from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel_bamba.model import BambaForCausalLM


@torch.no_grad()
def test_logits_shape_and_dtype(pair):
    """``[B, S, V]`` in the model's dtype."""
    logits = pair.native(pair.inputs()).logits
    assert logits.shape == (2, pair.inputs().shape[1], pair.native.config.vocab_size)
    assert logits.dtype == torch.float32


@torch.no_grad()
def test_logits_to_keep(pair):
    """Only the asked positions are projected."""
    ids = pair.inputs()
    full = pair.native(ids).logits
    torch.testing.assert_close(pair.native(ids, logits_to_keep=3).logits, full[:, -3:])
    wanted = torch.tensor([0, 5])
    torch.testing.assert_close(pair.native(ids, logits_to_keep=wanted).logits, full[:, wanted])


@torch.no_grad()
def test_inputs_embeds_equal_input_ids(pair):
    """Embeddings given directly take the place of token ids."""
    ids = pair.inputs()
    embeds = pair.native.get_input_embeddings()(ids)
    torch.testing.assert_close(pair.native(inputs_embeds=embeds).logits, pair.native(ids).logits)


def test_needs_exactly_one_input(pair):
    """Neither or both of token ids and embeddings is an error."""
    ids = pair.inputs()
    with pytest.raises(ValueError, match="exactly one"):
        pair.native()
    with pytest.raises(ValueError, match="exactly one"):
        pair.native(ids, inputs_embeds=pair.native.get_input_embeddings()(ids))


def test_meta_construction_then_loading(pair):
    """Built without memory, then given memory and weights: nothing is left over from the meta device."""
    config = pair.native.config
    with torch.device("meta"):
        model = BambaForCausalLM(config, BackendConfig(attn="sdpa"))
    assert all(parameter.is_meta for parameter in model.parameters())
    model = model.to_empty(device="cpu").eval()
    model.load_state_dict(pair.native.state_dict())
    model.tie_weights()
    ids = pair.inputs()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, pair.native(ids).logits)


def test_dtype_follows_the_config(tiny_config):
    """Under bf16 every parameter is bf16."""
    tiny_config.dtype = torch.bfloat16
    model = BambaForCausalLM(tiny_config)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@torch.no_grad()
def test_cached_generation_equals_the_reference(pair):
    """Greedy tokens with a key/value cache are the reference's."""
    ids = pair.inputs(batch=1, length=9)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = pair.reference.generate(ids, **options)
    assert pair.native.generate(ids, **options).tolist() == expected.tolist()


@torch.no_grad()
def test_static_cache_generates_the_same_tokens(pair):
    """With a cache of fixed size, whose masks ``generate`` prepares, too: the reference's with one that grows."""
    ids = pair.inputs(batch=2, length=9)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    options = {
        "attention_mask": mask,
        "max_new_tokens": 12,
        "min_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
    }
    expected = pair.reference.generate(ids, **options)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert pair.native.generate(ids, **options, **static).tolist() == expected.tolist()


@torch.no_grad()
def test_cache_equals_no_cache(pair, difference):
    """Token by token with a cache gives the logits of the whole sequence at once."""
    ids = pair.inputs(batch=1)
    whole = pair.native(ids).logits
    cache, steps = None, []
    for position in range(ids.shape[1]):
        output = pair.native(ids[:, position : position + 1], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        steps.append(output.logits)
    assert difference(torch.cat(steps, dim=1), whole) < 1e-4
