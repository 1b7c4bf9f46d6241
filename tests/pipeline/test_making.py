"""`onboard new` as a function: what it plans, writes and reports; its tests are run elsewhere."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from onboard.errors import Unsupported, UsageError
from onboard.pipeline import making
from onboard.pipeline.making import NewRequest, NewResult, make
from onboard.pipeline.verifying import check
from onboard.plan.targets import MODELS, REGISTRY
from onboard.verify.run import ProofResult

ROOT = Path(__file__).parents[2]
HEADER = "# Copyright (c) 2030, NVIDIA CORPORATION. All rights reserved.\n"


class Quiet:
    def __init__(self) -> None:
        self.steps: list[str] = []

    def start(self, label: str, total: int | None = None) -> None:
        self.steps.append(label)

    def advance(self, n: int = 1, note: str | None = None) -> None:
        pass

    def done(self, note: str | None = None) -> None:
        pass


@pytest.fixture(autouse=True)
def quick(quick_reference: None) -> None:
    """Measurements that were made before."""


def source(example: str) -> str:
    return str(ROOT / "examples" / example)


def run(example: str = "olmo-2-7b", **options: Any) -> NewResult:
    return make(NewRequest(source(example), **{"verify": False, **options}), Quiet())


def tree(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in little: the real registry, one model with a header, and a file that is nobody's business."""
    root = tmp_path / "checkout"
    installed = Path(find_spec("nemo_automodel").submodule_search_locations[0])
    registry = root / REGISTRY
    registry.parent.mkdir(parents=True)
    registry.write_bytes((installed / "_transformers" / "registry.py").read_bytes())
    model = root / MODELS / "theirs" / "model.py"
    model.parent.mkdir(parents=True)
    model.write_text(f"{HEADER}\nX = 1\n")
    (root / "notes.txt").write_text("keep me\n")
    return root


def test_the_json(tmp_path: Path) -> None:
    result = run(out=tmp_path / "out")
    payload = json.loads(json.dumps(result.as_json()))
    assert set(payload) == {
        "schema_version",
        "source",
        "kind",
        "architecture",
        "model_type",
        "name",
        "target",
        "out",
        "verify_path",
        "import",
        "files",
        "origins",
        "tests",
        "parity",
        "mutants",
        "capabilities",
        "warnings",
        "review",
        "unproven",
    }
    assert payload["unproven"] == []
    assert payload["schema_version"] == 1
    assert {"id", "revision", "path"} <= set(payload["source"])
    assert (payload["kind"], payload["architecture"], payload["model_type"]) == ("dense", "Olmo2ForCausalLM", "olmo2")
    assert payload["import"] == {
        "sys_path": str(tmp_path / "out" / "src"),
        "package": "nemo_automodel_olmo2",
        "model_module": "nemo_automodel_olmo2.model",
        "model_class": "Olmo2ForCausalLM",
        "adapter_class": "Olmo2StateDictAdapter",
    }
    origins = payload["origins"]
    assert origins["native"] == len(origins["modules"])
    assert origins["reused"] == origins["novel"] == 0
    assert {"path", "origin", "why"} == set(origins["modules"][0])
    assert payload["mutants"]["planted"] >= 8
    assert payload["mutants"]["caught"] is None
    assert set(payload["capabilities"].values()) == {False}
    assert sorted(payload["files"]) == sorted(tree(tmp_path / "out"))
    assert result.exit_status == 0


def test_all_files_of_the_design(tmp_path: Path) -> None:
    run(out=tmp_path / "out")
    files = set(tree(tmp_path / "out"))
    package = "src/nemo_automodel_olmo2"
    assert {f"{package}/{name}.py" for name in ("__init__", "model", "state_dict_adapter")} <= files
    tests = (
        "config",
        "forward",
        "state_dict_adapter",
        "layer_parity",
        "parity",
        "training",
        "registration",
        "packing",
        "mutants",
    )
    assert {f"tests/test_{name}.py" for name in tests} <= files
    assert {
        "pyproject.toml",
        "README.md",
        "REVIEW.md",
        ".onboard.lock.json",
        "examples/llm_finetune/olmo2/olmo2.yaml",
        "docs/model-coverage/llm/olmo2.mdx",
    } <= files


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    result = run(out=tmp_path / "out", dry_run=True, verify=True)
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.iterdir()) == []
    assert {row["action"] for row in result.summary_rows} == {"create"}
    assert {row["path"] for row in result.summary_rows} == set(result.payload["files"])
    assert all(row["reason"] for row in result.summary_rows)
    assert result.payload["tests"] is None
    assert result.exit_status == 0


def test_a_diff_is_a_patch_of_every_file(tmp_path: Path) -> None:
    result = run(out=tmp_path / "out", diff=True, dry_run=True)
    assert result.diff is not None
    for path in result.payload["files"]:
        if not path.endswith("__init__.py"):
            assert f"+++ b/{path}\n" in result.diff
    assert run(out=tmp_path / "out", dry_run=True).diff is None


