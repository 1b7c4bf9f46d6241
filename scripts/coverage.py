"""What is proven today: onboards every example, runs its tests, and prints the table of docs/coverage.md.

python scripts/coverage.py            print the table
python scripts/coverage.py --write    and put it into docs/coverage.md
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = (REPOSITORY / "README.md", REPOSITORY / "docs" / "coverage.md")
BEGIN, END = "<!-- begin: scripts/coverage.py -->\n", "<!-- end -->\n"
HEAD = (
    "| example | architecture | tests passed, failed, skipped | largest logit difference | mutants caught "
    "| native, reused, novel parts | seconds |\n| --- | --- | --- | --- | --- | --- | --- |"
)


def onboard(example: Path, out: Path) -> dict[str, Any]:
    """The JSON of `onboard new`, also where it failed."""
    command = [sys.executable, "-m", "onboard", "new", str(example), "--out", str(out), "--json"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer | {"exit": done.returncode}


def row(example: str, answer: dict[str, Any]) -> str:
    """One row of the table."""
    if answer.get("tests") is None:
        error = answer.get("error") or {}
        return f"| {example} | exit {answer['exit']}: {error.get('what')} {error.get('why')} | | | | | |"
    tests, mutants, origins = answer["tests"], answer["mutants"], answer["origins"]
    cells = (
        example,
        answer["architecture"],
        f"{tests['passed']}, {tests['failed']}, {tests['skipped']}",
        f"{answer['parity']['max_abs_logit_diff']:.1e}",
        f"{mutants['caught']} of {mutants['planted']}",
        f"{origins['native']}, {origins['reused']}, {origins['novel']}",
        f"{tests['seconds']:.0f}",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table; write it where asked to."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("nemo-automodel", "transformers", "torch"))
    lines = [f"Run with {versions}, on the CPU, one process at a time; the seconds are those of the tests.", "", HEAD]
    failed = False
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory(prefix="onboard-coverage-") as folder:
        for example in sorted(path.parent.name for path in (REPOSITORY / "examples").glob("*/config.json")):
            answer = onboard(REPOSITORY / "examples" / example, Path(folder) / example)
            failed |= bool(answer["exit"])
            lines.append(row(example, answer))
            print(lines[-1], flush=True)
    if "--write" in sys.argv[1:]:
        for page in PAGES:
            before, rest = page.read_text(encoding="utf-8").split(BEGIN)
            text = before + BEGIN + "\n" + "\n".join(lines) + "\n\n" + END + rest.split(END)[1]
            page.write_text(text, encoding="utf-8")
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
