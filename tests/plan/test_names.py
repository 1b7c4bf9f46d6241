"""Contract: whatever string comes in, a name that is safe in code and in a path comes out, or a UsageError."""

from __future__ import annotations

import ast
import keyword
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onboard.errors import UsageError
from onboard.plan.changes import check_path
from onboard.plan.names import check_identifier, class_prefix, package_name

from .trees import outcome

# Strings near the border are found more often than by plain text().
NAMES = (
    st.text()
    | st.from_regex(r"[A-Za-z_\-.0-9]{0,80}(ForCausalLM|Model)?", fullmatch=True)
    | st.sampled_from(keyword.kwlist)
)

HOSTILE = [
    "", " ", "a b", "../x", "a/b", "a\\b", "x\n", "x\0",
    "x;import os", "x'", 'x"', "{x}", "{{x}}", "é", "ﬁ", "x\u202ey",
    "1x", "__init__", "x" * 129, "класс", "class",
]  # fmt: skip


@given(NAMES)
def test_an_identifier_or_an_error(value):
    name, error = outcome(check_identifier, value, "it")
    if error:
        assert error.code == "name.invalid"
        assert (error.what + error.why + error.do).isprintable()
        return
    assert name == value
    tree = ast.parse(f"class {name}: pass")
    assert tree.body[0].name == value
    assert name.isascii()
    assert not name.startswith("__")


@given(NAMES)
def test_a_prefix_or_an_error(value):
    prefix, error = outcome(class_prefix, value)
    if error:
        return
    assert value.startswith(prefix)
    assert f"{prefix}Attention".isidentifier()


@given(NAMES)
def test_a_module_name_or_an_error(value):
    name, error = outcome(package_name, value)
    if error:
        assert error.code == "name.invalid"
        assert "--name" in error.do
        assert (error.what + error.why).isprintable()
        return
    assert name.isidentifier()
    assert name.isascii()
    assert name == name.lower()
    assert not keyword.iskeyword(name)
    assert name not in sys.stdlib_module_names
    assert "__" not in name
    assert len(name) <= 64
    assert package_name(name) == name
    check_path(f"src/nemo_automodel_{name}/{name}/model.py")


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("function", [package_name, class_prefix, lambda value: check_identifier(value, "it")])
def test_hostile(function, value):
    with pytest.raises(UsageError):
        function(value)


@pytest.mark.parametrize("value", [None, 1, [], {}, b"x", ["LlamaForCausalLM"]])
@pytest.mark.parametrize("function", [package_name, class_prefix, lambda value: check_identifier(value, "it")])
def test_what_else_json_can_hold(function, value):
    with pytest.raises(UsageError):
        function(value)


@pytest.mark.parametrize(
    "value", ["test", "json", "types", "common", "conftest", "torch", "aux", "con", "lambda", "com1"]
)
def test_taken_names(value):
    with pytest.raises(UsageError):
        package_name(value)


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ("gemma3_text", "gemma3_text"),
        ("llama", "llama"),
        ("xlm-roberta", "xlm_roberta"),
        ("qwen2.5", "qwen2_5"),
        ("Kimi_K2", "kimi_k2"),
        ("LlamaForCausalLM", "llama"),
        ("Qwen3MoeForCausalLM", "qwen3_moe"),
        ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe"),
        ("GPT2LMHeadModel", "gpt2"),
        ("DeepseekV3ForCausalLM", "deepseek_v3"),
        ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe"),
    ],
)
def test_module_names(given_, expected):
    assert package_name(given_) == expected


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("LlamaForCausalLM", "Llama"),
        ("Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoe"),
        ("GPT2LMHeadModel", "GPT2"),
        ("LlamaBidirectionalModel", "LlamaBidirectional"),
        ("LLaVAOneVision1_5_ForConditionalGeneration", "LLaVAOneVision1_5"),
        ("NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_Omni_Reasoning_V3"),
        ("TransForMerForCausalLM", "TransForMer"),
        ("Performer", "Performer"),
    ],
)
def test_prefixes(architecture, expected):
    assert class_prefix(architecture) == expected


@pytest.mark.parametrize("architecture", ["NoneForCausalLM", "1ForCausalLM"])
def test_prefixes_that_are_no_names(architecture):
    with pytest.raises(UsageError):
        class_prefix(architecture)


def test_every_model_type_and_class_of_transformers_has_a_name():
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        pytest.skip("transformers is not installed")
    folder = Path(spec.origin).parent / "models" / "auto"
    pairs = [
        (node.elts[0].value, node.elts[1].value)
        for file in ("modeling_auto.py", "auto_mappings.py", "configuration_auto.py")
        if (folder / file).is_file()
        for node in ast.walk(ast.parse((folder / file).read_text()))
        if isinstance(node, ast.Tuple) and len(node.elts) == 2 and all(isinstance(e, ast.Constant) for e in node.elts)
    ]
    assert len(pairs) > 500
    for model_type, class_name in pairs:
        if isinstance(model_type, str) and isinstance(class_name, str):
            assert package_name(model_type)
            assert class_prefix(class_name)
