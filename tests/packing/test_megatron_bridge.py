"""Megatron-Bridge 0.3.1 itself agrees: its packed data has no finding and its specs are refused where ours are.

Collected only where it is installed (`pip install --no-deps megatron-bridge==0.3.1`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from onboard.packing.checking import check
from onboard.packing.data.inspecting import inspect_data
from onboard.packing.data.rows import Wanted

from .packed import write_parquet
from .rule_cases import OFFLINE, SPECS, on

HERE = Path(__file__).parent
EOS, SIZE, MULT = 2, 64, 4
WANTED = Wanted(SIZE, MULT, EOS, 900)


def specs(folder):
    """Specs that both are asked about: 0.3.1 knows .npy paths only, and no `max_single_sequence_length`."""
    data = str(folder / "training_64.npy")
    sizes = [{"packed_sequence_size": 4096, "pad_seq_to_mult": mult} for mult in (None, -8, -1, 0, 1, 2, 8)]
    keys = ("packed_train_data_path", "packed_val_data_path")
    paths = [{"packed_sequence_size": 4096, key: path} for key in keys for path in (data, "nowhere.npy", "notes.txt")]
    return [{}, *sizes, *paths]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bridge")


@pytest.fixture(scope="module")
def answers(folder):
    done = subprocess.run(
        [sys.executable, str(HERE / "ask_megatron_bridge.py"), str(folder)],
        input=json.dumps(specs(folder)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_its_packed_data_has_no_finding(folder, answers):
    inspection = inspect_data(str(folder / "training_64.npy"), WANTED)
    assert [found.damage.id for found in inspection.findings] == ["D21"]
    assert inspection.entry == answers["metadata"]
    parquet = inspect_data(str(write_parquet(folder / "training_64.parquet", answers["rows"], pa.bool_())), WANTED)
    assert parquet.findings == ()
    assert parquet.totals == inspection.totals


def test_its_reader_sees_the_same_sequences(folder, answers):
    totals = inspect_data(str(folder / "training_64.npy"), WANTED).totals
    lengths = [length for row in answers["lengths"] for length in row]
    assert totals.sequences == len(lengths)
    assert totals.trained == sum(lengths)
    assert totals.longest_sequence == max(lengths)
    assert totals.most_sequences == max(map(len, answers["lengths"]))
    for row, edges, positions in zip(answers["lengths"], answers["cu_seqlens"], answers["position_ids"], strict=True):
        ends = [0]
        for length in row:
            ends.append(ends[-1] + length)
        assert edges[: len(ends)] == ends
        # Padded to two more entries than the most sequences of a row, all but the last of the row's length.
        assert set(edges[len(ends) : totals.most_sequences + 2]) <= {SIZE}
        assert [position for length in row for position in range(length)] == positions[: ends[-1]]


def test_a_synthetic_row_has_no_loss(answers):
    assert answers["synthetic_loss"] == 0


def test_its_specs_are_refused_where_ours_are(folder, answers):
    for given, refused in zip(specs(folder), answers["refused"], strict=True):
        ours = check(on(OFFLINE, {SPECS: given})).first_error in ("P01", "P03")
        assert ours == refused, given
