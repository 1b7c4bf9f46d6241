"""A repo is read through the real client: one commit for everything, headers without weights, the cache as with hf."""

from __future__ import annotations

from typing import Any

import pytest

from .files import CONFIG, index, safetensors
from .local_hub import LocalHub
from .reading import read_in_new_process

BIG = safetensors({"embed.weight": ("F32", (1500, 1000)), "norm.weight": ("F32", (1000,))})
SHARDS = {
    "model-00001-of-00002.safetensors": safetensors({"a": ("BF16", (2, 3)), "c": ("I64", ())}),
    "model-00002-of-00002.safetensors": safetensors({"b": ("F8_E4M3", (4,))}),
}
SHARDED = {
    "config.json": CONFIG,
    "model.safetensors.index.json": index({"a": next(iter(SHARDS)), "b": list(SHARDS)[1], "c": next(iter(SHARDS))}),
    **SHARDS,
}
LONG_NAMES = {f"layer.{number}.{'x' * 200}": ("F32", (1,)) for number in range(500)}


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory):
    """One process that reads several repos without any trouble."""
    with LocalHub() as hub:
        commits = {
            "gpt2": hub.add_repo("gpt2", {"config.json": CONFIG}),
            "org/big": hub.add_repo("org/big", {"config.json": CONFIG, "model.safetensors": BIG}),
            "org/sharded": hub.add_repo("org/sharded", SHARDED),
            "org/long": hub.add_repo("org/long", {"config.json": CONFIG, "model.safetensors": safetensors(LONG_NAMES)}),
            "org/bin": hub.add_repo("org/bin", {"config.json": CONFIG, "pytorch_model.bin": b"x"}),
            "org/branches": hub.add_repo("org/branches", {"config.json": b'{"main": 1}'}),
        }
        commits["branch"] = hub.add_repo("org/branches", {"config.json": b'{"branch": 1}'}, branch="feature/x")
        calls: dict[str, dict[str, Any]] = {
            **{name: {"given": name} for name in commits if name != "branch"},
            "address": {"given": "https://huggingface.co/org/branches"},
            "branch": {"given": "org/branches", "revision": "feature/x"},
            "commit": {"given": "org/branches", "revision": commits["branch"], "headers": False},
            "short": {"given": "org/branches", "revision": commits["branch"][:9]},
        }
        done = read_in_new_process(*calls.values(), home=tmp_path_factory.mktemp("home"), hub=hub.url)
        yield hub, commits, dict(zip(calls, done, strict=True)), done


def test_a_repo_is_read(ordinary):
    _, commits, readings, _ = ordinary
    facts = readings["gpt2"].facts
    assert facts["source"] == {"given": "gpt2", "kind": "hub", "id": "gpt2", "revision": commits["gpt2"], "path": None}
    assert facts["config"]["hidden_size"] == 8
    assert facts["tensors"] is None
    assert facts["no_tensors_because"] == "there are no weights beside config.json"
    assert all(reading.facts["warnings"] == [] for reading in readings.values())


def test_nothing_is_printed(ordinary):
    done = ordinary[3]
    assert (done.stdout, done.stderr) == ("", "")


def test_no_progress_bars_on_a_terminal(tmp_path, hub):
    hub.add_repo("org/sharded", SHARDED)
    done = read_in_new_process("org/sharded", home=tmp_path, hub=hub.url, terminal=True)
    assert done.readings[0].facts["tensors"]
    assert (done.stdout, done.stderr) == ("", "")


def test_the_same_facts_as_from_a_directory(ordinary, tmp_path):
    from dataclasses import asdict

    from onboard.facts import read_facts

    for name, content in SHARDED.items():
        (tmp_path / name).write_bytes(content)
    local, remote = asdict(read_facts(str(tmp_path))), ordinary[2]["org/sharded"].facts
    assert [(t["name"], t["dtype"], tuple(t["shape"]), t["file"]) for t in remote["tensors"]] == [
        (t["name"], t["dtype"], t["shape"], t["file"]) for t in local["tensors"]
    ]
    assert remote["config_sha256"] == local["config_sha256"]


