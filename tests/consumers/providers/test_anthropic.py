"""Of a compressed error answer, no more is decompressed than is read."""

import asyncio
import gzip
import json
import socket
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import httpx2
import pytest
from aiohttp import web

from consumers.dialects.answers import Answer
from consumers.dialects.anthropic import MESSAGES
from consumers.dialects.anthropic_stream import StreamedMessage
from consumers.dialects.bodies import set_stream
from consumers.failures import (
    AccountError,
    OverloadedError,
    ProviderError,
    RateLimitedError,
    RejectedError,
    TransientError,
)
from consumers.limits.base import Amounts, CallInProgress
from consumers.providers.anthropic import (
    AnthropicProvider,
    Lookups,
)
from consumers.providers.calling import Calling
from consumers.providers.routes import HeaderRules
from consumers.providers.streams import EventSplitter
from consumers.providers.transport import bound_error_body
from tests.support.faulty_api import FaultyAPI
from tests.support.malicious import MESSAGE as FIELDS
from tests.support.virtual_time import virtually
from tests.support.waiting import until
from tests.support.web_server import Handler, web_server

from .conftest import KEY, Answering, AskedFor

MESSAGE = (
    b'{ "type":"message", "model":"claude-x","content":[{"type":"text","text":"h\\u00e9","new":1.50}],\n'
    b'"stop_reason": "end_turn","usage":{"input_tokens":3,"output_tokens":4,"cache_read_input_tokens":null},"x":1e2}'
)
RESERVED = Amounts(1, 10, 10)
LONG = " and a prompt that is long enough for an answer in several pieces"
BROKEN_AS = {
    "html": ("http_502", "http_502"),
    "hang": ("timeout", "timeout"),
    "slow_first_byte": ("timeout", "timeout"),
    "stall": ("timeout", "timeout"),
    "drip delay=10ms": ("timeout", "timeout"),
    "cut": ("broken_answer", "cut"),
    "truncated": ("connection", "connection"),
    "reset": ("connection", "connection"),
    "reset at=start": ("connection", "connection"),
    "reset at=middle": ("connection", "connection"),
    "broken_json": ("broken_answer", "broken_stream"),
    "not_a_message": ("broken_answer", "cut"),
    "unfinished": ("unfinished", "unfinished"),
    "error_mid_stream type=api_error": ("api_error", "api_error"),
}


