"""Contract: every tensor of the checkpoint is accounted for, both ways, to the bit; anything else is a named error."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from nemo_automodel_falcon.state_dict_adapter import (
    BASE_PREFIX,
    EMBEDDING,
    HEAD,
    IGNORED,
    KEY_MAP,
    FalconStateDictAdapter,
)

LAYER_ROW = next(row for row in KEY_MAP if "{layer}" in row.disk)
FUSED = [row for row in KEY_MAP if len(row.native) > 1]


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
    names = [native for name in disk(any_pair.folder) for native in adapter.from_hf_names(name)]
    assert len(set(names)) == len(names)
    patterns = [native for row in KEY_MAP for native in row.native]
    assert len({row.disk for row in KEY_MAP}) == len(KEY_MAP)
    assert len(set(patterns)) == len(patterns)


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
        with pytest.raises(KeyError, match=adapter.from_hf_names(name)[0].replace(".", r"\.")):
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
    adapter = pair.native.state_dict_adapter
    assert sorted(adapter.from_hf(stage)) == sorted(native for name in stage for native in adapter.from_hf_names(name))


def test_tied_head(tiny_config):
    """A tied head is not written beside its embedding, alone it is; a checkpoint with another head is refused."""
    tiny_config.tie_word_embeddings = True
    adapter = FalconStateDictAdapter(tiny_config)
    head = torch.ones(3, 2)
    assert list(adapter.to_hf({HEAD: head, EMBEDDING: head})) == [adapter.to_hf_name(EMBEDDING)]
    assert list(adapter.to_hf({HEAD: head})) == [adapter.to_hf_name(HEAD)]
    assert list(adapter._resolve_head({HEAD: head, EMBEDDING: head})) == [EMBEDDING]
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        adapter._resolve_head({HEAD: head, EMBEDDING: head + 1})


@pytest.mark.parametrize("part", ["lora_A.weight", "lora_B.weight", "lora_magnitude_vector"])
def test_lora_tensors_follow_their_weight(pair, part):
    """Adapter weights are renamed with the projection that they belong to, and nothing else happens to them."""
    adapter = pair.native.state_dict_adapter
    row = next(row for row in KEY_MAP if row.native[0].endswith("o_proj.weight"))
    module = row.native[0].replace("{layer}", "1").removesuffix(".weight")
    on_disk = row.disk.replace("{layer}", "1").removesuffix(".weight")
    lora = {f"base_model.model.{module}.{part}": torch.zeros(2, 3)}
    assert list(adapter.to_hf(lora)) == [f"base_model.model.{on_disk}.{part}"]
    assert list(adapter.from_hf(adapter.to_hf(lora))) == list(lora)
    assert next(iter(adapter.to_hf(lora).values())).shape == (2, 3)
    assert adapter.map_peft_target_module_to_hf(module) == on_disk


def test_excluded_names_are_left_out(pair):
    """``exclude_key_regex`` drops the bookkeeping that no row maps."""
    state = {**pair.native.state_dict(), "model.norm._extra_state": torch.zeros(1)}
    exported = pair.native.state_dict_adapter.to_hf(state, exclude_key_regex=r".*_extra_state.*")
    assert sorted(exported) == sorted(disk(pair.folder))


def test_base_model_alone_has_no_prefix(pair):
    """Names of a base model's checkpoint are known too, each by its alias; both at once are an error."""
    adapter, weights = pair.native.state_dict_adapter, disk(pair.folder)
    bare = {name.removeprefix(BASE_PREFIX): tensor for name, tensor in weights.items()}
    expected = adapter.from_hf(weights)
    found = adapter.from_hf(bare)
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    aliases = adapter.checkpoint_key_aliases
    assert {aliases.get(name, name) for name in weights} == set(bare)
    assert len(set(bare) - set(weights)) > pair.native.config.num_hidden_layers
    with pytest.raises(ValueError, match="with and without"):
        adapter.from_hf(weights | bare)


def test_tensors_on_the_meta_device(pair):
    """Shapes are converted where there are no values yet."""
    state = {name: tensor.to("meta") for name, tensor in pair.native.state_dict().items()}
    adapter = pair.native.state_dict_adapter
    shapes = {name: tensor.shape for name, tensor in adapter.to_hf(state).items()}
    assert shapes == {name: tensor.shape for name, tensor in disk(pair.folder).items()}
    back = adapter.from_hf(adapter.to_hf(state))
    assert {name: tensor.shape for name, tensor in back.items()} == {name: state[name].shape for name in back}


