"""A sweep from its command line: resumed, interrupted, written into a page."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from breadth.cli import main
from breadth.runner import REPOSITORY
from breadth.table import read_rows

from .records import proven


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Configs whose `answer` is what the stand-in for onboard prints, and whose `exit` is its exit status."""
    configs = tmp_path / "configs"
    configs.mkdir()
    add(configs, "good", answer=proven("native"), exit=0)
    add(configs, "refused", answer={"error": {"what": "No.", "why": "So."}}, exit=3)
    add(configs, "crash", answer=None, exit=-9)
    return tmp_path


def add(configs: Path, name: str, **values: object) -> None:
    raw = {"architectures": ["AForCausalLM"], "model_type": name, **values}
    (configs / f"{name}.json").write_text(json.dumps(raw), encoding="utf-8")


def stand_in(log: Path):
    program = f"""
import json, os, sys
raw = json.load(open(sys.argv[1] + "/config.json"))
open({str(log)!r}, "a").write(raw["model_type"] + "\\n")
if raw["exit"] < 0:
    os.kill(os.getpid(), -raw["exit"])
print(json.dumps(raw["answer"]))
sys.exit(raw["exit"])
"""

    def command(source: Path, out: Path) -> Sequence[str]:
        return [sys.executable, "-S", "-c", program, str(source)]

    return command


def sweep(folder: Path, *words: str) -> tuple[int, list[str]]:
    """Exit status, and the names that were run."""
    log = folder / "log"
    log.write_text("", encoding="utf-8")
    status = main(["--configs", str(folder / "configs"), "--kept", str(folder / "kept"), *words], stand_in(log))
    return status, sorted(log.read_text(encoding="utf-8").split())


def test_what_ended_is_not_run_again_until_something_changes(folder, capsys):
    assert sweep(folder) == (0, ["crash", "good", "refused"])
    first = capsys.readouterr()
    assert "1 of 3 end with all tests passed" in first.out
    assert "killed by SIGKILL" in first.out
    assert "[3/3]" in first.err

    assert sweep(folder) == (0, ["crash"])
    second = capsys.readouterr()
    assert second.out == first.out
    assert "2 kept from before, 1 to run" in second.err

    add(folder / "configs", "good", answer=proven("native"), exit=0, hidden_size=8)
    assert sweep(folder) == (0, ["crash", "good"])
    assert sweep(folder, "--again") == (0, ["crash", "good", "refused"])
    assert sweep(folder, "refused", "--again") == (0, ["refused"])


def test_the_table_goes_into_a_page(folder, capsys):
    page = folder / "page.md"
    assert sweep(folder, "--page", str(page))[0] == 0
    assert capsys.readouterr().out == ""
    assert [row.name for row in read_rows(page.read_text(encoding="utf-8"), "configs")] == ["crash", "good", "refused"]
    text = page.read_text(encoding="utf-8")
    page.write_text(f"before\n{text}after\n", encoding="utf-8")
    sweep(folder, "--page", str(page))
    assert page.read_text(encoding="utf-8") == f"before\n{text}after\n"


def test_a_page_without_markers_is_refused_before_anything_runs(folder, capsys):
    page = folder / "page.md"
    page.write_text("mine\n", encoding="utf-8")
    assert sweep(folder, "--page", str(page)) == (2, [])
    assert "it needs the lines" in capsys.readouterr().err
    assert page.read_text(encoding="utf-8") == "mine\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nope"], "there is no nope"),
        (["bert"], "bert is left out: derived from an encoder"),
        (["--configs", "/nowhere"], "neither NAME/config.json nor NAME.json"),
    ],
)
def test_a_mistake_in_the_command_line_is_named(words, said, capsys):
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--jobs", "0"], ["--timeout", "-1"], ["--list", "--configs", "x"]])
def test_a_value_that_makes_no_sense_is_refused(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_has_ended(folder, number):
    add(folder / "configs", "zz-hangs", answer=None, exit=0)
    program = f"""
import sys
sys.path.append({str(REPOSITORY / "scripts")!r})
from pathlib import Path
from breadth.cli import main
def command(source, out):
    hangs = "zz-hangs" in (source / "config.json").read_text()
    return ["sleep", "600"] if hangs else [sys.executable, "-S", "-c", "print('{{}}')"]
sys.exit(main(sys.argv[1:], command))
"""
    page = folder / "page.md"
    words = ["--configs", str(folder / "configs"), "--kept", str(folder / "kept"), "--page", str(page)]
    with subprocess.Popen(
        [sys.executable, "-c", program, *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "generator")},
    ) as process:
        deadline = time.monotonic() + 60
        while len(list((folder / "kept").rglob("*.json"))) < 3:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        assert process.stderr is not None
        said = process.stderr.read()  # ends when all that inherited it have ended
    assert process.returncode == 130
    assert "interrupted: 1 are left" in said
    assert "Traceback" not in said
    assert not page.exists()
    assert sorted(path.stem for path in (folder / "kept" / "configs").iterdir()) == ["crash", "good", "refused"]


def test_a_list_runs_nothing(capsys):
    assert main(["--list"]) == 0
    out = capsys.readouterr().out
    assert "in scope: " in out
    assert "derived from an encoder" in out
