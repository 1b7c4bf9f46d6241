"""What SOURCE means: a local path, or the id of a repo on the Hub.

A path that exists always wins. What merely looks like a path is never sent to the Hub, so that a typing mistake in a
path is reported as one, and a local name does not leave the machine.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from onboard.errors import UsageError
from onboard.facts._text import shown

# The Hub's rules, which its client checks as well; repeated here because a local source must not import the client.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_ID = re.compile(rf"(?:{_PART}/)?{_PART}")
_GIVE = "Give a Hub id (org/name), a directory that holds config.json, or the path of a config.json."


@dataclass(frozen=True, slots=True)
class LocalPath:
    """A path that exists."""

    path: str


@dataclass(frozen=True, slots=True)
class HubId:
    """A well-formed repo id; nothing is known about whether it exists."""

    id: str


def understand(given: str) -> LocalPath | HubId:
    """Decide what a SOURCE argument names.

    Args:
        given: what the user typed. The address of a model's page (``https://huggingface.co/org/name``) counts as its
            id.

    Raises:
        UsageError: it is neither an existing path nor a well-formed id.
    """
    if not given.strip():
        raise UsageError("no model was given", "SOURCE is empty", _GIVE, code="source.empty")
    path = _existing(given)
    if path is not None:
        return LocalPath(path)
    if "://" in given:
        return HubId(_id_of_address(given))
    if given.startswith((".", "~", "/")) or given.endswith(".json") or given.count("/") > 1:
        raise UsageError(
            f"cannot read {shown(given)}",
            "it looks like a path, and there is no such file or directory",
            _GIVE,
            code="source.not_found",
        )
    if not is_repo_id(given):
        raise UsageError(
            f"cannot read {shown(given)}",
            "no file or directory has that name, and it is not a well-formed Hub id: one or two names of letters,"
            " digits, '-', '_' and '.' with '/' between them",
            _GIVE,
            code="source.bad_id",
        )
    return HubId(given)


def is_repo_id(text: str) -> bool:
    """Whether the Hub would accept the text as a repo id."""
    return bool(_ID.fullmatch(text)) and "--" not in text and ".." not in text and not text.endswith(".git")


def check_revision(revision: str) -> None:
    """Refuse what cannot be a git branch, tag or commit: the cache uses it as a path and the Hub as part of an address.

    Raises:
        UsageError: the revision breaks git's own rules for names.
    """
    parts = revision.split("/")
    if (
        not 0 < len(revision) <= 250
        or not revision.isprintable()
        or any(char in revision for char in " ~^:?*[\\")
        or ".." in revision
        or "@{" in revision
        or any(not part or part.startswith((".", "-")) or part.endswith((".", ".lock")) for part in parts)
    ):
        raise UsageError(
            f"cannot read the revision '{shown(revision)}'",
            "git allows no such name for a branch, a tag or a commit",
            "Give --revision a branch, a tag or a commit of the repo.",
            code="source.bad_revision",
        )


def _existing(given: str) -> str | None:
    try:
        path = os.path.expanduser(given)
        os.stat(path)
    except PermissionError as error:
        raise UsageError(
            f"cannot read {shown(given)}",
            error.strerror or "permission denied",
            "Change the permissions, or give another source.",
            code="source.unreadable",
        ) from error
    except (OSError, ValueError):
        # ValueError: a NUL or an unencodable character, which no path holds.
        return None
    return path


def _id_of_address(given: str) -> str:
    from urllib.parse import urlsplit

    hosts = {"huggingface.co", "www.huggingface.co", "hf.co"}
    do = "Give the model's id as org/name."
    try:
        endpoint = urlsplit(os.environ.get("HF_ENDPOINT", ""))
        address = urlsplit(given)
        on_hub = address.scheme in ("http", "https") and (
            address.netloc in hosts or (address.netloc != "" and address.netloc == endpoint.netloc)
        )
    except ValueError:
        on_hub = False
    if on_hub:
        parts = address.path.strip("/").split("/")
        candidate = "/".join(parts[:2])
        # Two names and nothing else: more (a file, a branch, a data set) is a wish that an id alone does not carry.
        if len(parts) <= 2 and not address.query and not address.fragment and is_repo_id(candidate):
            return candidate
        if len(parts) > 2 and parts[0] not in ("datasets", "spaces", "api") and is_repo_id(candidate):
            revision = f" --revision {shown(parts[3])}" if parts[2] in ("tree", "blob", "resolve") and parts[3:] else ""
            do = f"Give {candidate}{revision}."
    raise UsageError(
        "cannot read a model from that address",
        "it is not the address of a model's page on the Hub"
        if on_hub
        else "only a model's page on the Hub can be read",
        do,
        code="source.url",
    )
