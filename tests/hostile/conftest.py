from __future__ import annotations

import json

import pytest

from .harness import QWEN, ask_here


@pytest.fixture(scope="session")
def measured(tmp_path_factory):
    """A file with the measurement of Qwen3, made once."""
    file = tmp_path_factory.mktemp("measured") / "measured.json"
    file.write_text(json.dumps(ask_here(QWEN, "Qwen3ForCausalLM", "qwen3")))
    return file
