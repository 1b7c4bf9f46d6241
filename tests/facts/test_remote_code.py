"""Which files a model's own code is. They are read, never run: each of these leaves a mark if it is imported."""

from __future__ import annotations

import json

import pytest
from onboard.errors import Unsupported
from onboard.facts import read_facts
from onboard.facts.remote_code import names_code, read_remote_code

AUTO_MAP = {"AutoConfig": "configuration_toy.ToyConfig", "AutoModelForCausalLM": "modeling_toy.ToyForCausalLM"}


@pytest.fixture
def repo(tmp_path):
    """Writes a directory with code, whose every module would leave a mark; gives back what is read of it."""

    def write(files, auto_map=AUTO_MAP):
        mark = f"open({str(tmp_path / 'RAN')!r}, 'w')\n"
        for name, text in files.items():
            (tmp_path / name).write_text(text + mark, encoding="utf-8")
        (tmp_path / "config.json").write_text(json.dumps({"auto_map": auto_map}))
        return read_remote_code(read_facts(str(tmp_path)))

    yield write
    assert not (tmp_path / "RAN").exists()


CODE = {"configuration_toy.py": "", "modeling_toy.py": "from .configuration_toy import ToyConfig\n"}


def test_the_named_modules_are_read(repo):
    code = repo(CODE)
    assert list(code.files) == ["configuration_toy.py", "modeling_toy.py"]
    assert (code.config, code.model) == ("configuration_toy.ToyConfig", "modeling_toy.ToyForCausalLM")


def test_imports_are_followed_wherever_they_stand(repo):
    modeling = (
        "from .a import x\nfrom . import b, no_module\ntry:\n    from .c.d import y\nexcept ImportError:\n    pass\n"
        "def late():\n    from .e import z\n"
    )
    rest = {"a.py": "from .f import w\nfrom .modeling_toy import late\n", **dict.fromkeys(("b.py", "c.py", "e.py"), "")}
    code = repo({**CODE, **rest, "f.py": "", "modeling_toy.py": modeling})
    assert list(code.files) == ["a.py", "b.py", "c.py", "configuration_toy.py", "e.py", "f.py", "modeling_toy.py"]


@pytest.mark.parametrize(
    "stray", ["conftest.py", "test_model.py", "setup.py", "__init__.py", "web-demo.py", "tokenization_toy.py"]
)
def test_other_python_files_are_no_part_of_it(repo, stray):
    """pytest would load the first two from the generated tests; a name that is no module's would refuse the model."""
    assert stray not in repo({**CODE, stray: "import torch\n"}).files


def test_a_stray_file_may_be_broken(repo):
    assert len(repo({**CODE, "notes.py": "this is (not Python\n"}).files) == 2


@pytest.mark.parametrize(
    ("files", "auto_map", "why"),
    [
        ({"configuration_toy.py": ""}, AUTO_MAP, "modeling_toy.py, which is not there"),
        (CODE, {"AutoModelForCausalLM": "modeling_toy.ToyForCausalLM"}, "no AutoConfig"),
        (CODE, {**AUTO_MAP, "AutoConfig": "other/repo--configuration_toy.ToyConfig"}, "another repo, other/repo"),
        (CODE, {**AUTO_MAP, "AutoConfig": "..configuration_toy.ToyConfig"}, "auto_map names"),
        (CODE, {**AUTO_MAP, "AutoConfig": "configuration_toy.Toy Config"}, "auto_map names"),
        ({**CODE, "modeling_toy.py": "def (:\n"}, AUTO_MAP, "modeling_toy.py is not Python"),
        ({**CODE, "modeling_toy.py": "x = '\0'\n"}, AUTO_MAP, "modeling_toy.py is not Python"),
    ],
)
def test_what_cannot_be_used_is_named(repo, files, auto_map, why):
    with pytest.raises(Unsupported) as refusal:
        repo(files, auto_map)
    assert why in refusal.value.why
    assert refusal.value.do


@pytest.mark.parametrize("auto_map", [None, [], "x", {}, {"AutoConfig": "a.B"}, {"AutoModel": 3}])
def test_a_config_without_a_model_class_names_no_code(auto_map):
    assert not names_code({"auto_map": auto_map})
