"""Packed data: good data has no finding, each damage has its own with its rows, and nothing ends in a traceback."""

from __future__ import annotations

import copy
import io
import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onboard.errors import UsageError
from onboard.packing.data import reading
from onboard.packing.data.damage import DAMAGES
from onboard.packing.data.inspecting import inspect_data
from onboard.packing.data.rows import Wanted

from .packed import EOS, MULT, SIZE, VOCAB, metadata, row, rows, write_metadata, write_npy, write_parquet

WANTED = Wanted(SIZE, MULT, EOS, VOCAB)


def found(path, wanted=WANTED, **more):
    """Ids of the findings, with their rows."""
    inspection = inspect_data(str(path), wanted, **more)
    json.dumps(inspection.as_json())
    return {item.damage.id: item.rows for item in inspection.findings}


@pytest.fixture(params=["parquet", "npy"])
def write(request, tmp_path):
    """Writes rows with their metadata in one of the formats; returns the path and the findings of that format."""

    def writer(data, meta_of=None, **more):
        meta = metadata(data if meta_of is None else meta_of)
        write_metadata(tmp_path, meta)
        if request.param == "parquet":
            return write_parquet(tmp_path / "training_64.idx.parquet", data, **more), {}
        return write_npy(tmp_path / "training_64.npy", data), {"D21": []}

    return writer


@pytest.fixture(params=[reading._BATCH_TOKENS, 150], ids=["one-batch", "many-batches"])
def batches(request, monkeypatch):
    monkeypatch.setattr(reading, "_BATCH_TOKENS", request.param)


@pytest.mark.usefixtures("batches")
def test_good_data_has_no_finding(write):
    data = rows()
    path, own = write(data)
    assert found(path) == own
    inspection = inspect_data(str(path), WANTED)
    totals, payload = inspection.totals, inspection.as_json()
    assert (totals.rows, totals.sequences, totals.most_sequences) == (12, 36, 3)
    assert totals.tokens == sum(len(item["input_ids"]) for item in data)
    assert totals.losses == sum(sum(item["loss_mask"]) for item in data)
    assert payload["common_divisor_of_lengths"] == MULT
    meta = metadata(data)
    assert (payload["efficiency"], payload["packing_factor"]) == (meta["packing_efficiency"], meta["packing_factor"])
    assert sum(item["rows"] for item in payload["fill"]) == 12
    assert payload["verdict"] == "ok"


def test_a_row_without_loss_is_counted_and_fine(write):
    data = rows()
    data[3]["loss_mask"] = [0] * len(data[3]["loss_mask"])
    again = copy.deepcopy(data[5])
    again["loss_mask"] = [0] * len(again["loss_mask"])
    path, own = write([*data, again])
    assert found(path) == own
    assert inspect_data(str(path), WANTED).totals.rows_without_loss == 2


def _set(column, index, value):
    def damage(item):
        item[column][index] = value

    return damage


def _drop(column):
    def damage(item):
        item[column] = item[column][:-1]

    return damage


def _empty(column):
    def damage(item):
        item[column] = []

    return damage


def _unshift(item):
    ends = [*item["seq_start_id"][1:], len(item["input_ids"])]
    for begin, end in zip(item["seq_start_id"], ends, strict=True):
        item["loss_mask"][begin:end] = [0, *item["loss_mask"][begin : end - 1]]


def _unshift_to_the_end(item):
    item["loss_mask"] = [0] * 10 + [1] * (len(item["loss_mask"]) - 10)


def _longer(item):
    more = row(77, (13,))
    item["seq_start_id"].append(len(item["input_ids"]))
    for column in ("input_ids", "loss_mask"):
        item[column] = item[column] + more[column]


def _uneven(item):
    # One more token in the last sequence.
    item["input_ids"] = [*item["input_ids"][:-2], 7, *item["input_ids"][-2:]]
    item["loss_mask"] = [*item["loss_mask"][:-2], 0, *item["loss_mask"][-2:]]


def _single(item):
    # A last sequence of one token.
    item["seq_start_id"].append(len(item["input_ids"]))
    item["input_ids"] = [*item["input_ids"], EOS]
    item["loss_mask"] = [*item["loss_mask"], 0]


def _padding(item):
    # The second sequence of a row is 12 long and has one padding token: the label of its EOS is padding.
    end = item["seq_start_id"][2]
    assert item["input_ids"][end - 2 : end] == [EOS, EOS]
    item["loss_mask"][end - 2] = 1


DAMAGED = (
    ("D06", _drop("loss_mask")),
    ("D07", _set("seq_start_id", 0, 1)),
    ("D07", _empty("seq_start_id")),
    ("D08", _set("seq_start_id", 1, 0)),
    ("D08", _set("seq_start_id", 2, 5)),
    ("D09", _set("seq_start_id", 2, 5000)),
    ("D09", _set("seq_start_id", 2, -5)),
    ("D10", _longer),
    ("D11", _uneven),
    ("D12", _single),
    ("D13", _unshift_to_the_end),
    ("D14", _set("loss_mask", 3, 2)),
    ("D14", _set("loss_mask", 3, -1)),
    ("D15", _padding),
    ("D15", _unshift),
    ("D17", _set("input_ids", 3, VOCAB)),
    ("D17", _set("input_ids", 3, -1)),
)


