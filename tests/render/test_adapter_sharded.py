"""NeMo AutoModel's own checkpointer through the generated adapter, with the model sharded over two processes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from .checkpoints import FAMILIES, native, reference, tiny
from .hand_made import load

NAMES = ("gpt2", "gpt_neox", "falcon", "phi3")


class Toy(nn.Module):
    """Parameters under native names, all of them wrong; nothing is computed."""

    def __init__(self, name: str, shapes: dict[str, torch.Size]) -> None:
        super().__init__()
        self.config = tiny(FAMILIES[name]())
        self.state_dict_adapter = load(FAMILIES[name]().spec).ToyStateDictAdapter(self.config)
        for parameter, shape in shapes.items():
            module: nn.Module = self
            *path, leaf = parameter.split(".")
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(leaf, nn.Parameter(torch.full(shape, -7.0)))
        if self.config.tie_word_embeddings:
            self.lm_head = nn.Module()
            self.lm_head.weight = self.model.embed_tokens.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.full_tensor().clone() for name, tensor in model.state_dict().items()}


def load_save_load(rank: int, root: Path, found: str) -> None:
    """Read the reference's checkpoint, write it, read what was written; rank 0 keeps what the model had each time."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2)
    from nemo_automodel.components.checkpoint.checkpointing import Checkpointer, CheckpointingConfig
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for name in NAMES:
        folder = root / name
        shapes = {key: tensor.shape for key, tensor in torch.load(folder / "expected.pt").items()}
        model = Toy(name, shapes)
        fully_shard(model, mesh=mesh)
        config = CheckpointingConfig(
            checkpoint_dir=str(folder / "run"), model_cache_dir=str(folder), save_consolidated="every"
        )
        checkpointer = Checkpointer(config, rank, 0, 0)
        checkpointer.load_model(model, str(folder / "disk"), is_init_step=True)
        loaded = whole(model)
        checkpointer.save_model(model, str(folder / "run"))
        torch.distributed.barrier()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        checkpointer.load_model(model, str(folder / "run" / "model"))
        resumed = whole(model)
        if rank == 0:
            torch.save((loaded, resumed), folder / found)
        checkpointer.close()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sharded")
    for name in NAMES:
        family, folder = FAMILIES[name](), root / name
        (folder / "disk").mkdir(parents=True)
        reference(family).save_pretrained(folder / "disk")
        file = folder / "disk" / "model.safetensors"
        weights = load_file(file)
        torch.save(native(family, weights), folder / "expected.pt")
        torch.save(weights, folder / "weights.pt")
        # As GPT-2 and BLOOM are published.
        prefix = family.spec.checkpoint.base_prefix or ""
        save_file({key.removeprefix(prefix): tensor for key, tensor in weights.items()}, file, {"format": "pt"})
    torch.multiprocessing.spawn(load_save_load, (root, "found.pt"), nprocs=2)
    return root


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


@pytest.mark.parametrize("name", NAMES)
def test_shards_are_loaded_saved_and_resumed_to_the_bit(name: str, runs: Path) -> None:
    expected = torch.load(runs / name / "expected.pt")
    loaded, resumed = torch.load(runs / name / "found.pt")
    assert differing(loaded, expected) == []
    assert differing(resumed, expected) == []
    weights = torch.load(runs / name / "weights.pt")
    files = sorted((runs / name / "run" / "model" / "consolidated").glob("*.safetensors"))
    written = {key: tensor for file in files for key, tensor in load_file(file).items()}
    assert sorted(written) == sorted(weights)
    assert differing(written, weights) == []
