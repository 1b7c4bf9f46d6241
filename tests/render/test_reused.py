"""Packages that reuse transformers' modules: clean, complete, and open about what is novel."""

from __future__ import annotations

import ast
import json
import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from onboard.pipeline import making
from onboard.reference.ask import understand
from onboard.reference.probe import answer
from onboard.render.style import lint


class Quiet:
    """Progress that nobody looks at."""

    def start(self, label: str, total: int | None = None) -> None: ...

    def advance(self, n: int = 1, note: str | None = None) -> None: ...

    def done(self, note: str | None = None) -> None: ...


SIZES = {"vocab_size": 512, "hidden_size": 96, "num_hidden_layers": 5}
HEADS = {"intermediate_size": 200, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "decoder": {
        "architectures": ["CohereForCausalLM"],
        "model_type": "cohere",
        **SIZES,
        **HEADS,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
    },
    "model": {"architectures": ["MambaForCausalLM"], "model_type": "mamba", **SIZES, "state_size": 8},
    "parts": {
        "architectures": ["OlmoHybridForCausalLM"],
        "model_type": "olmo_hybrid",
        **SIZES,
        **HEADS,
        "pad_token_id": 0,
        "eos_token_id": 2,
    },
}


def ask_here(config: Any, architecture: str, model_type: str | None, style: str, problem: Any = None) -> dict[str, Any]:
    """The probe in this process."""
    request = {"architecture": architecture, "model_type": model_type, "config": dict(config)}
    found = answer({**request, "style": style, "problem": problem})
    return understand(json.loads(found), architecture)


@cache
def _written(level: str, root: Path) -> tuple[Path, dict[str, Any]]:
    folder = root / level
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[level]), encoding="utf-8")
    # Asked for: colleagues may explain these architectures one day.
    request = making.NewRequest(str(folder), out=folder / "project", verify=False, style="reuse")
    original, making.ask_reference = making.ask_reference, ask_here
    try:
        result = making.make(request, Quiet())
    finally:
        making.ask_reference = original
    return folder / "project", dict(result.payload)


@pytest.fixture(scope="session")
def reused(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Level to the project's folder and what ``onboard new`` reported, made once."""
    root = tmp_path_factory.mktemp("reused")
    return lambda level: _written(level, root)


pytestmark = pytest.mark.parametrize("level", list(CONFIGS))


def sources(project: Path) -> list[Path]:
    return sorted(next((project / "src").iterdir()).glob("*.py"))


def test_it_passes_the_linter(level: str, reused: Any) -> None:
    project, _ = reused(level)
    first_party = ("nemo_automodel", next((project / "src").iterdir()).name)
    assert lint(project / "src", first_party) == ""
    findings = lint(project / "tests", first_party).splitlines()
    assert [finding for finding in findings if " D10" not in finding] == []


def test_lines_characters_and_warnings(level: str, reused: Any) -> None:
    project, _ = reused(level)
    for file in project.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert text.isascii(), file
        assert max(map(len, text.splitlines()), default=0) <= 120, file
        assert not re.search(r"\n\n\n\n|[ \t]+$|\{%|%\}|\{\{ ", text, re.MULTILINE), file
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compile(text, str(file), "exec", dont_inherit=True)


def test_public_names_are_documented(level: str, reused: Any) -> None:
    project, _ = reused(level)
    for file in sources(project):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if tree.body:
            assert ast.get_docstring(tree), file
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{file.name}: {node.name}"


def test_no_name_is_left_over(level: str, reused: Any) -> None:
    project, _ = reused(level)
    source = "\n".join(file.read_text(encoding="utf-8") for file in sources(project))
    for name in re.findall(r"^def (\w+)", source, re.MULTILINE):
        assert len(re.findall(rf"\b{name}\b", source)) > 1, name
    for file in (project / "tests").glob("test_*.py"):
        assert (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").startswith("Contract: "), file


def test_what_is_reused(level: str, reused: Any) -> None:
    project, payload = reused(level)
    model = (project / "src" / payload["import"]["package"] / "model.py").read_text(encoding="utf-8")
    origins = payload["origins"]
    for origin in ("native", "reused", "novel"):
        assert origins[origin] == sum(module["origin"] == origin for module in origins["modules"])
    if level == "decoder":
        assert origins["native"] == 1
        assert "self.model = CohereModel(config)" in model
        assert "logits = logits * self.config.logit_scale" in model
        assert not re.search(r"import .*CohereForCausalLM", model)
    elif level == "parts":
        assert origins["native"] == 1
        rows = (project / "REVIEW.md").read_text(encoding="utf-8").split("## Key map")[1]
        parts = ", ".join(f"`model.layers.{{layer}}.linear_attn.{name}_conv1d.weight`" for name in "qkv")
        assert f"| {parts} | `model.layers.{{layer}}.linear_attn.conv1d.weight` | join along 0 | [" in rows
        assert any("are written with as many rows as" in item for item in payload["review"])
    else:
        assert origins["native"] == 0
        assert "class MambaForCausalLM(HFCheckpointingMixin, HFMambaForCausalLM):" in model
    assert payload["capabilities"] == {"tp": False, "cp": False, "pp": False, "ep": False}
    assert payload["mutants"]["planted"] >= 10


def test_the_report_names_what_is_novel(level: str, reused: Any) -> None:
    project, payload = reused(level)
    review = (project / "REVIEW.md").read_text(encoding="utf-8")
    novel = [module["path"] for module in payload["origins"]["modules"] if module["origin"] == "novel"]
    first = review.split("## Review these first")[1].split("## Where each part")[0]
    for path in novel:
        assert f"1. `{path}`" in first
        assert any(warning.startswith(f"{path} is novel") for warning in payload["warnings"])
    for module in payload["origins"]["modules"]:
        assert f"| `{module['path']}` | {module['origin']} |" in review
    assert "NOVEL = [" in (project / "tests" / "test_origins.py").read_text(encoding="utf-8")
    if level == "model":
        assert novel == ["backbone.layers.*.mixer"]
        assert "the whole class is reused" in review


def test_the_key_map_has_the_real_shapes(level: str, reused: Any) -> None:
    project, payload = reused(level)
    adapter = (project / "src" / payload["import"]["package"] / "state_dict_adapter.py").read_text(encoding="utf-8")
    assert '"[512, 96]"' in adapter
    assert adapter.count("KeyRow(") >= 8