class Received:
    """The parts that one attempt sent."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    async def __call__(self, part: bytes) -> None:
        self.parts.append(part)

    @property
    def kinds(self) -> list[str]:
        return [json.loads(part)["type"] for part in self.parts]


@pytest.mark.parametrize(
    ("body", "streamed", "sent"),
    [
        (b'{"a": 1}', False, b'{"a": 1}'),
        (b' {"a": 1}', True, b' {"stream":true,"a": 1}'),
        (b'{"a": {"stream": 1}}', False, b'{"a": {"stream": 1}}'),
        (b'{"a": {"stream": 1}}', True, b'{"stream":true,"a": {"stream": 1}}'),
        (b'{"stream": true,  "a": 1}', True, b'{"stream": true,  "a": 1}'),
        (b'{"stream" : false, "a": 1}', False, b'{"stream" : false, "a": 1}'),
        (b'{"stream": true, "a": "\xc3\xa9"}', False, b'{"stream": false, "a": "\xc3\xa9"}'),
        (b'{"stream": false, "a": 1}', True, b'{"stream": true, "a": 1}'),
        (b'{"str\\u0065am": false, "a": 1e400}', True, b'{"str\\u0065am": true, "a": 1e400}'),
        (b'{"stream": null}', False, b'{"stream": false}'),
    ],
)
def test_the_body_gets_the_right_stream_field_and_is_otherwise_unchanged(
    body: bytes, streamed: bool, sent: bytes
) -> None:
    assert set_stream(body, streamed) == sent


async def test_a_setting_narrows_the_headers_that_are_passed_on(api: FaultyAPI, asked: AskedFor) -> None:
    rules = HeaderRules(version="2025-01-01", passed=("anthropic-user-*",))
    provider = AnthropicProvider.at(api.base_url, api_key=KEY, header_rules=rules)
    names = ("anthropic-beta", "anthropic-user-profile-id", "anthropic-workspace-id")

    await provider.stream(asked(headers=dict.fromkeys(names, "a")), timeout_s=60, parts=None)
    await provider.aclose()

    headers = api.calls[0].headers
    assert [headers.get(name) for name in (*names, "anthropic-version")] == ["a", "a", None, "2025-01-01"]


async def test_environment_variables_change_neither_key_nor_address_nor_use_a_proxy_for_this_machine(
    api: FaultyAPI, asked: AskedFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "another")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "another")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("ANTHROPIC_PROFILE", "another")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    provider = AnthropicProvider.at(api.base_url, api_key=KEY)

    await provider.stream(asked(), timeout_s=60, parts=None)
    await provider.aclose()

    assert api.calls[0].headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.slow
@pytest.mark.parametrize("fault", BROKEN_AS)
async def test_a_broken_answer_is_a_transient_failure_and_closes_the_connection(
    api: FaultyAPI, provider: AnthropicProvider, asked: AskedFor, fault: str
) -> None:
    kinds = BROKEN_AS[fault]
    for parts, kind in zip((None, Received()), kinds, strict=True):
        with pytest.raises(AccountError if fault == "html" else TransientError) as caught:
            await provider.stream(
                asked(f"[[fault: {fault}]]" + LONG), timeout_s=0.3 if kind == "timeout" else 60, parts=parts
            )

        assert caught.value.type == kind
        assert LONG not in caught.value.detail
        await api.until(lambda: api.running == 0)
    assert len(api.calls) == 2


async def test_an_error_while_forwarding_does_not_count_as_the_providers_failure(
    api: FaultyAPI, provider: AnthropicProvider, asked: AskedFor
) -> None:
    for error in (TimeoutError("ours"), OSError("ours"), ValueError("ours")):

        async def failing(_: bytes, error: Exception = error) -> None:
            raise error

        with pytest.raises(error.__class__, match="ours"):
            await provider.stream(asked(LONG), timeout_s=60, parts=failing)
    await api.until(lambda: api.running == 0)


async def test_a_request_sent_before_the_connection_was_lost_may_have_been_paid(
    api: FaultyAPI, provider: AnthropicProvider, asked: AskedFor
) -> None:
    with pytest.raises(TransientError, match="connection to the provider was lost") as caught:
        await provider.stream(asked("[[fault: reset at=start]]"), timeout_s=60, parts=None)

    assert len(api.calls) == 1
    assert caught.value.spent(RESERVED) == RESERVED


async def test_what_python_shows_of_a_provider_has_no_key(provider: AnthropicProvider, asked: AskedFor) -> None:
    await provider.stream(asked(), timeout_s=60, parts=None)  # now it also has the headers of a call

    assert KEY not in f"{provider!r} {provider.batches!r} {provider.stream!r}"


async def test_a_failure_in_the_middle_of_an_answer_may_have_been_paid(
    provider: AnthropicProvider, asked: AskedFor
) -> None:
    received, in_progress = Received(), CallInProgress(0)
    with pytest.raises(OverloadedError) as caught:
        await provider.stream(
            asked("a story" + LONG + "[[fault: error_mid_stream]]"),
            timeout_s=60,
            parts=received,
            in_progress=in_progress,
        )

    assert (caught.value.status, caught.value.type) == (529, "overloaded_error")
    assert "content_block_delta" in received.kinds
    assert "error" not in received.kinds, "it is not forwarded"
    assert caught.value.spent(RESERVED) == RESERVED
    assert not caught.value.is_outage
    assert caught.value.request_id is not None
    used = in_progress.used()
    assert used is not None
    assert used.input_tokens > len(LONG) / 4, "the stream begins with this count"
    assert 0 < used.output_tokens < used.input_tokens, "by the text that has come"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"status": 200, "body": b"<html>"}, TransientError),
        ({"status": 200, "body": b""}, TransientError),
        ({"status": 204}, TransientError),
        ({"status": 200, "body": MESSAGE.replace(b'"end_turn"', b"null")}, TransientError),
        ({"status": 200, "body": MESSAGE.replace(b'"message"', b'"error"')}, TransientError),
        ({"status": 200, "body": b"[1]"}, TransientError),
        ({"status": 200, "body": b"[" * 100_000}, TransientError),
        ({"status": 200, "body": b"\xff\xfe"}, TransientError),
        ({"status": 200, "body": MESSAGE, "headers": {"content-encoding": "gzip"}}, TransientError),
        ({"status": 418, "body": b"teapot"}, RejectedError),
        ({"status": 400, "body": b'{"error": "no"}'}, RejectedError),
        ({"status": 400, "body": b'{"error": {"type": 3, "message": {"a": 1}}}'}, RejectedError),
        ({"status": 429, "body": b"", "headers": {"retry-after": "5"}}, RateLimitedError),
        ({"status": 529, "body": b""}, OverloadedError),
        ({"status": 307, "headers": {"location": "/elsewhere/"}}, ProviderError),
    ],
)
async def test_any_bytes_from_a_server_become_one_of_our_failures(
    answering: Answering, asked: AskedFor, answer: dict[str, Any], expected: type[ProviderError]
) -> None:
    async def say(_: web.BaseRequest) -> web.Response:
        return web.Response(**answer)

    async with answering(say) as provider:
        for parts in (None, Received()):
            with pytest.raises(expected) as caught:
                await provider.stream(asked(), timeout_s=60, parts=parts)
            assert "\n" not in caught.value.detail


async def test_a_request_that_cannot_be_sent_is_refused_without_retry(
    api: FaultyAPI, provider: AnthropicProvider, asked: AskedFor
) -> None:
    with pytest.raises(RejectedError, match="cannot be sent"):
        await provider.stream(asked(beta="bad\r\nx-injected: 1"), timeout_s=60, parts=None)

    assert not api.calls


@pytest.mark.parametrize("url", [f"http://{'a' * 64}.example", "http://a..b", "ftp://a.example"])
async def test_a_base_url_that_cannot_be_called_is_the_operators_to_mend(url: str, asked: AskedFor) -> None:
    provider = AnthropicProvider.at(url, api_key=KEY)
    with pytest.raises(AccountError):
        await provider.stream(asked(), timeout_s=60, parts=None)
    await provider.aclose()


KIB = 1024
PACKING: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes}


class Pieces(httpx2.AsyncByteStream):
    """A body in the pieces in which it arrives from the network."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for at in range(0, len(self._body), 16 * KIB):
            yield self._body[at : at + 16 * KIB]


