"""What the Hub's client raises, told to people: what, why, what to do, and never a token."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from urllib.parse import urlsplit

from huggingface_hub import constants
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from onboard.errors import HubError
from onboard.facts._text import shown
from onboard.facts.hub_http import Unanswered

LOG_IN = "run `hf auth login` or set HF_TOKEN"
_TOKEN_CHARACTERS = (
    "token",
    "the token holds characters that cannot be sent",
    "Correct HF_TOKEN, or log in again with `hf auth login`.",
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked of the Hub, and with which token.

    Attributes:
        repo: the repo id.
        revision: as the user gave it, or the commit.
        token: the token that was sent, if any.
    """

    repo: str
    revision: str | None
    token: str | None

    def redact(self, text: str) -> str:
        """The text without any token that this process knows."""
        variables = (os.environ.get("HF_TOKEN"), os.environ.get("HUGGING_FACE_HUB_TOKEN"))
        for secret in (self.token, *variables):
            if secret and secret.strip():
                text = text.replace(secret, "<token>").replace(secret.strip(), "<token>")
        return text


def endpoint() -> str:
    """The Hub's address as it may be shown: without the user name and password that a proxy's address may hold."""
    try:
        parts = urlsplit(constants.ENDPOINT)
        return shown(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())
    except ValueError:
        return "HF_ENDPOINT"


def explain(error: Exception, asked: Asked, file: str | None = None) -> HubError:
    """The error to raise for something that the Hub's client raised.

    Args:
        error: what it raised.
        asked: the repo and revision that it was asked for.
        file: the file, where it was one.
    """
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        # The client's "not cached either" hides why the Hub was of no help.
        error = error.__cause__
    subject = asked.repo if file is None else f"{file} of {asked.repo}"
    code, why, do = _unanswered(error, asked) if isinstance(error, Unanswered) else _refused(error, asked, file)
    return HubError(
        asked.redact(f"cannot read {shown(subject)} from the Hub"),
        asked.redact(why),
        asked.redact(do),
        code=f"hub.{code}",
    )


def tells_a_token(error: BaseException, asked: Asked) -> bool:
    """Whether a traceback of the error would show a token."""
    text = "".join(traceback.format_exception(error))
    return asked.redact(text) != text


def _unanswered(error: Unanswered, asked: Asked) -> tuple[str, str, str]:
    hub = endpoint()
    tried = "tried once" if error.tries == 1 else f"tried {error.tries} times"
    later = "Try again later"
    if error.retry_after is not None:
        later = f"Try again in {max(1, round(error.retry_after))} seconds"
    match error.trouble:
        case "status" if error.status == 429:
            more = f"; with a token the limit is higher ({LOG_IN})" if asked.token is None else ""
            return "rate_limited", f"{hub} limits the number of requests (429)", f"{later}{more}."
        case "status":
            return "unavailable", f"{hub} answered with status {error.status} ({tried})", f"{later}."
        case "timeout":
            why = f"{hub} did not answer in time ({tried})"
            return "timeout", why, "Check the connection; HF_HUB_DOWNLOAD_TIMEOUT sets the seconds for each try."
        case "dropped":
            return "unreachable", f"{hub} broke the connection off ({tried})", f"{later}."
        case "unreachable":
            why = f"there is no connection to {hub}: {shown(str(error.__cause__))}"
            return "unreachable", why, "Check the network, the proxy and HF_ENDPOINT, or give a local directory."
        case "token":
            return _TOKEN_CHARACTERS
        case "too_large":
            why = f"{hub} answered with far more than was asked for"
            return "bad_answer", why, "Check HF_ENDPOINT: the Hub's parts of files (HTTP Range) are needed."
        case "endpoint":
            why = f"{hub} cannot be asked: {shown(str(error.__cause__))}"
            return "endpoint", why, "Correct HF_ENDPOINT, or the proxy's variables (HTTPS_PROXY, HTTP_PROXY)."


def _refused(error: Exception, asked: Asked, file: str | None) -> tuple[str, str, str]:
    if isinstance(error, UnicodeEncodeError):
        return _TOKEN_CHARACTERS
    page = f"{endpoint()}/{asked.repo}"
    revision = shown(asked.revision or constants.DEFAULT_REVISION)
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    said = f": {shown(error.server_message)}" if isinstance(error, HfHubHTTPError) and error.server_message else ""
    if isinstance(error, GatedRepoError):
        if asked.token is None:
            why = "access to the repo has to be granted, and no token was sent"
            return "gated", why, f"Accept the terms at {page}, then {LOG_IN}."
        why = "access to the repo has to be granted, and the token's account has no access"
        return "gated", why, f"Ask for access at {page}, with the account that the token belongs to."
    if isinstance(error, RevisionNotFoundError):
        why = f"the repo has no revision '{revision}'"
        return "revision_not_found", why, f"Choose a branch, tag or commit: {page}/commits."
    if isinstance(error, EntryNotFoundError) or (file is not None and status == 404 and type(error) is HfHubHTTPError):
        why = f"the repo has no {shown(file or 'such file')} at revision '{revision}'"
        return "no_config" if file == "config.json" else "no_file", why, "Give a repo in the layout of transformers."
    if isinstance(error, DisabledRepoError):
        return "disabled", "the Hub has disabled the repo", "Use another copy of the model."
    if status == 401 and asked.token is not None and not isinstance(error, RepositoryNotFoundError):
        return (
            "token",
            f"the Hub does not accept the token{said}",
            "Log in again with `hf auth login`, or correct HF_TOKEN.",
        )
    if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
        if asked.token is None:
            why = "there is no such repo, or it is private and no token was sent"
            return "repo_not_found", why, f"Check the spelling of the id; for a private repo, {LOG_IN}."
        why = "there is no such repo, or it is private and the token does not give access to it"
        return "repo_not_found", why, "Check the spelling of the id, and which account the token belongs to."
    if status == 403:
        return "forbidden", f"the Hub does not allow it{said}", "Check the token's permissions."
    if status is not None:
        return (
            "bad_answer",
            f"{endpoint()} answered with status {status}{said}",
            "Check HF_ENDPOINT, or try again later.",
        )
    if isinstance(error, OSError) and error.errno is not None:
        why = f"the cache cannot be used: {shown(error.strerror or '')} ({shown(str(error.filename or ''))})"
        return "cache", why, "Make HF_HOME writable, or point it elsewhere."
    reason = f"{type(error).__name__}: {shown(str(error).partition(chr(10))[0])}"
    why = f"{endpoint()} did not answer as a Hub does ({reason})"
    return "bad_answer", why, "Check HF_ENDPOINT and the proxy, or give a local directory."
