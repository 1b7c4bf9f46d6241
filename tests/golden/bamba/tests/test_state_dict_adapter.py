"""Contract: every tensor of the checkpoint is accounted for, both ways, to the bit; anything else is a named error."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from nemo_automodel_bamba.state_dict_adapter import EMBEDDING, HEAD, IGNORED, KEY_MAP, BambaStateDictAdapter

LAYER_ROW = next(row for row in KEY_MAP if "{layer}" in row.disk)


def disk(folder):
    """All tensors of a checkpoint."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def test_disk_to_native_to_disk_to_the_bit(any_pair):
    """The checkpoint that the reference saved comes back unchanged: names, values, dtypes."""
    weights = disk(any_pair.folder)
    adapter = any_pair.native.state_dict_adapter
    back = adapter.to_hf(adapter.from_hf(weights))
    assert sorted(back) == sorted(weights)
    for name, tensor in weights.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor), name


def test_exported_names_are_the_checkpoints(any_pair):
    """The model exports exactly the names that the reference has on disk."""
    state = any_pair.native.state_dict()
    adapter = any_pair.native.state_dict_adapter
    assert sorted(adapter.to_hf(state)) == sorted(disk(any_pair.folder))
    assert sorted(adapter.get_hf_state_dict_keys(state)) == sorted(disk(any_pair.folder))


def test_every_row_is_used_once(any_pair):
    """No two rows claim the same tensor, and a row that the config asks for has tensors."""
    adapter = any_pair.native.state_dict_adapter
    names = list(disk(any_pair.folder))
    assert len({adapter.from_hf_name(name) for name in names}) == len(names)
    assert len({row.disk for row in KEY_MAP}) == len({row.native for row in KEY_MAP}) == len(KEY_MAP)


def test_dtypes_survive(pair):
    """The adapter moves tensors, it does not cast them."""
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in disk(pair.folder).items()}
    assert {tensor.dtype for tensor in pair.native.state_dict_adapter.from_hf(weights).values()} == {torch.bfloat16}


def test_unknown_tensor_is_named(pair):
    """A tensor that nobody expects is an error, also where it only resembles a known one."""
    adapter = pair.native.state_dict_adapter
    known, padded, beyond = (LAYER_ROW.disk.replace("{layer}", layer) for layer in ("0", "00", "99"))
    for name in (f"extra.{known}", f"{known}_scale_inv", padded, beyond):
        with pytest.raises(KeyError, match="No row of KEY_MAP"):
            adapter.from_hf({**disk(pair.folder), name: torch.zeros(1)})


def test_ignored_tensors_are_dropped(pair):
    """What a checkpoint may hold besides is left out, and nothing that a row maps."""
    adapter, weights = pair.native.state_dict_adapter, disk(pair.folder)
    besides = {pattern.replace("{layer}", "0"): torch.zeros(1) for pattern in IGNORED}
    assert sorted(adapter.from_hf({**weights, **besides})) == sorted(adapter.from_hf(weights))
    assert not {row.disk for row in KEY_MAP} & set(IGNORED)


def test_missing_tensor_is_named(pair):
    """A tensor that is not there is an error, for every kind of tensor."""
    adapter, weights = pair.native.state_dict_adapter, disk(pair.folder)
    for name in weights:
        if pair.native.config.tie_word_embeddings and name == adapter.to_hf_name(HEAD):
            continue
        partial = {other: tensor for other, tensor in weights.items() if other != name}
        with pytest.raises(KeyError, match=adapter.from_hf_name(name).replace(".", r"\.")):
            adapter.from_hf(partial)


def test_missing_layer_is_named(pair):
    """A whole layer, or everything, that is not there is an error too: it must not pass for a pipeline stage."""
    adapter, weights = pair.native.state_dict_adapter, disk(pair.folder)
    for layer in range(pair.native.config.num_hidden_layers):
        prefix = LAYER_ROW.disk.split("{layer}")[0] + f"{layer}."
        partial = {name: tensor for name, tensor in weights.items() if not name.startswith(prefix)}
        with pytest.raises(KeyError, match="has no tensor for"):
            adapter.from_hf(partial)
    with pytest.raises(KeyError, match="has no tensor for"):
        adapter.from_hf({})


def test_pipeline_stage_may_have_a_part(pair):
    """Whole layers are enough: a stage does not hold the others."""
    weights = disk(pair.folder)
    first = LAYER_ROW.disk.split("{layer}")[0] + "0."
    stage = {name: tensor for name, tensor in weights.items() if name.startswith(first)}
    assert len(pair.native.state_dict_adapter.from_hf(stage)) == len(stage)


def test_tied_head(tiny_config):
    """A tied head is not written beside its embedding, alone it is; a checkpoint with another head is refused."""
    tiny_config.tie_word_embeddings = True
    adapter = BambaStateDictAdapter(tiny_config)
    head = torch.ones(3, 2)
    assert list(adapter.to_hf({HEAD: head, EMBEDDING: head})) == [adapter.to_hf_name(EMBEDDING)]
    assert list(adapter.to_hf({HEAD: head})) == [adapter.to_hf_name(HEAD)]
    assert list(adapter._resolve_head({HEAD: head, EMBEDDING: head})) == [EMBEDDING]
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        adapter._resolve_head({HEAD: head, EMBEDDING: head + 1})


@pytest.mark.parametrize("part", ["lora_A.weight", "lora_B.weight", "lora_magnitude_vector"])
def test_lora_tensors_follow_their_weight(pair, part):
    """Adapter weights are renamed with the projection that they belong to."""
    adapter = pair.native.state_dict_adapter
    row = next(row for row in KEY_MAP if row.native.endswith("o_proj.weight"))
    module = row.native.replace("{layer}", "1").removesuffix(".weight")
    on_disk = row.disk.replace("{layer}", "1").removesuffix(".weight")
    lora = {f"base_model.model.{module}.{part}": torch.zeros(2, 3)}
    assert list(adapter.to_hf(lora)) == [f"base_model.model.{on_disk}.{part}"]
    assert list(adapter.from_hf(adapter.to_hf(lora))) == list(lora)
    assert adapter.map_peft_target_module_to_hf(module) == on_disk


def test_excluded_names_are_left_out(pair):
    """``exclude_key_regex`` drops the bookkeeping that no row maps."""
    state = {**pair.native.state_dict(), "model.norm._extra_state": torch.zeros(1)}
    exported = pair.native.state_dict_adapter.to_hf(state, exclude_key_regex=r".*_extra_state.*")
    assert sorted(exported) == sorted(disk(pair.folder))
