"""Facts from a repo on the Hugging Face Hub, through the Hub's own client.

A branch or tag is resolved to a commit once, and everything else is asked for by that commit. config.json and the index
go through the client's cache. Headers do not: the client has no cache for parts of files, and 100 kilobytes a file are
not worth a second cache with its own rules. Without the Hub (``HF_HUB_OFFLINE``, or it does not answer) the cache alone
is used, headers included where a snapshot happens to hold the weights.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import TypeVar

from huggingface_hub import HfApi, constants, get_hf_file_metadata, get_token, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, SafetensorsParsingError
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from onboard import __version__
from onboard.errors import HubError
from onboard.facts import checkpoint, config_json, hub_http
from onboard.facts._facts import Facts, Origin, Source, TensorHeader
from onboard.facts._text import few, shown
from onboard.facts.headers import FileHeader, HeaderError, check_entries
from onboard.facts.hub_errors import Asked, explain, tells_a_token
from onboard.facts.local import read_folder

T = TypeVar("T")
# The tensors, or None and why; and warnings.
CheckpointFacts = tuple[tuple[TensorHeader, ...] | None, str | None, tuple[str, ...]]
CONFIG = "config.json"
_NOT_ASKED: CheckpointFacts = (None, "the headers were not asked for", ())
_COMMIT = re.compile("[0-9a-f]{40}", re.IGNORECASE)
_AT_ONCE = 8
# The client checks little of what a safetensors header holds; over the rest it stumbles, in one of these ways.
_STUMBLES = (AttributeError, KeyError, MemoryError, OverflowError, RecursionError, TypeError, ValueError)
# With these the Hub said nothing about the repo, so that what the cache knows is as good as it gets.
_SILENT = {"hub.unreachable", "hub.timeout", "hub.unavailable", "hub.rate_limited"}


def read_hub(given: str, repo: str, *, revision: str | None, headers: bool) -> Facts:
    """Read the facts of a repo on the Hub.

    Args:
        given: what the user typed.
        repo: the well-formed repo id.
        revision: a branch, tag or commit; the default branch when omitted.
        headers: whether to read the checkpoint's headers as well.

    Raises:
        HubError: the Hub did not give the files, or gave malformed ones.
    """
    asked = Asked(repo, revision, _token(repo))
    with _quiet(asked), hub_http.one_try_each():
        api = HfApi(library_name="onboard", library_version=__version__)
        repository = _Repository(given, asked, api, hub_http.Patience(hub_http.MOST_WAITING))
        if constants.HF_HUB_OFFLINE:
            facts = repository.read_cached("HF_HUB_OFFLINE is set", headers)
            if facts is not None:
                return facts
            raise HubError(
                f"cannot read {repo} from the Hub",
                f"HF_HUB_OFFLINE is set, and the cache has no {CONFIG} of revision '{shown(revision or 'main')}'",
                "Read it once without HF_HUB_OFFLINE, or give a local directory.",
                code="hub.offline",
            )
        try:
            commit = repository.resolve()
        except HubError as error:
            facts = repository.read_cached(error.why, headers) if error.code in _SILENT else None
            if facts is None:
                raise
            warning = f"{error.why}; read commit {facts.source.revision} from the cache, which may be out of date"
            return replace(facts, warnings=(warning, *facts.warnings))
        return repository.read(commit, headers)


def read_code(given: str, repo: str, commit: str) -> dict[str, str]:
    """Fetch the Python files at the top of a repo.

    Args:
        given: what the user typed.
        repo: the repo id.
        commit: what the config was read from; branches may have moved since.

    Returns:
        The name of each file to its path in the client's cache.

    Raises:
        HubError: the Hub did not give them.
    """
    asked = Asked(repo, commit, _token(repo))
    with _quiet(asked), hub_http.one_try_each():
        api = HfApi(library_name="onboard", library_version=__version__)
        return _Repository(given, asked, api, hub_http.Patience(hub_http.MOST_WAITING)).code(commit)


@dataclass(frozen=True)
class _Repository:
    given: str
    asked: Asked
    api: HfApi
    patience: hub_http.Patience

    def resolve(self) -> str:
        """The commit that the revision stands for now; the client's cache remembers it for offline use."""
        repo, revision = self.asked.repo, self.asked.revision

        def resolved() -> str:
            try:
                return self.api.resolve_revision(repo, revision=revision).resolved
            except HfHubHTTPError as error:
                if not _is_plain_404(error):
                    raise
            # A mirror that serves files alone. Its answers name the commit, and so does the folder of the cached file.
            return os.path.basename(os.path.dirname(self.api.hf_hub_download(repo, CONFIG, revision=revision)))

        commit = self._ask(resolved)
        if not _COMMIT.fullmatch(commit):
            raise explain(ValueError("it named no commit"), self.asked)
        return commit

    def read(self, commit: str, headers: bool) -> Facts:
        """The facts at a commit, from the Hub."""
        path = self._ask(lambda: self.api.hf_hub_download(self.asked.repo, CONFIG, revision=commit), CONFIG)
        return self._facts(commit, path, (lambda: self._checkpoint(commit)) if headers else None)

    def read_cached(self, because: str, headers: bool) -> Facts | None:
        """The facts from the cache alone; None where it has no config.json of the revision."""
        path = self._ask(lambda: try_to_load_from_cache(self.asked.repo, CONFIG, revision=self.asked.revision))
        if not isinstance(path, str):
            return None
        snapshot = os.path.dirname(path)
        commit = os.path.basename(snapshot)

        def cached_checkpoint() -> CheckpointFacts:
            tensors, why, warnings = read_folder(snapshot, self._origin(commit), complete=False)
            if tensors is None:
                why = f"{because}, and the cache does not hold the whole checkpoint ({why})"
            return tensors, why, warnings

        return self._facts(commit, path, cached_checkpoint if headers else None)

    def _facts(self, commit: str, path: str, read_checkpoint: Callable[[], CheckpointFacts] | None) -> Facts:
        content = self._ask(lambda: _content(path, config_json.MOST_BYTES), CONFIG)
        config, warnings = config_json.parse_config(content, self._origin(commit))
        # After the config, so that no header is fetched for a repo whose config cannot be used.
        tensors, because, more = read_checkpoint() if read_checkpoint else _NOT_ASKED
        return Facts(
            source=Source(self.given, "hub", self.asked.repo, commit, None),
            config=config,
            config_sha256=sha256(content).hexdigest(),
            tensors=tensors,
            no_tensors_because=because,
            warnings=(*warnings, *more),
        )

    def _checkpoint(self, commit: str) -> CheckpointFacts:
        repo = self.asked.repo
        listed = self._names(commit)
        layout = checkpoint.find_layout(self._probe(commit) if listed is None else listed)
        if layout.because is not None:
            return None, layout.because, layout.warnings
        weight_map, files = None, layout.files
        if layout.index is not None:
            path = self._ask(
                lambda: self.api.hf_hub_download(repo, checkpoint.INDEX, revision=commit), checkpoint.INDEX
            )
            content = self._ask(lambda: _content(path, checkpoint.MOST_INDEX_BYTES), checkpoint.INDEX)
            weight_map = checkpoint.read_index(content, self._origin(commit))
            files = tuple(sorted(set(weight_map.values())))
            missing = [] if listed is None else checkpoint.missing_files(weight_map, listed)
            if missing:
                why = f"it names files that the repo lacks: {few(missing)}"
                raise self._origin(commit).refuse(checkpoint.INDEX, why, "checkpoint.missing_file")
        with ThreadPoolExecutor(min(_AT_ONCE, len(files))) as pool:
            # One failure is enough: map then drops the other shards, a few hundred perhaps.
            headers = list(pool.map(lambda file: self._header(file, commit), files))
        tensors, warnings = checkpoint.assemble(headers, weight_map)
        return tensors, None, (*layout.warnings, *warnings)

    def code(self, commit: str) -> dict[str, str]:
        """Name to path of the Python files at the top of the repo; without the Hub, of those in the cache."""
        names = None if constants.HF_HUB_OFFLINE else self._names(commit)
        if names is None:
            path = try_to_load_from_cache(self.asked.repo, CONFIG, revision=commit)
            folder = os.path.dirname(path) if isinstance(path, str) else None
            names = os.listdir(folder) if folder else []
            return {name: os.path.join(str(folder), name) for name in names if name.endswith(".py")}

        def fetched(name: str) -> str:
            return self._ask(lambda: self.api.hf_hub_download(self.asked.repo, name, revision=commit), name)

        return {name: fetched(name) for name in names if name.endswith(".py") and "/" not in name}

    def _names(self, commit: str) -> list[str] | None:
        """The repo's files; None where the Hub, or a mirror of it, does not list them."""

        def listed() -> list[str] | None:
            try:
                siblings = self.api.model_info(self.asked.repo, revision=commit).siblings
            except HfHubHTTPError as error:
                if not _is_plain_404(error):
                    raise
                return None
            return [sibling.rfilename for sibling in siblings] if siblings else None

        return self._ask(listed)

    def _probe(self, commit: str) -> list[str]:
        """Those of the two files that a checkpoint can start from that are there."""

        def is_there(file: str) -> bool:
            try:
                get_hf_file_metadata(hf_hub_url(self.asked.repo, file, revision=commit))
            except HfHubHTTPError as error:
                if isinstance(error, EntryNotFoundError) or _is_plain_404(error):
                    return False
                raise
            return True

        candidates = (checkpoint.SINGLE, checkpoint.INDEX)
        return [file for file in candidates if self._ask(partial(is_there, file), file)]

    def _header(self, file: str, commit: str) -> FileHeader:
        def parsed() -> FileHeader:
            try:
                header = self.api.parse_safetensors_file_metadata(self.asked.repo, file, revision=commit)
            except HfHubHTTPError as error:
                if error.response.status_code == 416:
                    raise HeaderError("it ends before its header begins") from error
                raise
            except SafetensorsParsingError as error:
                raise HeaderError(_own_words(error)) from error
            except UnicodeEncodeError:
                # Raised for the request's own headers, before there was an answer.
                raise
            except _STUMBLES as error:
                raise HeaderError(f"its header does not describe tensors ({type(error).__name__})") from error
            return check_entries({name: (t.dtype, t.shape, t.data_offsets) for name, t in header.tensors.items()}, file)

        try:
            return self._ask(parsed, file)
        except HeaderError as error:
            raise self._origin(commit).refuse(shown(file), shown(str(error)), "checkpoint.bad_header") from error

    def _origin(self, commit: str) -> Origin:
        return Origin(f"{self.asked.repo} at {commit[:7]} on the Hub", HubError)

    def _ask(self, request: Callable[[], T], file: str | None = None) -> T:
        try:
            return self.patience.ask(request)
        except (HeaderError, HubError):
            raise
        except Exception as error:
            # Whatever the client or a server's odd answer leads to. Its traceback goes on only where it shows no token.
            raise explain(error, self.asked, file) from (None if tells_a_token(error, self.asked) else error)


