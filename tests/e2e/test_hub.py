"""By Hub id, through the real client: the branch becomes a commit once, and that commit stands everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from facts.files import safetensors
from facts.local_hub import LocalHub

from .command import EXAMPLES, assert_proven, assert_shape, new, run

QWEN3 = (EXAMPLES / "qwen3-0.6b" / "config.json").read_bytes()


@pytest.fixture
def hub():
    with LocalHub() as server:
        yield server


def online(hub: LocalHub) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1,localhost"}


def test_a_model_by_id_is_onboarded_at_its_commit(hub, tmp_path):
    commit = hub.add_repo("Qwen/Qwen3-0.6B", {"config.json": QWEN3})
    out = tmp_path / "project"
    payload = new("Qwen/Qwen3-0.6B", "--out", str(out), home=tmp_path / "home", **online(hub))
    assert_shape(payload)
    assert_proven(payload)
    assert payload["source"]["id"] == "Qwen/Qwen3-0.6B"
    assert payload["source"]["revision"] == commit
    lock = json.loads((out / ".onboard.lock.json").read_text(encoding="utf-8"))
    assert lock["source"]["id"] == "Qwen/Qwen3-0.6B"
    assert lock["source"]["revision"] == commit
    assert commit in (out / "REVIEW.md").read_text(encoding="utf-8")


def test_a_branch_is_resolved_once_and_its_commit_is_kept(hub, tmp_path):
    """While the branch moves, everything that was written names the commit that was read."""
    first = hub.add_repo("org/model", {"config.json": QWEN3}, branch="release/1")
    words = ("org/model", "--revision", "release/1", "--no-verify")
    before = new(*words, "--out", str(tmp_path / "a"), home=tmp_path / "home", **online(hub))
    second = hub.add_repo("org/model", {"config.json": QWEN3, "LICENSE": b"new"}, branch="release/1")
    after = new(*words, "--out", str(tmp_path / "b"), home=tmp_path / "home", **online(hub))
    again = new(
        "org/model",
        "--revision",
        first,
        "--no-verify",
        "--out",
        str(tmp_path / "c"),
        home=tmp_path / "home",
        **online(hub),
    )
    assert [payload["source"]["revision"] for payload in (before, after, again)] == [first, second, first]
    for payload, other in ((before, second), (after, first), (again, second)):
        for file in payload["files"]:
            assert other not in (Path(payload["out"]) / file).read_text(encoding="utf-8"), file


def test_weights_are_never_fetched(hub, tmp_path):
    """Of a checkpoint only headers are read; here the weights would be 40 MB."""
    weights = safetensors({"model.embed_tokens.weight": ("F32", (10_000, 1024))})
    hub.add_repo("org/model", {"config.json": QWEN3, "model.safetensors": weights})
    new("org/model", "--no-verify", "--out", str(tmp_path / "p"), home=tmp_path / "home", **online(hub))
    assert sum(request.sent for request in hub.requests) < 1_000_000


def test_after_the_first_time_the_cache_is_enough(hub, tmp_path):
    commit = hub.add_repo("org/model", {"config.json": QWEN3})
    words = ("org/model", "--no-verify")
    new(*words, "--out", str(tmp_path / "a"), home=tmp_path / "home", **online(hub))
    asked = len(hub.requests)
    payload = new(*words, "--out", str(tmp_path / "b"), home=tmp_path / "home", HF_ENDPOINT=hub.url)
    assert payload["source"]["revision"] == commit
    assert len(hub.requests) == asked


def test_a_model_that_is_not_there_is_the_hubs_exit_status(hub, tmp_path):
    out = tmp_path / "p"
    done = run("new", "org/none", "--out", str(out), "--json", home=tmp_path / "home", **online(hub))
    assert done.returncode == 4, done.stderr
    assert json.loads(done.stdout)["error"].keys() >= {"code", "what", "why", "do"}
    assert not out.exists()