@pytest.mark.parametrize("encoding", PACKING)
async def test_a_decompression_bomb_is_read_up_to_64_kib(encoding: str) -> None:
    packed = PACKING[encoding](bytes(4096 * KIB))
    response = httpx2.Response(400, headers={"content-encoding": encoding}, stream=Pieces(packed))
    await bound_error_body(response)
    assert len(await response.aread()) == 64 * KIB


SHORT = b'{"type": "message", "model": "m", "content": [], "stop_reason": "end_turn", "usage": {}}'
EVENTS = b"".join(
    b"data: %s\n\n" % event
    for event in (
        b'{"type": "message_start", "message": {"type": "message", "model": "m", "content": [], "usage": {}}}',
        b'{"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {}}',
        b'{"type": "message_stop"}',
    )
)
ERROR = b'{"type": "error", "error": {"type": "%s", "message": "no", "details": {"error_code": "c"}}}'
Response = tuple[int, bytes, dict[str, str]]


def failing(*answers: Response | None) -> tuple[Sequence[web.BaseRequest], Handler]:
    """A handler that gives these answers in turn; None: it closes the connection without one."""
    asked: list[web.BaseRequest] = []

    async def answer(request: web.BaseRequest) -> web.Response:
        asked.append(request)
        await request.read()
        given = answers[len(asked) - 1]
        if given is None:
            assert request.transport is not None
            request.transport.abort()
            await asyncio.sleep(0)
            return web.Response()
        status, body, headers = given
        return web.Response(status=status, body=body, headers=headers)

    return asked, answer


