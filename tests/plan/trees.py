"""Plans and folders for the tests that write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from onboard.errors import UsageError
from onboard.plan.changes import FileChange, Plan, sha256
from onboard.plan.lock import file_hashes, render_lock

LOCK = ".onboard.lock.json"
REGISTRY = "framework/registry.py"


def outcome(function: Callable[..., Any], *arguments: Any) -> tuple[Any, UsageError | None]:
    """What a function returns, or the error for people that it raises; anything else fails the test."""
    try:
        return function(*arguments), None
    except UsageError as error:
        return None, error


def with_lock(changes: list[FileChange], lock: str = LOCK) -> tuple[FileChange, ...]:
    text = render_lock(
        source={"given": "org/name", "kind": "hub", "id": "org/name", "revision": "0" * 40},
        config_sha256="0" * 64,
        versions={},
        answers={},
        kind="dense",
        architecture="XForCausalLM",
        model_type="x",
        name="x",
        files=file_hashes(changes),
    )
    return (*changes, FileChange(lock, text, "the lock"))


def project(root: Path, version: str, files: int = 4) -> Plan:
    """A project; two versions share some files and differ in others, one has a file more."""
    names = {f"src/pkg/m{number}.py": f"{version} {number}\n" * 10 for number in range(files)}
    names |= {"src/pkg/__init__.py": "", "README.md": "the same\n", f"only_{version}.txt": f"{version}\n"}
    return Plan(root, "plugin", with_lock([FileChange(path, text, "why") for path, text in names.items()]))


def checkout(root: Path) -> Path:
    """A checkout with a registry and a file of somebody else."""
    (root / "framework").mkdir(parents=True)
    (root / REGISTRY).write_text("rows = []\n")
    (root / REGISTRY).chmod(0o640)
    (root / "framework" / "theirs.py").write_text("theirs\n")
    return root


def model(root: Path, version: str, files: int = 3) -> Plan:
    """A model for a checkout: an edit, and new files in new folders and old ones."""
    before = (root / REGISTRY).read_bytes()
    changes = [FileChange(f"framework/models/x/m{n}.py", f"{version} {n}\n" * 10, "why") for n in range(files)]
    changes.append(FileChange("docs/pages/x.mdx", f"{version}\n", "why"))
    changes.append(FileChange(REGISTRY, f"rows = ['{version}']\n", "row", True, sha256(before)))
    return Plan(root, "intree", with_lock(changes, f"framework/models/x/{LOCK}"))


def tree(root: Path) -> dict[str, bytes | str]:
    """Everything below a folder, links and empty folders included."""
    return {
        path.relative_to(root).as_posix(): f"-> {path.readlink()}"
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else ""
        for path in sorted(root.rglob("*"))
    }


def planned(plan: Plan) -> dict[str, bytes]:
    return {change.path: change.data for change in plan.changes}


def files(root: Path) -> dict[str, bytes | str]:
    return {path: data for path, data in tree(root).items() if data != "" or (root / path).is_file()}


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".onboard-")]
