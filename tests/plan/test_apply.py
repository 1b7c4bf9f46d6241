"""Contract: all files of a plan are written or none, and no work of human hands is ever lost."""

from __future__ import annotations

import errno
import os
import signal
import threading

import pytest
from onboard.errors import UsageError
from onboard.plan import _disk, _project, _signals
from onboard.plan.apply import apply, recover
from onboard.plan.changes import FileChange, Plan, sha256

from .trees import LOCK, REGISTRY, checkout, files, leftovers, model, planned, project, tree


def set_swap(monkeypatch, atomic):
    if not atomic:
        monkeypatch.setattr(_project, "exchange", lambda one, other: False)


@pytest.fixture(params=["exchange", "two renames"])
def swap(request, monkeypatch):
    """Both ways to swap two folders."""
    set_swap(monkeypatch, request.param == "exchange")


# A new project.


def test_a_new_project(tmp_path):
    plan = project(tmp_path / "deep" / "er" / "x", "a")
    assert apply(plan, force=False) == tuple(planned(plan))
    assert files(plan.root) == planned(plan)
    assert leftovers(plan.root.parent) == []
    assert {row["action"] for row in plan.summary()} == {"same"}


def test_everything_is_synced_before_it_is_in_place(tmp_path, monkeypatch, no_fsync):
    counts = {}
    monkeypatch.setattr(_signals, "_step", lambda name: counts.setdefault(name, list(no_fsync)))
    for plan, moment in (
        (project(tmp_path / "x", "a"), "project:staged"),
        (model(checkout(tmp_path), "a"), "checkout:journal"),
    ):
        apply(plan, force=False)
        # Each file, and the folders that they are in.
        assert len({path for path in counts[moment] if not path.endswith("journal.json.new")}) > len(plan.changes)
        no_fsync.clear()


def test_the_umask_counts(tmp_path):
    before = os.umask(0o027)
    try:
        plan = project(tmp_path / "x", "a")
        apply(plan, force=False)
    finally:
        os.umask(before)
    assert plan.root.stat().st_mode & 0o777 == 0o750
    assert (plan.root / "src" / "pkg" / "m0.py").stat().st_mode & 0o777 == 0o640


def test_an_empty_folder_may_be_filled(tmp_path):
    (tmp_path / "x").mkdir()
    plan = project(tmp_path / "x", "a")
    apply(plan, force=False)
    assert files(plan.root) == planned(plan)


def test_what_is_there_needs_force(tmp_path):
    root = tmp_path / "x"
    root.mkdir()
    (root / "mine").write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(UsageError) as caught:
        apply(project(root, "a"), force=False)
    assert caught.value.code == "target.exists"
    assert "--force" in caught.value.do
    assert tree(tmp_path) == before


