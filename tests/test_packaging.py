"""What is shipped: a wheel that holds the templates and the data, and works where the repository is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
WHERE = """
import json, onboard
from onboard.render.environment import templates_folder
print(json.dumps([onboard.__file__, str(templates_folder())]))
"""


def run(*command: str, cwd: Path, **variables: str) -> str:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "PYTHON", "HF_"))}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env={**kept, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shipped(folder: Path, ignored: str = "__pycache__") -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and ignored not in path.parts}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the source distribution, and the wheel that was made from it without a network."""
    folder = tmp_path_factory.mktemp("built")
    run("-m", "hatchling", "build", "-t", "sdist", "-d", str(folder), cwd=REPOSITORY)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder / "source", filter="data")
    source = next((folder / "source").iterdir())
    pip = ("-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--no-index", "--wheel-dir", str(folder), str(source), cwd=folder)
    return folder


def test_the_wheel_holds_the_package_and_the_templates(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        files = {name for name in wheel.namelist() if ".dist-info/" not in name}
        metadata = {name.split("/", 1)[1] for name in wheel.namelist() if ".dist-info/" in name}
    package = {f"onboard/{name}" for name in shipped(REPOSITORY / "generator" / "onboard")}
    templates = {f"onboard/_templates/{name}" for name in shipped(REPOSITORY / "templates")}
    assert files == package | templates
    assert {"licenses/LICENSE", "entry_points.txt", "METADATA"} <= metadata


def test_an_installed_wheel_works_without_the_repository(built, tmp_path):
    place = tmp_path / "installed"
    pip = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, "--target", str(place), str(next(built.glob("*.whl"))), cwd=tmp_path)
    found = run("-c", WHERE, cwd=tmp_path, PYTHONPATH=str(place))
    module, templates = map(Path, json.loads(found))
    assert module.is_relative_to(place)
    assert templates == place / "onboard" / "_templates"

    config = REPOSITORY / "examples" / "qwen3-0.6b" / "config.json"
    words = ("new", str(config), "--out", str(tmp_path / "project"), "--no-verify", "--json")
    made = run("-m", "onboard", *words, cwd=tmp_path, PYTHONPATH=str(place), HF_HUB_OFFLINE="1")
    assert (tmp_path / "project" / "src" / "nemo_automodel_qwen3" / "model.py").is_file()
    assert json.loads(made)["architecture"] == "Qwen3ForCausalLM"


def test_an_editable_install_uses_the_templates_of_the_repository():
    """And leaves no copy of them behind that would go stale."""
    found = run("-c", WHERE, cwd=REPOSITORY, PYTHONPATH=str(REPOSITORY / "generator"))
    module, templates = map(Path, json.loads(found))
    assert module.is_relative_to(REPOSITORY / "generator")
    assert templates == REPOSITORY / "templates"
