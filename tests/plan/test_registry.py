"""Contract: one row more at the place the alphabet wants, everything else byte for byte as it was; twice is once."""

from __future__ import annotations

import ast
import difflib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onboard.errors import UsageError
from onboard.plan.registry import insert_row, registry_change
from onboard.plan.targets import REGISTRY

MODULE = "nemo_automodel.components.models.{}.model"

SMALL = """\
from collections import OrderedDict

# The mapping.
MODEL_ARCH_MAPPING = OrderedDict(
    [  # sorted, mostly
        # about the bee
        (
            "BeeForCausalLM",
            ("m.bee", "BeeForCausalLM"),
        ),  # a bee
        # about the dog
        (
            # inside the dog
            "DogForCausalLM",
            ("m.dog", "DogForCausalLM", {"hf_parallelizer"}),
        ),
        (
            "AntForCausalLM",  # out of order
            (
                "m.ant",
                "AntForCausalLM",
            ),
        ),
        # the end
    ]
)
OTHER = {"x" : 1}   # odd   spacing
"""


@pytest.fixture(scope="module")
def real():
    spec = find_spec("nemo_automodel")
    if spec is None:
        pytest.skip("nemo_automodel is not installed")
    return (Path(spec.submodule_search_locations[0]) / "_transformers" / "registry.py").read_bytes().decode()


def rows(source):
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "MODEL_ARCH_MAPPING":
            return [
                ast.literal_eval(row)
                for row in (node.value.args[0] if isinstance(node.value, ast.Call) else node.value).elts
            ]
    raise AssertionError("no mapping")


def added(before, after):
    """The new lines; everything else has to be as it was."""
    lines = list(difflib.ndiff(before.splitlines(True), after.splitlines(True)))
    assert not [line for line in lines if line.startswith("-")]
    return "".join(line[2:] for line in lines if line.startswith("+"))


def insert(source, architecture, module="m.x", class_name=None, force=False):
    return insert_row(source, architecture, module, class_name or architecture, force=force)


@pytest.mark.parametrize(
    ("architecture", "after"),
    [
        ("AfmoeForCausalLM", None),
        ("FalconForCausalLM", "Ernie4_5_MoeForCausalLM"),
        ("JambaForCausalLM", "GptOssForCausalLM"),
        ("Qwen3_5NewForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        ("ZambaForCausalLM", "Step3p7ForConditionalGeneration"),
    ],
)
def test_the_real_file(real, architecture, after):
    result = insert(real, architecture, MODULE.format("new"))
    keys = [key for key, _ in rows(result)]
    place = keys.index(architecture)
    assert (keys[place - 1] if place else None) == after
    assert rows(result)[place][1] == (MODULE.format("new"), architecture)
    assert [row for row in rows(result) if row[0] != architecture] == rows(real)
    value = f'("{MODULE.format("new")}", "{architecture}")'
    new = f'        (\n            "{architecture}",\n            {value},\n        ),\n'
    assert real.replace(new, "") == real
    assert result.replace(new, "", 1) == real
    assert insert(result, architecture, MODULE.format("new")) == result


def test_a_long_row_is_broken_as_ruff_breaks_it(real, tmp_path):
    name = "VeryLongNameOfAnArchitectureForConditionalGeneration"
    result = insert(real, name, MODULE.format("very_long_name_of_an_architecture"))
    assert f'            (\n                "{MODULE.format("very_long_name_of_an_architecture")}",\n' in added(
        real, result
    )
    edge = "X" * (120 - len(f'            ("{MODULE.format("x")}", ""),'))
    for class_name, broken in ((edge, False), (edge + "X", True)):
        text = insert(real, "XForCausalLM", MODULE.format("x"), class_name)
        assert (added(real, text).count("\n") == 7) == broken
    (tmp_path / "r.py").write_text(result)
    command = [
        sys.executable,
        "-m",
        "ruff",
        "format",
        "--isolated",
        "--line-length",
        "120",
        "--check",
        str(tmp_path / "r.py"),
    ]
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_every_row_of_the_real_file_could_be_put_back(real):
    """Registering what is registered changes nothing, for every style of row there is."""
    found = rows(real)
    for key, value in [*found[::8], *(row for row in found if len(row[1]) > 2)]:
        assert insert_row(real, key, value[0], value[1], force=False) == real


@settings(max_examples=40, deadline=None)
@given(st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,20}", fullmatch=True))
def test_any_name_goes_in_once(name):
    try:
        result = insert(SMALL, name + "X")
    except UsageError:
        return
    assert sorted(rows(result)) == sorted([*rows(SMALL), (name + "X", ("m.x", name + "X"))])
    added(SMALL, result)
    assert insert(result, name + "X") == result


def test_comments_stay_with_their_rows():
    ant, cat, eel = (insert(SMALL, name) for name in ("AardForCausalLM", "CatForCausalLM", "EelForCausalLM"))
    assert '    [  # sorted, mostly\n        (\n            "AardForCausalLM",' in ant
    assert '        ),\n        # about the bee\n        (\n            "Bee' in ant
    assert '        ),  # a bee\n        (\n            "CatForCausalLM",' in cat
    assert "        ),\n        # about the dog\n        (\n            # inside" in cat
    assert '{"hf_parallelizer"}),\n        ),\n        (\n            "EelForCausalLM",' in eel
    zoo = insert(SMALL.replace('"AntForCausalLM",  # out', '"YakForCausalLM",  # out'), "ZooForCausalLM")
    assert '        ),\n        (\n            "ZooForCausalLM",' in zoo
    assert '("m.x", "ZooForCausalLM"),\n        ),\n        # the end\n    ]' in zoo


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            'MODEL_ARCH_MAPPING = [("B", ("m", "B"))]\n',
            'MODEL_ARCH_MAPPING = [("B", ("m", "B")), ("C", ("m.x", "C"))]\n',
        ),
        (
            'MODEL_ARCH_MAPPING = [("D", ("m", "D"))]\n',
            'MODEL_ARCH_MAPPING = [("C", ("m.x", "C")), ("D", ("m", "D"))]\n',
        ),
        (
            'MODEL_ARCH_MAPPING: dict = OrderedDict([("B", ("m", "B")), ("D", ("m", "D")),])\n',
            'MODEL_ARCH_MAPPING: dict = OrderedDict([("B", ("m", "B")), ("C", ("m.x", "C")), ("D", ("m", "D")),])\n',
        ),
        (
            'MODEL_ARCH_MAPPING = [\n  ("B", ("m", "B"))  # last\n]\n',
            'MODEL_ARCH_MAPPING = [\n  ("B", ("m", "B")),  # last\n  (\n    "C",\n    ("m.x", "C"),\n  )\n]\n',
        ),
    ],
)
def test_other_formats(source, expected):
    assert insert(source, "C") == expected