def test_parts_get_exactly_their_rows(any_pair):
    """A fused tensor whose every row says its group, part and place comes apart as the config's sizes ask."""
    native, adapter = any_pair.native, any_pair.native.state_dict_adapter
    weights, state = disk(any_pair.folder), native.state_dict()
    for row in FUSED:
        name, groups = row.disk.replace("{layer}", "0"), row.groups(native.config)
        parts = [pattern.replace("{layer}", "0") for pattern in row.native]
        if row.only_if and name not in weights:
            assert not set(parts) & set(state)
            continue
        shares = [len(state[part]) // groups for part in parts]
        # Group after group; in each, part after part; in each, its rows.
        labels = [
            [1e6 * group + 1e4 * part + place]
            for group in range(groups)
            for part, share in enumerate(shares)
            for place in range(share)
        ]
        fused = torch.tensor(labels, dtype=torch.float64)
        fused = fused[:, 0] if weights[name].ndim == 1 else fused
        converted = adapter.from_hf({**weights, name: fused})
        for number, (part, share) in enumerate(zip(parts, shares, strict=True)):
            expected = [1e6 * group + 1e4 * number + place for group in range(groups) for place in range(share)]
            assert converted[part].flatten().tolist() == expected
        assert torch.equal(adapter.to_hf({part: converted[part] for part in parts})[name], fused)


def test_a_part_alone_is_named(pair):
    """A fused tensor needs all of its parts, in every way that leads to the disk."""
    state, adapter = pair.native.state_dict(), pair.native.state_dict_adapter
    for row in FUSED:
        for pattern in row.native:
            name = pattern.replace("{layer}", "0")
            if name not in state:
                continue
            with pytest.raises(KeyError, match=name.replace(".", r"\.")):
                adapter.to_hf({other: tensor for other, tensor in state.items() if other != name})
            with pytest.raises(KeyError, match="needs all of its"):
                adapter.convert_single_tensor_to_hf(name, state[name])


def test_a_fused_tensor_of_another_size_is_named(pair):
    """A tensor that the config does not describe is an error instead of being cut at the wrong rows."""
    weights, adapter = disk(pair.folder), pair.native.state_dict_adapter
    name = FUSED[0].disk.replace("{layer}", "0")
    larger = torch.cat([weights[name]] * 2, dim=0)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        adapter.from_hf({**weights, name: larger})
    state = pair.native.state_dict()
    part = FUSED[0].native[-1].replace("{layer}", "0")
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        adapter.to_hf({**state, part: torch.cat([state[part]] * 2)})


@pytest.mark.parametrize("row", [row for row in FUSED if row.disk.endswith(".weight")], ids=lambda row: row.disk)
def test_lora_of_the_parts_is_lora_of_the_fused_tensor(pair, row):
    """The fused update is, row by row, what the parts' updates are; it comes apart into them again."""
    state, adapter = pair.native.state_dict(), pair.native.state_dict_adapter
    generator = torch.Generator().manual_seed(0)
    weights = [pattern.replace("{layer}", "0") for pattern in row.native]
    lora, updates = {}, {}
    for weight in weights:
        rows, columns = state[weight].shape
        a = torch.randint(-9, 9, (2, columns), generator=generator).float()
        b = torch.randint(-9, 9, (rows, 2), generator=generator).float()
        module = f"base_model.model.{weight.removesuffix('.weight')}"
        lora |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        updates[weight] = b @ a
    on_disk = adapter.to_hf(lora)
    module = f"base_model.model.{row.disk.replace('{layer}', '0').removesuffix('.weight')}"
    assert sorted(on_disk) == [f"{module}.lora_A.weight", f"{module}.lora_B.weight"]
    update = on_disk[f"{module}.lora_B.weight"] @ on_disk[f"{module}.lora_A.weight"]
    assert torch.equal(update, adapter.to_hf(updates)[row.disk.replace("{layer}", "0")])
    back = adapter.from_hf(on_disk)
    assert sorted(back) == sorted(lora)
    assert all(torch.equal(back[name], tensor) for name, tensor in lora.items())
    shared = {**on_disk, f"{module}.lora_B.weight": torch.ones_like(on_disk[f"{module}.lora_B.weight"])}
    with pytest.raises(ValueError, match="share"):
        adapter.from_hf(shared)
