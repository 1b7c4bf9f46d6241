"""A plan: the files that will be written, each with its reason. A plan is a value; nothing here writes."""

from __future__ import annotations

import difflib
import hashlib
import re
import stat
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from onboard.errors import UsageError
from onboard.plan.names import is_device_name, shown

Target = Literal["plugin", "intree"]

_MAX_PATH = 400
_MAX_PART = 200
_FORBIDDEN = frozenset('<>:"|?*\\')
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileChange:
    """One file, whole.

    Attributes:
        path: where it goes, relative to the plan's root, with forward slashes.
        content: the whole new text; ends with a newline unless it is empty.
        reason: one line, why the file is there.
        edits_existing: the file is an edit of one that must already be there (the registry).
        before_sha256: what the edited file held when the edit was made; the edit is refused on anything else.
    """

    path: str
    content: str
    reason: str
    edits_existing: bool = False
    before_sha256: str | None = None

    def __post_init__(self) -> None:
        check_path(self.path)
        if self.content and not self.content.endswith("\n"):
            raise ValueError(f"{self.path}: the content does not end with a newline")
        try:
            self.content.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{self.path} cannot be written as UTF-8",
                f"it holds {shown(error.object[error.start])}, half of a surrogate pair",
                "look for broken escapes (\\ud800 to \\udfff) in the strings of the config.json",
                code="content.encoding",
            ) from None
        if not self.reason.strip() or any(_is_control(c) for c in self.reason):
            raise ValueError(f"{self.path}: the reason is one line of text")
        if self.edits_existing != (self.before_sha256 is not None):
            raise ValueError(f"{self.path}: edits_existing and before_sha256 go together")
        if self.before_sha256 is not None and not _SHA256.fullmatch(self.before_sha256):
            raise ValueError(f"{self.path}: before_sha256 is not a SHA-256 in lower-case hex")

    @property
    def data(self) -> bytes:
        """The bytes that are written, on every platform the same."""
        return self.content.encode()


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that one command will write.

    Attributes:
        root: plugin: the project folder to be made; intree: the checkout.
        target: which of the two.
        changes: the files; paths are unique, also where case does not count, and none is a folder of another.
    """

    root: Path
    target: Target
    changes: tuple[FileChange, ...]

    def __post_init__(self) -> None:
        if self.target not in ("plugin", "intree"):
            raise ValueError(f"unknown target {self.target!r}")
        seen: dict[str, str] = {}
        for change in self.changes:
            if self.target == "plugin" and change.edits_existing:
                raise ValueError(f"{change.path}: a new project has no files to edit")
            if (folded := _folded(change.path)) in seen:
                raise _clash(seen[folded], change.path, "they are the same file, at least where case does not count")
            seen[folded] = change.path
        for change in self.changes:
            for parent in _parents(_folded(change.path)):
                if parent in seen:
                    raise _clash(seen[parent], change.path, "one is a file where the other needs a folder")

    def diff(self) -> str:
        """The plan as a unified diff against what is on disk now; ``git apply`` accepts it."""
        return "".join(line for change in self.changes for line in _diff(change, read_inside(self.root, change.path)))

    def summary(self) -> list[dict[str, Any]]:
        """One ``{"path", "action", "lines", "reason"}`` a file; the action is create, replace, edit or same."""
        return [
            {
                "path": change.path,
                "action": _action(change, read_inside(self.root, change.path)),
                "lines": change.content.count("\n"),
                "reason": change.reason,
            }
            for change in self.changes
        ]


def check_path(path: object) -> str:
    """Return ``path`` if it is safe below any root, on any platform.

    Raises:
        UsageError: it is absolute, climbs out, has empty or hidden-meaning parts, or characters that not every system
            can store.
    """
    why = None
    if not isinstance(path, str) or not path:
        why = "it is not a path"
    elif len(path) > _MAX_PATH:
        why = f"it is longer than {_MAX_PATH} characters"
    elif path.startswith(("/", "~")):
        why = "it is not relative"
    else:
        why = next(filter(None, map(_part_fault, path.split("/"))), None)
    if why is not None or not isinstance(path, str):
        raise UsageError(
            f"{shown(path)} cannot be a path of a generated file",
            why or "",
            "choose another name with --name",
            code="path.unsafe",
        )
    return path


def sha256(data: bytes) -> str:
    """The hash that plans and lock files use."""
    return hashlib.sha256(data).hexdigest()


def resolve_inside(root: Path, path: str) -> Path:
    """Where ``path`` below ``root`` really is, links followed.

    Raises:
        UsageError: a symbolic link on the way leads out of the root, or in a circle.
    """
    try:
        real_root = root.resolve()
        real = (real_root / path).resolve()
    except (OSError, RuntimeError) as error:
        raise _bad_link(root, path, f"it cannot be followed: {error}") from None
    if not real.is_relative_to(real_root) or real == real_root:
        raise _bad_link(root, path, "a symbolic link on the way leads out of that folder")
    return real


def read_inside(root: Path, path: str) -> bytes | None:
    """What is at ``path`` below ``root`` now; None where nothing is.

    Raises:
        UsageError: it is something other than a readable file inside the root.
    """
    real = resolve_inside(root, path)
    try:
        if not stat.S_ISREG(real.stat().st_mode):
            raise OSError("it is not a plain file")
        return real.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(
            f"cannot read {path} in {root}",
            error.strerror or str(error),
            "move it away, or mend its permissions",
            code="target.unreadable",
        ) from None


def _part_fault(part: str) -> str | None:
    if not part:
        return "it has an empty part"
    if part in (".", ".."):
        return "it has a '.' or '..' part"
    if len(part) > _MAX_PART:
        return f"a part is longer than {_MAX_PART} characters"
    if any(_is_control(c) or c in _FORBIDDEN for c in part):
        return "it has a control character, a backslash, a colon or another character that not every system can store"
    if part != part.strip() or part.endswith("."):
        return "a part begins or ends with a space, or ends with a dot"
    if is_device_name(part):
        return "a part is a reserved file name on Windows"
    # Git runs what it finds there.
    if _folded(part) == ".git":
        return "it leads into a .git folder"
    return None


def _is_control(char: str) -> bool:
    # Cf holds the marks that turn the reading direction around, Cs lone surrogates, Zl and Zp other line ends.
    return unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def _parents(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _clash(one: str, two: str, why: str) -> UsageError:
    return UsageError(f"the plan holds both {one} and {two}", why, "choose another name with --name", code="path.clash")


def _bad_link(root: Path, path: str, why: str) -> UsageError:
    return UsageError(
        f"{path} in {root} is not a place to write to",
        why,
        "remove the link, or choose another place with --out",
        code="target.symlink",
    )


def _action(change: FileChange, before: bytes | None) -> str:
    if before == change.data:
        return "same"
    if change.edits_existing:
        return "edit"
    return "create" if before is None else "replace"


def _diff(change: FileChange, before: bytes | None) -> Iterator[str]:
    if before == change.data:
        return
    yield f"diff --git a/{change.path} b/{change.path}\n"
    if before is None:
        yield "new file mode 100644\n"
    old = [] if before is None else _lines(before.decode(errors="replace"))
    hunks = difflib.unified_diff(
        old,
        _lines(change.content),
        fromfile="/dev/null" if before is None else f"a/{change.path}",
        tofile=f"b/{change.path}",
    )
    for line in hunks:
        yield line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"


def _lines(text: str) -> list[str]:
    # str.splitlines would also split at form feeds and other characters that are no line ends to diff and git.
    return re.findall(r"[^\n]*\n|[^\n]+", text)
