"""`onboard inspect` as a function."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from onboard.errors import Unsupported
from onboard.pipeline.inspecting import inspect_source

ROOT = Path(__file__).parents[2]
EXAMPLES = tuple(sorted(file.parent.name for file in (ROOT / "examples").glob("*/config.json")))


def written(folder: Path, **keys: object) -> str:
    raw = json.loads((ROOT / "examples" / "qwen3-0.6b" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **keys}))
    return str(folder)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_json(example: str) -> None:
    found = inspect_source(str(ROOT / "examples" / example), revision=None)
    payload = json.loads(json.dumps(found.as_json()))
    keys = {"schema_version", "source", "kind", "evidence", "architecture", "model_type", "spec", "nearest", "warnings"}
    assert keys <= set(payload)
    assert payload["kind"] == "dense"
    assert payload["evidence"]
    assert found.exit_status == 0
    if not payload["spec"]:
        # An architecture with a part that nothing explains has no measured spec, and that is said.
        assert any(payload["architecture"] in warning for warning in payload["warnings"])
        return
    assert set(payload["nearest"][0]) == {"architecture", "why"}
    assert payload["spec"]["dimensions"]["hidden_size"]["provenance"].startswith("config.json: ")
    assert all(len(row) == 4 and all(isinstance(cell, str) for cell in row) for row in found.rows)
    assert next(row[0] for row in found.rows) == "model"


def test_what_is_not_written(tmp_path: Path) -> None:
    found = inspect_source(
        written(tmp_path, architectures=["T5ForConditionalGeneration"], is_encoder_decoder=True), revision=None
    )
    payload = found.as_json()
    assert found.exit_status == 3
    assert (payload["kind"], payload["is"]) == ("unsupported", "encoder-decoder")
    assert payload["reason"]


def test_an_architecture_that_was_not_measured(tmp_path: Path) -> None:
    given = written(tmp_path, architectures=["SurpriseForCausalLM"], model_type="surprise", surprising_factor=7)
    found = inspect_source(given, revision=None)
    assert found.exit_status == 0
    assert found.spec == {}
    assert any("SurpriseForCausalLM" in warning for warning in found.warnings)
    assert any("surprising_factor=7" in warning for warning in found.warnings)


def test_a_known_architecture_under_another_name(tmp_path: Path) -> None:
    found = inspect_source(
        written(tmp_path, architectures=["SurpriseForCausalLM"], model_type="surprise"), revision=None
    )
    payload = json.loads(json.dumps(found.as_json()))
    assert payload["recognised"]["architecture"] == "Qwen3ForCausalLM"
    assert payload["recognised"]["why"]
    assert payload["unproven"][0]["what"] == "That SurpriseForCausalLM computes what Qwen3ForCausalLM computes."
    assert payload["spec"]["attention"]["qk_norm"]


@pytest.mark.parametrize("keys", [{"hidden_act": "sillu"}, {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}])
def test_names_that_the_reference_does_not_know(tmp_path: Path, keys: dict[str, object]) -> None:
    with pytest.raises(Unsupported):
        inspect_source(written(tmp_path, **keys), revision=None)


def test_keys_to_review(tmp_path: Path) -> None:
    found = inspect_source(written(tmp_path, temperature_of_attention=3.0), revision=None)
    assert any("temperature_of_attention" in item["what"] for item in found.review)
