"""Whatever Hub, network or repo do wrong is one named error with exit status 4, in bounded time, and never a token."""

from __future__ import annotations

import random
import socket
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import pytest
from onboard.facts.hub_http import retry_after

from .files import CONFIG, MALFORMED, index, safetensors, with_header
from .local_hub import LocalHub
from .reading import read_in_new_process

TOKEN = "hf_" + "s3cr3t" * 5
GRANTED = TOKEN + "_granted"
ONE = safetensors({"a": ("F32", (1,))})


def _check(reading, code):
    assert reading.code == code, (reading.error, reading.traceback)
    assert reading.exit_status == 4
    for line in ("what", "why", "do"):
        assert reading.error[line]
        assert reading.error[line].isprintable()
        assert len(reading.error[line]) < 400


_INDEX = "model.safetensors.index.json"
DEFECTS: dict[str, tuple[dict[str, bytes], str]] = {
    "no-config": ({"README.md": b"x"}, "hub.no_config"),
    "not-json": ({"config.json": b"{,}"}, "config.not_json"),
    "not-object": ({"config.json": b"[]"}, "config.not_object"),
    "not-utf8": ({"config.json": b'{"a": "\xff"}'}, "config.not_utf8"),
    "too-deep": ({"config.json": b'{"a": ' + b"[" * 50_000}, "config.too_deep"),
    "too-large": ({"config.json": b" " * (16 * 1024**2) + b"{}"}, "config.too_large"),
    "bad-index": (
        {"config.json": CONFIG, _INDEX: b'{"weight_map": {"a": "../../x.safetensors"}}'},
        "checkpoint.bad_index",
    ),
    "no-shard": ({"config.json": CONFIG, _INDEX: index({"a": "gone.safetensors"})}, "checkpoint.missing_file"),
    **{
        f"header-{number}": ({"config.json": CONFIG, "model.safetensors": content}, "checkpoint.bad_header")
        for number, (name, content) in enumerate(MALFORMED.items())
        # The client takes what it is sent for the whole header; here that is JSON, although announced as longer.
        if name != "length beyond the file"
    },
}


@pytest.fixture(scope="module")
def without_token(tmp_path_factory):
    """One process, no token, every defect that a repo can have."""
    with LocalHub() as hub:
        hub.tokens = {TOKEN, GRANTED}
        hub.add_repo("org/name", {"config.json": CONFIG})
        hub.add_repo("org/gated", {"config.json": CONFIG, "model.safetensors": ONE}, gated=True)
        hub.add_repo("org/private", {"config.json": CONFIG}, private=True)
        for name, (files, _) in DEFECTS.items():
            hub.add_repo(f"bad/{name}", files)
        hub.add_repo("org/disabled", {"config.json": CONFIG})
        hub.fail("/org/disabled", 403, headers={"X-Error-Message": "Access to this resource is disabled."})
        hub.add_repo("org/teapot", {"config.json": CONFIG})
        hub.fail("/org/teapot", 418, headers={"X-Error-Message": "a\x1b[31m teapot", "X-HF-Warning": "t; a warning"})
        hub.add_repo("org/portal", {"config.json": CONFIG})
        hub.fail("/org/portal", 200, headers={"Content-Type": "text/html"}, body="<html>Please log in</html>")
        hub.add_repo("org/list", {"config.json": CONFIG})
        hub.fail("/api/models/org/list", 200, body="[1, 2]")
        hub.add_repo("org/shapeless", {"config.json": CONFIG})
        hub.fail("/api/models/org/shapeless", 200, body='{"id": "org/shapeless"}')
        hub.add_repo("org/lost", {"config.json": CONFIG, "model.safetensors": ONE})
        hub.fail("/org/lost/resolve/.*safetensors", 404)
        calls = {
            **{name: {"given": f"bad/{name}"} for name in DEFECTS},
            **{name: {"given": f"org/{name}"} for name in ("gated", "private", "missing", "disabled", "teapot")},
            **{name: {"given": f"org/{name}"} for name in ("portal", "list", "shapeless", "lost")},
            "revision": {"given": "org/name", "revision": "no-such-branch"},
            "commit": {"given": "org/name", "revision": "0" * 40},
        }
        done = read_in_new_process(*calls.values(), home=tmp_path_factory.mktemp("home"), hub=hub.url)
        yield dict(zip(calls, done, strict=True)), done


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_of_the_repo(name, without_token):
    _check(without_token[0][name], DEFECTS[name][1])
    assert f"bad/{name}" in without_token[0][name].error["what"]


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("gated", "hub.gated", "no token was sent"),
        ("private", "hub.repo_not_found", "no token was sent"),
        ("missing", "hub.repo_not_found", "no such repo"),
        ("disabled", "hub.disabled", "disabled"),
        ("revision", "hub.revision_not_found", "no-such-branch"),
        ("commit", "hub.revision_not_found", "0000000"),
        ("teapot", "hub.bad_answer", "status 418"),
        ("portal", "hub.bad_answer", "did not answer as a Hub does"),
        ("list", "hub.bad_answer", "did not answer as a Hub does"),
        ("shapeless", "hub.bad_answer", "did not answer as a Hub does"),
        ("lost", "hub.no_file", "model.safetensors"),
    ],
)
def test_a_refusal(name, code, words, without_token):
    reading = without_token[0][name]
    _check(reading, code)
    assert words in reading.error["why"]


