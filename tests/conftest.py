"""What the tests of several folders share: the examples, each measured once, and packages rendered from them."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# A shell starts its background jobs with these ignored, and children inherit that; the tests of Ctrl-C need them.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


ROOT = Path(__file__).parents[1]
# Set before the workers of pytest-xdist start, which must all choose the same dozen, also around midnight.
os.environ.setdefault("ONBOARD_DOZEN_SEED", datetime.datetime.now(datetime.timezone.utc).date().isoformat())


def pytest_report_header() -> str:
    return f"ONBOARD_DOZEN_SEED={os.environ['ONBOARD_DOZEN_SEED']} (chooses the architectures of test_sweep_dozen.py)"


def _load_breadth() -> None:
    """Make the sweep's package importable without its folder on the path, where coverage.py would hide a library."""
    folder = ROOT / "scripts" / "breadth"
    spec = importlib.util.spec_from_file_location(
        "breadth", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["breadth"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["breadth"])


_load_breadth()
EXAMPLES = tuple(sorted(file.parent.name for file in (ROOT / "examples").glob("*/config.json")))


@cache
def read_example(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "examples" / name / "config.json").read_text(encoding="utf-8"))


@cache
def measure(name: str) -> dict[str, Any]:
    """What the probe finds on an example, in this process instead of one of its own."""
    from onboard.reference.ask import understand
    from onboard.reference.probe import answer

    raw = read_example(name)
    named = {"architecture": raw["architectures"][0], "model_type": raw["model_type"], "config": raw}
    request = {**named, "style": "auto", "problem": None}
    return understand(json.loads(answer(request)), raw["architectures"][0])


@pytest.fixture
def measured() -> Callable[[str], dict[str, Any]]:
    """Example name to a measurement of its own."""
    return lambda name: json.loads(json.dumps(measure(name)))


@pytest.fixture
def quick_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """``onboard new`` in this process, with measurements that were made before."""
    from onboard.pipeline import making

    by_type = {read_example(name)["model_type"]: name for name in EXAMPLES if name != "phi-4-mini"}
    monkeypatch.setattr(
        making, "ask_reference", lambda _config, _architecture, model_type, *_: measure(by_type[model_type])
    )


class Quiet:
    """Nobody looks at the progress."""

    def start(self, label: str, total: int | None = None) -> None:
        pass

    def advance(self, n: int = 1, note: str | None = None) -> None:
        pass

    def done(self, note: str | None = None) -> None:
        pass


@cache
def _written(name: str, root: Path) -> Path:
    from onboard.pipeline import making

    request = making.NewRequest(str(ROOT / "examples" / name), out=root / name, verify=False)
    original, making.ask_reference = making.ask_reference, lambda *_: measure(name)
    try:
        making.make(request, Quiet())
    finally:
        making.ask_reference = original
    return root / name


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Example name to the folder of its generated project, written once; copy it before you change it."""
    root = tmp_path_factory.mktemp("packages")
    return lambda name: _written(name, root)