def test_headers_are_read_without_weights(ordinary):
    hub, _, readings, _ = ordinary
    assert [(tensor["name"], tensor["shape"]) for tensor in readings["org/big"].facts["tensors"]] == [
        ("embed.weight", [1500, 1000]),
        ("norm.weight", [1000]),
    ]
    sent = sum(request.sent for request in hub.requests if request.path.startswith("/org/big/"))
    assert sent < 150_000 < len(BIG) / 30


def test_a_header_longer_than_the_first_answer(ordinary):
    assert len(ordinary[2]["org/long"].facts["tensors"]) == len(LONG_NAMES)


def test_pickled_weights_alone(ordinary):
    facts = ordinary[2]["org/bin"].facts
    assert facts["tensors"] is None
    assert facts["no_tensors_because"] == "the weights are not safetensors: pytorch_model.bin"


def test_branches_commits_and_addresses(ordinary):
    _, commits, readings, _ = ordinary
    assert readings["org/branches"].facts["config"] == {"main": 1}
    assert readings["address"].facts["source"]["id"] == "org/branches"
    for call in ("branch", "commit", "short"):
        assert readings[call].facts["config"] == {"branch": 1}
        assert readings[call].facts["source"]["revision"] == commits["branch"]


def test_a_branch_is_resolved_once_and_everything_else_asked_for_by_commit(tmp_path):
    with LocalHub() as hub:
        commit = hub.add_repo("org/sharded", SHARDED)
        (reading,) = read_in_new_process({"given": "org/sharded", "revision": "main"}, home=tmp_path, hub=hub.url)
        assert reading.facts["source"]["revision"] == commit
        first, *others = [request.path for request in hub.requests]
        assert first == "/api/models/org/sharded/revision/main"
        assert others
        assert all(commit in path for path in others)


def test_the_branch_moves_while_it_is_read(tmp_path):
    """The commit that the first answer named is the one that is read, whatever the branch points at later."""
    with LocalHub() as hub:
        old = hub.add_repo("org/name", {"config.json": b'{"old": 1}'})

        class Moving(dict):
            def get(self, name, default=None):
                hub.add_repo("org/name", {"config.json": b'{"new": 1}'})
                return super().get(name, default)

        hub.repos["org/name"].commits[old] = Moving(hub.repos["org/name"].commits[old])
        (reading,) = read_in_new_process("org/name", home=tmp_path, hub=hub.url)
        assert hub.repos["org/name"].refs["main"] != old
        assert reading.facts["source"]["revision"] == old
        assert reading.facts["config"] == {"old": 1}


def test_the_cache(tmp_path, hub):
    """A second reading fetches nothing that is cached; offline the cache is enough; a new commit is noticed."""
    old = hub.add_repo("org/name", {"config.json": b'{"old": 1}', "model.safetensors": BIG})
    first, again = read_in_new_process("org/name", "org/name", home=tmp_path, hub=hub.url)
    assert first.facts == again.facts
    fetched = [request.method for request in hub.requests if request.path.endswith("config.json")]
    assert fetched == ["HEAD", "GET"]

    new = hub.add_repo("org/name", {"config.json": b'{"new": 1}'})
    count = len(hub.requests)
    offline = read_in_new_process(
        "org/name",
        {"given": "org/name", "revision": old, "headers": False},
        {"given": "org/name", "revision": new},
        {"given": "org/other"},
        home=tmp_path,
        hub=hub.url,
        environment={"HF_HUB_OFFLINE": "1"},
    )
    assert len(hub.requests) == count
    branch, commit, *absent = offline
    assert branch.facts["source"]["revision"] == old
    assert branch.facts["config"] == commit.facts["config"] == {"old": 1}
    assert branch.facts["tensors"] is None
    assert branch.facts["no_tensors_because"].startswith("HF_HUB_OFFLINE is set, and the cache")
    assert [(reading.code, reading.exit_status) for reading in absent] == [("hub.offline", 4)] * 2
    assert (offline.stdout, offline.stderr) == ("", "")

    (online,) = read_in_new_process("org/name", home=tmp_path, hub=hub.url)
    assert online.facts["source"]["revision"] == new
    assert online.facts["config"] == {"new": 1}


