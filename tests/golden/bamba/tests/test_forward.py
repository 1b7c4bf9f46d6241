"""Contract: the model takes the inputs that the framework and ``generate`` give it, on any device and in any dtype."""

from __future__ import annotations

import torch
from transformers.initialization import no_init_weights

from nemo_automodel.components.checkpoint.checkpointing import Checkpointer
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.utils.model_utils import init_empty_weights
from nemo_automodel_bamba.model import BambaForCausalLM


@torch.no_grad()
def test_logits_shape_and_dtype(pair):
    """``[B, S, V]`` in the model's dtype."""
    logits = pair.native(pair.inputs()).logits
    assert logits.shape == (2, pair.inputs().shape[1], pair.native.config.vocab_size)
    assert logits.dtype == torch.float32


@torch.no_grad()
def test_logits_to_keep(pair, difference):
    """Only the asked positions are projected."""
    ids = pair.inputs()
    full = pair.native(ids).logits
    kept = pair.native(ids, logits_to_keep=3).logits
    assert difference(kept, full[:, -3:]) < 1e-5


@torch.no_grad()
def test_inputs_embeds_equal_input_ids(pair, difference):
    """Embeddings given directly take the place of token ids."""
    ids = pair.inputs()
    embeds = pair.native.get_input_embeddings()(ids)
    assert difference(pair.native(inputs_embeds=embeds).logits, pair.native(ids).logits) < 1e-5


@torch.no_grad()
def test_meta_construction_then_loading(any_pair, difference):
    """Built without memory, then given memory and weights as the framework does: nothing is left over."""
    config = any_pair.native.config
    with no_init_weights(), init_empty_weights():
        model = BambaForCausalLM(config, BackendConfig(attn="sdpa"))
    assert all(parameter.is_meta for parameter in model.parameters())
    Checkpointer.initialize_model_weights(model, torch.device("cpu"))
    model.load_state_dict(any_pair.native.state_dict())
    model.tie_weights()
    ids = any_pair.inputs()
    assert difference(model.eval()(ids).logits, any_pair.native(ids).logits) < 1e-5


@torch.no_grad()
def test_every_parameter_is_initialised(tiny_config):
    """Memory that was never written must not pass for weights, where the framework initialises a model."""
    model = BambaForCausalLM(tiny_config)
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
        parameter._is_hf_initialized = False
    Checkpointer.initialize_model_weights(model, torch.device("cpu"))
    assert [name for name, parameter in model.named_parameters() if not torch.isfinite(parameter).all()] == []


def test_dtype_follows_the_config(tiny_config):
    """Under bf16 every parameter is bf16."""
    tiny_config.dtype = torch.bfloat16
    model = BambaForCausalLM(tiny_config)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@torch.no_grad()
def test_generation_equals_the_reference(pair):
    """Greedy tokens are the reference's."""
    ids = pair.inputs(batch=2, length=9)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = pair.reference.generate(ids, **options)
    actual = pair.native.generate(ids, **options)
    assert actual.shape == (2, 21)
    assert actual.tolist() == expected.tolist()
