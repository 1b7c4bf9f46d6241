"""Runs one process for each config, a few at a time. Whatever one of them does, the others go on.

A process that takes too long is ended with all that it started; one that is killed, crashes, prints no JSON or runs out
of memory is a result like the others. If this process is interrupted, the running ones are ended and nothing is
yielded of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from breadth.scope import Subject
from breadth.store import Record

REPOSITORY = Path(__file__).resolve().parents[2]
GIB = 1 << 30
_POLL_S = 0.1
_SAID = 2000
_DROPPED = ("HF_", "HUGGING", "TRANSFORMERS_", "PYTEST_")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

Command = Callable[[Path, Path], Sequence[str]]


@dataclass(frozen=True)
class Limits:
    """What one architecture may use.

    Attributes:
        seconds: of wall-clock time.
        memory: bytes of private memory of each of its processes.
    """

    seconds: float = 900.0
    memory: int = 12 * GIB


@dataclass
class _Running:
    subject: Subject
    folder: Path
    process: subprocess.Popen[bytes]
    began: float
    killed_before: int


def onboard_new(config: Path, out: Path) -> list[str]:
    """The command line: `onboard new CONFIG --out OUT --json`, by this interpreter."""
    return [sys.executable, "-m", "onboard", "new", str(config), "--out", str(out), "--json"]


def environment(folder: Path) -> dict[str, str]:
    """This process's environment, with one thread, offline, on this checkout's generator, and no settings of others."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_DROPPED)}
    paths = [str(REPOSITORY / "generator"), os.environ.get("PYTHONPATH", "")]
    return {
        **kept,
        **dict.fromkeys(_THREADS, "1"),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        # What a killed process leaves behind goes with the folder.
        "TMPDIR": str(folder / "tmp"),
    }


def run_all(
    subjects: Sequence[Subject],
    keys: Mapping[str, str],
    *,
    workers: int,
    limits: Limits,
    command: Command = onboard_new,
    started: Callable[[Subject], None] = lambda subject: None,
) -> Generator[Record, None, None]:
    """Run the command on each config and yield each record as its process ends.

    Args:
        subjects: what to run, in this order.
        keys: name to the key of its record.
        workers: how many at a time.
        limits: for each of them.
        command: the command line, of the folder with the config.json and the folder to write to.
        started: told about each subject when its process starts.
    """
    waiting = deque(subjects)
    running: list[_Running] = []
    with tempfile.TemporaryDirectory(prefix="onboard-sweep-", ignore_cleanup_errors=True) as root:
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    subject = waiting.popleft()
                    try:
                        running.append(_start(subject, Path(root), limits, command))
                    except OSError as error:  # no process, no space: this one's result, and the next is tried
                        stopped = f"did not start: {error}"
                        yield Record(subject.name, keys[subject.name], None, stopped, False, 0.0, None, "")
                        continue
                    started(subject)
                time.sleep(_POLL_S)
                for one in tuple(running):
                    late = time.monotonic() - one.began > limits.seconds
                    if one.process.poll() is None and not late:
                        continue
                    stopped = f"stopped after {limits.seconds:.0f} s" if one.process.poll() is None else None
                    running.remove(one)
                    _end(one.process)
                    yield _record(one, keys[one.subject.name], stopped)
        finally:
            for one in running:
                _end(one.process)


def _start(subject: Subject, root: Path, limits: Limits, command: Command) -> _Running:
    killed = _killed_for_memory()
    folder = Path(tempfile.mkdtemp(prefix="one-", dir=root))
    source = folder / "source"
    for path in (source, folder / "tmp"):
        path.mkdir()
    (source / "config.json").write_text(subject.config, encoding="utf-8")
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        process = subprocess.Popen(
            command(source, folder / "out"),
            cwd=folder,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,  # so that all that it starts can be ended with it
        )
    _bound(process.pid, limits.memory)
    return _Running(subject, folder, process, time.monotonic(), killed)


def _bound(pid: int, memory: int) -> None:
    """Let a process, and each that it starts, fail by itself where it wants too much memory (on Linux)."""
    with contextlib.suppress(ImportError, AttributeError, OSError, ValueError):
        import resource

        _, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
        most = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
        resource.prlimit(pid, resource.RLIMIT_DATA, (most, hard))


def _killed_for_memory() -> int:
    """How many processes this machine has killed because it had no memory left; 0 where that is not known."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, and wait for it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _record(one: _Running, key: str, stopped: str | None) -> Record:
    seconds = time.monotonic() - one.began
    # The folder's name is of this machine and this run; nothing that is kept or published has it.
    home = f"{one.folder}{os.sep}"
    said = (one.folder / "stderr").read_text(encoding="utf-8", errors="replace").replace(home, "")[-_SAID:]
    out = (one.folder / "stdout").read_text(encoding="utf-8", errors="replace").replace(home, "")
    answer: Any
    try:
        answer = json.loads(out)
    except ValueError:
        answer = None
    shutil.rmtree(one.folder, ignore_errors=True)
    return Record(
        name=one.subject.name,
        key=key,
        exit=None if stopped else one.process.returncode,
        stopped=stopped,
        out_of_memory=_killed_for_memory() > one.killed_before,
        seconds=round(seconds, 1),
        answer=answer if isinstance(answer, dict) else None,
        said=said,
    )