@pytest.mark.parametrize("force", [True, False])
def test_a_file_or_a_link_is_never_replaced(force, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    before = tree(tmp_path)
    for name in ("file", "link", "dangling", "file/x"):
        with pytest.raises(UsageError):
            apply(project(tmp_path / name, "a"), force=force)
    assert tree(tmp_path) == before


def test_force_replaces_what_onboard_wrote(tmp_path, swap):
    root = tmp_path / "x"
    apply(project(root, "a"), force=False)
    (root / "src" / "pkg" / "__pycache__").mkdir()
    (root / "src" / "pkg" / "__pycache__" / "m0.pyc").write_bytes(b"cache")
    written = apply(project(root, "b"), force=True)
    assert written.backup is None
    assert files(root) == planned(project(root, "b"))
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("how", ["edited", "added", "link", "folder link", "lock gone", "lock broken", "pipe"])
def test_force_keeps_what_a_hand_made(how, tmp_path, swap):
    root = tmp_path / "x"
    apply(project(root, "a"), force=False)
    if how == "edited":
        (root / "src" / "pkg" / "m1.py").write_text("mine\n")
    elif how == "added":
        (root / "notes.txt").write_text("mine\n")
    elif how == "link":
        (root / "link").symlink_to("README.md")
    elif how == "folder link":
        (root / "link").symlink_to("src")
    elif how == "lock gone":
        (root / LOCK).unlink()
    elif how == "lock broken":
        (root / LOCK).write_text("{}")
    else:
        os.mkfifo(root / "pipe")
    names = sorted(path.relative_to(root) for path in root.rglob("*"))
    (tmp_path / "x.onboard-backup-1").mkdir()
    written = apply(project(root, "b"), force=True)
    assert written.backup == tmp_path / "x.onboard-backup-2"
    assert sorted(path.relative_to(written.backup) for path in written.backup.rglob("*")) == names
    assert files(root) == planned(project(root, "b"))
    assert leftovers(tmp_path) == []


def test_an_edit_that_is_the_new_text_too_is_not_lost(tmp_path, swap):
    root = tmp_path / "x"
    apply(project(root, "a"), force=False)
    (root / "src" / "pkg" / "m1.py").write_text("b 1\n" * 10)
    assert apply(project(root, "b"), force=True).backup is None


def test_the_folder_one_stands_in_is_not_replaced(tmp_path, monkeypatch):
    root = tmp_path / "x"
    apply(project(root, "a"), force=False)
    monkeypatch.chdir(root / "src")
    with pytest.raises(UsageError, match="cannot make"):
        apply(project(root, "b"), force=True)
    monkeypatch.chdir("/")
    monkeypatch.setenv("HOME", str(root))
    with pytest.raises(UsageError, match="cannot make"):
        apply(project(root, "b"), force=True)
    assert files(root) == planned(project(root, "a"))


# A checkout.


def test_a_checkout(tmp_path):
    plan = model(checkout(tmp_path), "a")
    written = apply(plan, force=False)
    assert written == tuple(planned(plan))
    assert files(tmp_path) == {**planned(plan), "framework/theirs.py": b"theirs\n"}
    assert (tmp_path / REGISTRY).stat().st_mode & 0o777 == 0o640
    assert apply(plan, force=False) == (), "a second time there is nothing to write"
    assert leftovers(tmp_path) == []


def test_a_root_that_is_not_there(tmp_path):
    with pytest.raises(UsageError) as caught:
        apply(Plan(tmp_path / "no", "intree", (FileChange("a", "x\n", "why"),)), force=True)
    assert caught.value.code == "target.missing"


def test_files_in_the_way_need_force_and_edited_ones_are_kept(tmp_path):
    apply(model(checkout(tmp_path), "a"), force=False)
    mine = tmp_path / "framework" / "models" / "x" / "m1.py"
    mine.write_text("mine\n")
    before = tree(tmp_path)
    with pytest.raises(UsageError) as caught:
        apply(model(tmp_path, "b"), force=False)
    assert caught.value.code == "target.exists"
    assert "framework/models/x/m1.py" in caught.value.why
    assert tree(tmp_path) == before
    written = apply(model(tmp_path, "b"), force=True)
    assert written.backup == tmp_path / ".onboard-backup-1"
    assert files(written.backup) == {"framework/models/x/m1.py": b"mine\n"}
    assert mine.read_text() == "b 1\n" * 10
    assert leftovers(tmp_path) == [".onboard-backup-1"]


@pytest.mark.parametrize("now", ["somebody else was here\n", None])
def test_an_edited_file_that_has_changed_since(now, tmp_path):
    plan = model(checkout(tmp_path), "a")
    if now is None:
        (tmp_path / REGISTRY).unlink()
    else:
        (tmp_path / REGISTRY).write_text(now)
    before = tree(tmp_path)
    with pytest.raises(UsageError) as caught:
        apply(plan, force=True)
    assert caught.value.code == "target.changed"
    assert tree(tmp_path) == before


@pytest.mark.parametrize("path", [REGISTRY, "docs/pages/x.mdx", "framework/models/x/m2.py"])
def test_a_file_that_changes_at_the_last_moment(path, tmp_path, monkeypatch):
    plan = model(checkout(tmp_path), "a")
    place = tmp_path / path

    def meddle(name):
        if name == f"checkout:move:{path}":
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("meddled\n")

    before = tree(tmp_path)
    monkeypatch.setattr(_signals, "_step", meddle)
    with pytest.raises(UsageError) as caught:
        apply(plan, force=True)
    assert caught.value.code == "target.changed"
    assert place.read_text() == "meddled\n"
    assert {**files(tmp_path), path: b""} == {**{k: v for k, v in before.items() if v != ""}, path: b""}
    assert leftovers(tmp_path) == []


def test_links_that_lead_outside_are_refused(tmp_path):
    root = checkout(tmp_path / "root")
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "framework" / "models").symlink_to(outside)
    before = tree(tmp_path)
    with pytest.raises(UsageError) as caught:
        apply(model(root, "a"), force=True)
    assert caught.value.code == "target.symlink"
    assert tree(tmp_path) == before