def test_nothing_is_printed(without_token):
    assert (without_token[1].stdout, without_token[1].stderr) == ("", "")


def test_damaged_headers_never_crash(tmp_path, hub):
    """Headers damaged at random: tensors, or the named error; as with local files, but through the Hub's client."""
    chance = random.Random(0)
    whole = safetensors({"a": ("BF16", (2, 3)), "layer.weight": ("F32", (4,))})
    names = []
    for number in range(60):
        content = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            content[chance.randint(0, len(whole) - 25)] = chance.choice(b'{}[]":,0123456789-xaF\xff\x00')
        names.append(f"org/damaged-{number}")
        hub.add_repo(names[-1], {"config.json": CONFIG, "model.safetensors": bytes(content)})
    names += ["org/empty", "org/huge"]
    hub.add_repo("org/empty", {"config.json": CONFIG, "model.safetensors": b""})
    giant = b'{"w": {"dtype": "F32", "shape": [%d, 4], "data_offsets": [0, 4]}}' % 2**62
    hub.add_repo("org/huge", {"config.json": CONFIG, "model.safetensors": with_header(giant)})
    readings = list(read_in_new_process(*names, home=tmp_path, hub=hub.url))
    assert {reading.code for reading in readings} == {None, "checkpoint.bad_header"}
    assert all(reading.exit_status in (0, 4) for reading in readings)
    assert "do not fit" in readings[-1].facts["warnings"][0]


class TestTokens:
    def _repos(self, hub):
        hub.tokens = {TOKEN, GRANTED}
        hub.add_repo("org/gated", {"config.json": CONFIG, "model.safetensors": ONE}, gated=True)
        hub.add_repo("org/private", {"config.json": CONFIG}, private=True)
        hub.add_repo("org/echo", {"config.json": CONFIG})
        echo = {"X-Error-Message": "no entry with {authorization}", "X-HF-Warning": "t; seen {authorization}"}
        hub.fail("/org/echo", 403, headers=echo, body='{"error": "{authorization}"}')

    def test_a_token_that_was_granted_access(self, tmp_path, hub):
        self._repos(hub)
        environment = {"HF_TOKEN": GRANTED}
        gated, private = read_in_new_process(
            "org/gated", "org/private", home=tmp_path, hub=hub.url, environment=environment
        )
        assert [tensor["name"] for tensor in gated.facts["tensors"]] == ["a"]
        assert private.facts["config"]["hidden_size"] == 8

    @pytest.mark.parametrize("stored", [False, True])
    def test_a_token_without_access_is_never_shown(self, tmp_path, hub, stored):
        """Given by variable or by login; with the client's own debugging on, and a server that repeats the token."""
        self._repos(hub)
        if stored:
            (tmp_path / "token").write_text(TOKEN)
        done = read_in_new_process(
            "org/gated",
            "org/missing",
            "org/echo",
            home=tmp_path,
            hub=hub.url,
            environment={"HF_DEBUG": "1"} | ({} if stored else {"HF_TOKEN": TOKEN}),
        )
        gated, missing, echo = done
        _check(gated, "hub.gated")
        assert "token's account has no access" in gated.error["why"]
        _check(missing, "hub.repo_not_found")
        _check(echo, "hub.forbidden")
        assert "no entry with Bearer <token>" in echo.error["why"]
        assert any(request.headers.get("authorization") == f"Bearer {TOKEN}" for request in hub.requests)
        assert TOKEN not in done.everything
        assert "Send: curl" in done.stderr

    def test_a_wrong_token(self, tmp_path, hub):
        self._repos(hub)
        hub.tokens = {"another"}
        hub.add_repo("org/public", {"config.json": CONFIG})
        done = read_in_new_process("org/public", home=tmp_path, hub=hub.url, environment={"HF_TOKEN": TOKEN})
        _check(done.readings[0], "hub.token")
        assert "does not accept the token" in done.readings[0].error["why"]
        assert TOKEN not in done.everything

    @pytest.mark.parametrize("odd", ["\x01", "\u00e9"])
    def test_a_token_that_cannot_be_sent(self, tmp_path, hub, odd):
        hub.add_repo("org/name", {"config.json": CONFIG})
        done = read_in_new_process("org/name", home=tmp_path, hub=hub.url, environment={"HF_TOKEN": TOKEN + odd})
        _check(done.readings[0], "hub.token")
        assert TOKEN not in done.everything

    def test_an_endpoints_password_is_not_shown(self, tmp_path, hub):
        url = hub.url.replace("http://", "http://user:pa55word@")
        done = read_in_new_process("org/missing", home=tmp_path, hub=url)
        _check(done.readings[0], "hub.repo_not_found")
        assert "pa55word" not in str(done.readings[0].error)


