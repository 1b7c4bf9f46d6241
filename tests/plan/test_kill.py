"""Contract: a run that is killed, at whatever moment, leaves the old state or the new, once the next has run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from onboard.plan import _project, _signals
from onboard.plan.apply import apply, recover

from .test_apply import CASES, scenario, set_swap, steps_of
from .trees import checkout, files, leftovers, model, planned, project, tree


def killed(function, at):
    """Call the function in a child that kills itself at the given step; whether it came that far."""
    child = os.fork()
    if child == 0:
        seen = iter(range(100_000))

        def kill(_name):
            if next(seen) == at:
                os.kill(os.getpid(), signal.SIGKILL)

        _signals._step = kill
        try:
            function()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def run_and_kill(plan, at):
    return killed(lambda: apply(plan, force=True), at)


def without(found, *names):
    return {path: data for path, data in found.items() if not path.startswith(names)}


@pytest.mark.parametrize(("kind", "atomic"), CASES)
def test_killed_at_every_step(kind, atomic, tmp_path, monkeypatch):
    set_swap(monkeypatch, atomic)
    names = steps_of(kind, tmp_path / "count", monkeypatch)
    done = 0
    for at, name in enumerate(names):
        base = tmp_path / str(at)
        base.mkdir()
        plan = scenario(kind, base)
        before = without(files(base))
        assert run_and_kill(plan, at), name
        # The last file of a plan is in place only if all are, once the leftovers have been put right.
        recover(plan.root)
        after = files(base)
        mine = [path for path, data in after.items() if data == b"mine\n"]
        assert len(mine) == (kind != "new"), (name, mine)
        backup = ".onboard-backup-1" if kind == "checkout" else "x.onboard-backup-1"
        if after != before:
            done += 1
            assert planned(plan).items() <= files(plan.root).items(), name
            assert without(files(plan.root), ".onboard-backup") == (
                planned(plan) | ({"framework/theirs.py": b"theirs\n"} if kind == "checkout" else {})
            ), name
            assert (base / backup).exists() is (kind != "new")
        assert not [left for left in leftovers(plan.root.parent) + (leftovers(base)) if "backup" not in left], name
    # Both outcomes were seen, or the test would prove less than it says.
    assert 0 < done < len(names)


@pytest.mark.parametrize("atomic", [True, False])
def test_apply_puts_right_what_it_finds(atomic, tmp_path, monkeypatch):
    """Without a call of recover in between."""
    set_swap(monkeypatch, atomic)
    for at in range(len(steps_of("replace", tmp_path / "count", monkeypatch))):
        base = tmp_path / str(at)
        base.mkdir()
        plan = scenario("replace", base)
        assert run_and_kill(plan, at)
        apply(plan, force=True)
        assert files(plan.root) == planned(plan)
        assert [path for path, data in files(base).items() if data == b"mine\n"] == ["x.onboard-backup-1/mine"]
        assert sorted(path.name for path in base.iterdir()) == ["x", "x.onboard-backup-1"]


def test_a_rollback_that_is_killed_is_finished_by_the_next(tmp_path, monkeypatch):
    names = steps_of("checkout", tmp_path / "count", monkeypatch)
    at = names.index("checkout:moved")
    for second in range(len([name for name in names if name.startswith("checkout:move:")])):
        base = tmp_path / str(second)
        base.mkdir()
        plan = scenario("checkout", base)
        before = tree(base)
        assert run_and_kill(plan, at)
        assert killed(partial(recover, base), second)
        assert len(recover(base)) == 1
        assert tree(base) == before


def test_killed_while_the_old_project_is_removed(tmp_path, monkeypatch):
    """What is left of it must not look like a project whose lock is gone, that is, like work of human hands."""
    apply(project(tmp_path / "x", "a"), force=False)

    def remove_half(folder):
        for lock in folder.rglob(".onboard.lock.json"):
            lock.unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(_project, "remove_tree", remove_half)
        assert killed(partial(apply, project(tmp_path / "x", "b"), force=True), -1)
    recover(tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert files(tmp_path / "x") == planned(project(tmp_path / "x", "b"))


def test_edits_made_after_a_kill_are_kept_by_the_rollback(tmp_path, monkeypatch):
    names = steps_of("checkout", tmp_path / "count", monkeypatch)
    base = tmp_path / "base"
    base.mkdir()
    plan = scenario("checkout", base)
    assert run_and_kill(plan, names.index("checkout:moved"))
    edited = base / "framework" / "models" / "x" / "m1.py"
    edited.write_text("edited after the kill\n")
    notes = recover(base)
    assert edited.read_text() == "edited after the kill\n"
    assert (base / ".onboard-backup-1" / "framework" / "models" / "x" / "m1.py").read_text() == "mine\n"
    assert "rolled back" in notes[0]
    assert ".onboard-backup-1" in notes[0]


LOOP = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from plan.trees import model, project
from onboard.plan.apply import apply
print("ready", flush=True)
while True:
    for version in "ab":
        make = {{"project": project, "model": model}}[{kind!r}]
        apply(make(Path({root!r}), version, files=20), force=True)
"""


@pytest.mark.parametrize("kind", ["project", "model"])
def test_killed_at_random_moments(kind, tmp_path):
    root = tmp_path / "root"
    make = {"project": project, "model": model}[kind]
    if kind == "model":
        checkout(root)
    apply(make(root, "a", files=20), force=True)
    wanted = [without(planned(make(root, version, files=20))) for version in "ab"]
    code = LOOP.format(tests=str(Path(__file__).parent.parent), kind=kind, root=str(root))
    chance = random.Random(0)
    for _ in range(8):
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"ready\n"
        time.sleep(chance.uniform(0.0, 0.15))
        child.kill()
        child.wait()
        child.stdout.close()
        recover(root)
        assert without(files(root), "framework/theirs.py") in wanted
        assert leftovers(root) + leftovers(tmp_path) == []
        assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_ctrl_c_in_a_real_process(tmp_path):
    code = LOOP.format(tests=str(Path(__file__).parent.parent), kind="project", root=str(tmp_path / "root"))
    for number, status in ((signal.SIGINT, (-signal.SIGINT, 1, 130)), (signal.SIGTERM, (-signal.SIGTERM,))):
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        child.stdout.readline()
        time.sleep(0.1)
        child.send_signal(number)
        assert child.wait(10) in status
        child.stdout.close()
        assert leftovers(tmp_path) == [], "nothing is left for a next run to clean up"
