"""Writing a whole project folder, swapped in by one rename.

Everything is written and synced into ``.onboard-<random>/new`` beside the final place, on the same file system. Then:

- nothing there yet, or an empty folder: one ``rename``.
- something there, and ``force``: Linux swaps the two folders atomically (``renameat2`` with ``RENAME_EXCHANGE``).
  Where that does not exist, the old folder is renamed to ``.onboard-<random>/old`` and the new one into its place.

The old folder is thrown away only if every file in it is one that the lock file knows, unedited. Otherwise it is
kept, whole, as ``<name>.onboard-backup-<n>``. A journal in the working folder says which folder is the new one (by
its inode, which a rename does not change), so that whatever a kill leaves, :func:`_settle` can tell old from new: it
finishes a swap that happened and undoes one that did not.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from onboard.errors import UsageError
from onboard.plan._disk import (
    exchange,
    folder_lock,
    free_name,
    leftovers,
    read_journal,
    remove_tree,
    sync_folder,
    working_folder,
    write_durably,
    write_journal,
)
from onboard.plan._signals import mark, step
from onboard.plan.changes import FileChange, Plan
from onboard.plan.lock import is_unchanged, read_lock
from onboard.plan.targets import LOCK_NAME

_PREFIX = ".onboard-"
_CACHES = frozenset({"__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache", ".hypothesis"})


def write(plan: Plan, *, force: bool) -> tuple[tuple[str, ...], Path | None]:
    """Make the project folder; see :func:`onboard.plan.apply.apply`."""
    root = Path(os.path.abspath(plan.root))
    if root.is_symlink() or root == root.parent:
        raise _in_the_way(
            root, "it is a symbolic link or the root of the file system", "choose another place with --out"
        )
    with _parents(root.parent) as parent, folder_lock(parent) as alone:
        _recover(parent, alone)
        _check_place(root, force)
        work = working_folder(parent, _PREFIX)
        backup: Path | None = None
        try:
            step("project:working-folder")
            _stage(work, root.name, plan.changes)
            _swap(work / "new", work / "old", root)
            mark("project:swapped")
        finally:
            backup = _settle(work)
        sync_folder(parent)
    return tuple(change.path for change in plan.changes), backup


def recover(parent: Path) -> list[str]:
    """Settle what killed runs left in ``parent``; a line for each."""
    if not os.access(parent, os.R_OK | os.W_OK | os.X_OK):
        return []
    with folder_lock(parent) as alone:
        return _recover(parent, alone)


def _recover(parent: Path, alone: bool) -> list[str]:
    notes = []
    for work in leftovers(parent, _PREFIX, alone):
        backup = _settle(work)
        notes.append(
            f"cleaned up {work}, left by an interrupted run" + (f"; hand-made files are in {backup}" if backup else "")
        )
    return notes


def _check_place(root: Path, force: bool) -> None:
    if not os.path.lexists(root):
        return
    if not root.is_dir():
        raise _in_the_way(root, "it is not a folder", "choose another place with --out")
    if not any(root.iterdir()):
        return
    if not force:
        raise _in_the_way(
            root, "it is a folder with something in it", "choose another place with --out, or replace it with --force"
        )
    # Swapping the folder that a shell stands in would leave that shell in a folder that is gone; and nobody means to
    # swap a home.
    with contextlib.suppress(OSError, RuntimeError):
        for inside in (Path.cwd(), Path.home()):
            if inside.resolve().is_relative_to(root.resolve()):
                raise _in_the_way(
                    root,
                    f"{inside} is in it, and the whole folder would be replaced",
                    "change to a folder outside of it first",
                )


def _stage(work: Path, name: str, changes: tuple[FileChange, ...]) -> None:
    new = work / "new"
    new.mkdir()
    found = new.stat()
    write_journal(work / "journal.json", {"root": name, "new": [found.st_dev, found.st_ino]})
    folders = {new}
    for change in changes:
        step(f"project:stage:{change.path}")
        file = new / change.path
        file.parent.mkdir(parents=True, exist_ok=True)
        write_durably(file, change.data)
        folders.update(file.parents[: len(Path(change.path).parts)])
    for folder in folders:
        sync_folder(folder)
    step("project:staged")


def _swap(new: Path, aside: Path, root: Path) -> None:
    if not root.is_dir() or not any(root.iterdir()):
        # Replaces an empty folder, and fails on one that has been filled in the meantime.
        os.rename(new, root)
    elif not exchange(new, root):
        os.rename(root, aside)
        step("project:moved-aside")
        os.rename(new, root)


def _settle(work: Path) -> Path | None:
    """Bring the disk to a whole state, old or new, and remove the working folder; returns the backup if one is kept."""
    new, old = work / "new", work / "old"
    journal = read_journal(work / "journal.json")
    backup = None
    if journal is not None:
        name = journal.get("root")
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
            return None
        root = work.parent / name
        if new.is_dir() and [new.stat().st_dev, new.stat().st_ino] == journal.get("new"):
            # The new folder never got into place. If the old one was already moved aside, it goes back.
            if old.is_dir():
                backup = _restore(old, root)
        else:
            for tree in (new, old):
                if tree.is_dir():
                    backup = _dispose(tree, root, work / "trash")
    elif any(new.glob("*")) or old.exists():
        return None  # Not one of ours: the journal is there before anything else is.
    remove_tree(work)
    return backup


def _restore(old: Path, root: Path) -> Path | None:
    place = root if not os.path.lexists(root) else free_name(root.parent, f"{root.name}.onboard-backup-")
    os.rename(old, place)
    return None if place == root else place


def _dispose(tree: Path, root: Path, trash: Path) -> Path | None:
    if any(_hand_made(tree, root)):
        backup = free_name(root.parent, f"{root.name}.onboard-backup-")
        os.rename(tree, backup)
        return backup
    # Out of the way first: a removal that is killed half-way must not look like a tree of hand-made files.
    os.rename(tree, trash)
    mark("project:trashed")
    return None


def _hand_made(tree: Path, root: Path) -> Iterator[str]:
    """The files of an old tree that nobody could generate again: unknown to its lock, or edited."""
    try:
        known = {**read_lock(tree / LOCK_NAME).files}
    except UsageError:
        known = {}
    else:
        known[LOCK_NAME] = ""
    for folder, subfolders, files in os.walk(tree):
        links = [name for name in subfolders if os.path.islink(os.path.join(folder, name))]
        subfolders[:] = [name for name in subfolders if name not in _CACHES and not name.endswith(".egg-info")]
        for name in (*links, *files):
            path = Path(folder, name).relative_to(tree).as_posix()
            if path == LOCK_NAME and path in known:
                continue
            if path in known and is_unchanged(tree / path, known[path]):
                continue
            if not _same_file(tree / path, root / path):
                yield path


def _same_file(one: Path, other: Path) -> bool:
    try:
        return (
            all(stat.S_ISREG(path.lstat().st_mode) for path in (one, other)) and one.read_bytes() == other.read_bytes()
        )
    except OSError:
        return False


@contextlib.contextmanager
def _parents(parent: Path) -> Iterator[Path]:
    """Make the folders above the project, and take them away again if nothing comes of it."""
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    parent.mkdir(parents=True, exist_ok=True)
    try:
        yield parent.resolve()
    except BaseException:
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _in_the_way(root: Path, why: str, do: str) -> UsageError:
    return UsageError(f"cannot make {root}", why, do, code="target.exists")
