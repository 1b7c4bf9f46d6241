"""Hostile strings and numbers, the way of a config through the real pipeline, and what must hold of its result."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import sys
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from onboard.errors import OnboardError
from onboard.pipeline import making
from onboard.plan.lock import drift, read_lock

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {path.parent.name: json.loads(path.read_text()) for path in sorted(ROOT.glob("examples/*/config.json"))}
QWEN = EXAMPLES["qwen3-0.6b"]
# Of child processes: offline, and nothing of the user's settings.
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTEST_"))},
    "PYTHONPATH": str(ROOT / "generator"),
    "HF_HUB_OFFLINE": "1",
    "NO_COLOR": "1",
}

MARK = "pwned"
SUM = "49441"  # what Jinja makes of {{ 7 * 7 * 1009 }}


def payloads(witness: Path) -> list[str]:
    """Strings that would touch ``witness``, or leave :data:`MARK` outside of a string, if they were ever taken as code.

    Args:
        witness: a file that does not exist.
    """
    touch = f"__import__('pathlib').Path({str(witness)!r}).touch()  # {MARK}"
    return [
        touch,
        f"silu\n{touch}",
        f"silu\r\n{touch}\r",
        f'"\n{touch}\n"',
        f"'\n{touch}\n'",
        f'"""\n{touch}\n"""',
        f"'''\n{touch}\n'''",
        f'\\"""\n{touch}\n',
        f'")\n{touch}\n("',
        f"'; {touch}; '",
        f'"+{MARK}+"',
        f"\\'+{MARK}+\\'",
        f"\"'+{MARK}+'\"",
        f"{MARK}\\",
        f"\\N{{DIGIT ONE}}{MARK}\\x00\\u0041",
        f"{{{{ 7 * 7 * 1009 }}}}{MARK}",
        f"{{{{ cycler.__init__.__globals__.os.popen('touch {witness}').read() }}}}",
        f"{{% for x in range(9) %}}{MARK}{{% endfor %}}",
        f"{{# {MARK}",
        f"${{{MARK}}} $({MARK}) `{MARK}`",
        f"!!python/object/apply:os.system ['touch {witness}'] # {MARK}",
        f"\n{MARK}: 1\n- {MARK}\n---\n{MARK}: 2",
        f"]\n[project.scripts]\n{MARK} = '{MARK}:main'",
        f"<script>{MARK}()</script><!-- {MARK}",
        f"export const {MARK} = 1;\n\nimport {MARK} from '{MARK}'",
        f"a | b ` {MARK} `` c ``` d\n\n# {MARK}\n\n| {MARK} |",
        f"[{MARK}](javascript:{MARK})![{MARK}](https://{MARK}.example)",
        f"../../../{MARK}",
        f"/{MARK}/etc/passwd",
        f"C:\\{MARK}\\con",
        f"{MARK}/{MARK}--{MARK}",
        f"\u202e{MARK}\u2028{MARK}\u2029{MARK}\u0085{MARK}\x0b{MARK}\x0c{MARK}\x1b[31m{MARK}\x07",
        f"\x00{MARK}\x00",
        f"{MARK}\ufeff\u200b\U000e0041",
        "\uff50\uff57\uff4e\uff45\uff44 \u043e\u0455.system",
        f"# -*- coding: utf-7 -*-\n+AAo-{MARK}",
        f"{MARK}" * 3000,
        f"config.hidden_size or {MARK}()",
        f"silu if {MARK} else silu",
        f"os.system({MARK})",
    ]


NUMBERS: list[Any] = [
    0,
    -1,
    1,
    3,
    2**31,
    2**63,
    10**9,
    10**30,
    -(10**30),
    10**3000,
    0.0,
    -0.0,
    0.5,
    1e-320,
    1e308,
    -1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    True,
    False,
]


def nested(depth: int, inside: Any) -> Any:
    """A value inside of objects and lists in turn."""
    for level in range(depth):
        inside = {"text_config": inside} if level % 2 else [inside]
    return inside


