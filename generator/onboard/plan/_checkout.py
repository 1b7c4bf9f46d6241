"""Writing into a folder that stays where it is: a checkout, or a project that is brought up to date.

All new files are first written into ``.onboard-staging-<random>`` inside the root, and what they replace is linked
there too. Then a journal is written, the files are moved into place one by one, and the journal is renamed: that
rename is the moment at which the change has happened. Whoever finds a journal rolls back; whoever finds the renamed
one only cleans up. Both can be killed and run again.

A file that ``force`` replaces although a hand has edited it is kept in ``.onboard-backup-<n>`` in the root, under its
own path.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from onboard.errors import UsageError
from onboard.plan._disk import (
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
from onboard.plan.changes import FileChange, Plan, check_path, read_inside, resolve_inside, sha256
from onboard.plan.lock import read_lock
from onboard.plan.targets import LOCK_NAME

_PREFIX = ".onboard-staging-"
_BACKUP = ".onboard-backup-"


@dataclass(frozen=True, slots=True)
class _Entry:
    """One file to be moved into place: hashes before (None: not there) and after, and whether the old one is kept."""

    path: str
    old: str | None
    new: str
    keep: bool


def write(plan: Plan, *, force: bool) -> tuple[tuple[str, ...], Path | None]:
    """Put the files in place; see :func:`onboard.plan.apply.apply`."""
    root = plan.root.absolute()
    if not root.is_dir():
        raise UsageError(
            f"{root} is not a folder",
            "files are to be added to it",
            "give an existing checkout with --into",
            code="target.missing",
        )
    root = root.resolve()
    with folder_lock(root) as alone:
        _recover(root, alone)
        todo = _survey(root, plan.changes, force)
        if not todo:
            return (), None
        work = working_folder(root, _PREFIX)
        backup = None
        try:
            step("checkout:working-folder")
            entries = [entry for _, entry in todo]
            folders = _missing_folders(root, entries)
            _stage(root, work, todo)
            write_journal(work / "journal.json", {"entries": [asdict(entry) for entry in entries], "folders": folders})
            step("checkout:journal")
            _move(root, work, entries)
            (work / "journal.json").rename(work / "committed.json")
            sync_folder(work)
            mark("checkout:committed")
        finally:
            backup = _settle(root, work)
    return tuple(change.path for change, _ in todo), backup


def recover(root: Path) -> list[str]:
    """Settle what killed runs left in ``root``; a line for each."""
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        return []
    root = root.resolve()
    with folder_lock(root) as alone:
        return _recover(root, alone)


def _recover(root: Path, alone: bool) -> list[str]:
    notes = []
    for work in leftovers(root, _PREFIX, alone):
        undone = (work / "journal.json").exists()
        backup = _settle(root, work)
        what = "rolled back" if undone else "cleaned up after"
        notes.append(f"{what} an interrupted run in {root}" + (f"; hand-made files are in {backup}" if backup else ""))
    return notes


def _survey(root: Path, changes: tuple[FileChange, ...], force: bool) -> list[tuple[FileChange, _Entry]]:
    """What has to be written, after everything that speaks against it has been looked for."""
    known = _known_hashes(root, changes)
    todo: list[tuple[FileChange, _Entry]] = []
    in_the_way: list[str] = []
    places: set[Path] = set()
    for change in changes:
        place = resolve_inside(root, change.path)
        if place in places:
            raise UsageError(
                f"{change.path} leads to a file that is already in the plan", f"a symbolic link leads to {place}",
                "remove the link", code="target.symlink",
            )  # fmt: skip
        places.add(place)
        before = read_inside(root, change.path)
        _check_parents(root, place, change.path)
        if before == change.data:
            continue
        old = None if before is None else sha256(before)
        if change.edits_existing and old != change.before_sha256:
            raise _changed(change.path, "missing" if old is None else "not what it was")
        edited = old is not None and not change.edits_existing and known.get(change.path) != old
        if edited and not force:
            in_the_way.append(change.path)
        todo.append((change, _Entry(place.relative_to(root).as_posix(), old, sha256(change.data), keep=edited)))
    if in_the_way:
        more = f" and {len(in_the_way) - 5} more" if len(in_the_way) > 5 else ""
        raise UsageError(
            f"files in {root} are in the way",
            f"they exist and are different: {', '.join(in_the_way[:5])}{more}",
            "choose another name with --name, or replace them with --force (edited ones are kept in a backup)",
            code="target.exists",
        )
    return todo


def _known_hashes(root: Path, changes: tuple[FileChange, ...]) -> dict[str, str]:
    """What the lock file that is about to be replaced says about the files as onboard wrote them."""
    known: dict[str, str] = {}
    for change in changes:
        if PurePosixPath(change.path).name == LOCK_NAME and (data := read_inside(root, change.path)) is not None:
            with contextlib.suppress(UsageError):
                known.update(read_lock(resolve_inside(root, change.path)).files)
                known[change.path] = sha256(data)
    return known


def _check_parents(root: Path, place: Path, path: str) -> None:
    for folder in place.parents:
        if folder == root:
            return
        if folder.exists() and not folder.is_dir():
            raise UsageError(
                f"cannot write {path} in {root}",
                f"{folder.relative_to(root)} is a file, not a folder",
                "move it away, or choose another name with --name",
                code="target.exists",
            )


def _missing_folders(root: Path, entries: list[_Entry]) -> list[str]:
    """The folders that the files need and that are not there, outermost first."""
    missing: dict[str, None] = {}
    for entry in entries:
        for folder in reversed(PurePosixPath(entry.path).parents[:-1]):
            if not (root / folder).exists():
                missing[folder.as_posix()] = None
    return list(missing)


def _stage(root: Path, work: Path, todo: list[tuple[FileChange, _Entry]]) -> None:
    new, old = work / "new", work / "old"
    new.mkdir()
    old.mkdir()
    for number, (change, entry) in enumerate(todo):
        step(f"checkout:stage:{change.path}")
        staged = new / str(number)
        write_durably(staged, change.data)
        if entry.old is not None:
            place = root / entry.path
            shutil.copymode(place, staged)
            _keep(place, old / str(number))
    for folder in (new, old):
        sync_folder(folder)
    step("checkout:staged")


def _keep(place: Path, copy: Path) -> None:
    # A link rather than a copy: a rollback then gives back the very same file, times and attributes included.
    try:
        os.link(place, copy)
    except OSError:
        shutil.copy2(place, copy)


def _is_link(copy: Path, place: Path) -> bool:
    try:
        return copy.samefile(place)
    except OSError:
        return False


def _move(root: Path, work: Path, entries: list[_Entry]) -> None:
    folders = set()
    for number, entry in enumerate(entries):
        step(f"checkout:move:{entry.path}")
        place = root / entry.path
        if _digest(root, entry.path) != entry.old:
            raise _changed(entry.path, "not what it was a moment ago")
        place.parent.mkdir(parents=True, exist_ok=True)
        (work / "new" / str(number)).replace(place)
        folders.add(place.parent)
    for folder in folders:
        sync_folder(folder)
    step("checkout:moved")


def _settle(root: Path, work: Path) -> Path | None:
    """Roll back if there is a journal; keep what has to be kept if it is committed. Then remove the working folder."""
    backup = None
    if (work / "journal.json").exists():
        if (journal := _read(work / "journal.json")) is None:
            return None
        backup = _roll_back(root, work, *journal)
    elif (journal := _read(work / "committed.json")) is not None:
        backup = _back_up(root, work, journal[0], [number for number, entry in enumerate(journal[0]) if entry.keep])
    mark("checkout:settled")
    remove_tree(work)
    return backup


def _roll_back(root: Path, work: Path, entries: list[_Entry], folders: list[str]) -> Path | None:
    unclear = []
    for number, entry in reversed(list(enumerate(entries))):
        mark(f"checkout:roll-back:{entry.path}")
        before = work / "old" / str(number)
        try:
            now = _digest(root, entry.path)
        except UsageError:
            now = "something else"
        if now == entry.new:
            if entry.old is None:
                (root / entry.path).unlink()
            else:
                before.replace(root / entry.path)
        elif now != entry.old and not _is_link(before, root / entry.path):
            # Edited, or removed, since we replaced it. A hand's work stays; what we had replaced is put beside it.
            unclear.append(number)
    for folder in reversed(folders):
        with contextlib.suppress(OSError, UsageError):
            resolve_inside(root, folder).rmdir()
    return _back_up(root, work, entries, unclear)


def _back_up(root: Path, work: Path, entries: list[_Entry], numbers: list[int]) -> Path | None:
    present = [number for number in numbers if (work / "old" / str(number)).exists()]
    if not present:
        return None
    backup = free_name(root, _BACKUP)
    for number in present:
        place = backup / entries[number].path
        place.parent.mkdir(parents=True, exist_ok=True)
        (work / "old" / str(number)).replace(place)
    return backup


def _digest(root: Path, path: str) -> str | None:
    data = read_inside(root, path)
    return None if data is None else sha256(data)


def _read(path: Path) -> tuple[list[_Entry], list[str]] | None:
    # A journal may come with a checkout from a stranger: its paths are checked like any others.
    journal: dict[str, Any] | None = read_journal(path)
    if journal is None:
        return None
    try:
        entries = [_Entry(check_path(e["path"]), e["old"], e["new"], e["keep"] is True) for e in journal["entries"]]
        return entries, [check_path(folder) for folder in journal["folders"]]
    except (KeyError, TypeError, UsageError):
        return None


def _changed(path: str, how: str) -> UsageError:
    return UsageError(
        f"{path} has changed since the plan was made",
        f"it is {how}; nothing was written",
        "run the command again",
        code="target.changed",
    )