def test_links_inside_are_followed_but_not_to_one_file_twice(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    apply(Plan(tmp_path, "intree", (FileChange("link/a", "x\n", "why"),)), force=False)
    assert (tmp_path / "real" / "a").read_text() == "x\n"
    assert (tmp_path / "link").is_symlink()
    changes = (FileChange("link/b", "x\n", "why"), FileChange("real/b", "y\n", "why"))
    with pytest.raises(UsageError, match="already in the plan"):
        apply(Plan(tmp_path, "intree", changes), force=True)


def test_a_file_where_a_folder_is_needed(tmp_path):
    (tmp_path / "docs").write_text("a file\n")
    with pytest.raises(UsageError, match="cannot write docs/x"):
        apply(Plan(tmp_path, "intree", (FileChange("docs/x", "x\n", "why"),)), force=True)
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="cannot read folder"):
        apply(Plan(tmp_path, "intree", (FileChange("folder", "x\n", "why"),)), force=True)


def test_an_existing_project_can_be_updated_in_place(tmp_path):
    root = tmp_path / "x"
    apply(project(root, "a"), force=False)
    (root / "notes.txt").write_text("mine\n")
    apply(Plan(root, "intree", project(root, "b").changes), force=True)
    assert files(root) == {**planned(project(root, "a")), **planned(project(root, "b")), "notes.txt": b"mine\n"}


# Whatever goes wrong, at every step.


def scenario(kind, base):
    """A plan that has work to do in every respect, and what the disk may look like afterwards."""
    if kind == "new":
        return project(base / "deep" / "x", "a")
    if kind == "replace":
        apply(project(base / "x", "a"), force=False)
        (base / "x" / "mine").write_text("mine\n")
        return project(base / "x", "b")
    apply(model(checkout(base), "a"), force=False)
    (base / "framework" / "models" / "x" / "m1.py").write_text("mine\n")
    (base / "docs" / "pages" / "x.mdx").unlink()
    (base / "docs" / "pages").rmdir()
    (base / "docs").rmdir()
    return model(base, "b")


def steps_of(kind, base, monkeypatch):
    names: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(_signals, "_step", names.append)
        plan = scenario(kind, base)
        names.clear()
        apply(plan, force=True)
    return names


# Kind, and whether folders are swapped atomically: that matters only where there are two.
CASES = [("new", True), ("replace", True), ("replace", False), ("checkout", True)]


def is_done(kind, base):
    root = {"new": base / "deep" / "x", "replace": base / "x", "checkout": base}[kind]
    at = root / ("framework/models/x/m0.py" if kind == "checkout" else "src/pkg/m0.py")
    return at.is_file() and at.read_text().startswith("a" if kind == "new" else "b")


@pytest.mark.parametrize(("kind", "atomic"), CASES)
@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), ZeroDivisionError()])
def test_a_failure_at_any_step_leaves_nothing_half_done(kind, atomic, failure, tmp_path, monkeypatch):
    set_swap(monkeypatch, atomic)
    names = steps_of(kind, tmp_path / "count", monkeypatch)
    assert len(names) > 5
    for number, name in enumerate(names):
        if name in ("project:swapped", "project:trashed", "checkout:committed", "checkout:settled"):
            continue  # Nothing can fail here; kills at these places are tested elsewhere.
        base = tmp_path / str(number)
        base.mkdir()
        plan = scenario(kind, base)
        before = tree(base)
        seen = 0

        def fail(_name):
            nonlocal seen
            seen += 1
            if seen == number + 1:  # noqa: B023
                raise failure

        with monkeypatch.context() as patch:
            patch.setattr(_signals, "_step", fail)
            with pytest.raises((UsageError, type(failure))) as caught:
                apply(plan, force=True)
        assert tree(base) == before, name
        if isinstance(failure, OSError):
            assert caught.value.code == "target.full"
            assert "nothing was changed" in caught.value.what


