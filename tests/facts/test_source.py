"""SOURCE is what the user meant: an existing path wins, a mistyped path never reaches the Hub, and nothing crashes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onboard.errors import OnboardError, UsageError
from onboard.facts.source import HubId, LocalPath, check_revision, is_repo_id, understand


@pytest.fixture(autouse=True)
def _in_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)


@pytest.mark.parametrize("name", ["gpt2", "org/name", "Qwen/Qwen3-0.6B", "a_b/c.d-e", "_x/y_", "org/" + "n" * 96])
def test_ids(name):
    assert understand(name) == HubId(name)


def test_an_existing_path_wins_over_an_id(tmp_path):
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert understand("org/name") == LocalPath("org/name")


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert understand("~/model") == LocalPath(str(tmp_path / "model"))


@pytest.mark.parametrize(
    "path",
    ["./model", "../model", ".", "~/no/model", "/no/model", "config.json", "no/config.json", "a/b/c", "org/name/"],
)
def test_a_mistyped_path_is_reported_as_a_path(path):
    if path == ".":
        assert understand(path) == LocalPath(".")
        return
    with pytest.raises(UsageError) as caught:
        understand(path)
    assert caught.value.code == "source.not_found"
    assert path in caught.value.what


@pytest.mark.parametrize(
    "name",
    ["org name", "org/na me", "-org/name", "org/name-", "org/.name", "a--b/c", "a..b", "org/name.git", "org\\name",
     "C:\\models\\x", "org/n\u00e4me", "org/" + "n" * 97, "na\nme", "na\x00me", "\ud800", "name\n", "org/name?x=1",
     "%2e%2e"],
)  # fmt: skip
def test_what_is_no_id_is_refused_on_one_printable_line(name):
    with pytest.raises(UsageError) as caught:
        understand(name)
    assert caught.value.code == "source.bad_id"
    for line in (caught.value.what, caught.value.why, caught.value.do):
        assert line.isprintable()


@pytest.mark.parametrize("nothing", ["", " ", "\t\n"])
def test_an_empty_source(nothing):
    with pytest.raises(UsageError) as caught:
        understand(nothing)
    assert caught.value.code == "source.empty"


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("https://huggingface.co/org/name", "org/name"),
        ("https://huggingface.co/org/name/", "org/name"),
        ("https://huggingface.co/gpt2", "gpt2"),
        ("https://hf.co/org/name", "org/name"),
        ("https://mirror.example/org/name", "org/name"),
    ],
)
def test_the_address_of_a_models_page_is_its_id(address, name, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    assert understand(address) == HubId(name)


@pytest.mark.parametrize(
    ("address", "do"),
    [
        ("https://huggingface.co/org/name/tree/v1", "Give org/name --revision v1."),
        ("https://huggingface.co/org/name/blob/main/config.json", "Give org/name --revision main."),
        ("https://huggingface.co/datasets/org/name", "org/name"),
        ("https://huggingface.co/org/name?x=1", "org/name"),
        ("https://huggingface.co/", "org/name"),
        ("https://user:secret@huggingface.co/org/name", "org/name"),
        ("https://elsewhere.example/org/name", "org/name"),
        ("file:///etc/passwd", "org/name"),
        ("hf://org/name", "org/name"),
        ("http://[::1", "org/name"),
        ("://", "org/name"),
    ],
)
def test_other_addresses_are_refused(address, do):
    with pytest.raises(UsageError) as caught:
        understand(address)
    assert caught.value.code == "source.url"
    assert do in caught.value.do
    assert "secret" not in str(caught.value.as_json())


@pytest.mark.parametrize(
    "revision", ["main", "v1.0", "refs/pr/4", "feature/x_y", "a" * 40, "1234567", "release@2", "\u00fc"]
)
def test_revisions(revision):
    check_revision(revision)


@pytest.mark.parametrize(
    "revision",
    ["", " ", "a b", "../x", "a/../b", "/main", "main/", "a//b", "-x", ".x", "a/.b", "x.lock", "x~1", "x^", "a:b", "a?",
     "a*", "a[b", "a\\b", "a\nb", "a\x00b", "a@{1}", "x" * 251, "end."],
)  # fmt: skip
def test_what_git_would_not_accept_is_no_revision(revision):
    with pytest.raises(UsageError) as caught:
        check_revision(revision)
    assert caught.value.code == "source.bad_revision"
    assert caught.value.what.isprintable()


@settings(max_examples=400, deadline=None)
@given(st.text(max_size=40) | st.text(alphabet="./~:\\-_ahfjson@\x00\n\ud800", max_size=24))
def test_any_text_is_an_id_or_a_path_or_an_error_of_ours(text):
    try:
        found, error = understand(text), None
    except OnboardError as caught:
        found, error = None, caught
    if isinstance(found, HubId):
        assert is_repo_id(found.id)
    if error is not None:
        assert error.exit_status == 2
        assert (error.what + error.why + error.do).isprintable()


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30) | st.text(alphabet="./@{}~-x", max_size=12))
def test_an_accepted_revision_stays_inside_the_cache(text):
    try:
        check_revision(text)
    except UsageError:
        return
    assert ".." not in text.split("/")
    assert not text.startswith("/")
    assert text.isprintable()


def test_ids_are_those_that_the_client_accepts():
    """The rules are written down twice; this keeps the two the same."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    @settings(max_examples=300, deadline=None)
    @given(st.text(alphabet="aZ0_-./ git\n", max_size=9) | st.from_regex(r"\A[a-z._-]{1,6}/[a-z._-]{1,6}\Z"))
    def same(text):
        try:
            validate_repo_id(text)
            accepted = True
        except HFValidationError:
            accepted = False
        assert is_repo_id(text) == accepted

    same()