GOOD: Response = (200, SHORT, {})


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_later_answer_may_be_compressed(answering: Answering, asked: AskedFor, streamed: bool) -> None:
    packed = gzip.compress(EVENTS if streamed else SHORT)
    _, handler = failing(*[(200, packed, {"content-encoding": "gzip"})] * 2)
    received = Received()
    async with answering(handler) as provider:
        for _ in range(2):
            answer = await provider.stream(asked(), timeout_s=60, parts=received if streamed else None)
            assert answer.stop_reason == "end_turn"


@pytest.mark.filterwarnings("ignore:BasicAuth is deprecated", "ignore:The 'proxy_auth'")  # of the SDK's transport
async def test_all_calls_go_through_the_proxy(monkeypatch: pytest.MonkeyPatch, asked: AskedFor) -> None:
    calls, answer = failing(*[GOOD] * 3)
    async with web_server(answer) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.replace("//", "//me:secret@"))
        provider = AnthropicProvider.at("http://api.test", api_key=KEY)
        for _ in range(3):
            await provider.stream(asked(), timeout_s=60, parts=None)
        await provider.aclose()
    assert [str(call.url) for call in calls] == ["http://api.test/v1/messages"] * 3
    assert {call.headers.get("Proxy-Authorization") for call in calls} == {"Basic bWU6c2VjcmV0"}


def refusing(status: int) -> tuple[list[str], Handler]:
    """A handler that answers calls of a model, and lists no models: it answers that with this status."""
    calls: list[str] = []

    async def answer(request: web.BaseRequest) -> web.Response:
        calls.append(f"{request.method} {request.rel_url}")
        if request.method == "GET":
            return web.Response(status=status, body=b"{}" if status == 200 else b"")
        assert (await request.json())["max_tokens"] == 1
        return web.Response(body=SHORT)

    return calls, answer


LISTED, CALLED = "GET /v1/models?limit=1", "POST /v1/messages"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "calls"),
    [
        (200, [LISTED]),
        (400, [LISTED, CALLED]),
        (403, [LISTED, CALLED]),
        (404, [LISTED, CALLED]),
        (405, [LISTED, CALLED]),
        (401, [LISTED]),
        (402, [LISTED]),
        (422, [LISTED]),
        (500, [LISTED]),
        (501, [LISTED]),
    ],
)
async def test_a_free_probe_lists_the_models_and_calls_one_where_there_is_no_list(
    status: int, calls: list[str], answering: Answering
) -> None:
    made, handler = refusing(status)
    async with answering(handler) as provider:
        if calls == [LISTED] and status != 200:
            with pytest.raises(ProviderError):
                await provider.probe("m", by_call=False)
        else:
            await provider.probe("m", by_call=False)
        assert made == calls
        made.clear()
        await provider.probe("m", by_call=True)
        assert made == [CALLED]