def test_line_ends_and_missing_last_newline_are_kept():
    windows = SMALL.replace("\n", "\r\n")
    assert insert(windows, "CatForCausalLM") == insert(SMALL, "CatForCausalLM").replace("\n", "\r\n")
    assert insert(SMALL.rstrip("\n"), "CatForCausalLM") == insert(SMALL, "CatForCausalLM").rstrip("\n")


def test_a_row_of_somebody_else_stays_without_force():
    with pytest.raises(UsageError) as caught:
        insert(SMALL, "DogForCausalLM")
    assert caught.value.code == "registry.conflict"
    assert "m.dog.DogForCausalLM" in caught.value.why
    assert "--force" in caught.value.do


def test_force_replaces_the_value_and_nothing_else():
    result = insert(SMALL, "DogForCausalLM", force=True)
    assert result == SMALL.replace('("m.dog", "DogForCausalLM", {"hf_parallelizer"})', '("m.x", "DogForCausalLM")')
    assert insert(result, "DogForCausalLM") == result
    assert dict(rows(insert(SMALL, "AntForCausalLM", force=True)))["AntForCausalLM"] == ("m.x", "AntForCausalLM")


def test_of_two_rows_the_last_counts():
    source = 'MODEL_ARCH_MAPPING = [("B", ("m.x", "B")), ("B", ("n", "B"))]\n'
    with pytest.raises(UsageError):
        insert(source, "B")
    assert insert(source, "B", force=True) == source.replace('"n"', '"m.x"')


def test_rows_that_are_no_literals_are_left_alone():
    source = 'MODEL_ARCH_MAPPING = [*MORE, (KEY, ("m", "B")), ("D", VALUE), ("E", ("m", NAME)), make("F")]\n'
    assert insert(source, "C").index('"C"') < source.index('"D"') + 30
    for key in "DE":
        with pytest.raises(UsageError, match="already"):
            insert(source, key)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("", "assigns no"),
        ("x = 1\n", "assigns no"),
        ("MODEL_ARCH_MAPPING = load()\n", "not a list"),
        ("MODEL_ARCH_MAPPING = {}\n", "not a list"),
        ("MODEL_ARCH_MAPPING = []\n", "no rows"),
        ("MODEL_ARCH_MAPPING: dict\n", "not a list"),
        ("MODEL_ARCH_MAPPING = [\n", "parsed"),
        ("def f():\n    MODEL_ARCH_MAPPING = []\n", "assigns no"),
    ],
)
def test_a_file_without_the_mapping(source, why):
    with pytest.raises(UsageError, match="cannot edit") as caught:
        insert(source, "C")
    assert why in caught.value.why
    assert caught.value.code == "registry.unreadable"


@pytest.mark.parametrize(
    "arguments",
    [('x"y', "m", "C"), ("X", "m;x", "C"), ("X", "m..x", "C"), ("X", "", "C"), ("X", "m", "class"), ("X\n", "m", "C")],
)
def test_no_string_gets_into_the_code_unchecked(arguments):
    with pytest.raises(UsageError):
        insert_row(SMALL, *arguments, force=True)


def test_as_a_change_of_a_plan(tmp_path):
    with pytest.raises(UsageError, match="has no"):
        registry_change(tmp_path, "CatForCausalLM", "m.x", "CatForCausalLM", force=False)
    file = tmp_path / REGISTRY
    file.parent.mkdir(parents=True)
    file.write_bytes(SMALL.encode())
    change = registry_change(tmp_path, "CatForCausalLM", "m.x", "CatForCausalLM", force=False)
    assert change.edits_existing
    assert change.content == insert(SMALL, "CatForCausalLM")
    file.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="cannot edit"):
        registry_change(tmp_path, "CatForCausalLM", "m.x", "CatForCausalLM", force=False)


def test_libcst_is_imported_by_this_module_alone():
    code = "import sys, onboard.plan.apply, onboard.plan.lock, onboard.plan.targets; sys.exit('libcst' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
