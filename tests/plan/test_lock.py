"""Contract: a lock says byte for byte the same for the same run anywhere, and a broken one is an error with a name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onboard.errors import UsageError
from onboard.plan.changes import FileChange, sha256
from onboard.plan.lock import Drift, drift, file_hashes, locate, read_lock, render_lock
from onboard.plan.targets import MODELS, REGISTRY

from .trees import outcome

HASH = sha256(b"x\n")


def arguments(**other):
    return {
        "source": {"given": "org/name", "kind": "hub", "id": "org/name", "revision": "0" * 40},
        "config_sha256": HASH,
        "versions": {"onboard": "0.1.0", "transformers": "5.18.0", "nemo_automodel": None, "torch": "2.14.1"},
        "answers": {"target": "plugin", "style": "auto", "force": False, "out": None},
        "kind": "dense",
        "architecture": "LlamaForCausalLM",
        "model_type": "llama",
        "name": "llama",
        "files": {"src/b.py": HASH, "a.py": sha256(b"a\n")},
    } | other


def test_there_and_back(tmp_path):
    text = render_lock(**arguments())
    (tmp_path / "lock").write_text(text)
    lock = read_lock(tmp_path / "lock")
    assert render_lock(**{key: getattr(lock, key) for key in arguments()}) == text
    assert lock.schema_version == 1
    assert lock.files["src/b.py"] == HASH
    assert text.endswith("}\n")


def test_the_order_of_the_input_does_not_matter():
    one = arguments()
    other = {key: dict(reversed(value.items())) if isinstance(value, dict) else value for key, value in one.items()}
    assert render_lock(**one) == render_lock(**other)


@pytest.mark.parametrize(
    "path",
    [
        "/home/me/models/tiny",
        "/home/me/models/tiny/",
        "C:\\Users\\me\\tiny",
        "~/me/tiny",
        Path("/me/tiny"),
    ],
)
def test_no_path_of_the_machine(path):
    source = {"given": str(path), "kind": "directory", "id": None, "revision": None, "path": str(path)}
    text = render_lock(**arguments(source=source, answers={"out": path, "more": [{"x": path}]}))
    assert not any(part in text for part in ("home", "Users", "/me", "me/", "me\\\\"))
    lock = json.loads(text)
    assert lock["source"]["path"] == lock["source"]["given"] == lock["answers"]["out"] == "tiny"


def test_a_hub_id_is_kept_whole():
    assert json.loads(render_lock(**arguments()))["source"]["given"] == "org/name"


def test_edits_and_the_lock_are_not_ours_to_watch():
    changes = [
        FileChange("a.py", "x\n", "why"),
        FileChange("pkg/.onboard.lock.json", "{}\n", "why"),
        FileChange("registry.py", "x\n", "why", True, HASH),
    ]
    assert file_hashes(changes) == {"a.py": HASH}


BROKEN = [
    ("schema_version", None), ("schema_version", True), ("schema_version", "1"), ("schema_version", 0),
    ("source", None), ("source", []), ("source", {"given": 3}), ("config_sha256", "x"), ("config_sha256", None),
    ("versions", {"torch": 2}), ("answers", "x"), ("kind", "encoder"), ("kind", None), ("kind", []),
    ("architecture", 1), ("model_type", None), ("name", {}),
    ("files", []), ("files", {"a": 1}), ("files", {"a": "A" * 64}),
    ("files", {"../a": HASH}), ("files", {"/etc/passwd": HASH}), ("files", {"a\0": HASH}),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), BROKEN)
def test_wrong_types_are_named(key, value, tmp_path):
    raw = json.loads(render_lock(**arguments())) | {key: value}
    (tmp_path / "lock").write_text(json.dumps(raw))
    with pytest.raises(UsageError) as caught:
        read_lock(tmp_path / "lock")
    assert caught.value.code == "lock.invalid"
    assert caught.value.why.isprintable()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b"\0", b" " * 4_000_001])
def test_what_is_no_lock(data, tmp_path):
    (tmp_path / "lock").write_bytes(data)
    with pytest.raises(UsageError) as caught:
        read_lock(tmp_path / "lock")
    assert caught.value.code == "lock.invalid"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(key=st.sampled_from([*arguments(), "schema_version"]), value=JSON)
def test_any_json_in_any_field(key, value, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.lock"
    path.write_text(json.dumps(json.loads(render_lock(**arguments())) | {key: value}))
    _, error = outcome(read_lock, path)
    assert error is None or error.code in ("lock.invalid", "lock.newer")


def test_a_newer_lock_asks_for_an_upgrade(tmp_path):
    (tmp_path / "lock").write_text(json.dumps({"schema_version": 2}))
    with pytest.raises(UsageError, match="newer") as caught:
        read_lock(tmp_path / "lock")
    assert caught.value.do == "upgrade onboard"


def test_drift(tmp_path):
    names = ("same", "edited", "missing", "under/edited", "link", "folder")
    (tmp_path / "lock").write_text(render_lock(**arguments(files=dict.fromkeys(names, HASH))))
    for name in ("same", "edited", "under"):
        (tmp_path / name).write_text("x\n")
    (tmp_path / "edited").write_text("y\n")
    (tmp_path / "link").symlink_to("same")
    (tmp_path / "folder").mkdir()
    assert drift(tmp_path, read_lock(tmp_path / "lock")) == [
        Drift("edited", "edited"),
        Drift("folder", "edited"),
        Drift("link", "edited"),
        Drift("missing", "missing"),
        Drift("same", "same"),
        Drift("under/edited", "missing"),
    ]


def test_locate(tmp_path):
    project, package = tmp_path / "project", tmp_path / "checkout" / MODELS / "llama"
    for folder in (project, package):
        folder.mkdir(parents=True)
        (folder / ".onboard.lock.json").write_text("{}")
    registry = tmp_path / "checkout" / REGISTRY
    registry.parent.mkdir(parents=True)
    registry.write_text("")
    inside = tmp_path / "checkout" / "plugins" / "x"
    inside.mkdir(parents=True)
    (inside / ".onboard.lock.json").write_text("{}")
    assert locate(project)[1] == project
    assert locate(project / ".onboard.lock.json")[1] == project
    assert locate(package)[1] == tmp_path / "checkout"
    assert locate(inside)[1] == inside, "a project that lies in a checkout is still a project"
    with pytest.raises(UsageError) as caught:
        locate(tmp_path)
    assert caught.value.code == "lock.missing"
