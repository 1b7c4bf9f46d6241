"""A small Hugging Face Hub over HTTP on this machine, for tests that go through the real client.

It answers what ``huggingface_hub`` asks when a repo is read: a repo's state, its tree, and files by HEAD and GET with
ranges, with the Hub's own headers and error codes. It can also fail on purpose. Point ``HF_ENDPOINT`` at
:attr:`LocalHub.url` in the environment of a new process, because the client reads it once, at import.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Request:
    """One request, and what it was answered with."""

    method: str
    path: str
    headers: dict[str, str]
    status: int = 0
    sent: int = 0


@dataclass
class _Failure:
    pattern: re.Pattern[str]
    status: int
    left: int | None
    headers: Mapping[str, str]
    body: str
    delay: float
    drop: bool
    method: str | None


@dataclass
class _Repo:
    gated: bool = False
    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, revision: str) -> str | None:
        if revision in self.refs:
            return self.refs[revision]
        matches = [commit for commit in self.commits if len(revision) >= 7 and commit.startswith(revision)]
        return matches[0] if len(matches) == 1 else None


class LocalHub:
    """The server; use it in a ``with`` statement.

    Args:
        lists_files: whether a repo's state lists its files; some mirrors' do not.
        has_api: whether there is anything but files.
        ranges: whether parts of files can be asked for.

    Attributes:
        url: for ``HF_ENDPOINT``.
        tokens: those that the server accepts; they give access to gated and private repos.
        requests: every request so far.
    """

    def __init__(self, *, lists_files: bool = True, has_api: bool = True, ranges: bool = True) -> None:
        self.lists_files, self.has_api, self.ranges = lists_files, has_api, ranges
        self.tokens: set[str] = set()
        self.requests: list[Request] = []
        self.repos: dict[str, _Repo] = {}
        self.closing = threading.Event()
        self._failures: list[_Failure] = []
        self._lock = threading.Lock()
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> LocalHub:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    def add_repo(
        self,
        id: str,
        files: Mapping[str, bytes],
        commit: str | None = None,
        branch: str = "main",
        gated: bool = False,
        private: bool = False,
    ) -> str:
        """Add a repo, or another commit to one; the branch then points at it.

        Returns:
            The commit, made from the files where none is given.
        """
        if commit is None:
            commit = hashlib.sha1(b"\0".join(name.encode() + content for name, content in files.items())).hexdigest()
        repo = self.repos.setdefault(id, _Repo())
        repo.gated, repo.private = gated, private
        repo.commits[commit] = dict(files)
        repo.refs[branch] = commit
        return commit

    def fail(
        self,
        path_regex: str,
        status: int = 503,
        times: int | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        body: str = "",
        delay: float = 0,
        drop: bool = False,
        method: str | None = None,
    ) -> None:
        """Answer matching requests otherwise than they should be.

        Args:
            path_regex: searched for in the path.
            status: the answer's status.
            times: how many requests fail; all of them when omitted.
            headers: of the answer. ``{authorization}`` in a value, or in the body, is replaced by the request's own.
            body: of the answer.
            delay: seconds before the answer.
            drop: close the connection instead of answering.
            method: only for this method.
        """
        failure = _Failure(re.compile(path_regex), status, times, headers or {}, body, delay, drop, method)
        self._failures.append(failure)

    def log(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)

    def failure(self, request: Request) -> _Failure | None:
        with self._lock:
            for failure in self._failures:
                if (
                    failure.method in (None, request.method)
                    and failure.pattern.search(request.path)
                    and failure.left != 0
                ):
                    if failure.left is not None:
                        failure.left -= 1
                    return failure
        return None


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"
    # Small answers at once: otherwise each waits for the client's delayed acknowledgement.
    disable_nagle_algorithm = True
    wbufsize = -1

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        self.request_ = Request(
            self.command, unquote(urlsplit(self.path).path), {k.lower(): v for k, v in self.headers.items()}
        )
        self.hub.log(self.request_)
        failure = self.hub.failure(self.request_)
        if failure is None:
            self._route()
            return
        if failure.delay:
            self.hub.closing.wait(failure.delay)
        if failure.drop:
            self.close_connection = True
            return
        authorization = self.request_.headers.get("authorization", "")
        headers = {name: value.replace("{authorization}", authorization) for name, value in failure.headers.items()}
        self._send(failure.status, failure.body.replace("{authorization}", authorization).encode(), headers)

    def _route(self) -> None:
        path = urlsplit(self.path)
        # One level of quoting is the address's; a revision such as refs/pr/1 is quoted inside it.
        parts = path.path.strip("/").split("/")
        if parts[0] != "api" and "resolve" in parts[1:3]:
            at = parts.index("resolve", 1)
            self._file("/".join(parts[:at]), unquote(parts[at + 1]), unquote("/".join(parts[at + 2 :])))
        elif parts[:2] == ["api", "models"] and self.hub.has_api:
            rest = parts[2:]
            at = next((i for i, part in enumerate(rest) if i and part in ("revision", "tree")), len(rest))
            revision = unquote(rest[at + 1]) if at < len(rest) else "main"
            kind = rest[at] if at < len(rest) else "revision"
            self._state("/".join(rest[:at]), revision, kind, parse_qs(path.query))
        else:
            self._send(404, b"not found")

    def _allowed(self, repo: _Repo | None, of_file: bool) -> bool:
        """Whether the request may go on; if not, it has been answered, in the Hub's words."""
        given = self.request_.headers.get("authorization", "").removeprefix("Bearer ")
        if given and given not in self.hub.tokens:
            self._error(401, None, "Invalid credentials in Authorization header")
        elif repo is None or (repo.private and not given):
            self._error(404 if given else 401, "RepoNotFound", "Repository not found")
        elif repo.gated and of_file and not given:
            self._error(401, "GatedRepo", "Access to the model is restricted. You must be authenticated to access it.")
        elif repo.gated and of_file and "granted" not in given:
            self._error(403, "GatedRepo", "Access to the model is restricted and you are not in the authorized list.")
        else:
            return True
        return False

    def _state(self, name: str, revision: str, kind: str, query: Mapping[str, list[str]]) -> None:
        repo = self.hub.repos.get(name)
        if not self._allowed(repo, of_file=False):
            return
        assert repo is not None
        commit = repo.commit(revision)
        if commit is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        files = repo.commits[commit]
        if kind == "tree":
            tree = [
                {"type": "file", "path": path, "size": len(data), "oid": _etag(data)} for path, data in files.items()
            ]
            self._send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
            return
        state: dict[str, Any] = {"_id": "0", "id": name, "modelId": name, "sha": commit, "private": repo.private}
        state |= {"gated": "manual" if repo.gated else False, "tags": [], "downloads": 0, "likes": 0}
        if self.hub.lists_files:
            sizes = "blobs" in query
            state["siblings"] = [
                {"rfilename": path} | ({"size": len(data), "blobId": _etag(data)} if sizes else {})
                for path, data in files.items()
            ]
        self._send(200, json.dumps(state).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str, revision: str, path: str) -> None:
        repo = self.hub.repos.get(name)
        if not self._allowed(repo, of_file=True):
            return
        assert repo is not None
        commit = repo.commit(revision)
        if commit is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        content = repo.commits[commit].get(path)
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if content is None:
            self._error(404, "EntryNotFound" if self.hub.has_api else None, "Entry not found", headers)
            return
        headers["ETag"] = f'"{_etag(content)}"'
        if path.endswith(".safetensors"):
            headers["X-Linked-Etag"] = f'"{hashlib.sha256(content).hexdigest()}"'
            headers["X-Linked-Size"] = str(len(content))
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.request_.headers.get("range", ""))
        if wanted is None or not self.hub.ranges:
            self._send(200, content, headers)
            return
        first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
        if first > last:
            self._send(416, b"", headers | {"Content-Range": f"bytes */{len(content)}"})
            return
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self._send(206, content[first : last + 1], headers)

    def _error(self, status: int, code: str | None, message: str, headers: Mapping[str, str] | None = None) -> None:
        words = {"X-Error-Message": message} | ({"X-Error-Code": code} if code and self.hub.has_api else {})
        self._send(status, json.dumps({"error": message}).encode(), {**(headers or {}), **words})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.request_.status = status
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.request_.sent = len(body)
            try:
                self.wfile.write(body)
            except OSError:
                # The client has gone, as it should when it is sent too much.
                self.close_connection = True


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
