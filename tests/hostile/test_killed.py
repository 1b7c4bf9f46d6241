"""Contract: `onboard new`, stopped at any moment, leaves its target absent or whole, and no process running."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from onboard.plan.apply import recover

from .harness import ENVIRONMENT, QWEN, check_package, write_config

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds children in /proc")

QUICK = Path(__file__).parent / "quick_onboard.py"
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}


def started(words: list[object], cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """Wait for a line of progress."""
    said = ""
    for line in process.stderr:
        said += line
        if words in line:
            return said
    raise AssertionError(f"never said {words!r}: {said}")


def descendants(pid: int) -> list[int]:
    """Processes below one, from top to bottom."""
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [one for child in children for one in (child, *descendants(child))]


def running(pid: int) -> bool:
    """Whether it runs; a dead process that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def wait_for_child(process: subprocess.Popen[str]) -> list[int]:
    for _ in range(500):
        if found := descendants(process.pid):
            return found
        time.sleep(0.01)
    raise AssertionError("no child process was started")


def check_gone(pids: list[int]) -> None:
    for _ in range(500):
        if not any(map(running, pids)):
            return
        time.sleep(0.01)
    raise AssertionError(f"still running: {[Path(f'/proc/{pid}/cmdline').read_text() for pid in pids if running(pid)]}")


def check_place(place: Path, *, swept: bool) -> bool:
    """The target is absent or whole; whether it is there.

    Args:
        place: the folder that the target lies in.
        swept: no working folder may be left, not even for the next run to remove.
    """
    left = {path.name for path in place.iterdir()} - {"model", "out"}
    assert not left or (not swept and all(name.startswith(".onboard-") for name in left)), left
    recover(place / "out")
    assert {path.name for path in place.iterdir()} <= {"model", "out"}
    if not (place / "out").exists():
        return False
    check_package(place / "out")
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_stopped_while_the_reference_is_measured(number, tmp_path):
    """The probe ends with its parent, also where that was killed and could not end it."""
    write_config(tmp_path / "model", QWEN)
    process = started(["-m", "onboard", "new", "model", "--out", "out", "--no-verify"], tmp_path)
    read_until(process, "measuring")
    children = wait_for_child(process)
    time.sleep(0.3)  # so that it has bound itself to its parent, and is importing torch
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert process.returncode == STATUS[number]
    assert "Traceback" not in said
    check_gone(children)
    assert not check_place(tmp_path, swept=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_stopped_while_the_generated_tests_run(number, measured, tmp_path):
    """The package is whole, and pytest ends."""
    write_config(tmp_path / "model", QWEN)
    process = started([QUICK, measured, "new", "model", "--out", "out"], tmp_path)
    read_until(process, "running the generated tests")
    children = wait_for_child(process)
    time.sleep(0.5)
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert process.returncode == STATUS[number]
    assert "Traceback" not in said
    check_gone(children)
    assert check_place(tmp_path, swept=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_stopped_at_random_moments_of_writing(number, measured, tmp_path):
    """From the first line of progress to the end, over and over in one place, as a new project and over an old one."""
    write_config(tmp_path / "model", QWEN)
    words: list[object] = [QUICK, measured, "new", "model", "--out", "out", "--no-verify", "--force"]
    began = time.monotonic()
    whole = started(words, tmp_path)
    read_until(whole, "reading")
    longest = time.monotonic()
    assert whole.wait(30) == 0
    longest = time.monotonic() - longest
    assert check_place(tmp_path, swept=True)
    chance = random.Random(number)
    outcomes = set()
    for turn in range(5):
        if turn % 2:
            subprocess.run(["rm", "-r", tmp_path / "out"], check=True)
        process = started(words, tmp_path)
        read_until(process, "reading")
        time.sleep(chance.uniform(0.3, 1.0) * longest)
        process.send_signal(number)
        _, said = process.communicate(timeout=20)
        # The signal may come when the work is done and Python is on its way out, with its own handlers again.
        ended = said.count("rendering") == 2
        assert process.returncode in ((0, STATUS[number], -number) if ended else (STATUS[number],)), said
        assert ended or "Traceback" not in said
        outcomes.add(check_place(tmp_path, swept=number != signal.SIGKILL))
        if not (tmp_path / "out").exists():
            assert started(words, tmp_path).wait(30) == 0
            assert check_place(tmp_path, swept=True)
    assert time.monotonic() - began < 60
    assert os.path.isdir(tmp_path / "out")