class TestTrouble:
    def test_trouble_that_passes(self, tmp_path, hub):
        """Twice refused, then answered; at every step, and for as long as the server wants."""
        files = {"config.json": CONFIG, "model.safetensors": ONE}
        for name in ("state", "head", "get", "header", "dropped", "later"):
            hub.add_repo(f"org/{name}", files)
        hub.fail("/api/models/org/state", 429, times=2)
        hub.fail("/org/head/.*config", 503, times=2, method="HEAD")
        hub.fail("/org/get/.*config", 429, times=2, method="GET")
        hub.fail("/org/header/.*safetensors", 500, times=2)
        hub.fail("/api/models/org/dropped", drop=True, times=2)
        hub.fail("/api/models/org/later", 429, times=1, headers={"Retry-After": "1"})
        done = read_in_new_process(
            "org/state", "org/head", "org/get", "org/header", "org/dropped", "org/later", home=tmp_path, hub=hub.url
        )
        for reading in done:
            assert reading.facts, reading.traceback
            assert reading.facts["tensors"]
        *quick, later = [reading.seconds for reading in done]
        assert max(quick) < 1 <= later < 3
        assert done.stderr == ""

    def test_trouble_that_stays(self, tmp_path, hub):
        """Three tries a request, a little longer apart each time, then the error; a far-off date is not waited for."""
        files = {"config.json": CONFIG, "model.safetensors": ONE}
        for name in ("state", "head", "get", "header", "dropped", "later", "limit"):
            hub.add_repo(f"org/{name}", files)
        hub.fail("/api/models/org/state", 503)
        hub.fail("/org/head/.*config", 504, method="HEAD")
        hub.fail("/org/get/.*config", 429, method="GET")
        hub.fail("/org/header/.*safetensors", 500)
        hub.fail("/api/models/org/dropped", drop=True)
        hub.fail("/org/later/.*config", 429, headers={"Retry-After": "3600"}, method="GET")
        hub.fail("/api/models/org/limit", 429, headers={"RateLimit": '"api";r=0;t=290'})
        expected = {
            "state": ("hub.unavailable", 3),
            "head": ("hub.unavailable", 3),
            "get": ("hub.rate_limited", 3),
            "header": ("hub.unavailable", 3),
            "dropped": ("hub.unreachable", 3),
            "later": ("hub.rate_limited", 1),
            "limit": ("hub.rate_limited", 1),
        }
        done = read_in_new_process(*(f"org/{name}" for name in expected), home=tmp_path, hub=hub.url)
        for reading, (name, (code, tries)) in zip(done, expected.items(), strict=True):
            _check(reading, code)
            assert reading.seconds < 1.5
            assert code != "hub.unavailable" or "tried 3 times" in reading.error["why"]
            failed = [
                request
                for request in hub.requests
                if request.path.startswith((f"/org/{name}/", f"/api/models/org/{name}"))
                and request.status in (0, 429, 500, 503, 504)
            ]
            assert len(failed) == tries, name
        assert "3600 seconds" in done.readings[5].error["do"]
        assert "290 seconds" in done.readings[6].error["do"]
        assert done.stderr == ""

    def test_one_bad_shard_stops_the_others(self, tmp_path, hub):
        names = [f"model-{number:05}-of-00200.safetensors" for number in range(1, 201)]
        weight_map = {f"w{number}": name for number, name in enumerate(names)}
        hub.add_repo("org/wide", {"config.json": CONFIG, _INDEX: index(weight_map), **dict.fromkeys(names, ONE)})
        hub.fail("/org/wide/.*of-00200.safetensors", 503)
        (reading,) = read_in_new_process("org/wide", home=tmp_path, hub=hub.url)
        _check(reading, "hub.unavailable")
        assert len([request for request in hub.requests if request.status == 503]) < 100

    def test_the_waits_grow_and_have_an_end(self, tmp_path, hub):
        hub.add_repo("org/name", {"config.json": CONFIG})
        hub.fail("/api/models/", 503)
        (reading,) = read_in_new_process("org/name", home=tmp_path, hub=hub.url, settings={"FIRST_WAIT": 0.2})
        assert reading.seconds >= 0.6  # 0.2 s, then twice that; how long the tries take depends on the machine
        assert "tried 3 times" in reading.error["why"]
        (reading,) = read_in_new_process(
            "org/name", home=tmp_path, hub=hub.url, settings={"FIRST_WAIT": 0.2, "MOST_WAITING": 0.3}
        )
        assert reading.seconds >= 0.2
        _check(reading, "hub.unavailable")
        assert "tried 2 times" in reading.error["why"]

    def test_no_answer_in_time(self, tmp_path, hub):
        """The client sets no time-out for a repo's state, and a minute for a file's; neither is waited for."""
        for name in ("state", "head"):
            hub.add_repo(f"org/{name}", {"config.json": CONFIG})
        hub.fail("/api/models/org/state", delay=60)
        hub.fail("/org/head/.*config", delay=60)
        environment = {"HF_HUB_DOWNLOAD_TIMEOUT": "1", "HF_HUB_ETAG_TIMEOUT": "1"}
        done = read_in_new_process(
            "org/state",
            "org/head",
            home=tmp_path,
            hub=hub.url,
            environment=environment,
            settings={"TRIES": 1},
        )
        for reading in done:
            _check(reading, "hub.timeout")
            assert reading.seconds < 2


