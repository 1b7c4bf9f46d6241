"""Breadth, measured: onboards transformers' own decoders from their default configs and writes docs/coverage.md.

    python scripts/sweep.py                         all that are in scope, two at a time
    python scripts/sweep.py llama phi3 --jobs 1     these
    python scripts/sweep.py --configs DIR           every config.json (or *.json) of a directory, to stdout

Results are kept in ``.sweep/``, one file for each model and state of the code, so that a run that was stopped goes on
where it was. Nothing that one model does (a crash, a hang) stops the others.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

REPOSITORY = Path(__file__).resolve().parents[1]
KEPT = REPOSITORY / ".sweep"
PAGE = REPOSITORY / "docs" / "coverage.md"
BEGIN, END = "<!-- begin: scripts/sweep.py -->\n", "<!-- end: scripts/sweep.py -->\n"
BEGIN_CONFIGS = "<!-- begin: scripts/sweep.py --configs -->\n"
END_CONFIGS = "<!-- end: scripts/sweep.py --configs -->\n"
TIMEOUT_SECONDS = 600
HEAD = (
    "| model type | architecture | result | tests passed, failed, skipped | largest logit difference | mutants caught "
    "| native modules | not native | seconds |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)
CONFIGS_HEAD = "| config | architecture | result |\n| --- | --- | --- |"


def in_scope() -> dict[str, dict[str, Any]]:
    """Default config.json of every decoder-only architecture of the causal-LM mapping that is no mixture of experts.

    Left out are classes that fill masks or have an encoder (they are in the mapping for those tasks), and what
    ``classify`` says is no dense decoder.
    """
    import transformers
    from onboard.spec.kind import classify
    from transformers.models.auto import modeling_auto as auto

    transformers.logging.set_verbosity_error()
    elsewhere = {*auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, *auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for model_type, architecture in sorted(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
            if model_type in elsewhere:
                continue
            try:
                raw = json.loads(transformers.CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
            except Exception:  # a config of several parts without a default: no language model by itself
                continue
            raw["architectures"] = [architecture]
            if classify(raw).kind == "dense":
                found[model_type] = raw
    return found


def state_of_the_code() -> str:
    """A hash of what a result depends on: the generator, its templates, the versions of the framework."""
    digest = hashlib.sha256()
    for folder in (REPOSITORY / "generator" / "onboard", REPOSITORY / "templates"):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(str(path.relative_to(REPOSITORY)).encode() + path.read_bytes())
    for name in ("transformers", "torch", "nemo-automodel"):
        digest.update(metadata.version(name).encode())
    return digest.hexdigest()[:16]


def onboard(name: str, config: Path, timeout: float = TIMEOUT_SECONDS) -> dict[str, Any]:
    """The JSON of `onboard new`, with the exit status and the seconds; an error of its own where there is none."""
    command = [sys.executable, "-m", "onboard", "new", str(config), "--json", "--out"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="onboard-sweep-") as folder:
        try:
            done = subprocess.run(
                [*command, f"{folder}/package"],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout,
            )
            answer: dict[str, Any] = json.loads(done.stdout)
            answer["exit"] = done.returncode
        except subprocess.TimeoutExpired:
            answer = {"exit": None, "error": {"what": f"No answer within {timeout:.0f} s.", "why": ""}}
        except ValueError:
            last = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
            answer = {"exit": done.returncode, "error": {"what": "No JSON on stdout.", "why": last[:200]}}
    answer.pop("files", None)
    return answer | {"name": name, "wall_seconds": round(time.monotonic() - begin, 1)}


def kept(name: str, state: str) -> dict[str, Any] | None:
    """A result of an earlier run with the same code."""
    try:
        found: dict[str, Any] = json.loads((KEPT / state / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def keep(name: str, state: str, answer: Mapping[str, Any]) -> None:
    """Write a result whole or not at all."""
    folder = KEPT / state
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{name}.{os.getpid()}"
    draft.write_text(json.dumps(answer), encoding="utf-8")
    draft.replace(folder / f"{name}.json")


def sweep(configs: Mapping[str, Path], jobs: int) -> dict[str, dict[str, Any]]:
    """Onboard each config that has no result yet.

    Args:
        configs: name to config.json.
        jobs: how many at a time.

    Returns:
        Name to the JSON of `onboard new`.
    """
    state = state_of_the_code()
    results = {name: found for name in configs if (found := kept(name, state)) is not None}
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    pool = ThreadPoolExecutor(jobs)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("onboarding", total=len(configs), completed=len(results))
        waiting: dict[Future[dict[str, Any]], str] = {
            pool.submit(onboard, name, config): name for name, config in configs.items() if name not in results
        }
        try:
            for done in as_completed(waiting):
                name = waiting[done]
                try:
                    results[name] = done.result()
                except Exception as error:  # of this script's own: the others go on
                    results[name] = {"exit": None, "error": {"what": type(error).__name__, "why": str(error)}}
                else:
                    keep(name, state, results[name])
                progress.update(task, advance=1, description=name)
                console.print(f"{name}: {outcome(results[name])}", highlight=False)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    pool.shutdown()
    return {name: results[name] for name in configs}


def proven(answer: Mapping[str, Any]) -> bool:
    """Whether all generated tests passed and every mutant was caught."""
    tests = answer.get("tests")
    return answer.get("exit") == 0 and bool(tests) and not tests["failed"]


def outcome(answer: Mapping[str, Any]) -> str:
    """One cell: how it ended."""
    if answer.get("tests") is None:
        error = answer.get("error") or {"what": answer.get("reason", ""), "why": ""}
        return f"exit {answer['exit']}: {error['what']} {error['why']}".strip()
    origins = answer["origins"]
    if not proven(answer):
        return f"{answer['tests']['failed']} tests failed"
    if answer.get("unproven"):
        return "all tests passed, with points unproven"
    if origins["novel"]:
        return "proven, with parts reused that nothing explains"
    return "proven, with parts reused" if origins["reused"] else "proven, all native"


def row(name: str, answer: Mapping[str, Any]) -> str:
    """One row of the table of architectures."""
    tests = answer.get("tests")
    if tests is None:
        return f"| {name} | {answer.get('architecture', '')} | {_cell(outcome(answer))} | | | | | | |"
    origins, mutants = answer["origins"], answer["mutants"]
    parity = (answer.get("parity") or {}).get("max_abs_logit_diff")
    others = [f"{one['path']} ({one['origin']})" for one in origins["modules"] if one["origin"] != "native"]
    total = sum(origins[kind] for kind in ("native", "reused", "novel"))
    cells = (
        name,
        answer["architecture"],
        outcome(answer),
        f"{tests['passed']}, {tests['failed']}, {tests['skipped']}",
        "" if parity is None else f"{parity:.1e}",
        f"{mutants['caught']} of {mutants['planted']}",
        f"{origins['native']} of {total}",
        _cell(", ".join(others)),
        f"{tests['seconds']:.0f}",
    )
    return "| " + " | ".join(cells) + " |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def summary(rows: Iterable[str]) -> str:
    """How many of how many, counted in the rows themselves."""
    lines = list(rows)
    passed = sum("| proven, " in line for line in lines)
    native = sum("| proven, all native |" in line for line in lines)
    return (
        f"{passed} of {len(lines)} architectures end with all generated tests passed; {native} of them have no reused "
        "and no novel module."
    )


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Put text between two markers of a page; a page without them gets them at its end."""
    whole = page.read_text(encoding="utf-8")
    if begin not in whole:
        whole = f"{whole.rstrip()}\n\n{begin}{end}"
    before, rest = whole.split(begin)
    page.write_text(f"{before}{begin}\n{text}\n\n{end}{rest.split(end)[1]}", encoding="utf-8")


