"""`onboard inspect`."""

from __future__ import annotations

import json


def test_human(invoke, calls):
    result = invoke("inspect", "acme/dense", "--revision", "main")
    assert (result.exit_code, result.stderr) == (0, "")
    assert calls == [("acme/dense", "main")]
    assert result.stdout == (
        "source        acme/dense@0123abc\n"
        "kind          dense\n"
        "architecture  AcmeForCausalLM (acme)\n"
        "nearest       qwen3 (same norms and rope)\n"
        "\n"
        "field                  value  from\n"
        "attention\n"
        "  num_attention_heads  16     config.json: num_attention_heads\n"
        "  head_dim             128    rule: hidden_size / num_attention_heads\n"
        "mlp\n"
        "  intermediate_size    3072   config.json: intermediate_size\n"
        "\n"
        "evidence\n"
        "  - architectures = ['AcmeForCausalLM']: a causal language model\n"
        "\n"
        "warnings\n"
        "  - sliding_window is set and never used\n"
        "\n"
        "to review\n"
        "  1. qk norm order: two candidates agree\n"
    )


def test_json(invoke):
    result = invoke("inspect", "acme/dense", "--json")
    payload = json.loads(result.stdout)
    assert payload["spec"] == {"rope": {"limit": "Infinity"}, "path": "a"}
    assert next(iter(payload)) == "schema_version"


def test_unsupported(invoke):
    result = invoke("inspect", "acme/t5")
    assert result.exit_code == 3
    assert "evidence\n  - architectures" in result.stdout
    assert "architecture  not named (acme)" in result.stdout
    assert result.stderr.splitlines()[:2] == [
        "error: acme/t5 is not supported: it is encoder-decoder",
        "  why: is_encoder_decoder is true",
    ]


def test_unsupported_in_json_is_an_inspection_and_no_error(invoke):
    result = invoke("inspect", "acme/t5", "--json")
    assert (result.exit_code, result.stderr) == (3, "")
    assert json.loads(result.stdout) == {
        "schema_version": 1,
        "source": {"id": "acme/t5"},
        "kind": "unsupported",
        "is": "encoder-decoder",
        "reason": "is_encoder_decoder is true",
    }