class TestEndpoint:
    def test_nothing_there(self, tmp_path):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{taken.getsockname()[1]}"
            done = read_in_new_process("org/name", home=tmp_path, hub=url)
        _check(done.readings[0], "hub.unreachable")
        assert url in done.readings[0].error["why"]
        assert done.readings[0].seconds < 2
        assert done.stderr == ""

    @pytest.mark.parametrize(
        ("url", "code"),
        [
            ("http://no-such-host.invalid", "hub.unreachable"),
            ("localhost:1", "hub.endpoint"),
            ("hub.example", "hub.endpoint"),
            ("http://[::1", "hub.environment"),
        ],
    )
    def test_no_address_of_a_hub(self, url, code, tmp_path):
        (reading,) = read_in_new_process("org/name", home=tmp_path, hub=url)
        _check(reading, code)

    def test_a_variable_that_the_client_cannot_read(self, tmp_path, hub):
        environment = {"HF_HUB_DOWNLOAD_TIMEOUT": "soon"}
        (reading,) = read_in_new_process("org/name", home=tmp_path, hub=hub.url, environment=environment)
        _check(reading, "hub.environment")
        assert "soon" in reading.error["why"]

    def test_a_cache_that_cannot_be_written(self, tmp_path, hub):
        hub.add_repo("org/name", {"config.json": CONFIG})
        (tmp_path / "file").write_text("in the way")
        environment = {"HF_HUB_CACHE": str(tmp_path / "file")}
        (reading,) = read_in_new_process("org/name", home=tmp_path, hub=hub.url, environment=environment)
        _check(reading, "hub.cache")


class TestRetryAfter:
    def test_seconds(self):
        assert retry_after({"retry-after": " 12 "}) == 12

    def test_a_date(self):
        date = format_datetime(datetime.now(timezone.utc) + timedelta(seconds=20), usegmt=True)
        assert 17 < (retry_after({"retry-after": date}) or 0) <= 20
        assert retry_after({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0

    def test_the_hubs_own_header(self):
        assert retry_after({"ratelimit": '"api";r=0;t=55'}) == 55
        assert retry_after({"ratelimit": '"api";r=9;t=55'}) is None

    @pytest.mark.parametrize("nonsense", ["", "soon", "-3", "1e9", "\u0663", "Wed, 99 Oct"])
    def test_nonsense(self, nonsense):
        assert retry_after({"retry-after": nonsense}) in (None, 3)
