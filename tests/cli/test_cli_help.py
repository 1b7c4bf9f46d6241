"""The help is complete, fits 80 columns, costs nothing to show, and names only what exists."""

from __future__ import annotations

import subprocess
import sys

import pytest
from child_process import clean_environment
from onboard import __version__

COMMANDS = ["new", "inspect", "verify", "check", "packing", "doctor", "completion"]
COMMON = {"--format", "--json", "--debug", "--help"}
OWN = {
    "new": {
        *("--target", "--out", "--into", "--name", "--revision", "--style", "--no-verify", "--dry-run", "--diff"),
        *("--force", "--trust-remote-code", "--license-header"),
    },
    "inspect": {"--revision"},
    "verify": {"--mutants", "--parallel"},
    "check": set(),
    "packing": set(),
    "doctor": set(),
    "completion": set(),
}
HEAVY = (
    "torch",
    "transformers",
    "nemo_automodel",
    "rich",
    "jinja2",
    "huggingface_hub",
    "safetensors",
    "libcst",
    "numpy",
)


def test_group_lists_exactly_the_commands_that_exist(invoke):
    result = invoke("--help")
    assert result.exit_code == 0
    listed = result.stdout.split("Commands:\n")[1].split("\n\n")[0]
    assert [line.split()[0] for line in listed.splitlines()] == COMMANDS
    assert "..." not in listed, "a summary is cut off"
    assert "130  interrupted" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_command_help_has_options_and_examples(invoke, command, flag):
    result = invoke(command, flag)
    assert result.exit_code == 0
    options = {
        word.strip(",") for line in result.stdout.splitlines() for word in line.split() if line.startswith("  -")
    }
    assert {word for word in options if word.startswith("--")} == COMMON | OWN[command]
    assert f"onboard {command}" in result.stdout.split("Examples:\n")[1]


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_fits_80_columns(invoke, command):
    result = invoke(*([command] if command else []), "--help")
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["new", "--help"], ["inspect", "--bogus"]])
def test_nothing_heavy_is_imported_before_a_command_runs(words):
    script = (
        "import sys\n"
        "from onboard.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    child = subprocess.run(
        [sys.executable, "-c", script, *words], env=clean_environment(), capture_output=True, text=True, check=True
    )
    assert child.stdout.splitlines()[-1] == "[]"


def test_version(onboard):
    assert onboard("--version", stub=False).stdout == f"onboard {__version__}\n"


def test_version_in_json(invoke):
    assert invoke("--json", "--version").stdout.split() == [
        "{",
        '"schema_version":',
        "1,",
        '"version":',
        '"0.1.0"',
        "}",
    ]


def test_no_command_shows_the_help_as_a_usage_error(invoke):
    result = invoke()
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Commands:" in result.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(invoke, shell):
    result = invoke("completion", shell)
    assert result.exit_code == 0
    assert f"_ONBOARD_COMPLETE={shell}_complete" in result.stdout


def test_completion_completes_commands_and_options(onboard):
    words = {"COMP_WORDS": "onboard in", "COMP_CWORD": "1", "_ONBOARD_COMPLETE": "bash_complete"}
    assert onboard(stub=False, **words).stdout == "plain,inspect\n"
    words |= {"COMP_WORDS": "onboard new --st", "COMP_CWORD": "2"}
    assert onboard(stub=False, **words).stdout == "plain,--style\n"
