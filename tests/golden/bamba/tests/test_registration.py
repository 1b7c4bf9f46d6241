"""Contract: the framework finds the class by the checkpoint's architecture and loads it through its own entry point."""

from __future__ import annotations

import inspect
import json

import pytest
import torch
from transformers import BambaForCausalLM as HFBambaForCausalLM

from nemo_automodel._transformers.registry import ModelRegistry
from nemo_automodel.components.models.common.hf_checkpointing_mixin import HFCheckpointingMixin
from nemo_automodel.components.models.common.tie_word_embeddings import TieSupport
from nemo_automodel_bamba import model as module
from nemo_automodel_bamba.model import BambaForCausalLM, ModelClass

ARCHITECTURE = "BambaForCausalLM"


@pytest.fixture
def registered(monkeypatch):
    """Register the class for one test, also over a class that the framework has built in."""
    mapping = ModelRegistry.model_arch_name_to_cls
    monkeypatch.setattr(mapping, "_extra", {**mapping._extra})
    monkeypatch.setattr(mapping, "_loaded", {**mapping._loaded})
    ModelRegistry.register(ARCHITECTURE, BambaForCausalLM, exist_ok=True)


def test_entry_point_names_this_class():
    """The entry point in pyproject.toml loads the class that the tests prove."""
    from pathlib import Path

    try:
        import tomllib
    except ImportError:
        import tomli as tomllib

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    entry = project["project"]["entry-points"]["nemo_automodel.architectures"][ARCHITECTURE]
    assert entry == f"{module.__name__}:{BambaForCausalLM.__name__}"


def test_class_contracts():
    """What the framework asks of every registered class."""
    assert ModelClass is BambaForCausalLM
    assert issubclass(BambaForCausalLM, HFCheckpointingMixin)
    assert isinstance(BambaForCausalLM.tie_word_embeddings_support, TieSupport)
    declared = [name for name in ("ModelCapabilities", "get_capabilities") if name in vars(BambaForCausalLM)]
    assert len(declared) == 1


@torch.no_grad()
def test_from_pretrained_through_the_framework(any_pair, registered, automodel_on_cpu, difference):
    """``NeMoAutoModelForCausalLM.from_pretrained`` on the tiny checkpoint: this class, the reference's logits."""
    from nemo_automodel import NeMoAutoModelForCausalLM

    config_file = any_pair.folder / "config.json"
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps({**config, "architectures": [ARCHITECTURE]}))
    loaded = NeMoAutoModelForCausalLM.from_pretrained(
        str(any_pair.folder),
        torch_dtype=torch.float32,
        attn_implementation="sdpa",
        use_liger_kernel=False,
    ).eval()
    assert isinstance(loaded, BambaForCausalLM)
    ids = any_pair.inputs()
    assert difference(loaded(ids).logits, any_pair.reference(ids).logits) < 1e-4


def test_from_config_through_the_framework(tiny_config, registered, automodel_on_cpu):
    """``NeMoAutoModelForCausalLM.from_config``: this class, initialised and trainable."""
    from nemo_automodel import NeMoAutoModelForCausalLM
    from nemo_automodel.components.checkpoint.checkpointing import Checkpointer

    if f'"{ARCHITECTURE}"' in inspect.getsource(Checkpointer.initialize_model_weights):
        pytest.skip(f"the framework initialises no {ARCHITECTURE} built from a config: it is on a list in Checkpointer")
    tiny_config.architectures = [ARCHITECTURE]
    model = NeMoAutoModelForCausalLM.from_config(tiny_config, torch_dtype=torch.float32, use_liger_kernel=False)
    assert isinstance(model, BambaForCausalLM)
    ids = torch.arange(3, 15).unsqueeze(0)
    loss = model(ids, labels=ids).loss
    loss.backward()
    # Fresh weights predict nothing: about the log of the vocabulary's size.
    assert abs(loss.item() - torch.tensor(tiny_config.vocab_size).log().item()) < 0.2


@torch.no_grad()
@pytest.mark.parametrize("variant", ["base", "tied"])
def test_checkpoint_saved_by_the_framework_loads_in_transformers(make_pair, variant, tmp_path, difference):
    """The framework's checkpointer writes, through the adapter, what transformers loads completely."""
    from nemo_automodel.components.checkpoint.checkpointing import Checkpointer, CheckpointingConfig

    pair = make_pair(variant)
    config = CheckpointingConfig(
        checkpoint_dir=tmp_path,
        model_cache_dir=tmp_path / "cache",
        model_repo_id=str(pair.folder),
        model_save_format="safetensors",
        save_consolidated=True,
    )
    pair.native.save_pretrained(str(tmp_path), checkpointer=Checkpointer(config, dp_rank=0, tp_rank=0, pp_rank=0))
    loaded, report = HFBambaForCausalLM.from_pretrained(
        tmp_path / "model" / "consolidated", output_loading_info=True, attn_implementation="sdpa"
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = pair.inputs()
    assert difference(loaded.eval()(ids).logits, pair.reference(ids).logits) < 1e-4
