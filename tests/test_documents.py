"""What the documents tell people to type is there: make targets, commands, options, files."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import click
import pytest
from onboard.cli._group import root

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/coverage.md", "docs/packing.md")
NOT_THERE_YET = {"update", "keys", "registry"}
TARGETS = {"help", "install", "demo", "test", "lint", "golden", "bench", "coverage", "sweep", "clean"}


@pytest.fixture(params=DOCUMENTS)
def text(request) -> str:
    return (REPOSITORY / request.param).read_text(encoding="utf-8")


def test_make_without_a_target_lists_the_targets():
    # Under `make test` this make would otherwise be a part of that one, and say so.
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(["make"], cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=True)
    assert {line.split()[1] for line in done.stdout.splitlines()} == TARGETS


def test_the_targets_that_are_named_are_there(text):
    code = re.findall(r"`[^`\n]+`|^(?:    |\$ )?make .*$", text, re.MULTILINE)
    named = {target for part in code for target in re.findall(r"\bmake ([a-z]+)", part)}
    assert named <= TARGETS


def test_the_commands_that_are_named_are_there(text):
    context = click.Context(root)
    commands = {name: root.get_command(context, name) for name in root.list_commands(context)}
    for name, command in list(commands.items()):
        if isinstance(command, click.Group):
            commands |= {
                f"{name} {inner}": command.get_command(context, inner) for inner in command.list_commands(context)
            }
    names = "|".join([*(name for name in commands if " " in name), "[a-z]+"])
    for name, rest in re.findall(rf"(?:^|[`$ ])onboard ({names})\b([^`|\n]*)", text, re.MULTILINE):
        if not re.match(r"( |$)", rest) or name not in commands:
            # Prose ("what onboard writes") is not a command line; a command line has options or a path.
            assert "--" not in rest, (name, rest)
            continue
        known = {
            option for parameter in commands[name].params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        for option in re.findall(r"(?<![\w-])--[a-z-]+", rest):
            assert option in known, f"onboard {name} has no {option}"


def test_the_files_that_are_linked_are_there(text):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (REPOSITORY / target).exists() or (REPOSITORY / "docs" / target).exists(), target


def test_what_is_not_there_yet_is_really_not_there():
    """And once it is, the page must say so."""
    page = (REPOSITORY / "docs" / "coverage.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.endswith("not there yet |"))
    named = set(re.findall(r"`([a-z]+)`", row))
    assert named == NOT_THERE_YET
    assert not named & set(root.list_commands(click.Context(root)))


def test_no_document_has_a_gap():
    for name in DOCUMENTS:
        assert "@@" not in (REPOSITORY / name).read_text(encoding="utf-8"), name