@pytest.mark.parametrize(("kind", "atomic"), CASES)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_step(kind, atomic, number, tmp_path, monkeypatch):
    """It stops the run cleanly, or, once the change has happened, comes after it; and it is never swallowed."""
    set_swap(monkeypatch, atomic)
    arrived = []
    before_handler = signal.signal(number, lambda *_: arrived.append(1))
    try:
        for at, name in enumerate(steps_of(kind, tmp_path / "count", monkeypatch)):
            base = tmp_path / str(at)
            base.mkdir()
            plan = scenario(kind, base)
            before = tree(base)
            arrived.clear()
            seen = iter(range(10_000))

            def kill(_name, seen=seen, at=at):
                if next(seen) == at:
                    signal.raise_signal(number)

            interrupted = False
            with monkeypatch.context() as patch:
                patch.setattr(_signals, "_step", kill)
                try:
                    apply(plan, force=True)
                except KeyboardInterrupt:
                    interrupted = True
            assert arrived == [1], name
            assert is_done(kind, base) is not interrupted, name
            if interrupted:
                assert tree(base) == before, name
            assert not [left for left in leftovers(base) if "backup" not in left]
    finally:
        signal.signal(number, before_handler)


def test_handlers_are_put_back(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    apply(project(tmp_path / "x", "a"), force=False)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_in_another_thread(tmp_path):
    thread = threading.Thread(target=lambda: apply(project(tmp_path / "x", "a"), force=False))
    thread.start()
    thread.join()
    assert files(tmp_path / "x") == planned(project(tmp_path / "x", "a"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(UsageError) as caught:
            apply(project(tmp_path / "x", "a"), force=False)
    finally:
        tmp_path.chmod(0o700)
    assert caught.value.code == "target.permission"


def test_a_disk_that_says_no(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system", str(tmp_path))

    monkeypatch.setattr(_project, "write_durably", refuse)
    with pytest.raises(UsageError) as caught:
        apply(project(tmp_path / "deep" / "x", "a"), force=False)
    assert caught.value.code == "target.permission"
    assert "Read-only" in caught.value.why
    assert tree(tmp_path) == {}


# Other runs, at the same time and before.


def test_two_runs_do_not_meet(tmp_path, monkeypatch):
    monkeypatch.setattr(_disk, "LOCK_WAIT_S", 0.1)
    with _disk.folder_lock(tmp_path) as alone:
        assert alone
        for plan in (project(tmp_path / "x", "a"), model(checkout(tmp_path), "a")):
            with pytest.raises(UsageError) as caught:
                apply(plan, force=False)
            assert caught.value.code == "target.busy"


def test_without_locks_only_old_leftovers_are_touched(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(_disk.fcntl, "flock", unsupported)
    young, old = tmp_path / f".onboard-{'0' * 16}", tmp_path / f".onboard-{'1' * 16}"
    young.mkdir()
    old.mkdir()
    os.utime(old, (1, 1))
    apply(project(tmp_path / "x", "a"), force=False)
    assert leftovers(tmp_path) == [young.name]


def test_what_only_looks_like_a_leftover_is_left_alone(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / f".onboard-{'2' * 16}").symlink_to("real")
    (tmp_path / f".onboard-{'3' * 16}").write_text("a file")
    (tmp_path / ".onboard-mine").mkdir()
    odd = tmp_path / f".onboard-{'4' * 16}"
    (odd / "old").mkdir(parents=True)
    (odd / "journal.json").write_text('{"root": "../x", "new": [1, 2]}')
    half = tmp_path / f".onboard-{'5' * 16}"
    (half / "new" / "x").mkdir(parents=True)
    before = tree(tmp_path)
    recover(tmp_path / "x")
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "journal",
    [
        "[]",
        '{"entries": 1}',
        '{"entries": [{"path": "../secret", "old": null, "new": "%s", "keep": false}], "folders": []}',
        '{"entries": [{"path": "out/secret", "old": null, "new": "%s", "keep": false}], "folders": ["out/empty"]}',
    ],
)
def test_a_planted_journal_reaches_nothing_outside(journal, tmp_path):
    (tmp_path / "secret").write_text("s\n")
    (tmp_path / "empty").mkdir()
    root = checkout(tmp_path / "root")
    (root / "out").symlink_to("..")
    work = root / f".onboard-staging-{'0' * 16}"
    work.mkdir()
    (work / "journal.json").write_text(journal.replace("%s", sha256(b"s\n")))
    recover(root)
    assert (tmp_path / "secret").read_text() == "s\n"
    assert (tmp_path / "empty").is_dir()
