"""Reads facts in a process of its own, because the Hub's client takes its environment at import.

``read_in_new_process`` runs this file; the result comes back in a file, so that whatever the reading prints is seen.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Reading:
    """What one call of ``read_facts`` led to: facts, or an error, or (a bug) some other exception's traceback."""

    facts: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)
    exit_status: int = 0
    traceback: str = ""
    seconds: float = 0

    @property
    def code(self) -> str | None:
        """The error's code."""
        return self.error.get("code")


@dataclass
class Readings:
    """The readings of one process, and everything that it printed."""

    readings: list[Reading]
    stdout: str
    stderr: str
    modules: list[str]

    def __iter__(self) -> Iterator[Reading]:
        return iter(self.readings)

    @property
    def everything(self) -> str:
        """All text that a user could come to see, tracebacks included."""
        return self.stdout + self.stderr + json.dumps([vars(reading) for reading in self.readings])


def read_in_new_process(
    *calls: str | dict[str, Any],
    home: Path,
    hub: str | None = None,
    environment: dict[str, str] | None = None,
    settings: dict[str, float] | None = None,
    cwd: Path | None = None,
    terminal: bool = False,
) -> Readings:
    """Call ``read_facts`` in a new process, once for each of ``calls``.

    Args:
        calls: a source, or the keyword arguments.
        home: for HF_HOME, so that the cache and the token are the test's own.
        hub: for HF_ENDPOINT.
        environment: more variables.
        settings: constants of ``onboard.facts.hub_http``, beside a shorter wait before the second try.
        cwd: the working directory.
        terminal: whether the process's stderr is a terminal, on which progress bars appear.
    """
    import onboard

    home.mkdir(parents=True, exist_ok=True)
    result = home / "result.json"
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "TRANSFORMERS"))}
    variables = {
        **kept,
        "HF_HOME": str(home),
        "PYTHONPATH": str(Path(onboard.__file__).parent.parent),
        "NO_PROXY": "127.0.0.1,localhost",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **({"HF_ENDPOINT": hub} if hub is not None else {}),
        **(environment or {}),
    }
    work = {
        "calls": [{"given": call} if isinstance(call, str) else call for call in calls],
        "settings": {"FIRST_WAIT": 0.01, **(settings or {})} if hub is not None else {},
    }
    ours, theirs = os.openpty() if terminal else (None, subprocess.PIPE)
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(work), str(result)],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        env=variables,
        cwd=cwd or home,
        timeout=120,
        check=False,
    )
    stderr = done.stderr
    if ours is not None:
        os.set_blocking(ours, False)
        try:
            stderr = os.read(ours, 100_000).decode()
        except BlockingIOError:
            stderr = ""
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 0, stderr
    answer = json.loads(result.read_text())
    readings = [Reading(**reading) for reading in answer["readings"]]
    return Readings(readings, done.stdout, stderr, answer["modules"])


def _main() -> None:
    import time

    from onboard.errors import OnboardError
    from onboard.facts import read_facts

    work = json.loads(sys.argv[1])
    readings = []
    if work["settings"]:
        # The client may refuse its environment; then it is up to read_facts to say so.
        with contextlib.suppress(ValueError):
            from onboard.facts import hub_http

            vars(hub_http).update(work["settings"])
    for call in work["calls"]:
        reading: dict[str, Any] = {}
        start = time.monotonic()
        try:
            reading["facts"] = asdict(read_facts(**call))
        except OnboardError as error:
            reading |= {"error": error.as_json(), "exit_status": error.exit_status}
            reading["traceback"] = traceback.format_exc()
        except Exception:
            reading |= {"exit_status": 5, "traceback": traceback.format_exc()}
        reading["seconds"] = time.monotonic() - start
        readings.append(reading)
    heavy = {name.partition(".")[0] for name in sys.modules}
    Path(sys.argv[2]).write_text(json.dumps({"readings": readings, "modules": sorted(heavy)}))


if __name__ == "__main__":
    _main()
