"""How fast the command line is, as ratios of whole processes measured in turn in one run. `make bench` runs this.

Not a test: what is measured depends on the machine and on what else it does. Writes nothing but a temporary folder.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = str(REPOSITORY / "examples" / "qwen3-0.6b" / "config.json")
ONBOARD = [sys.executable, "-m", "onboard"]


@dataclass(frozen=True)
class Comparison:
    """A command of ours, and the least that such a command could cost."""

    label: str
    command: Sequence[str]
    against: str
    at_most: float
    rounds: int


COMPARISONS = (
    Comparison("onboard inspect FILE", [*ONBOARD, "inspect", CONFIG], "import click, jinja2", 3, 15),
    Comparison(
        "onboard new FILE --no-verify",
        [*ONBOARD, "new", CONFIG, "--no-verify", "--out"],
        "from transformers import AutoModelForCausalLM; import nemo_automodel",
        2,
        5,
    ),
)


def seconds(command: Sequence[str], folder: Path) -> float:
    """Wall time of one process."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return time.perf_counter() - began


def measure(comparison: Comparison, folder: Path) -> tuple[float, float]:
    """Medians of both, taken in turn so that both see the same machine; the first round warms the disk's cache."""
    ours, theirs = [], []
    for turn in range(comparison.rounds + 1):
        last = [str(folder / f"{comparison.at_most}-{turn}")] if comparison.command[-1] == "--out" else []
        theirs.append(seconds([sys.executable, "-c", comparison.against], folder))
        ours.append(seconds([*comparison.command, *last], folder))
    return statistics.median(ours[1:]), statistics.median(theirs[1:])


def main() -> None:
    """Print the table."""
    print("| command | seconds | against `python -c ...` | seconds | ratio | at most | rounds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory(prefix="onboard-bench-") as folder:
        for item in COMPARISONS:
            ours, theirs = measure(item, Path(folder))
            row = (f"`{item.label}`", f"{ours:.2f}", f"`{item.against}`", f"{theirs:.2f}", f"{ours / theirs:.2f}")
            print("| " + " | ".join((*row, str(item.at_most), str(item.rounds))) + " |", flush=True)


if __name__ == "__main__":
    main()