def write_config(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write a config.json, with NaN and Infinity as the field's files have them."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    return file


class Quiet:
    """Progress that nobody looks at."""

    def start(self, label: str, total: int | None = None) -> None: ...

    def advance(self, n: int = 1, note: str | None = None) -> None: ...

    def done(self, note: str | None = None) -> None: ...


def ask_here(
    config: Mapping[str, Any],
    architecture: str,
    model_type: str | None,
    style: str = "native",
    problem: Any = None,
    code: Any = None,
) -> dict[str, Any]:
    """:func:`onboard.reference.ask.ask_reference` in this process: the same probe and the same answers, 5 s sooner."""
    from onboard.reference.ask import understand
    from onboard.reference.probe import answer

    request = {"architecture": architecture, "model_type": model_type, "config": config, "style": style}
    request = json.loads(json.dumps({**request, "problem": problem, "code": code}))
    return understand(json.loads(answer(request)), architecture)


def onboard_here(source: Path, out: Path, **options: Any) -> OnboardError | None:
    """``onboard new --no-verify``; the error that a user would see, or None where the package was made."""
    try:
        making.make(making.NewRequest(str(source), target="plugin", out=out, verify=False, **options), Quiet())
    except OnboardError as error:
        return error
    return None


def check_error(error: OnboardError) -> None:
    """It is one for people, and not a bug of ours."""
    assert error.exit_status in (2, 3, 4), error.as_json()
    assert error.what
    assert error.why
    assert error.do


def check_package(out: Path) -> None:
    """A package made of a hostile config is whole, and strings of the config are nothing but strings in it."""
    lock = read_lock(out / ".onboard.lock.json")
    assert {one.state for one in drift(out, lock)} == {"same"}
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert found == {*lock.files, ".onboard.lock.json"}
    for path in out.rglob("*"):
        if path.is_dir():
            continue
        text = path.read_text(encoding="utf-8")
        if path.name != "config.json":
            assert SUM not in text, f"{path.name}: Jinja syntax of the config was evaluated"
        {".py": check_python, ".md": check_prose, ".mdx": check_prose}.get(path.suffix, lambda _: None)(text)
        if path.suffix == ".yaml":
            assert set(yaml.safe_load(text)) == RECIPE_KEYS
        if path.suffix == ".toml":
            project = tomllib.loads(text)
            assert set(project) == {"build-system", "project", "tool"}
            assert "scripts" not in project["project"]
            assert len(project["project"]["entry-points"]["nemo_automodel.architectures"]) == 1
        if path.suffix == ".json":
            json.loads(text)


RECIPE_KEYS = {
    "recipe",
    "step_scheduler",
    "dist_env",
    "rng",
    "model",
    "checkpoint",
    "distributed",
    "loss_fn",
    "dataset",
    "dataloader",
    "optimizer",
}


def check_python(text: str) -> None:
    """The marker stands in no name and no comment, only in string literals that are no docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for name, value in ast.iter_fields(node):
            if not isinstance(node, ast.Constant) and isinstance(value, str):
                assert MARK not in value.lower(), f"{type(node).__name__}.{name}: {value!r}"
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            assert MARK not in (ast.get_docstring(node) or "")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            assert MARK not in token.string
    assert "\0" not in text


def check_prose(text: str) -> None:
    """Outside of code spans, nothing of the config is markup; no line of it begins a block."""
    for line in text.splitlines():
        bare = re.sub(r"`[^`]*`", "", line)
        assert not re.search(r"<script|<!--|\]\(javascript|\{\{|\{%|!\[", bare), line
        assert not re.match(rf"[#>|\-*\s]*(export const |import )?{MARK}", bare), line
        if line.startswith("|"):
            assert line.rstrip().endswith("|"), line
    assert text.count("\n---\n") <= 1
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\x85\u2028\u2029\u202e]", text)