def sse(**event: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(event).encode()


BEGIN = sse(type="message_start", message={"type": "message", "model": "m", "content": [], "usage": {}})
PING = sse(type="ping")
BLOCK = sse(type="content_block_start", index=0, content_block={"type": "text", "text": ""})
TOKEN = sse(type="content_block_delta", index=0, delta={"type": "text_delta", "text": "a"})
END = sse(type="message_delta", delta={"stop_reason": "end_turn"}, usage={}) + sse(type="message_stop")


def read_in_time(
    *timed: tuple[float, bytes], timeout_s: float, pause_s: float, forwarding_s: float = 0, most_bytes: int = 4000
) -> float:
    """Read a stream whose pieces come after these seconds. Returns how long it took."""

    async def body() -> AsyncIterator[bytes]:
        for after_s, piece in timed:
            await asyncio.sleep(after_s)
            yield piece

    async def forward(_: bytes) -> None:
        await asyncio.sleep(forwarding_s)

    async def story() -> float:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        calling = Calling(name="a", secret="", max_answer_bytes=most_bytes)
        splitter = EventSplitter(most_bytes, keeps=MESSAGES.is_event)
        async with asyncio.timeout(timeout_s) as limit:
            await calling._read_stream(
                body(), StreamedMessage(), MESSAGES, splitter, urgent=0, limit=limit, pause_s=pause_s, parts=forward
            )
        return clock() - began_s

    return virtually(story())


@pytest.mark.parametrize(
    "early", [[], [(9, BEGIN)], [(4, BEGIN), (5, PING)]], ids=["nothing", "start", "start and ping"]
)
def test_what_comes_before_the_first_token_does_not_lengthen_the_time_for_it(early: list[tuple[float, bytes]]) -> None:
    so_far = sum(after_s for after_s, _ in early)
    begin = [] if early else [(0.0, BEGIN)]
    took_s = read_in_time(*early, *begin, (9.9 - so_far, BLOCK), (0, END), timeout_s=10, pause_s=10)
    assert took_s == pytest.approx(9.9)
    with pytest.raises(TimeoutError):
        read_in_time(*early, *begin, (10.1 - so_far, BLOCK), (0, END), timeout_s=10, pause_s=10)


def test_after_the_first_token_each_pause_has_the_same_limit() -> None:
    begin = [(1.0, BEGIN), (1.0, BLOCK)]
    slow = [(19.9, TOKEN)] * 5
    assert read_in_time(*begin, *slow, (19.9, END), timeout_s=5, pause_s=20) == pytest.approx(2 + 6 * 19.9)
    with pytest.raises(TimeoutError):
        read_in_time(*begin, *slow, (20.1, END), timeout_s=5, pause_s=20)
    with pytest.raises(TimeoutError):
        read_in_time(*begin, (19.9, TOKEN[:9]), (0.2, TOKEN[9:]), (0, END), timeout_s=5, pause_s=20)


def test_forwarding_takes_nothing_of_the_time_for_the_first_token_or_of_a_pause() -> None:
    took_s = read_in_time((1, BEGIN), (3.9, BLOCK), (4.9, TOKEN), (4.9, END), timeout_s=5, pause_s=5, forwarding_s=100)
    assert took_s == pytest.approx(14.7 + 500)


STOPPED, LAST = END.split(b"\n\n")[0] + b"\n\n", sse(type="message_stop")
SENTINEL = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "stream",
    [
        BEGIN + BLOCK + TOKEN + SENTINEL + STOPPED + LAST,
        BEGIN + BLOCK + TOKEN + STOPPED + SENTINEL + LAST,
        BEGIN + BLOCK + TOKEN + STOPPED + LAST + SENTINEL,
        BEGIN + BLOCK + TOKEN + STOPPED + SENTINEL,
        BEGIN + BLOCK + TOKEN + STOPPED,
        b"event: keepalive\ndata: still here\n\n" + BEGIN + b"data: 5\n\n" + BLOCK + TOKEN + END,
        BEGIN + sse(type="brand_new", a=1) + BLOCK + TOKEN + sse(ok=True) + END,
    ],
    ids=["early", "before", "after", "in place", "neither", "no JSON", "unknown"],
)
async def test_a_stream_may_end_and_be_filled_as_other_servers_do(
    answering: Answering, asked: AskedFor, stream: bytes
) -> None:
    calls, handler = failing((200, stream, {"content-type": "text/event-stream"}))
    received = Received()
    async with answering(handler) as provider:
        answer = await provider.stream(asked(), timeout_s=60, parts=received)

    assert (answer.stop_reason, json.loads(answer.body)["content"][0]["text"]) == ("end_turn", "a")
    assert received.kinds[0] == "message_start"
    assert received.kinds[-1] == "message_stop"
    assert len(calls) == 1


@pytest.mark.parametrize(
    "stream", [BEGIN + BLOCK + SENTINEL, BEGIN + b"event: content_block_delta\ndata: no\n\n" + END]
)
async def test_a_stream_that_ends_early_or_is_broken_fails(
    answering: Answering, asked: AskedFor, stream: bytes
) -> None:
    _, handler = failing((200, stream, {}))
    async with answering(handler) as provider:
        with pytest.raises(TransientError):
            await provider.stream(asked(), timeout_s=60, parts=Received())