def _token(repo: str) -> str | None:
    """The token that the client will send."""
    if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return None
    try:
        return get_token()
    except Exception as error:
        # It may have to be fetched or refreshed. The message could quote the old one, so it is not passed on.
        why = f"the token cannot be had ({type(error).__name__})"
        raise HubError(
            f"cannot read {repo} from the Hub", why, "Log in again with `hf auth login`.", code="hub.token"
        ) from None


def _is_plain_404(error: HfHubHTTPError) -> bool:
    """Whether there is nothing at that address, without the Hub's own word for what is missing."""
    return type(error) is HfHubHTTPError and error.response.status_code == 404


def _own_words(error: SafetensorsParsingError) -> str:
    """What the client found, without the file and repo, which our error names."""
    return str(error).rpartition("): ")[2].partition(" Please ")[0].rstrip(".") or "it is not a safetensors file"


def _content(path: str, most: int) -> bytes:
    """A file's bytes, one more than allowed where there are more, so that the parser can refuse it."""
    with open(path, "rb") as stream:
        return stream.read(most + 1)


@contextmanager
def _quiet(asked: Asked) -> Iterator[None]:
    """Keep the client from printing: no progress bars for small files, no warnings about what our errors say better.

    What the user asked for by HF_HUB_VERBOSITY or HF_DEBUG still appears, on stderr, without tokens.
    """
    logger = logging.getLogger("huggingface_hub")
    level, bars = logger.level, not are_progress_bars_disabled()

    def redact(record: logging.LogRecord) -> bool:
        record.msg, record.args = asked.redact(record.getMessage()), ()
        return True

    handlers = list(logger.handlers)
    if not os.environ.get("HF_HUB_VERBOSITY") and not constants.HF_DEBUG:
        logger.setLevel(logging.CRITICAL)
    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        disable_progress_bars()
    for handler in handlers:
        handler.addFilter(redact)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(redact)
        if constants.HF_HUB_DISABLE_PROGRESS_BARS is None and bars:
            enable_progress_bars()
        logger.setLevel(level)
