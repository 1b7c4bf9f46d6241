"""The few operations on the disk that need care: durable writes, an atomic swap, a lock, journals."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onboard.errors import UsageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK_WAIT_S = 30.0
# Without locks, how long a working folder must have been left alone before it counts as a dead run's.
STALE_AFTER_S = 600.0

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
# How file systems say that they have no such thing as a lock on a folder (NFS, Lustre without flock).
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.ENOLCK, errno.EINVAL)


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and wait until the disk has it."""
    with path.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the folder's entries; a no-op where folders cannot be opened (Windows)."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        # Some network file systems refuse to sync a folder; they are no worse off than before.
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)


def exchange(one: Path, other: Path) -> bool:
    """Swap two paths in one atomic step; False where the system or file system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENOTSUP, errno.EXDEV):
        return False
    raise OSError(code, os.strerror(code), str(other))


def working_folder(folder: Path, prefix: str) -> Path:
    """Make a new private folder inside ``folder``, on the same file system, so that renames out of it are atomic."""
    work = folder / f"{prefix}{secrets.token_hex(8)}"
    work.mkdir(mode=0o700)
    return work


def leftovers(folder: Path, prefix: str, alone: bool) -> Iterator[Path]:
    """The working folders that killed runs left in ``folder``.

    Args:
        folder: where to look.
        prefix: what their names start with.
        alone: the folder is locked, so that no live run can own one.
    """
    name = re.compile(re.escape(prefix) + r"[0-9a-f]{16}")
    for path in sorted(folder.iterdir()):
        if not name.fullmatch(path.name):
            continue
        try:
            found = path.lstat()
        except OSError:
            continue
        # Someone else's, or a link: in a shared folder it may have been put there to make us move files.
        if not stat.S_ISDIR(found.st_mode) or (hasattr(os, "geteuid") and found.st_uid != os.geteuid()):
            continue
        if alone or time.time() - found.st_mtime > STALE_AFTER_S:
            yield path


def write_journal(path: Path, entries: dict[str, Any]) -> None:
    """Write a journal so that it is there whole or not at all."""
    fresh = path.with_name(path.name + ".new")
    write_durably(fresh, json.dumps(entries).encode())
    fresh.replace(path)
    sync_folder(path.parent)


def read_journal(path: Path) -> dict[str, Any] | None:
    """The journal, or None where there is none that we wrote."""
    try:
        entries = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return entries if isinstance(entries, dict) else None


def free_name(folder: Path, prefix: str) -> Path:
    """The first of ``<prefix>1``, ``<prefix>2``, ... that ``folder`` does not have."""
    number = 1
    while os.path.lexists(folder / f"{prefix}{number}"):
        number += 1
    return folder / f"{prefix}{number}"


def remove_tree(folder: Path) -> None:
    """Remove a folder of ours as far as possible; what resists is left for a later run."""
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[bool]:
    """Keep other runs of onboard out of a folder.

    The lock is on the folder itself, so it leaves no file behind and dies with its process: whoever holds it knows
    that any working folder in there was left by a run that is gone.

    Yields:
        False where the file system has no such locks; leftovers can then belong to a run that is still alive.

    Raises:
        UsageError: another run holds the lock and does not let go.
    """
    if fcntl is None:
        yield False
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        yield _take_lock(fd, folder)
    finally:
        os.close(fd)


def _take_lock(fd: int, folder: Path) -> bool:
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EINTR):
                raise
        if time.monotonic() > deadline:
            raise UsageError(
                f"another run of onboard is writing in {folder}",
                f"it has not finished within {LOCK_WAIT_S:.0f} seconds",
                "wait for it, or end it, and try again",
                code="target.busy",
            )
        time.sleep(0.05)


def write_error(error: OSError, root: Path) -> UsageError:
    """The error for people when the disk says no; everything was rolled back by then."""
    path = error.filename2 or error.filename
    why = (error.strerror or str(error)) + (f": {os.fsdecode(path)}" if isinstance(path, str | bytes) else "")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        do, code = "free some space and run the command again", "target.full"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        do, code = "mend the permissions, or choose another place with --out", "target.permission"
    else:
        do, code = "mend that, or choose another place with --out", "target.write"
    return UsageError(f"cannot write to {root}; nothing was changed", why, do, code=code)
