"""Contract: every generated file has one place in each target, and no two models share one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from onboard.plan.changes import check_path
from onboard.plan.targets import MODELS, REGISTRY, find_checkout, layout, license_header

NVIDIA = "# Copyright (c) {}, NVIDIA CORPORATION. All rights reserved.\n#\n# Licensed under the Apache License\n"


def checkout(folder):
    (folder / REGISTRY).parent.mkdir(parents=True)
    (folder / REGISTRY).write_text("")
    return folder


def test_find_checkout_walks_up(tmp_path):
    root = checkout(tmp_path / "Automodel")
    deep = root / "examples" / "llm_finetune"
    deep.mkdir(parents=True)
    assert find_checkout(deep) == find_checkout(root) == root
    assert find_checkout(root / "not" / "there" / "yet") == root
    assert find_checkout(tmp_path) is None


def test_an_installed_package_is_no_checkout(tmp_path):
    assert find_checkout(checkout(tmp_path / "lib" / "site-packages")) is None


def test_plugin():
    places = layout("plugin", "gemma3_text", "dense", org="google")
    assert places.project == "nemo-automodel-gemma3-text"
    assert places.package_dir == "src/nemo_automodel_gemma3_text"
    assert places.import_package == "nemo_automodel_gemma3_text"
    assert places.docs_page == "docs/model-coverage/llm/gemma3_text.mdx"
    assert (places.lock, places.review, places.tests_dir) == (".onboard.lock.json", "REVIEW.md", "tests")
    assert places.registry is None


def test_intree():
    places = layout("intree", "qwen3_vl", "vlm", org="Qwen")
    assert places.package_dir == "nemo_automodel/components/models/qwen3_vl"
    assert places.import_package == "nemo_automodel.components.models.qwen3_vl"
    assert places.tests_dir == "tests/unit_tests/models/qwen3_vl"
    assert places.example_dir == "examples/vlm_finetune/qwen3_vl"
    assert places.docs_page == "docs/model-coverage/vlm/qwen/qwen3_vl.mdx"
    assert places.lock.startswith(places.package_dir)
    assert places.pyproject is None


@pytest.mark.parametrize("org", ["../..", "a/b", "", None, ".git", "x.", "nul", "\n", "é", "-", "~"])
def test_a_publisher_that_is_no_folder_name_is_left_out(org):
    assert layout("intree", "llama", "moe", org).docs_page == "docs/model-coverage/llm/llama.mdx"


@pytest.mark.parametrize("kind", ["dense", "moe", "vlm"])
def test_models_in_a_checkout_share_only_the_registry(kind):
    one, other = (set(map(str, asdict(layout("intree", name, kind, "org")).values())) for name in ("a1", "b1"))
    assert one & other == {"intree", "", ".", "None", REGISTRY, "vlm" if kind == "vlm" else "llm"}


@pytest.mark.parametrize("target", ["plugin", "intree"])
def test_all_places_are_safe_paths(target):
    places = asdict(layout(target, "llama", "moe", "meta-llama"))
    for name in ("package_dir", "tests_dir", "example_dir", "docs_page", "review", "lock"):
        check_path(places[name])


@pytest.mark.parametrize("name", ["../x", "Llama", "a-b", "", "json"])
def test_only_a_module_name_has_a_layout(name):
    with pytest.raises(Exception, match="module name"):
        layout("plugin", name, "dense")


def write_models(root, *texts):
    for number, text in enumerate(texts):
        file = root / MODELS / f"m{number}" / "model.py"
        file.parent.mkdir(parents=True)
        file.write_text(text)


def test_the_newest_year_wins_and_then_the_most_frequent(tmp_path):
    old, new, rare = NVIDIA.format(2025), NVIDIA.format(2026), NVIDIA.format(2026).replace("rights", "  rights")
    write_models(
        tmp_path,
        old,
        old,
        old,
        "#!/usr/bin/env python\n# coding: utf-8\n" + new,
        new + "\nimport os\n# not this\n",
        rare,
        "",
    )
    assert license_header(tmp_path) == new


def test_no_header(tmp_path):
    assert license_header(tmp_path) == ""
    write_models(
        tmp_path, "import os\n# Copyright 2026 somebody further down\n", '"""Doc."""\n', "# A comment of 2026\n"
    )
    assert license_header(tmp_path) == ""


def test_bytes_that_are_no_text(tmp_path):
    write_models(tmp_path, NVIDIA.format(2026))
    (tmp_path / MODELS / "bad.py").write_bytes(b"\xff\xfe\0")
    assert license_header(tmp_path) == NVIDIA.format(2026)


def test_the_installed_framework():
    nemo = pytest.importorskip("importlib.util").find_spec("nemo_automodel")
    if nemo is None:
        pytest.skip("nemo_automodel is not installed")
    header = license_header(Path(nemo.submodule_search_locations[0]).parent)
    assert header.startswith("# Copyright (c) 20")
    assert "Apache License" in header
    assert all(line.startswith("#") for line in header.splitlines())
