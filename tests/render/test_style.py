"""Generated code is formatted and linted the same everywhere, whatever configuration lies around."""

from __future__ import annotations

from pathlib import Path

import pytest
from onboard.render.style import format_sources, lint

MESSY = """import torch
import os, sys
from nemo_automodel.b import c
from transformers import x
def f( a ):
    return  {'a' : a, 'b' : torch, 'c': c, 'x': x, 's': sys}
"""


def test_imports_in_groups_and_black_style() -> None:
    found = format_sources({"pkg/a.py": MESSY}, ("nemo_automodel",))["pkg/a.py"]
    assert found == (
        "import sys\n\nimport torch\nfrom transformers import x\n\nfrom nemo_automodel.b import c\n\n\n"
        'def f(a):\n    return {"a": a, "b": torch, "c": c, "x": x, "s": sys}\n'
    )


def test_formatting_again_changes_nothing() -> None:
    once = format_sources({"a.py": MESSY}, ("nemo_automodel",))
    assert format_sources(once, ("nemo_automodel",)) == once


def test_other_files_stay_as_they_are() -> None:
    sources = {"a.md": "a   b\r\n", "b.json": '{"a":1}', "c.yaml": "x:   1"}
    assert format_sources(sources, ()) == sources


def test_code_that_does_not_parse_is_our_bug() -> None:
    with pytest.raises(ValueError, match="ruff"):
        format_sources({"a.py": "def f(:\n"}, ())


def test_a_configuration_around_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ruff.toml").write_text("line-length = 20\n[format]\nquote-style = 'single'\n")
    monkeypatch.chdir(tmp_path)
    expected = format_sources({"a.py": MESSY}, ("nemo_automodel",))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert format_sources({"a.py": MESSY}, ("nemo_automodel",)) == expected


def test_findings(tmp_path: Path) -> None:
    (tmp_path / "ruff.toml").write_text("[lint]\nselect = []\n")
    (tmp_path / "good.py").write_text('"""Docs."""\n')
    assert lint(tmp_path) == ""
    (tmp_path / "bad.py").write_text("import os\n\n\ndef f():\n    x = undefined\n")
    found = lint(tmp_path)
    for rule in ("F401", "F821", "F841", "D103"):
        assert rule in found
    assert "bad.py:1" in found