@pytest.mark.usefixtures("batches")
@pytest.mark.parametrize(("id", "damage"), DAMAGED, ids=[f"{id}-{n}" for n, (id, _) in enumerate(DAMAGED)])
def test_each_damage_is_found_in_its_row(write, id, damage):
    data = rows()
    damage(data[7])
    path, _ = write(data, rows())
    assert found(path)[id] == [7]


@pytest.mark.parametrize(("id", "damage"), DAMAGED, ids=[f"{id}-{n}" for n, (id, _) in enumerate(DAMAGED)])
def test_the_rows_around_a_damaged_one_are_still_looked_at(write, id, damage):
    data = rows()
    damage(data[0])
    data[3]["loss_mask"][data[3]["seq_start_id"][1] - 1] = 1
    damage(data[7])
    data[11]["input_ids"][0] = VOCAB + 5
    result = found(write(data, rows())[0])
    # A mask that is not shifted at all also counts at the end of a sequence without padding.
    unshifted = damage in (_unshift, _unshift_to_the_end)
    assert result["D13"] == sorted({3, *((0, 7) if unshifted else ())})
    assert result["D17"] == sorted({11, *((0, 7) if id == "D17" else ())})
    assert set(result[id]) >= {0, 7}


def test_the_nearest_good_values_are_not_found(write):
    data = rows()
    data[0]["input_ids"][0] = VOCAB - 1
    data[1]["input_ids"][1] = 0
    data[2]["loss_mask"] = [0] * len(data[2]["loss_mask"])
    path, own = write(data)
    assert found(path) == own
    # Rows may be as long as the pack size; the metadata is of another.
    assert found(path, Wanted(metadata(data)["min_packed_seqlen"], MULT, EOS, VOCAB)) == {"D20": [], **own}


def test_a_repeated_row_that_counts_again(write):
    data = rows()
    path, own = write([*data, data[4]])
    assert found(path) == {"D16": [12], **own}


@pytest.mark.parametrize("mask", [pa.int8(), pa.int64(), pa.bool_(), pa.float32()], ids=str)
def test_masks_of_every_type_are_read(tmp_path, mask):
    data = rows()
    write_metadata(tmp_path, metadata(data))
    assert found(write_parquet(tmp_path / "a.parquet", data, mask=mask)) == {}


def test_large_and_fixed_lists_are_read(tmp_path):
    data = [row(number, (17, 13)) for number in range(3)]
    write_metadata(tmp_path, metadata(data))
    for kind in (pa.large_list(pa.int32()), pa.list_(pa.int32(), len(data[0]["input_ids"]))):
        table = pa.table(
            {
                "input_ids": pa.array([item["input_ids"] for item in data], kind),
                "loss_mask": pa.array([item["loss_mask"] for item in data], pa.list_(pa.int8())),
                "seq_start_id": pa.array([item["seq_start_id"] for item in data], pa.list_(pa.int32())),
            }
        )
        pq.write_table(table, tmp_path / "a.parquet")
        assert found(tmp_path / "a.parquet") == {}


def test_nulls_are_found(tmp_path):
    data = rows()
    write_metadata(tmp_path, metadata(data))
    data[2]["loss_mask"] = None
    data[5]["input_ids"][3] = None
    assert found(write_parquet(tmp_path / "a.parquet", data))["D05"] == [2, 5]


def test_shards_are_one_data_set(tmp_path):
    data = rows()
    damaged = copy.deepcopy(data[7])
    damaged["input_ids"][3] = -1
    write_metadata(tmp_path, metadata(data))
    write_parquet(tmp_path / "shard_0.parquet", data[:5])
    write_parquet(tmp_path / "shard_1.pq", [*data[5:7], damaged, *data[8:]])
    for spec in (tmp_path, tmp_path / "shard_*"):
        assert found(spec) == {"D17": [7]}


def test_missing_columns_wrong_types_and_no_rows(tmp_path):
    write_metadata(tmp_path, metadata(rows()))
    table = pq.read_table(write_parquet(tmp_path / "good.parquet", rows()))
    path = tmp_path / "a.parquet"
    pq.write_table(table.drop_columns(["loss_mask"]), path)
    assert list(found(path)) == ["D02"]
    pq.write_table(table.set_column(0, "input_ids", pa.array([1.5] * 12)), path)
    assert list(found(path)) == ["D04"]
    pq.write_table(table.set_column(0, "input_ids", pa.array([["a"]] * 12)), path)
    assert list(found(path)) == ["D04"]
    pq.write_table(table.slice(0, 0), path)
    assert list(found(path)) == ["D03"]


