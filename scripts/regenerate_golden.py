"""Writes the golden trees: whole generated projects, checked in, so that a change of a template shows in review.

`make golden` runs this; `tests/test_golden.py` compares. A tree is what `onboard new EXAMPLE --no-verify` writes, byte
for byte, with the versions of constraints.txt.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from onboard.pipeline.making import NewRequest, make

REPOSITORY = Path(__file__).resolve().parents[1]
GOLDEN = REPOSITORY / "tests" / "golden"
TREES = {
    "bamba": "bamba-9b",
    "cohere": "command-r",
    "falcon": "falcon-40b",
    "gemma3_text": "gemma-3-1b",
    "gpt2": "gpt2",
    "llama": "llama-3.2-1b",
    "olmo2": "olmo-2-7b",
    "phi3": "phi-3-mini-4k",
    "qwen3": "qwen3-0.6b",
}
"""Name of a tree, and the example that it is made from."""


class Silent:
    """Progress that nobody looks at."""

    def start(self, label: str, total: int | None = None) -> None:
        """Say nothing."""

    def advance(self, n: int = 1, note: str | None = None) -> None:
        """Say nothing."""

    def done(self, note: str | None = None) -> None:
        """Say nothing."""


def write_tree(name: str, out: Path) -> None:
    """Make one tree the way the command line does.

    Args:
        name: a key of :data:`TREES`.
        out: the project folder, which must not be there yet.
    """
    example = REPOSITORY / "examples" / TREES[name]
    make(NewRequest(source=str(example), target="plugin", out=out, verify=False), Silent())


def main() -> None:
    """Write every tree again, or those that are named on the command line."""
    for name in sys.argv[1:] or TREES:
        with tempfile.TemporaryDirectory(prefix="onboard-golden-") as folder:
            made = Path(folder) / name
            write_tree(name, made)
            shutil.rmtree(GOLDEN / name, ignore_errors=True)
            shutil.copytree(made, GOLDEN / name)
        print(f"tests/golden/{name}  from examples/{TREES[name]}")


if __name__ == "__main__":
    main()
