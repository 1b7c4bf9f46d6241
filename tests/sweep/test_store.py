"""What is finished is not run again, and what could have ended otherwise is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from breadth.store import Store, base_key, record_key

from .records import proven, record, refused


def test_a_record_comes_back_by_its_key_alone(tmp_path: Path):
    store = Store(tmp_path / "kept")
    assert store.load("gpt-sw3", "k") is None
    one = record("gpt-sw3", proven("native"))
    store.save(one)
    assert store.load("gpt-sw3", "k") == one
    assert store.load("gpt-sw3", "other") is None
    store.save(replace(one, key="other", exit=3))
    assert store.load("gpt-sw3", "k") is None
    assert [path.name for path in store.folder.iterdir()] == ["gpt-sw3.json"]


@pytest.mark.parametrize("text", ["", '{"schema_version": 1, "na', "[]", "{}", '{"schema_version": 1, "name": "a"}'])
def test_a_record_that_cannot_be_read_is_none(tmp_path: Path, text: str):
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    assert Store(tmp_path).load("a", "k") is None


def test_a_name_stays_in_the_folder(tmp_path: Path):
    Store(tmp_path / "kept").save(record("../../a b"))
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json")] == ["kept/.._.._a_b.json"]


@pytest.mark.parametrize(
    ("changes", "ended"),
    [
        ({"exit": 0}, True),
        ({"exit": 1}, True),
        ({"exit": 3}, True),
        ({"exit": 5}, True),
        ({"exit": -9}, False),
        ({"exit": -11}, False),
        ({"exit": 130}, False),
        ({"exit": 137}, False),
        ({"exit": None, "stopped": "stopped after 9 s"}, False),
        ({"exit": 3, "out_of_memory": True}, False),
        ({"exit": 0, "out_of_memory": True}, True),
    ],
)
def test_what_was_killed_has_not_ended(changes, ended):
    assert record("a", refused("w", "y"), **changes).ended is ended


def test_a_key_depends_on_sources_versions_and_config(tmp_path: Path):
    sources = tmp_path / "onboard"
    (sources / "sub").mkdir(parents=True)
    (sources / "a.py").write_text("1", encoding="utf-8")
    versions: dict[str, str | None] = {"torch": "2"}
    keys = [base_key(versions, [sources])]
    (sources / "__pycache__").mkdir()
    (sources / "__pycache__" / "a.pyc").write_text("x", encoding="utf-8")
    assert base_key(versions, [sources]) == keys[0]

    (sources / "a.py").write_text("2", encoding="utf-8")
    keys.append(base_key(versions, [sources]))
    (sources / "a.py").rename(sources / "sub" / "a.py")
    keys.append(base_key(versions, [sources]))
    keys.append(base_key({"torch": "3"}, [sources]))
    keys += [record_key(keys[0], "{}"), record_key(keys[0], "{ }"), record_key(keys[1], "{}")]
    assert len(set(keys)) == len(keys)
