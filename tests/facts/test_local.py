"""A directory or a file on this machine is read at once, without any model library, and each defect is named."""

from __future__ import annotations

import hashlib
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onboard.errors import UsageError
from onboard.facts import TensorHeader, read_facts
from onboard.facts._facts import Origin
from onboard.facts.config_json import DEEPEST, MOST_BYTES, parse_config

from .files import CONFIG, MALFORMED, index, safetensors
from .reading import read_in_new_process


@pytest.fixture
def model(tmp_path):
    """A directory with a config.json and whatever a test adds."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes(CONFIG)
    return folder


def _refused(source, code):
    with pytest.raises(UsageError) as caught:
        read_facts(str(source))
    error = caught.value
    assert error.code == code
    assert error.exit_status == 2
    assert all(line and line.isprintable() and len(line) < 600 for line in (error.what, error.why, error.do))
    return error


def test_a_directory(model):
    (model / "model.safetensors").write_bytes(safetensors({"b": ("BF16", (2, 3)), "a": ("F32", ())}))
    facts = read_facts(str(model))
    assert facts.source.kind == "directory"
    assert facts.source.as_json() == {
        "given": str(model), "kind": "directory", "id": None, "revision": None, "path": str(model / "config.json"),
    }  # fmt: skip
    assert facts.config == json.loads(CONFIG)
    assert facts.config_sha256 == hashlib.sha256(CONFIG).hexdigest()
    assert facts.tensors == (
        TensorHeader("a", "F32", (), "model.safetensors"),
        TensorHeader("b", "BF16", (2, 3), "model.safetensors"),
    )
    assert (facts.no_tensors_because, facts.warnings) == (None, ())


def test_the_path_is_spelled_as_the_user_spelled_it(model, monkeypatch):
    monkeypatch.chdir(model.parent)
    assert read_facts("model").source.path == os.path.join("model", "config.json")
    assert read_facts("./model/config.json").source.path == "./model/config.json"


def test_a_config_json_stands_for_its_directory(model, monkeypatch):
    (model / "model.safetensors").write_bytes(safetensors({"a": ("F32", (1,))}))
    monkeypatch.chdir(model)
    for source in (str(model / "config.json"), "config.json"):
        facts = read_facts(source)
        assert facts.source.kind == "file"
        assert [tensor.name for tensor in facts.tensors or ()] == ["a"]


def test_any_other_json_file_is_a_config_alone(model):
    (model / "model.safetensors").write_bytes(b"not even a checkpoint")
    (model / "other.json").write_bytes(CONFIG)
    facts = read_facts(str(model / "other.json"))
    assert facts.tensors is None
    assert "other.json" in (facts.no_tensors_because or "")


def test_headers_only_where_asked_for(model):
    (model / "model.safetensors").write_bytes(b"not even a checkpoint")
    facts = read_facts(str(model), headers=False)
    assert facts.tensors is None
    assert "not asked for" in (facts.no_tensors_because or "")


def test_a_local_file_imports_nothing_heavy(model, tmp_path):
    (model / "model.safetensors").write_bytes(safetensors({"a": ("F32", (1,))}))
    readings = read_in_new_process(str(model), home=tmp_path / "home")
    assert readings.readings[0].facts["tensors"]
    heavy = {"huggingface_hub", "torch", "transformers", "safetensors", "numpy", "httpx", "httpx2", "requests", "click"}
    assert not heavy & set(readings.modules)
    assert readings.readings[0].seconds < 0.5


class TestConfig:
    @pytest.mark.parametrize(
        ("content", "code", "why"),
        [
            (b"", "config.not_json", "line 1 column 1"),
            (b'{"a": 1,\n "b": }', "config.not_json", "line 2 column 7"),
            (b'{"a": 1', "config.not_json", "line 1 column 8"),
            (b"\xef\xbb\xbf{}", "config.not_json", "BOM"),
            (b'{"a": 1%s}' % (b"0" * 5000), "config.not_json", "digits"),
            (b"[1]", "config.not_object", "a list"),
            (b"3", "config.not_object", "a number"),
            (b'"x"', "config.not_object", "a string"),
            (b"true", "config.not_object", "a boolean"),
            (b"null", "config.not_object", "null"),
            (b'{"a": "\xe4"}', "config.not_utf8", "byte 7 is 0xe4"),
            ('{"a": 1}'.encode("utf-16"), "config.not_utf8", "UTF-8"),
            (b'{"a": "\\ud800"}', "config.not_utf8", "surrogate"),
            (b'{"a": %s1%s}' % (b"[" * DEEPEST, b"]" * DEEPEST), "config.too_deep", "100 levels"),
            (b'{"a": %s}' % (b"[" * 200_000), "config.too_deep", "100 levels"),
            (b'{"a": "%s"}' % (b"x" * MOST_BYTES), "config.too_large", "16 MiB"),
        ],
    )
    def test_what_is_no_config(self, model, content, code, why):
        (model / "config.json").write_bytes(content)
        assert why in _refused(model, code).why

    def test_the_deepest_that_is_allowed(self, model):
        (model / "config.json").write_bytes(b'{"a": %s1%s}' % (b"[" * (DEEPEST - 1), b"]" * (DEEPEST - 1)))
        assert "a" in read_facts(str(model)).config

    def test_numbers_that_json_does_not_have(self, model):
        (model / "config.json").write_bytes(b'{"time_step_limit": [0.0, Infinity], "x": -Infinity}')
        assert read_facts(str(model)).config == {"time_step_limit": [0.0, float("inf")], "x": float("-inf")}

    def test_characters_beyond_the_first_plane(self, model):
        (model / "config.json").write_bytes(b'{"a": "\\ud83d\\ude00"}')
        assert read_facts(str(model)).config == {"a": "\U0001f600"}

    def test_keys_that_are_there_twice(self, model):
        (model / "config.json").write_bytes(b'{"a": 1, "t": {"b": 1, "b": 2, "b": 3}, "a": 2}')
        facts = read_facts(str(model))
        assert facts.config == {"a": 2, "t": {"b": 3}}
        assert facts.warnings == ("config.json has keys more than once, and the last value counts: b, a",)

    @settings(max_examples=300, deadline=None)
    @given(
        st.binary(max_size=40) | st.text(alphabet='{}[]":,0123456789.eE+-\\utnfalsrIiyN ', max_size=40).map(str.encode)
    )
    def test_any_bytes_are_an_object_or_an_error_of_ours(self, content):
        try:
            config, error = parse_config(content, Origin("here", UsageError))[0], None
        except UsageError as caught:
            config, error = {}, caught
        assert isinstance(config, dict)
        assert error is None or (error.code.startswith("config.") and error.why.isprintable())


class TestPlace:
    def test_a_directory_without_config_json(self, tmp_path):
        (tmp_path / "adapter_config.json").write_text("{}")
        error = _refused(tmp_path, "source.no_config")
        assert "only adapter_config.json" in error.why

    def test_weights(self, model):
        (model / "model.safetensors").write_bytes(safetensors({"a": ("F32", (1,))}))
        assert str(model) in _refused(model / "model.safetensors", "source.not_json").do

    def test_a_pipe_does_not_block(self, tmp_path):
        os.mkfifo(tmp_path / "config.json")
        _refused(tmp_path, "source.unreadable")
        _refused(tmp_path / "config.json", "source.unreadable")

    def test_a_directory_in_the_place_of_the_file(self, tmp_path):
        (tmp_path / "config.json").mkdir()
        _refused(tmp_path, "source.unreadable")

    def test_a_link_to_nothing(self, tmp_path):
        (tmp_path / "config.json").symlink_to(tmp_path / "gone")
        _refused(tmp_path, "source.unreadable")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_no_permission(self, model):
        (model / "config.json").chmod(0)
        assert "denied" in _refused(model, "source.unreadable").why

    def test_a_revision_of_a_local_source(self, model):
        with pytest.raises(UsageError) as caught:
            read_facts(str(model), revision="main")
        assert caught.value.code == "source.local_revision"


class TestCheckpoint:
    @pytest.mark.parametrize("name", MALFORMED)
    def test_a_malformed_header(self, model, name):
        (model / "model.safetensors").write_bytes(MALFORMED[name])
        assert "model.safetensors" in _refused(model, "checkpoint.bad_header").what

    def test_none(self, model):
        facts = read_facts(str(model))
        assert facts.tensors is None
        assert facts.no_tensors_because == "there are no weights beside config.json"

    def test_pickled_weights_alone(self, model):
        (model / "pytorch_model.bin").write_bytes(b"x")
        facts = read_facts(str(model))
        assert facts.tensors is None
        assert facts.no_tensors_because == "the weights are not safetensors: pytorch_model.bin"

    def test_an_empty_checkpoint_is_a_checkpoint(self, model):
        (model / "model.safetensors").write_bytes(safetensors({}))
        assert read_facts(str(model)).tensors == ()

    def _shards(self, model, count=2):
        names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        for number, name in enumerate(names):
            (model / name).write_bytes(safetensors({f"layers.{number}.weight": ("BF16", (2, 2))}))
        return names

    def test_shards_with_their_index(self, model):
        names = self._shards(model)
        (model / "consolidated.safetensors").write_bytes(b"not asked for")
        weight_map = {f"layers.{number}.weight": name for number, name in enumerate(names)}
        (model / "model.safetensors.index.json").write_bytes(index(weight_map))
        facts = read_facts(str(model))
        assert {tensor.name: tensor.file for tensor in facts.tensors or ()} == weight_map
        assert facts.warnings == ()

    def test_a_whole_set_of_shards_without_index(self, model):
        names = self._shards(model)
        facts = read_facts(str(model))
        assert [tensor.file for tensor in facts.tensors or ()] == names
        assert "no index" in facts.warnings[0]

    def test_part_of_a_set_without_index(self, model):
        (model / self._shards(model)[0]).unlink()
        facts = read_facts(str(model))
        assert facts.tensors is None
        assert "model-00002-of-00002.safetensors" in (facts.no_tensors_because or "")

    def test_a_missing_shard(self, model):
        names = self._shards(model, 3)
        (model / "model.safetensors.index.json").write_bytes(
            index({f"layers.{i}.weight": n for i, n in enumerate(names)})
        )
        (model / names[1]).unlink()
        assert names[1] in _refused(model, "checkpoint.missing_file").why

    def test_one_file_of_another_name(self, model):
        (model / "weights.safetensors").write_bytes(safetensors({"a": ("F32", (1,))}))
        (model / "adapter_model.safetensors").write_bytes(b"no part of the model")
        facts = read_facts(str(model))
        assert [tensor.file for tensor in facts.tensors or ()] == ["weights.safetensors"]
        assert "weights.safetensors" in facts.warnings[0]

    def test_files_that_nothing_explains(self, model):
        for name in ("a.safetensors", "b.safetensors"):
            (model / name).write_bytes(safetensors({"a": ("F32", (1,))}))
        facts = read_facts(str(model))
        assert facts.tensors is None
        assert "a.safetensors, b.safetensors" in (facts.no_tensors_because or "")

    def test_both_a_single_file_and_an_index(self, model):
        (model / "model.safetensors").write_bytes(safetensors({"a": ("F32", (1,))}))
        (model / "model.safetensors.index.json").write_bytes(b"broken")
        facts = read_facts(str(model))
        assert [tensor.name for tensor in facts.tensors or ()] == ["a"]
        assert "ignored" in facts.warnings[0]

    def test_an_index_and_files_that_disagree(self, model):
        first, second = self._shards(model)
        (model / second).write_bytes(safetensors({"layers.0.weight": ("F32", (7,)), "extra": ("F32", (1,))}))
        weight_map = {"layers.0.weight": first, "gone": second}
        (model / "model.safetensors.index.json").write_bytes(index(weight_map))
        facts = read_facts(str(model))
        assert [(tensor.name, tensor.file) for tensor in facts.tensors or ()] == [
            ("extra", second),
            ("layers.0.weight", first),
        ]
        repeated, absent, unlisted = facts.warnings
        assert "more than one file" in repeated
        assert absent.endswith(": gone")
        assert unlisted.endswith(": extra")

    @pytest.mark.parametrize(
        "content",
        [
            b"", b"{", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {}}', b'{"weight_map": {"a": 1}}',
            b'{"weight_map": {"a": "../x.safetensors"}}', b'{"weight_map": {"a": "/etc/passwd"}}', b"[" * 100_000,
            b'{"weight_map": {"a": "x\\u0000.safetensors"}}', b"\xff", b'{"weight_map": {"a": "pytorch_model.bin"}}',
        ],
    )  # fmt: skip
    def test_a_malformed_index(self, model, content):
        (model / "model.safetensors.index.json").write_bytes(content)
        _refused(model, "checkpoint.bad_index")
