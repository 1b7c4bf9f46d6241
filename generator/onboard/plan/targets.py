"""Where the files go: a project of their own (plugin), or upstream's places in a checkout (intree)."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from onboard.errors import UsageError
from onboard.plan.changes import Target, check_path
from onboard.plan.names import is_device_name, package_name, shown

Kind = Literal["dense", "moe", "vlm"]

REGISTRY = "nemo_automodel/_transformers/registry.py"
MODELS = "nemo_automodel/components/models"
LOCK_NAME = ".onboard.lock.json"

_INSTALLED = ("site-packages", "dist-packages")
_HEADER_BYTES = 8192
_NOT_HEADER = re.compile(r"#!|#.*coding[:=]")
_COPYRIGHT = re.compile(r"\bcopyright\b[^\n]*", re.IGNORECASE)
_YEAR = re.compile(r"\b20[0-9]{2}\b")
_ORG = re.compile(r"[a-z0-9](?:[a-z0-9._\-]*[a-z0-9])?")


def find_checkout(start: Path) -> Path | None:
    """The NeMo AutoModel checkout that ``start`` is in, or None.

    An installed package has the registry too, but nobody means to edit that.
    """
    here = start.absolute()
    for folder in (here, *here.parents):
        if folder.name not in _INSTALLED and (folder / REGISTRY).is_file():
            return folder
    return None


@dataclass(frozen=True, slots=True)
class Layout:
    """The place of each thing, relative to the plan's root.

    In a checkout the review and the lock lie in the model's own package folder, so that several models do not collide
    and a removed model takes them along. Upstream keeps its pages by publisher
    (``docs/model-coverage/llm/<org>/<page>.mdx``).

    Attributes:
        target: plugin or intree.
        name: the model's module name.
        modality: ``llm`` or ``vlm``, as upstream's folders are called.
        project: the project folder's name; empty in a checkout, where the root is the checkout itself.
        package_dir: the folder of ``model.py``.
        tests_dir: the folder of the generated tests.
        example_dir: the folder of the recipe.
        docs_page: the coverage page.
        review: ``REVIEW.md``.
        lock: the lock file.
        import_package: how ``package_dir`` is imported.
        sys_path: the folder that has to be on ``sys.path`` for that.
        pyproject: ``pyproject.toml`` of the project; None in a checkout.
        readme: ``README.md`` of the project; None in a checkout.
        registry: the registry to edit; None in a project, which has an entry point instead.
    """

    target: Target
    name: str
    modality: Literal["llm", "vlm"]
    project: str
    package_dir: str
    tests_dir: str
    example_dir: str
    docs_page: str
    review: str
    lock: str
    import_package: str
    sys_path: str
    pyproject: str | None
    readme: str | None
    registry: str | None


def layout(target: Target, name: str, kind: Kind, org: str | None = None) -> Layout:
    """The layout for one model.

    Args:
        target: plugin or intree.
        name: the module name, as :func:`~onboard.plan.names.package_name` gives it.
        kind: what the model is; a VLM's recipe and page lie in folders of their own.
        org: the publisher on the Hub, which upstream's pages are kept by; only used in a checkout.
    """
    if package_name(name) != name:
        raise ValueError(f"{name!r} is not a module name")
    modality: Literal["llm", "vlm"] = "vlm" if kind == "vlm" else "llm"
    example_dir = f"examples/{modality}_finetune/{name}"
    if target == "plugin":
        package = f"nemo_automodel_{name}"
        return Layout(
            target=target,
            name=name,
            modality=modality,
            project=f"nemo-automodel-{name.replace('_', '-')}",
            package_dir=f"src/{package}",
            tests_dir="tests",
            example_dir=example_dir,
            docs_page=f"docs/model-coverage/{modality}/{name}.mdx",
            review="REVIEW.md",
            lock=LOCK_NAME,
            import_package=package,
            sys_path="src",
            pyproject="pyproject.toml",
            readme="README.md",
            registry=None,
        )
    package_dir = f"{MODELS}/{name}"
    # A publisher's name is a stranger's string: one that is no plain folder name is left out, the page is found
    # either way.
    folder = (org or "").lower()
    publisher = f"{folder}/" if _ORG.fullmatch(folder) and not is_device_name(folder) else ""
    return Layout(
        target=target,
        name=name,
        modality=modality,
        project="",
        package_dir=package_dir,
        tests_dir=f"tests/unit_tests/models/{name}",
        example_dir=example_dir,
        docs_page=check_path(f"docs/model-coverage/{modality}/{publisher}{name}.mdx"),
        review=f"{package_dir}/REVIEW.md",
        lock=f"{package_dir}/{LOCK_NAME}",
        import_package=package_dir.replace("/", "."),
        sys_path=".",
        pyproject=None,
        readme=None,
        registry=REGISTRY,
    )


def license_header(checkout: Path) -> str:
    """The header that the checkout's newest model files carry, with its year; ``""`` if they carry none.

    Newest is read off the copyright lines, not off file times, which a fresh clone does not keep. Of several
    headers of that year the most frequent one wins.
    """
    headers: Counter[tuple[int, str]] = Counter()
    for file in sorted((checkout / MODELS).rglob("*.py")):
        try:
            with file.open("rb") as stream:
                text = stream.read(_HEADER_BYTES).decode(errors="replace")
        except OSError:
            continue
        header = _leading_comment(text)
        if years := [int(year) for line in _COPYRIGHT.findall(header) for year in _YEAR.findall(line)]:
            headers[max(years), header] += 1
    if not headers:
        return ""
    newest = max(year for year, _ in headers)
    return min((-count, header) for (year, header), count in headers.items() if year == newest)[1]


def header_from(file: Path) -> str:
    """The header in a file of the user's, every line of it a comment.

    Raises:
        UsageError: it is no text, too long, or has a line that Python would read as the file's encoding.
    """
    why = None
    try:
        # Without waiting: a pipe that nobody writes to would block.
        with open(os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as stream:
            regular = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
            text = stream.read(_HEADER_BYTES + 1).decode("utf-8") if regular else ""
    except OSError as error:
        why, text = error.strerror or type(error).__name__, ""
    except UnicodeDecodeError:
        why, text = "it is not UTF-8 text", ""
    else:
        if not regular:
            why = "it is not a regular file"
    comments = [line if line.startswith("#") else f"# {line}".rstrip() for line in text.splitlines()]
    if len(text) > _HEADER_BYTES:
        why = f"it is longer than {_HEADER_BYTES} bytes"
    elif any(not char.isprintable() and char != "\t" for line in comments for char in line):
        why = "it has characters that are not printable"
    elif any(_NOT_HEADER.match(line) for line in comments):
        why = "it has a line that starts a script or sets its encoding (#!, coding:)"
    if why is not None:
        raise UsageError(
            f"cannot use {shown(str(file))} as the licence header",
            why,
            "give a text file with the header, as comment lines or plain lines",
            code="header.invalid",
        )
    return "".join(f"{line}\n" for line in comments)


def _leading_comment(text: str) -> str:
    lines: list[str] = []
    for line in text.splitlines():
        if not lines and (_NOT_HEADER.match(line) or not line.strip()):
            continue
        if not line.startswith("#"):
            break
        lines.append(line.rstrip())
    return "".join(line + "\n" for line in lines)
