"""What is generated reads as if written by hand: clean, complete, and without a word on what the model lacks."""

from __future__ import annotations

import ast
import json
import re
import warnings
from pathlib import Path

import pytest
from onboard.render.style import lint

ROOT = Path(__file__).parents[2]
EXAMPLES = tuple(sorted(file.parent.name for file in (ROOT / "examples").glob("*/config.json")))

pytestmark = pytest.mark.parametrize("example", EXAMPLES)


def package(project: Path) -> Path:
    return next((project / "src").iterdir())


def is_native(project: Path) -> bool:
    """Whether the package has layers of its own, instead of reusing transformers' decoder."""
    return "(GradientCheckpointingLayer)" in (package(project) / "model.py").read_text(encoding="utf-8")


def model_source(project: Path) -> str:
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(package(project).glob("*.py")))


def test_it_passes_the_linter(example: str, written) -> None:
    project = written(example)
    first_party = ("nemo_automodel", package(project).name)
    assert lint(project / "src", first_party) == ""
    # Names of tests say what docstrings would, as in upstream's own tests.
    findings = lint(project / "tests", first_party).splitlines()
    assert [finding for finding in findings if " D10" not in finding] == []


def test_it_compiles_without_a_warning(example: str, written) -> None:
    for file in written(example).rglob("*.py"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compile(file.read_text(encoding="utf-8"), str(file), "exec", dont_inherit=True)


def test_lines_and_characters(example: str, written) -> None:
    for file in written(example).rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert text.isascii(), file
        assert "\t" not in text, file
        assert not re.search(r"[ \t]+$", text, re.MULTILINE), file
        assert not text.endswith("\n\n"), file
        for number, line in enumerate(text.splitlines(), 1):
            assert len(line) <= 120, f"{file.name}:{number}"
        assert not re.search(r"\n\n\n\n", text), file


def test_no_trace_of_a_template(example: str, written) -> None:
    project = written(example)
    for file in project.rglob("*"):
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            assert not re.search(r"\{%|%\}|\{#|\{\{ |StrictUndefined|Undefined\b", text), file
            assert str(project) not in text, file
            assert str(ROOT) not in text, file


def public(tree: ast.AST, inside: str = ""):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield f"{inside}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public(node, f"{node.name}.")


def test_public_names_are_documented(example: str, written) -> None:
    for file in package(written(example)).glob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if tree.body:
            assert ast.get_docstring(tree), file
        for name, node in public(tree):
            assert ast.get_docstring(node), f"{file.name}: {name}"


def test_forward_methods_name_shapes(example: str, written) -> None:
    tree = ast.parse((package(written(example)) / "model.py").read_text(encoding="utf-8"))
    forwards = [node for name, node in public(tree) if name.endswith(".forward")]
    if not is_native(written(example)):
        # The forward pass is transformers' own, and so is what it says of itself.
        assert all(node.decorator_list for node in forwards)
        return
    assert len(forwards) >= 4
    for node in forwards:
        assert re.search(r"``\[.*[BST.].*\]``", ast.get_docstring(node) or ""), node.lineno


def test_no_device_of_its_own(example: str, written) -> None:
    source = model_source(written(example))
    for word in ("torch.cuda", ".cuda(", '"cuda', "'cuda", "get_device_name", "flash_attn_func"):
        assert word not in source


def test_every_test_opens_with_its_contract(example: str, written) -> None:
    for file in (written(example) / "tests").glob("test_*.py"):
        assert (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").startswith("Contract: "), file


# Words that a package may have only where its model has the feature; the families that have it.
FEATURES = {
    "sliding": {
        "gemma-3-1b",
        "mistral-7b-v0.1",
        "phi-3-mini-4k",
        "phi-4-mini",
        "qwen2.5-0.5b",
        "qwen3-0.6b",
        "smollm3-3b",
    },
    "use_rope": {"smollm3-3b"},
    "no_rope_layers": {"smollm3-3b"},
    "create_recurrent_attention_mask": {"bamba-9b"},
    "nn.Dropout": {"falcon-40b", "gpt2", "phi-3-mini-4k", "phi-4-mini"},
    "ScaledEmbedding": {"gemma-3-1b"},
    "q_norm": {"gemma-3-1b", "qwen3-0.6b", "olmo-2-7b"},
    "qkv_proj": {"phi-3-mini-4k", "phi-4-mini"},
    "gate_up_proj": {"phi-3-mini-4k", "phi-4-mini"},
    "softcap": {"gemma-3-1b"},
    "attention_bias": {"bamba-9b", "command-r", "llama-3.2-1b", "qwen3-0.6b", "olmo-2-7b", "gemma-3-1b", "smollm3-3b"},
    "mlp_bias": {"bamba-9b", "llama-3.2-1b", "smollm3-3b"},
    "longrope": {"phi-3-mini-4k", "phi-4-mini"},
    "post_feedforward_layernorm": {"gemma-3-1b", "olmo-2-7b"},
    "pre_feedforward_layernorm": {"gemma-3-1b"},
    "expert": set(),
    "router": set(),
    "vision": set(),
}


@pytest.mark.parametrize("word", FEATURES)
def test_no_branch_for_a_feature_that_the_model_lacks(example: str, word: str, written) -> None:
    source = model_source(written(example))
    adapter = "no tensor is split over experts"
    has = word in source.replace(adapter, "")
    if example not in FEATURES[word]:
        assert not has
    elif word not in ("longrope",):
        assert has, "or the table above is out of date"


@pytest.mark.parametrize("name", ["layers.py", "rope_utils.py"])
def test_helper_modules_are_there_only_where_needed(example: str, name: str, written) -> None:
    needs = {
        "layers.py": {"gemma-3-1b"},
        "rope_utils.py": {"bamba-9b", "command-r", "gemma-3-1b", "phi-4-mini"},
    }
    assert (package(written(example)) / name).exists() is (example in needs[name])


def test_no_module_or_name_is_left_over(example: str, written) -> None:
    """Each class and function of the package is used, or is what others import."""
    source = model_source(written(example))
    for name, node in public(ast.parse(source)):
        if "." not in name and not isinstance(node, ast.ClassDef):
            assert len(re.findall(rf"\b{name}\b", source)) > 1, name
    for name in re.findall(r"^def (_\w+)", source, re.MULTILINE):
        assert len(re.findall(rf"\b{name}\b", source)) > 1, name


def test_the_published_config_lies_beside_the_tests(example: str, written) -> None:
    copy = json.loads((written(example) / "tests" / "config.json").read_text(encoding="utf-8"))
    raw = json.loads((ROOT / "examples" / example / "config.json").read_text(encoding="utf-8"))
    assert {key: raw[key] for key in copy} == copy
    assert {"auto_map", "quantization_config"}.isdisjoint(copy)
