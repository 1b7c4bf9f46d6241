"""`onboard doctor`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import tempfile

import pytest
from onboard.cli import _environment
from onboard.cli._environment import examine, satisfies

VERSIONS = {
    "click": "8.5.1",
    "rich": "15.0.0",
    "jinja2": "3.1.6",
    "huggingface_hub": "2.4.0",
    "safetensors": "0.8.0",
    "torch": "2.14.1+cu130",
    "transformers": "5.18.0",
    "nemo-automodel": "0.7.0",
    "pytest": "9.2.0",
    "ruff": "0.17.6",
    "libcst": "1.9.0",
    "pyyaml": "6.0.4",
    "pyarrow": "26.0.1",
    "triton": "3.8.0",
}
NOT_FOR_NEW = ("libcst", "pyyaml", "pyarrow")
REQUIRES = ["torch>=2.8.0", "transformers==5.18.0", 'torch<2.0; extra == "old"', "torchdata"]


@pytest.fixture
def installed(monkeypatch):
    """Versions that a test may change, instead of those of this environment."""
    versions = dict(VERSIONS)

    def version(name):
        if versions.get(name) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    def requires(name):
        version(name)
        return REQUIRES

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", requires)
    for variable in ("HF_ENDPOINT", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_HOME"):
        monkeypatch.delenv(variable, raising=False)
    return versions


def found(environ=None):
    return {check.name: check for check in examine({"HF_HOME": tempfile.gettempdir(), **(environ or {})})}


def test_all_is_well(installed, invoke):
    result = invoke("doctor")
    assert result.exit_code == 0
    assert "`onboard new` can work here." in result.stdout
    assert all(check.status == "ok" for check in found().values())


@pytest.mark.parametrize("name", [name for name in VERSIONS if name not in (*NOT_FOR_NEW, "triton")])
def test_missing_package_fails_and_says_what_to_install(installed, invoke, name):
    installed[name] = None
    assert found()[name].status == "fail"
    assert name in (found()[name].do or "")
    result = invoke("doctor")
    assert result.exit_code == 1
    assert f"cannot work before this is mended: {name}\n" in result.stdout


@pytest.mark.parametrize("name", NOT_FOR_NEW)
def test_what_checkouts_and_packing_alone_need_is_a_warning(installed, invoke, name):
    installed[name] = None
    assert found()[name].status == "warn"
    assert invoke("doctor").exit_code == 0


def test_old_package_fails(installed):
    installed["transformers"] = "4.57.1"
    assert found()["transformers"].status == "fail"
    assert found()["transformers"].do == "pip install 'transformers>=5.0'"


@pytest.mark.parametrize(
    ("triton", "automodel", "status"),
    [("3.9.0", "0.7.0", "fail"), ("3.10.0", "0.7.0", "fail"), ("3.9.0", None, "ok"), (None, "0.7.0", "ok")],
)
def test_triton_that_breaks_automodel(installed, triton, automodel, status):
    installed |= {"triton": triton, "nemo-automodel": automodel}
    assert found()["triton"].status == status


def test_pins_of_automodel(installed):
    installed |= {"transformers": "5.17.0", "torch": "2.7.1"}
    pins = found()
    assert pins["transformers for nemo-automodel"].do == "pip install 'transformers==5.18.0'"
    assert pins["torch for nemo-automodel"].status == "warn"


@pytest.mark.parametrize(
    ("version", "bounds", "kept"),
    [
        ("2.14.1+cu130", ">=2.6", True),
        ("2.6", ">=2.6.0", True),
        ("2.5.9", ">=2.6", False),
        ("3.10", "<3.9", False),
        ("5.18.0", "==5.18.0", True),
        ("5.18.1", "==5.18.0", False),
        ("2.0", ">=1, <2", False),
        ("2.0", "~=1.0", True),
        ("unknown", ">=1", True),
        ("1", "", True),
    ],
)
def test_satisfies(version, bounds, kept):
    assert satisfies(version, bounds) is kept


def test_old_python_fails(installed, monkeypatch):
    monkeypatch.setattr(_environment, "_OLDEST_PYTHON", (3, 99))
    assert found()["python"].status == "fail"


def test_token_is_never_shown(installed, invoke, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    monkeypatch.setenv("HF_ENDPOINT", "https://user:password@mirror.example/hf")
    for words in (["doctor"], ["doctor", "--json"], ["doctor", "--debug"]):
        said = invoke(*words).output
        assert "secret" not in said
        assert "password" not in said
        assert "https://mirror.example/hf" in said
    (tmp_path / "token").write_text("hf_secretsecret")
    check = found({"HF_HOME": str(tmp_path)})["HF_TOKEN"]
    assert check.found.startswith("not set; a token file is there")


@pytest.mark.parametrize("endpoint", ["mirror.example", "ftp://mirror.example", "https://", "http://[broken"])
def test_endpoint_that_cannot_work(installed, endpoint):
    assert found({"HF_ENDPOINT": endpoint})["HF_ENDPOINT"].status == "warn"


@pytest.mark.parametrize(("value", "status"), [("1", "warn"), ("true", "warn"), ("0", "ok"), ("", "ok")])
def test_offline(installed, value, status):
    assert found({"HF_HUB_OFFLINE": value})["HF_HUB_OFFLINE"].status == status


def test_cache_follows_the_variables(tmp_path):
    home = {"HF_HOME": str(tmp_path)}
    assert _environment.cache_folder(home) == tmp_path / "hub"
    assert _environment.cache_folder({**home, "HF_HUB_CACHE": "/there"}).as_posix() == "/there"
    assert _environment.cache_folder({"XDG_CACHE_HOME": "/x"}).as_posix() == "/x/huggingface/hub"


def test_cache_that_cannot_be_written(installed, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert found({"HF_HOME": str(tmp_path)})["cache"].status == "warn"
    (tmp_path / "file").write_text("")
    monkeypatch.undo()
    assert found({"HF_HOME": str(tmp_path / "file")})["cache"].status == "warn"


def test_no_temporary_folder_fails(installed, monkeypatch):
    def missing():
        raise FileNotFoundError

    monkeypatch.setattr(tempfile, "gettempdir", missing)
    checks = {check.name: check for check in examine({})}
    assert checks["temporary folder"].status == "fail"


def test_json(installed, invoke):
    payload = json.loads(invoke("doctor", "--json").stdout)
    assert payload["ok"] is True
    assert payload["checks"][0]["name"] == "python"
    assert set(payload["checks"][0]) == {"name", "status", "found", "do"}


def test_imports_no_package_that_it_looks_at(onboard):
    result = onboard("doctor", "--json", stub=False, PYTHONPROFILEIMPORTTIME="1")
    assert json.loads(result.stdout)["schema_version"] == 1
    imported = {
        line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time")
    }
    assert "click" in imported
    assert not imported & {"torch", "transformers", "nemo_automodel", "triton", "huggingface_hub", "libcst"}
    assert sys.executable in json.loads(result.stdout)["checks"][0]["found"]
