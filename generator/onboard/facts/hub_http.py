"""How long, and how often, the Hub is asked: one policy for every request.

Left alone, the Hub's client has several: requests for a repo's state have no time-out and no second try, a download
tries up to six times with time-outs of a minute and sleeps for as long as ``Retry-After`` says, and a server that
ignores ``Range`` would send whole weights. Inside :func:`one_try_each`, every request of the client is bounded in time
and size and tried once; trying again is :meth:`Patience.ask`'s business alone.
"""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Literal, TypeVar

from huggingface_hub import constants, get_session

T = TypeVar("T")
Trouble = Literal["status", "timeout", "dropped", "unreachable", "endpoint", "token", "too_large"]

TRIES = 3
FIRST_WAIT = 1.0
# For one model altogether, however many files it has.
MOST_WAITING = 30.0
# The largest things ever wanted whole are an index and a header; an answer beyond this would be weights.
MOST_BYTES = 64 * 1024 * 1024
_COME_BACK = frozenset({408, 429, 500, 502, 503, 504})
_RATE_LIMIT = re.compile(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d+)")


class Unanswered(Exception):
    """A request that got no usable answer.

    Deliberately none of the exception types that the client catches, so that it reaches :meth:`Patience.ask`.

    Attributes:
        trouble: what went wrong.
        status: the HTTP status, for trouble ``"status"``.
        retry_after: for how many seconds the server asked to be left alone.
        tries: how often it was tried.
    """

    def __init__(self, trouble: Trouble, status: int | None = None, retry_after: float | None = None) -> None:
        super().__init__(trouble if status is None else f"{trouble} {status}")
        self.trouble = trouble
        self.status = status
        self.retry_after = retry_after
        self.tries = 1


@dataclass
class Patience:
    """The waiting that is left for one model.

    Attributes:
        left: seconds.
    """

    left: float

    def ask(self, request: Callable[[], T]) -> T:
        """Make a request, and again a little later where the trouble may pass.

        Args:
            request: calls the Hub's client.

        Raises:
            Unanswered: there was no answer after some tries, or the server wants a longer wait than is left.
        """
        tries, wait = 1, FIRST_WAIT
        while True:
            try:
                return request()
            except Unanswered as error:
                error.tries = tries
                pause = wait if error.retry_after is None else error.retry_after
                may_pass = error.trouble in ("status", "timeout", "dropped")
                if not may_pass or tries >= TRIES or pause > self.left:
                    raise
            self.left -= pause
            time.sleep(pause)
            tries, wait = tries + 1, wait * 2


@contextmanager
def one_try_each() -> Iterator[None]:
    """Bound every request of the Hub's client, and have it tried once.

    The client's own session is used, so that its proxies, certificates and headers are those of ``hf``. There is one
    for the process: not for two threads that come and go on their own.
    """
    client: Any = get_session()
    send = client.send

    def send_once(request: Any, *, stream: bool = False, **options: Any) -> Any:
        most = max(constants.HF_HUB_DOWNLOAD_TIMEOUT, constants.HF_HUB_ETAG_TIMEOUT)
        given = request.extensions.get("timeout") or dict.fromkeys(("connect", "read", "write", "pool"))
        request.extensions = {
            **request.extensions,
            "timeout": {key: most if value is None else min(value, most) for key, value in given.items()},
        }
        try:
            response = send(request, stream=True, **options)
            try:
                if response.status_code in _COME_BACK:
                    raise Unanswered("status", response.status_code, retry_after(response.headers))
                if request.method == "GET" and _length(response.headers) > MOST_BYTES:
                    raise Unanswered("too_large")
                if "range" in request.headers and response.status_code == 200 and not _length(response.headers):
                    # The whole file instead of its beginning, and no saying how long it is.
                    raise Unanswered("too_large")
                if not stream:
                    response.read()
            except BaseException:
                response.close()
                raise
        except Exception as error:
            trouble = _trouble(error)
            if trouble is None:
                raise
            raise Unanswered(trouble) from error
        return response

    client.send = send_once
    try:
        yield
    finally:
        # The method of the class again.
        vars(client).pop("send", None)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """For how many seconds a server asks to be left alone.

    Args:
        headers: of its answer: ``Retry-After`` as seconds or as a date, or the Hub's own ``RateLimit``.
    """
    limit = _RATE_LIMIT.search(headers.get("ratelimit", ""))
    if limit:
        return float(limit[1])
    value = headers.get("retry-after", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        when = email.utils.parsedate_to_datetime(value)
    except (TypeError, ValueError):
        return None
    when = when if when.tzinfo else when.replace(tzinfo=timezone.utc)
    return max(0.0, (when - datetime.now(timezone.utc)).total_seconds())


def _length(headers: Mapping[str, str]) -> int:
    value = headers.get("content-length", "")
    return int(value) if value.isdecimal() else 0


def _trouble(error: Exception) -> Trouble | None:
    """What a failure of the HTTP library means; None where it is not one.

    By name, because huggingface_hub 1 and 2 are built on different packages with the same classes (httpx and httpx2).
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    if "TimeoutException" in names:
        return "timeout"
    if "ConnectError" in names:
        return "unreachable"
    if "NetworkError" in names or "RemoteProtocolError" in names:
        return "dropped"
    if "LocalProtocolError" in names:
        # The only part of a request that comes from the user's environment unchecked is the token's header.
        return "token"
    return "endpoint" if names & {"UnsupportedProtocol", "ProxyError", "InvalidURL"} else None
