"""Contract: in real processes, hostile files and places end in three lines and exit 2, 3 or 4; nothing is written,
and no file of the current folder is imported.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from onboard import _child
from onboard.errors import OnboardError, Unsupported, VerificationFailed
from onboard.plan.targets import layout
from onboard.reference import ask
from onboard.verify import run as verify

from .harness import ENVIRONMENT, MARK, QWEN, ROOT, Quiet, check_package, payloads, write_config


def onboard(*words: object, cwd: Path, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Run `onboard`; a variable of None is taken out of the environment."""
    env = {name: value for name, value in {**ENVIRONMENT, **environment}.items() if value is not None}
    # Not -m, which would put the current folder on sys.path; the installed script does not either.
    code = "import sys; sys.path = [p for p in sys.path if p]; from onboard.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=60,
        check=False,
    )


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def refused(done: subprocess.CompletedProcess[str], *statuses: int) -> str:
    """Check the shape of an error, and return it."""
    lines = done.stderr[done.stderr.rfind("error: ") :].splitlines()
    assert done.returncode in (statuses or (2, 3, 4)), done.stderr
    assert "Traceback" not in done.stderr
    assert [line.split(":")[0] for line in lines] == ["error", "  why", "  do"], done.stderr
    assert done.stderr.isascii() or "\x1b" not in done.stderr
    assert done.stdout == ""
    return "\n".join(lines)


PAYLOADS = payloads(Path("/nonexistent/witness"))
BAD = {
    "list": [],
    "null": None,
    "text": "x",
    "empty": {},
    "no architecture": {key: value for key, value in QWEN.items() if key != "architectures"} | {"architectures": []},
    "architectures of numbers": {**QWEN, "architectures": [5, None]},
    "architecture is code": {**QWEN, "architectures": [PAYLOADS[1] + "ForCausalLM"]},
    "model_type is a path": {**QWEN, "model_type": "../../../x"},
    "model_type is Jinja": {**QWEN, "model_type": "{{7*7}}"},
    "hidden_size": {**QWEN, "hidden_size": -(10**30)},
    "layers": {**QWEN, "num_hidden_layers": 10**9},
    "nan": {**QWEN, "rms_norm_eps": math.nan},
    "theta": {**QWEN, "rope_theta": math.inf},
    "rope": {**QWEN, "rope_scaling": [PAYLOADS[0]]},
    "layer types": {**QWEN, "layer_types": [{"a": PAYLOADS[0]}]},
    "dtype": {**QWEN, "torch_dtype": "load"},
    "escape sequences": {**QWEN, "architectures": ["\x1b]0;title\x07\x1b[2J\u202eForCausalLM"]},
}


@pytest.mark.parametrize("name", BAD)
def test_bad_config(name, tmp_path):
    write_config(tmp_path / "model", BAD[name])
    before = tree(tmp_path)
    refused(onboard("new", "model", "--out", "out", "--no-verify", cwd=tmp_path))
    assert tree(tmp_path) == before