def test_npy_rows_of_another_kind(tmp_path):
    write_metadata(tmp_path, metadata(rows()))
    result = found(
        write_npy(tmp_path / "a.npy", [*rows(3), "text", {"input_ids": [1.5]}, {"input_ids": [[1], [2, 3]]}])
    )
    assert result["D04"] == [3, 4, 5]
    assert "D02" in result
    np.save(tmp_path / "b.npy", np.arange(5))
    assert "D01" in found(tmp_path / "b.npy")


class _Runs:
    def __reduce__(self):
        return (print, ("the pickle ran",))


def test_a_pickle_that_runs_code_is_refused(tmp_path, capsys):
    path = write_npy(tmp_path / "a.npy", [{"input_ids": _Runs(), "loss_mask": [], "seq_start_id": []}])
    inspection = inspect_data(str(path), WANTED)
    finding = next(item for item in inspection.findings if item.damage.id == "D01")
    assert "builtins.print" in finding.examples[0]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_npy_of_arrays_and_of_every_pickle_protocol(tmp_path, protocol):
    data = [{key: np.array(value) for key, value in item.items()} for item in rows(3)]
    array = np.empty(3, dtype=object)
    array[:] = data
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "|O", "fortran_order": False, "shape": (3,)})
    stream.write(pickle.dumps(array, protocol=protocol))
    (tmp_path / "a.npy").write_bytes(stream.getvalue())
    write_metadata(tmp_path, metadata(rows(3)))
    assert list(found(tmp_path / "a.npy")) == ["D21"]


@pytest.mark.parametrize("suffix", ["parquet", "npy"])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.floats(0, 1), junk=st.binary(min_size=1, max_size=40), cut=st.booleans())
def test_damaged_bytes_never_end_in_a_traceback(tmp_path, suffix, at, junk, cut):
    path = tmp_path / f"a.{suffix}"
    good = (write_parquet if suffix == "parquet" else write_npy)(path, rows(4)).read_bytes()
    place = int(at * len(good))
    path.write_bytes(good[:place] if cut else good[:place] + junk + good[place + len(junk) :])
    inspection = inspect_data(str(path), WANTED)
    json.dumps(inspection.as_json())
    if cut and place < len(good) // 2:
        assert inspection.errors


def test_metadata_that_is_missing_malformed_or_wrong(tmp_path):
    data = rows()
    path = write_parquet(tmp_path / "training_64.idx.parquet", data)
    good = metadata(data)
    assert list(found(path)) == ["D18"]
    assert list(found(path, pad_cu_seqlens=True)) == ["D22"]
    for content in ("", "{", "{}", "[]", "[1]", '[{"pack_size": 64}]', json.dumps([{**good, "pack_size": "64"}])):
        (tmp_path / "64_metadata.jsonl").write_text(content)
        assert list(found(path)) == ["D19"], content
        assert set(found(path, pad_cu_seqlens=True)) == {"D19", "D22"}
    for key, value in good.items():
        write_metadata(tmp_path, {**good, key: value + 1})
        assert "D20" in found(path, Wanted(SIZE, MULT, EOS, VOCAB)), key
    other = metadata([row(1, (21, 9))])
    write_metadata(tmp_path, other, good)
    assert found(path) == {}
    assert found(path, pad_cu_seqlens=True) == {}


def test_the_pack_size_is_given_or_in_the_metadata_or_in_the_name(tmp_path):
    data = rows(3)
    named = write_parquet(tmp_path / "validation_64.parquet", data)
    plain = write_parquet(tmp_path / "data.parquet", data)

    def size(path, given=None):
        return inspect_data(str(path), Wanted(given)).pack_size

    assert size(named, 128) == (128, "given")
    assert size(named) == (64, "the file's name")
    assert size(plain) == (metadata(data)["min_packed_seqlen"], "the longest row")
    write_metadata(tmp_path, metadata(data, 96), size=96)
    assert size(plain) == (96, "metadata")


def test_metadata_of_another_pack_size_than_training_uses(tmp_path):
    write_metadata(tmp_path, metadata(rows()))
    path = write_parquet(tmp_path / "training_64.idx.parquet", rows())
    assert found(path, Wanted(64)) == {}
    inspection = inspect_data(str(path), Wanted(128), metadata_path=tmp_path / "64_metadata.jsonl")
    assert [item.examples for item in inspection.findings] == [["pack_size is 64, training uses 128"]]


def test_no_data_is_a_usage_error(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    for spec in ("nowhere.parquet", "notes.txt", "*.parquet", ""):
        with pytest.raises(UsageError):
            inspect_data(str(tmp_path / spec), WANTED)


def test_every_kind_of_damage_is_tested():
    tested = {id for id, _ in DAMAGED} | {"D01", "D02", "D03", "D04", "D05", "D16", "D18", "D19", "D20", "D21", "D22"}
    assert tested == set(DAMAGES)