def test_a_commit_that_is_cached_needs_no_hub(tmp_path, hub):
    commit = hub.add_repo("org/name", {"config.json": CONFIG})
    call = {"given": "org/name", "revision": commit, "headers": False}
    first, again = read_in_new_process(call, call, home=tmp_path, hub=hub.url)
    assert first.facts == again.facts
    assert again.facts["source"]["revision"] == commit
    assert [request.method for request in hub.requests] == ["HEAD", "GET"]


def test_a_silent_hub_leaves_the_cache_and_a_warning(tmp_path, hub):
    commit = hub.add_repo("org/name", {"config.json": CONFIG})
    hub.add_repo("org/gone", {"config.json": CONFIG})
    read_in_new_process("org/name", "org/gone", home=tmp_path, hub=hub.url)
    hub.fail("/api/models/org/name", 503)
    del hub.repos["org/gone"]
    reading, gone = read_in_new_process("org/name", "org/gone", home=tmp_path, hub=hub.url)
    # This one the Hub did answer, and its answer counts.
    assert gone.code == "hub.repo_not_found"
    assert reading.facts["source"]["revision"] == commit
    assert "status 503" in reading.facts["warnings"][0]
    assert "out of date" in reading.facts["warnings"][0]
    assert "status 503" in reading.facts["no_tensors_because"]


def test_offline_headers_from_a_whole_snapshot(tmp_path, hub):
    """A snapshot that was downloaded with its weights has headers too; with a part of them it says what is missing."""
    commit = hub.add_repo("org/whole", SHARDED)
    hub.add_repo("org/part", SHARDED)
    read_in_new_process("org/part", "org/whole", home=tmp_path, hub=hub.url)
    snapshot = tmp_path / "hub" / "models--org--whole" / "snapshots" / commit
    for name, content in SHARDS.items():
        (snapshot / name).write_bytes(content)
    environment = {"HF_HUB_OFFLINE": "1"}
    part, whole = read_in_new_process("org/part", "org/whole", home=tmp_path, hub=hub.url, environment=environment)
    assert part.facts["tensors"] is None
    assert "model-00001-of-00002.safetensors" in part.facts["no_tensors_because"]
    assert [tensor["name"] for tensor in whole.facts["tensors"]] == ["a", "b", "c"]
    assert whole.facts["no_tensors_because"] is None


@pytest.mark.parametrize("server", [{"lists_files": False}, {"has_api": False}, {"ranges": False}])
def test_mirrors_that_do_less_than_the_hub(server, tmp_path):
    """No list of files, nothing but files, no parts of files: all of these serve a model still."""
    with LocalHub(**server) as hub:
        commit = hub.add_repo("org/sharded", SHARDED)
        hub.add_repo("org/single", {"config.json": CONFIG, "model.safetensors": BIG})
        hub.add_repo("org/none", {"config.json": CONFIG, "pytorch_model.bin": b"x"})
        sharded, single, none, gone = read_in_new_process(
            "org/sharded", "org/single", "org/none", "org/gone", home=tmp_path, hub=hub.url
        )
        assert sharded.facts["source"]["revision"] == commit
        assert [tensor["name"] for tensor in sharded.facts["tensors"]] == ["a", "b", "c"]
        assert [tensor["name"] for tensor in single.facts["tensors"]] == ["embed.weight", "norm.weight"]
        assert none.facts["tensors"] is None
        assert gone.code == "hub.repo_not_found"


def test_a_server_without_ranges_sends_no_weights(tmp_path):
    with LocalHub(ranges=False) as hub:
        hub.add_repo("org/big", {"config.json": CONFIG, "model.safetensors": BIG})
        (reading,) = read_in_new_process("org/big", home=tmp_path, hub=hub.url, settings={"MOST_BYTES": 1_000_000})
        assert reading.code == "hub.bad_answer"
        assert "far more" in reading.error["why"]