def test_a_second_run_is_the_same(tmp_path: Path) -> None:
    """A project that is there needs --force; then each file is as it was."""
    run(out=tmp_path / "out")
    before = tree(tmp_path / "out")
    with pytest.raises(UsageError, match="cannot make"):
        run(out=tmp_path / "out")
    result = run(out=tmp_path / "out", force=True)
    assert tree(tmp_path / "out") == before
    assert {row["action"] for row in result.summary_rows} == {"same"}
    assert run(out=tmp_path / "out", diff=True, dry_run=True).diff == ""
    assert check(tmp_path / "out").exit_status == 0


def test_edits_by_hand_are_not_lost(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(out=out)
    model = next(out.glob("src/*/model.py"))
    model.write_text(model.read_text() + "\n# mine\n")
    before = tree(out)
    with pytest.raises(UsageError) as caught:
        run(out=out)
    assert "--force" in caught.value.do
    assert tree(out) == before
    assert check(out).exit_status == 1
    assert ("src/nemo_automodel_olmo2/model.py", "edited") in check(out).rows
    result = run(out=out, force=True)
    assert "# mine" not in model.read_text()
    backup = next(warning.rpartition(" ")[2] for warning in result.payload["warnings"] if "kept in" in warning)
    assert "# mine" in next(Path(backup).rglob("model.py")).read_text()
    assert check(out).exit_status == 0


def test_what_onboard_did_not_write_stays_where_it_is(tmp_path: Path) -> None:
    """A user's git history lies in the project's folder: --force replaces files, it does not move the folder."""
    out = tmp_path / "out"
    run(out=out)
    (out / ".git").mkdir()
    (out / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (out / "src" / "nemo_automodel_olmo2" / "extra.py").write_text("# mine\n")
    result = run(out=out, force=True)
    assert (out / ".git" / "HEAD").read_text() == "ref: refs/heads/main\n"
    assert (out / "src" / "nemo_automodel_olmo2" / "extra.py").read_text() == "# mine\n"
    assert not any("kept in" in warning for warning in result.payload["warnings"])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_dry_run_says_what_the_real_run_would_refuse(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(out=out)
    (out / "README.md").write_text("mine\n")
    said = run(out=out, dry_run=True).payload["warnings"]
    assert any("needs --force" in warning and "README.md" in warning for warning in said)
    assert not any("needs --force" in warning for warning in run(out=out, dry_run=True, force=True).payload["warnings"])


def test_a_folder_of_somebody_else_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "README.md").write_text("mine\n")
    with pytest.raises(UsageError):
        run(out=out)
    assert tree(out) == {"README.md": b"mine\n"}
    result = run(out=out, force=True)
    assert any("kept in" in warning for warning in result.payload["warnings"])
    kept = [path for path in tmp_path.rglob("README.md") if path.read_text() == "mine\n"]
    assert len(kept) == 1


def test_another_name(tmp_path: Path) -> None:
    result = run(out=tmp_path / "out", name="my_olmo")
    assert result.payload["name"] == "my_olmo"
    assert result.payload["import"]["package"] == "nemo_automodel_my_olmo"
    with pytest.raises(UsageError):
        run(out=tmp_path / "other", name="../up")
    assert not (tmp_path / "other").exists()


def test_a_builtin_architecture_is_warned_about(tmp_path: Path) -> None:
    warnings = run("qwen3-0.6b", out=tmp_path / "out").payload["warnings"]
    assert any("exist_ok=True" in warning for warning in warnings)
    assert not any("exist_ok" in warning for warning in run(out=tmp_path / "b").payload["warnings"])


def test_into_a_checkout(checkout: Path) -> None:
    before = tree(checkout)
    result = run(into=checkout)
    after = tree(checkout)
    payload = result.payload
    assert (payload["target"], payload["out"]) == ("intree", str(checkout))
    assert payload["import"]["package"] == "nemo_automodel.components.models.olmo2"
    assert payload["import"]["sys_path"] == str(checkout)
    assert set(after) - set(before) == set(payload["files"]) - {REGISTRY}
    assert {path for path in before if after[path] != before[path]} == {REGISTRY}
    registry = after[REGISTRY].decode()
    assert '"Olmo2ForCausalLM",' in registry
    compile(registry, "registry.py", "exec")
    for path in payload["files"]:
        if path.endswith(".py") and path != REGISTRY:
            assert after[path].decode().startswith(HEADER), path
    assert not any(path.endswith("pyproject.toml") for path in payload["files"])


def test_check_sees_that_the_registry_has_lost_the_row(checkout: Path) -> None:
    registry = checkout / REGISTRY
    original = registry.read_bytes()
    result = run(into=checkout)
    package = Path(result.payload["verify_path"])
    assert (REGISTRY, "same") in check(package).rows
    registry.write_bytes(original)
    assert (REGISTRY, "missing") in check(package).rows
    assert check(package).exit_status == 1


def test_into_a_checkout_twice(checkout: Path) -> None:
    run(into=checkout)
    before = tree(checkout)
    result = run(into=checkout)
    assert tree(checkout) == before
    assert {row["action"] for row in result.summary_rows} == {"same"}
    package = checkout / MODELS / "olmo2"
    assert check(package).exit_status == 0


def test_two_models_into_one_checkout(checkout: Path) -> None:
    run(into=checkout)
    before = tree(checkout)
    run("smollm3-3b", into=checkout)
    after = tree(checkout)
    assert {path for path in before if after[path] != before[path]} == {REGISTRY}
    for architecture in ("Olmo2ForCausalLM", "SmolLM3ForCausalLM"):
        assert after[REGISTRY].decode().count(f'"{architecture}",\n') == 1


def test_the_working_directory_chooses_the_target(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkout / MODELS)
    assert run(dry_run=True).payload["target"] == "intree"
    assert run(dry_run=True, target="plugin").payload["target"] == "plugin"
    assert run(dry_run=True, out=tmp_path / "out").payload["target"] == "plugin"
    monkeypatch.chdir(tmp_path)
    result = run(dry_run=True)
    assert (result.payload["target"], result.payload["out"]) == ("plugin", str(tmp_path / "nemo-automodel-olmo2"))


def test_no_checkout_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        run(into=tmp_path)
    assert caught.value.code == "target.no_checkout"
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_where_the_reference_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise Unsupported("no", "because", "do")

    monkeypatch.setattr(making, "ask_reference", refuse)
    with pytest.raises(Unsupported):
        run(out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("style", ["auto", "native"])
def test_what_is_not_understood_is_reused_unless_native_is_asked_for(
    style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the parts are explained and their checkpoint is not."""
    asked: list[Any] = []
    real = making.ask_reference

    def ask(config: Any, architecture: str, model_type: str, style: str, problem: Any = None) -> Any:
        asked.append((style, problem))
        if style == "reuse":
            raise Unsupported("no", f"neither: {problem['what']}", "do", code="second")
        return real(config, architecture, model_type)

    def refuse(*_: Any) -> Any:
        raise Unsupported("the layout", "is unheard of", "do", code="first")

    monkeypatch.setattr(making, "ask_reference", ask)
    monkeypatch.setattr(making, "derive", refuse)
    with pytest.raises(Unsupported) as caught:
        run(out=tmp_path / "out", style=style)
    assert caught.value.code == ("first" if style == "native" else "second")
    assert asked[0] == (style, None)
    assert len(asked) == (1 if style == "native" else 2)
    if style == "auto":
        assert "the layout is unheard of" in caught.value.why
    assert list(tmp_path.iterdir()) == []


def test_a_licence_header_of_the_users(tmp_path: Path) -> None:
    header = tmp_path / "header.txt"
    header.write_text("Copyright somebody\n")
    run(out=tmp_path / "out", license_header=header)
    for path in (tmp_path / "out").rglob("*.py"):
        assert path.read_text().startswith("# Copyright somebody\n"), path


RESULT = ProofResult(
    passed=41,
    failed=0,
    skipped=1,
    seconds=3.21,
    parity=(("base", 2e-6, 9.5), ("tied", 3e-6, 8.5)),
    planted=2,
    caught=2,
    failures=(),
    skips=("test_training::test_gpu: needs a GPU",),
    survived=(),
)


def test_results_are_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the JSON and in REVIEW.md, whose new hash the lock knows; a second run gives the same bytes."""
    monkeypatch.setattr(making, "run_tests", lambda *_, **__: RESULT)
    out = tmp_path / "out"
    result = run(out=out, verify=True)
    assert result.exit_status == 0
    assert result.payload["tests"]["passed"] == 41
    assert result.payload["parity"]["max_abs_logit_diff"] == 3e-6
    assert result.payload["mutants"] == {"planted": 2, "caught": 2, "survived": []}
    review = (out / "REVIEW.md").read_text()
    assert "needs a GPU" in review
    assert "41" in review
    assert check(out).exit_status == 0
    before = tree(out)
    run(out=out, verify=True, force=True)
    assert tree(out) == before


def test_a_failed_proof_is_exit_1_and_stays_to_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = ProofResult(40, 1, 0, 1.0, (), 2, 1, ("test_parity::test_x: 6.7",), (), ("test_mutants::test_m",))
    monkeypatch.setattr(making, "run_tests", lambda *_, **__: failed)
    result = run(out=tmp_path / "out", verify=True)
    assert result.exit_status == 1
    assert result.payload["parity"]["max_abs_logit_diff"] is None
    assert "test_parity::test_x" in (tmp_path / "out" / "REVIEW.md").read_text()