def rows_of(page: Path) -> dict[str, str]:
    """The rows that the page has, by model type."""
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text:
        return {}
    table = text.split(BEGIN)[1].split(END)[0].splitlines()
    found = [line for line in table if line.startswith("| ") and not line.startswith(("| model type", "| ---"))]
    return {line.split("|")[1].strip(): line for line in found}


def write_architectures(names: list[str], jobs: int) -> int:
    """Sweep architectures and write the page; with names given, the other rows stay."""
    scope = in_scope()
    unknown = sorted(set(names) - set(scope))
    if unknown:
        print(f"{', '.join(unknown)}: not in scope; it has {', '.join(scope)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="onboard-sweep-") as folder:
        configs = {}
        for name in names or scope:
            configs[name] = Path(folder) / name / "config.json"
            configs[name].parent.mkdir()
            configs[name].write_text(json.dumps(scope[name]), encoding="utf-8")
        results = sweep(configs, jobs)
    rows = (rows_of(PAGE) if names else {}) | {name: row(name, answer) for name, answer in results.items()}
    lines = [rows[name] for name in sorted(rows)]
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("nemo-automodel", "transformers", "torch"))
    told = f"{summary(lines)} Run with {versions}, on the CPU, {jobs} at a time."
    write_between(PAGE, BEGIN, END, "\n".join((told, "", HEAD, *lines)))
    print(summary(lines))
    return 0 if all(proven(answer) for answer in results.values()) else 1


def sweep_directory(directory: Path, jobs: int, page: Path | None) -> int:
    """Sweep a directory of real configs: ``NAME/config.json`` or ``NAME.json``."""
    files = sorted({*directory.glob("*/config.json"), *directory.glob("*.json")})
    if not files:
        print(f"{directory} has neither NAME/config.json nor NAME.json", file=sys.stderr)
        return 2
    configs = {file.parent.name if file.name == "config.json" else file.stem: file for file in files}
    results = sweep(configs, jobs)
    rows = []
    for name, answer in results.items():
        named = answer.get("architecture") or ", ".join(_architectures(configs[name]))
        rows.append(f"| {name} | {named} | {_cell(outcome(answer))} |")
    text = "\n".join((CONFIGS_HEAD, *rows))
    print(text)
    if page is not None:
        write_between(page, BEGIN_CONFIGS, END_CONFIGS, text)
    return 0


def _architectures(config: Path) -> list[str]:
    listed = json.loads(config.read_text(encoding="utf-8")).get("architectures")
    return [str(one) for one in listed] if isinstance(listed, list) else []


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="model types; all that are in scope where none is given")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default 2)")
    parser.add_argument("--configs", type=Path, help="a directory of real configs instead")
    parser.add_argument("--write", type=Path, help="with --configs: the page that gets the table")
    arguments = parser.parse_args()
    try:
        if arguments.configs:
            return sweep_directory(arguments.configs, arguments.jobs, arguments.write)
        return write_architectures(arguments.names, arguments.jobs)
    except KeyboardInterrupt:
        print("stopped; what was finished is kept and not run again", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
