"""Contract: a plan holds only paths that are safe below its root on any system, and shows truly what it would do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import PurePosixPath, PureWindowsPath

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onboard.errors import UsageError
from onboard.plan.changes import FileChange, Plan, check_path, sha256

from .trees import outcome

PARTS = st.text(max_size=12) | st.sampled_from(
    ["..", ".", "", "a", "A", "b.py", ".git", "C:", "aux.py", "~", "a ", "a."]
)
PATHS = st.text() | st.lists(PARTS, max_size=5).map("/".join)


@given(PATHS)
def test_a_safe_path_or_an_error(path):
    result, error = outcome(check_path, path)
    if error:
        assert error.code == "path.unsafe"
        assert (error.what + error.why).isprintable()
        return
    assert result == path
    assert not PurePosixPath(path).is_absolute()
    assert not PureWindowsPath(path).drive
    assert str(PurePosixPath(path)) == path
    assert PureWindowsPath(path).as_posix() == path
    assert os.path.normpath(path).replace(os.sep, "/") == path
    assert ".." not in path.split("/")


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../x", "a/../x", "a//b", "a/", "", ".", "a/./b", "C:/x", "a\\b", "a\0b", "a\nb", "~/x",
     "nul", "a/aux.py", "a.", " a", "a\u202eb", ".git/hooks/pre-commit", "x/.GIT/config",
     "a" * 201, "a/" * 300 + "a", None, 3],
)  # fmt: skip
def test_unsafe_paths(path):
    with pytest.raises(UsageError):
        check_path(path)
    with pytest.raises(UsageError):
        FileChange(path, "x\n", "why")


def change(path, content="x\n"):
    return FileChange(path, content, "why")


@pytest.mark.parametrize(
    "paths",
    [("a", "a"), ("a", "A"), ("a/b", "a"), ("A", "a/b/c"), ("é", "e\u0301"), ("ß.py", "ss.py"), ("x", "a/b", "a/B")],
)
def test_paths_that_clash(paths, tmp_path):
    for order in (paths, paths[::-1]):
        with pytest.raises(UsageError) as caught:
            Plan(tmp_path, "plugin", tuple(map(change, order)))
        assert caught.value.code == "path.clash"


def test_neighbours_do_not_clash(tmp_path):
    Plan(tmp_path, "plugin", tuple(map(change, ("a/b", "a/c", "ab", "a.b", "a-/b"))))


@pytest.mark.parametrize(
    "arguments",
    [
        {"content": "no newline"},
        {"reason": ""},
        {"reason": "two\nlines"},
        {"edits_existing": True},
        {"before_sha256": sha256(b"")},
        {"edits_existing": True, "before_sha256": "abc"},
    ],
)
def test_mistakes_of_ours_are_bugs(arguments):
    with pytest.raises(ValueError, match="x:"):
        FileChange(**({"path": "x", "content": "x\n", "reason": "why"} | arguments))


def test_a_lone_surrogate_is_an_error_for_people():
    with pytest.raises(UsageError, match="UTF-8"):
        change("x", "\ud800\n")


def test_a_new_project_has_nothing_to_edit(tmp_path):
    with pytest.raises(ValueError, match="no files to edit"):
        Plan(tmp_path, "plugin", (FileChange("x", "x\n", "why", True, sha256(b"")),))


def plan_against(root):
    (root / "same").write_text("s\n")
    (root / "old").write_text("one\ntwo\nthree")
    (root / "edit").write_text("1\n2\n3\n")
    return Plan(
        root,
        "intree",
        (
            change("same", "s\n"),
            change("old", "one\n2\nthree\n"),
            FileChange("edit", "1\n2\n3\n4\n", "row", True, sha256(b"1\n2\n3\n")),
            change("new/file.py", "a\x0cb\nc\n"),
            change("new/__init__.py", ""),
        ),
    )


def test_summary(tmp_path):
    assert [(row["path"], row["action"], row["lines"]) for row in plan_against(tmp_path).summary()] == [
        ("same", "same", 1),
        ("old", "replace", 3),
        ("edit", "edit", 4),
        ("new/file.py", "create", 2),
        ("new/__init__.py", "create", 0),
    ]


def test_a_plan_for_a_folder_that_is_not_there_creates_everything(tmp_path):
    plan = Plan(tmp_path / "no" / "where", "plugin", (change("a"),))
    assert plan.summary() == [{"path": "a", "action": "create", "lines": 1, "reason": "why"}]
    assert "+++ b/a" in plan.diff()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_can_apply_the_diff(tmp_path):
    plan = plan_against(tmp_path)
    subprocess.run(["git", "apply", "-"], input=plan.diff().encode(), cwd=tmp_path, check=True)
    assert {c.path: (tmp_path / c.path).read_bytes() for c in plan.changes} == {c.path: c.data for c in plan.changes}
    assert plan.diff() == ""


def test_nothing_outside_the_root_is_read(tmp_path):
    (tmp_path / "secret").write_text("s\n")
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to("../secret")
    (root / "loop").symlink_to("loop")
    for path in ("link", "loop", "loop/x"):
        with pytest.raises(UsageError) as caught:
            Plan(root, "intree", (change(path),)).diff()
        assert caught.value.code == "target.symlink"


def test_what_is_no_file_is_an_error(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path in ("folder", "pipe"):
        with pytest.raises(UsageError, match="cannot read"):
            Plan(tmp_path, "intree", (change(path),)).summary()