@pytest.mark.parametrize(
    ("status", "body", "is_passed_on"),
    [
        (200, b"any", True),
        (400, ERROR % b"invalid_request_error", True),
        (404, ERROR % b"not_found_error", True),
        (529, ERROR % b"overloaded_error", True),
        (401, ERROR % b"authentication_error", False),
        (402, ERROR % b"billing_error", False),
        (400, ERROR % b"invalid: the key is sk-its-key", False),
        (302, ERROR % b"invalid_request_error", False),
        (400, b'{"type": "message", "error": {}}', False),
        (400, b'{"type": "error", "error": "no"}', False),
        (400, b'["error"]', False),
        (502, b"<html>", False),
    ],
)
async def test_a_look_up_passes_on_answers_and_errors_of_anthropics_that_are_not_about_the_key(
    status: int, body: bytes, is_passed_on: bool, answering: Answering
) -> None:
    asked, handler = failing((status, body, {"x-more": "1"}))
    async with answering(handler) as provider:
        lookups = Lookups(str(provider.client.base_url), api_key="sk-its-key")
        if is_passed_on:
            found = await lookups.call("/v1/models", query={"limit": "5"}, headers={"anthropic-beta": "b"})
            assert (found.status, found.headers["x-more"], found.body) == (status, "1", body)
        else:
            with pytest.raises(ProviderError) as refused:
                await lookups.call("/v1/models", query={"limit": "5"}, headers={"anthropic-beta": "b"})
            assert "sk-its-key" not in refused.value.detail
        await lookups.aclose()
    (call,) = asked
    assert (call.method, str(call.rel_url), call.headers["anthropic-beta"]) == ("GET", "/v1/models?limit=5", "b")


READ, UNREAD, TOGETHER = "read while idle", "not read yet", "together with the answer"


def message(text: bytes) -> bytes:
    body = b'{"content":[{"type":"text","text":"%b"}],"stop_reason":"end_turn",%b}' % (text, FIELDS)
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


class Server:
    """Keeps its connections open. After the first answer it sends another, when `go` is set or together with it."""

    def __init__(self, listening: socket.socket, *, together: bool) -> None:
        self._listening = listening
        self._together = together
        self.go, self.sent = threading.Event(), threading.Event()
        self.connections = 0

    def run(self) -> None:
        while True:
            try:
                taken, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(taken, self.connections), daemon=True).start()

    def _serve(self, taken: socket.socket, number: int) -> None:
        with taken:
            while _asked(taken):
                forged = message(b"forged") if number == 1 else b""
                taken.sendall(message(b"%d" % number) + (forged if self._together else b""))
                if number == 1 and not self._together:
                    self.go.wait(timeout=60)
                    taken.sendall(forged)
                self.sent.set()


def _asked(taken: socket.socket) -> bool:
    """Whether another request has come."""
    got = b""
    while b"\r\n\r\n" not in got:
        piece = b""
        with suppress(ConnectionError):
            piece = taken.recv(65_536)
        if not piece:
            return False
        got += piece
    head, _, body = got.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split()[0])
    while len(body) < length:
        body += taken.recv(65_536)
    return True


@contextmanager
def serving(*, together: bool) -> Iterator[tuple[Server, str]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = Server(listening, together=together)
        threading.Thread(target=server.run, daemon=True).start()
        try:
            yield server, f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.go.set()
            listening.shutdown(socket.SHUT_RDWR)


def pool_of(provider: AnthropicProvider) -> Any:
    """aiohttp's only pool of idle connections."""
    (found,) = provider.client._client._transport._session._connector._conns.values()
    return found


@pytest.mark.parametrize("when", [READ, UNREAD, TOGETHER])
async def test_a_response_that_nobody_asked_for_answers_no_call(asked: AskedFor, when: str) -> None:
    with serving(together=when == TOGETHER) as (server, url):
        provider = AnthropicProvider.at(url, api_key="sk-ant-k")

        async def ask() -> Answer:
            return await provider.stream(asked(), timeout_s=60, parts=None)

        assert b'"1"' in (await ask()).body
        server.go.set()
        assert server.sent.wait(timeout=60)  # without giving the loop a chance to read
        if when == READ:
            ((connection, _),) = pool_of(provider)
            await until(lambda: connection._buffer or not connection.is_connected())
        assert b'"2"' in (await ask()).body
        assert b'"2"' in (await ask()).body, "a silent connection is used again"
        assert server.connections == 2
        await provider.aclose()