def test_the_error_in_json_and_on_a_terminal_of_ascii(tmp_path):
    write_config(tmp_path / "model", BAD["escape sequences"])
    done = onboard("new", "model", "--json", cwd=tmp_path, PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert set(error) == {"code", "what", "why", "do"}
    assert "\x1b" not in done.stderr + error["what"]


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_loop(path: Path) -> None:
    path.symlink_to(path)


def make_huge(path: Path) -> None:
    with path.open("wb") as stream:
        stream.write(b'{"a": 1')
        stream.truncate(10**11)


@pytest.mark.parametrize(
    "make",
    [
        make_fifo,
        make_loop,
        make_huge,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("/nonexistent"),
        lambda path: path.mkdir(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\x80\x04K\x01."),
        lambda path: path.write_bytes(b"[" * 200_000),
        lambda path: path.write_bytes(b'{"a":' * 5_000 + b"1" + b"}" * 5_000),
        lambda path: path.write_bytes(b'{"a": ' + b"9" * 5_000 + b"}"),
        lambda path: path.write_bytes(b'{"a": "\\ud800"}'),
    ],
    ids=[
        *("fifo", "link to itself", "sparse 100 GB", "device", "dangling", "folder", "empty", "pickle"),
        *("brackets", "deep", "digits", "surrogate"),
    ],
)
def test_config_that_is_no_ordinary_file(make, tmp_path):
    """No hang, no memory filled."""
    (tmp_path / "model").mkdir()
    make(tmp_path / "model" / "config.json")
    refused(onboard("new", "model", "--out", "out", cwd=tmp_path), 2)
    assert not (tmp_path / "out").exists()


def test_licence_header_that_never_ends(tmp_path):
    """Read at the end of the way in a process, so the measurement is replaced; a FIFO and a device do not hang it."""
    from onboard.errors import UsageError
    from onboard.plan.targets import header_from

    os.mkfifo(tmp_path / "fifo")
    for file in (tmp_path / "fifo", Path("/dev/zero"), tmp_path, tmp_path / "missing"):
        with pytest.raises(UsageError, match="licence header"):
            header_from(file)


def quick(measured: Path, *words: object, cwd: Path, **environment: str | None) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in {**ENVIRONMENT, **environment}.items() if value is not None}
    return subprocess.run(
        [sys.executable, Path(__file__).parent / "quick_onboard.py", measured, *map(str, words)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_places_that_are_not_fit(measured, tmp_path):
    source = write_config(tmp_path / "model", QWEN)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    before = tree(tmp_path)
    places = ["link", "dangling", "file", "full", "file/below", ".", "/", "/proc/x", "/dev/null", "x\ny/\0"[:3]]
    for place in places[:-1]:
        done = quick(measured, "new", source, "--out", place, "--no-verify", cwd=tmp_path)
        refused(done, 2)
        assert tree(tmp_path) == before, place
    for force in ("link", "file", "."):
        refused(quick(measured, "new", source, "--out", force, "--no-verify", "--force", cwd=tmp_path), 2)
        assert tree(tmp_path) == before, force
    if os.geteuid():
        (tmp_path / "elsewhere").chmod(0o500)
        done = quick(measured, "new", source, "--out", tmp_path / "elsewhere" / "x", "--no-verify", cwd=tmp_path)
        assert "ermission" in refused(done, 2)
        assert tree(tmp_path) == before


def test_no_home(measured, tmp_path):
    source = write_config(tmp_path / "model", QWEN)
    for number, home in enumerate((None, "", "/nonexistent")):
        out = tmp_path / f"out{number}"
        done = quick(measured, "new", source, "--out", out, "--no-verify", cwd=tmp_path, HOME=home)
        assert done.returncode == 0, done.stderr
        check_package(out)


def test_nothing_of_the_current_folder_is_imported(tmp_path):
    """A downloaded model's folder may hold a torch.py; the whole way through the real probe imports none of it."""
    write_config(tmp_path, QWEN | {PAYLOADS[5]: PAYLOADS[7]})
    witness = tmp_path / "witness"
    for name in (
        "torch",
        "transformers",
        "json",
        "onboard",
        "jinja2",
        "ruff",
        "conftest",
        "sitecustomize",
        "modeling_x",
    ):
        (tmp_path / f"{name}.py").write_text(f"open({str(witness)!r}, 'a').write({name!r})\n")
    done = onboard("new", ".", "--out", tmp_path / "out", "--no-verify", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not witness.exists(), witness.read_text()
    check_package(tmp_path / "out")


def child(code: str):
    return lambda *_, **__: [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        ("import os; os.kill(os.getpid(), 11)", Unsupported, "SIGSEGV"),
        ("import os; os.kill(os.getpid(), 9)", Unsupported, "SIGKILL"),
        ("import os; os.abort()", Unsupported, "SIGABRT"),
        ("import time; time.sleep(60)", Unsupported, "took more than 1 s"),
        ("print('not JSON')", OnboardError, "no output"),
        ("print('[1]')", OnboardError, "no output"),
        ("import sys; sys.exit('\\x1b[2Jno torch')", OnboardError, r"\\x1b\[2Jno torch"),
        ("import sys; sys.stdout.buffer.write(bytes(range(256)) * 99999)", OnboardError, "no output"),
    ],
)
def test_probe_that_breaks(code, kind, says, monkeypatch):
    """A crash, a hang or nonsense instead of an answer is an error of three lines."""
    monkeypatch.setattr(ask, "command", child(code))
    monkeypatch.setattr(ask, "TIMEOUT_SECONDS", 1)
    with pytest.raises(kind) as caught:
        ask.ask_reference(QWEN, "Qwen3ForCausalLM", "qwen3")
    assert re.search(says, f"{caught.value.what} {caught.value.why}")
    assert len(caught.value.why) < 400


def test_what_libraries_print_is_not_the_answer(tmp_path, monkeypatch):
    (tmp_path / "noisy.py").write_text(
        "import os\nprint('hello')\nos.write(1, b'{\"error\": \"failed\"}')\nos.system('echo from a shell')\n"
        "from onboard._child import answer_stream\n"
        "with answer_stream() as stream:\n    stream.write('42')\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT / "generator"))))
    done = subprocess.run(_child.command("noisy", answers=True), capture_output=True, text=True, check=True)
    assert done.stdout == "42"
    assert "from a shell" in done.stderr


def test_probe_cannot_fill_the_memory(tmp_path, monkeypatch):
    (tmp_path / "greedy.py").write_text(
        "from onboard._child import answer_stream, bound_memory\nbound_memory(8 * 1024**3)\n"
        "try:\n    bytearray(64 * 1024**3)\n    said = 'got it'\nexcept MemoryError:\n    said = 'refused'\n"
        "with answer_stream() as stream:\n    stream.write(said)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT / "generator"))))
    done = subprocess.run(_child.command("greedy", answers=True), capture_output=True, text=True, check=True)
    assert done.stdout == "refused"


def project(tmp_path: Path, body: str) -> Path:
    """A project whose only generated test has this body, below a stranger's conftest.py."""
    root = tmp_path / "stranger" / "project"
    (root / "tests").mkdir(parents=True)
    (root / "src").mkdir()
    (root / "tests" / "test_config.py").write_text(f"def test_one():\n    {body}\n")
    touch = f"open({str(tmp_path / 'witness')!r}, 'w')\n"
    for file in ("conftest.py", "pytest.ini", "torch.py"):
        (root.parent / file).write_text(touch)
    return root


def test_generated_tests_do_not_read_what_lies_above_them(tmp_path, monkeypatch):
    root = project(tmp_path, "pass")
    monkeypatch.chdir(root.parent)
    result = verify.run_tests(root, layout("plugin", MARK, "dense"), Quiet())
    assert (result.passed, result.failed) == (1, 0)
    assert not (tmp_path / "witness").exists()


def test_generated_test_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "TIMEOUT_SECONDS", 2)
    root = project(tmp_path, "import time; time.sleep(60)")
    with pytest.raises(VerificationFailed, match="did not end within 2 s"):
        verify.run_tests(root, layout("plugin", MARK, "dense"), Quiet())
