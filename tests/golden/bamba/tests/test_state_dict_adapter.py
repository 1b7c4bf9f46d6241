"""Contract: every tensor of the checkpoint is accounted for, both ways, to the bit; anything else is a named error."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from nemo_automodel_bamba.state_dict_adapter import IGNORED, KEY_MAP


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
    """No two rows claim the same tensor."""
    adapter = any_pair.native.state_dict_adapter
    names = list(disk(any_pair.folder))
    assert len({adapter.from_hf_name(name) for name in names}) == len(names)
    assert len({row.disk for row in KEY_MAP}) == len({row.native for row in KEY_MAP}) == len(KEY_MAP)


def test_dtypes_survive(pair):
    """The adapter moves tensors, it does not cast them."""
    weights = {name: tensor.to(torch.float16) for name, tensor in disk(pair.folder).items()}
    assert {tensor.dtype for tensor in pair.native.state_dict_adapter.from_hf(weights).values()} == {torch.float16}


def test_unknown_tensor_is_named(pair):
    """A tensor that nobody expects is an error, also where it only resembles a known one."""
    adapter = pair.native.state_dict_adapter
    weights = disk(pair.folder)
    known = sorted(weights)[-1]
    resembling = [f"extra.{known}", f"{known}_scale_inv"]
    for row in KEY_MAP:
        resembling += [row.disk.replace("{layer}", index) for index in ("00", "99") if "{layer}" in row.disk]
    asked = [name for name in resembling if not any(pattern.search(name) for pattern in adapter.ignored)]
    assert len(asked) > len(resembling) / 2
    for name in asked:
        with pytest.raises(KeyError, match="No row of KEY_MAP"):
            adapter.from_hf({**weights, name: torch.zeros(1)})


def test_ignored_tensors_are_dropped(pair):
    """What a checkpoint may hold besides is left out, and nothing that a row maps."""
    adapter, weights = pair.native.state_dict_adapter, disk(pair.folder)
    besides = {"layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(1)}
    assert [pattern for pattern in IGNORED if "inv_freq" in pattern]
    assert sorted(adapter.from_hf({**weights, **besides})) == sorted(adapter.from_hf(weights))


def test_missing_tensor_is_named(pair):
    """A tensor that is not there is an error, for every tensor."""
    adapter, weights = pair.native.state_dict_adapter, disk(pair.folder)
    for name in weights:
        native = adapter.from_hf_name(name)
        if native in adapter.shared:
            continue
        partial = {other: tensor for other, tensor in weights.items() if other != name}
        with pytest.raises(KeyError, match=native.replace(".", r"\.")):
            adapter.from_hf(partial)
    with pytest.raises(KeyError, match="has no tensor for"):
        adapter.from_hf({})


def test_tied_head(make_pair):
    """A tied head is not written beside its embedding, alone it is; a checkpoint with another head is refused."""
    pair = make_pair("tied")
    adapter, weights = pair.native.state_dict_adapter, disk(pair.folder)
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    assert adapter.shared[head] == embedding
    on_disk = adapter.to_hf_name(head)
    tensor = torch.ones(3, 2)
    assert list(adapter.to_hf({head: tensor, embedding: tensor})) == [adapter.to_hf_name(embedding)]
    assert list(adapter.to_hf({head: tensor})) == [on_disk]
    stored = weights[adapter.to_hf_name(embedding)]
    assert sorted(adapter.from_hf({**weights, on_disk: stored})) == sorted(adapter.from_hf(weights))
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        adapter.from_hf({**weights, on_disk: stored + 1})


@pytest.mark.parametrize("part", ["lora_A.weight", "lora_B.weight", "lora_magnitude_vector"])
def test_lora_tensors_follow_their_weight(pair, part):
    """Adapter weights are renamed with the projection that they belong to."""
    adapter = pair.native.state_dict_adapter
    native, disk_name = (
        "model.layers.{layer}.feed_forward.down_proj.weight",
        "model.layers.{layer}.feed_forward.down_proj.weight",
    )
    layer = next(index for index in map(str, range(9)) if native.replace("{layer}", index) in adapter.names)
    module = native.replace("{layer}", layer).removesuffix(".weight")
    on_disk = disk_name.replace("{layer}", layer).removesuffix(".weight")
    lora = {f"base_model.model.{module}.{part}": torch.zeros(2, 3)}
    assert list(adapter.to_hf(lora)) == [f"base_model.model.{on_disk}.{part}"]
    assert list(adapter.from_hf(adapter.to_hf(lora))) == list(lora)


def test_excluded_names_are_left_out(pair):
    """``exclude_key_regex`` drops the bookkeeping that no row maps."""
    state = {**pair.native.state_dict(), "norm._extra_state": torch.zeros(1)}
    exported = pair.native.state_dict_adapter.to_hf(state, exclude_key_regex=r".*_extra_state.*")
    assert sorted(exported) == sorted(disk(pair.folder))
