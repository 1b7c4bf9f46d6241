"""Whole generated projects are what they were, byte for byte. Is a change meant? `make golden`, and read the diff."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent
SCRIPT = HERE.parent / "scripts" / "regenerate_golden.py"
MOST_LINES = 200


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("regenerate_golden", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


golden = load_script()


def tree(root: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path, but for what Python caches there."""
    paths = (path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def differences(expected: dict[str, bytes], made: dict[str, bytes]) -> list[str]:
    """A unified diff of two trees, line by line."""
    lines: list[str] = []
    for path in sorted(expected.keys() | made.keys()):
        if path not in made:
            lines.append(f"only in the golden tree: {path}")
        elif path not in expected:
            lines.append(f"only in the new tree: {path}")
        elif expected[path] != made[path]:
            before, after = (data.decode(errors="replace").splitlines() for data in (expected[path], made[path]))
            lines += difflib.unified_diff(before, after, f"golden/{path}", f"new/{path}", n=2, lineterm="")
            if before == after:
                lines.append(f"{path}: the line ends differ")
    return lines


@pytest.mark.parametrize("name", golden.TREES)
def test_a_generated_project_is_what_it_was(name, tmp_path):
    golden.write_tree(name, tmp_path / name)
    lines = differences(tree(golden.GOLDEN / name), tree(tmp_path / name))
    more = f"\n... and {len(lines) - MOST_LINES} lines more" if len(lines) > MOST_LINES else ""
    assert not lines, (
        f"\n{name} is not what it was; if that is meant: make golden\n" + "\n".join(lines[:MOST_LINES]) + more
    )


def test_nothing_but_the_trees_is_in_the_folder():
    assert sorted(path.name for path in golden.GOLDEN.iterdir()) == sorted(golden.TREES)


def test_a_difference_is_shown():
    made = {"a": b"1\n2\n", "c": b"\n", "d": b"x\r\n"}
    lines = differences({"a": b"1\n3\n", "b": b"\n", "d": b"x\n"}, made)
    assert "-3" in lines
    assert "+2" in lines
    assert "only in the golden tree: b" in lines
    assert "only in the new tree: c" in lines
    assert "d: the line ends differ" in lines
