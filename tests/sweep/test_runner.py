"""Whatever one process does, the others go on; what is stopped takes all that it started with it."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from breadth.runner import Limits, environment, onboard_new, run_all

from .records import subject

# Each config is the program that is run in place of onboard.
PROGRAMS = {
    "good": 'print(\'{"kind": "dense"}\')',
    "refuses": "import sys; print('{\"error\": {}}'); print('why', file=sys.stderr); sys.exit(3)",
    "segfault": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "hangs": "import time; time.sleep(600)",
    "no json": "print('{'); print('Traceback'); raise SystemExit(5)",
    "list": "print('[]')",
    "memory": "print(len(bytearray(3 << 30)))",
    "bytes": "import sys; sys.stdout.buffer.write(b'\\xff'); sys.stderr.buffer.write(b'\\xfe')",
}


def run_program(source: Path, out: Path) -> Sequence[str]:
    return [sys.executable, "-S", str(source / "config.json")]


def run(*names: str, workers: int = 2, seconds: float = 60, **programs: str):
    subjects = [subject(name, {**PROGRAMS, **programs}[name]) for name in names]
    keys = {name: f"key of {name}" for name in names}
    limits = Limits(seconds, 1 << 30)
    records = list(run_all(subjects, keys, workers=workers, limits=limits, command=run_program))
    assert sorted(record.name for record in records) == sorted(names)
    assert all(record.key == keys[record.name] for record in records)
    return {record.name: record for record in records}


def test_one_that_ends_badly_does_not_stop_the_rest():
    records = run(*(name for name in PROGRAMS if name not in ("hangs", "memory")))
    ends = {name: (record.exit, record.stopped, record.answer) for name, record in records.items()}
    assert ends == {
        "good": (0, None, {"kind": "dense"}),
        "refuses": (3, None, {"error": {}}),
        "segfault": (-11, None, None),
        "killed": (-9, None, None),
        "no json": (5, None, None),
        "list": (0, None, None),
        "bytes": (0, None, None),
    }
    assert records["refuses"].said == "why\n"


def test_one_that_takes_too_long_is_stopped_and_the_next_one_runs():
    records = run("hangs", "good", workers=1, seconds=2)
    assert (records["hangs"].exit, records["hangs"].stopped) == (None, "stopped after 2 s")
    assert 2 <= records["hangs"].seconds < 30
    assert records["good"].exit == 0


def test_one_that_wants_too_much_memory_fails_by_itself():
    records = run("memory", "good")
    assert records["memory"].exit == 1
    assert "MemoryError" in records["memory"].said
    assert records["good"].exit == 0


def test_what_cannot_be_started_is_a_result():
    def missing(source: Path, out: Path) -> Sequence[str]:
        return (
            ["/nowhere/python"] if "hangs" in source.joinpath("config.json").read_text() else run_program(source, out)
        )

    subjects = [subject("bad", "hangs"), subject("good", PROGRAMS["good"])]
    records = list(run_all(subjects, {"bad": "", "good": ""}, workers=1, limits=Limits(60), command=missing))
    assert [record.exit for record in records] == [None, 0]
    assert records[0].stopped.startswith("did not start: ")


def test_no_more_than_the_given_number_run_at_once(tmp_path: Path):
    program = f"""
import os, time
folder = {str(tmp_path)!r}
open(f"{{folder}}/{{os.getpid()}}", "w").close()
time.sleep(0.3)
print(len(os.listdir(folder)))
os.remove(f"{{folder}}/{{os.getpid()}}")
raise SystemExit(len(os.listdir(folder)) > 1)
"""
    names = [f"n{index}" for index in range(5)]
    records = run(*names, workers=2, **dict.fromkeys(names, program))
    assert {record.exit for record in records.values()} == {0}


def test_an_interrupt_ends_the_running_ones_with_their_children(tmp_path: Path):
    program = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
time.sleep(600)
"""
    subjects = [subject("parent", program), subject("good", PROGRAMS["good"])]
    runs = run_all(subjects, {"parent": "", "good": ""}, workers=2, limits=Limits(60), command=run_program)
    with closing(runs):
        assert next(runs).name == "good"
        deadline = time.monotonic() + 30
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert is_gone(int((tmp_path / "pid").read_text()))


def is_gone(pid: int) -> bool:
    """Whether a process has ended; init may take a moment to bury it."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
            stat = Path(f"/proc/{pid}/stat")
            if stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_nothing_is_left_and_no_path_of_this_machine_is_kept(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = "import json, os, sys; print(json.dumps({'out': os.getcwd() + '/out'})); sys.exit(os.getcwd() + '/x')"
    records = run("where", where=program)
    assert records["where"].answer == {"out": "out"}
    assert records["where"].said == "x\n"
    assert list(tmp_path.iterdir()) == []


def test_a_worker_has_one_thread_and_nobody_elses_settings(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-x")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    given = environment(tmp_path)
    assert not {"HF_TOKEN", "PYTEST_ADDOPTS"} & given.keys()
    assert {given[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"1"}
    assert given["HF_HUB_OFFLINE"] == "1"


def test_the_command_is_onboard_new_by_this_interpreter(tmp_path: Path):
    words = onboard_new(tmp_path / "source", tmp_path / "out")
    assert words[:4] == [sys.executable, "-m", "onboard", "new"]
    assert words[4:] == [str(tmp_path / "source"), "--out", str(tmp_path / "out"), "--json"]
