import asyncio
import gzip
import json
import time
from typing import Any

import pytest
from aiohttp import web

from consumers.failures import (
    AnswerTooLargeError,
    OverloadedError,
    ProviderError,
    RateLimitedError,
    RejectedError,
    SpendLimitError,
    TransientError,
)
from consumers.limits.base import NOTHING, Amounts
from consumers.providers.anthropic import MAX_TOKENS_AT_ONCE, AnthropicProvider, Dialect, set_stream
from service.simulated.app import SimulatedAPI
from service.simulated.faults import BROKEN, REFUSED

from .conftest import KEY, Answering, AskedFor

MESSAGE = (
    b'{ "type":"message", "model":"claude-x","content":[{"type":"text","text":"h\\u00e9","new":1.50}],\n'
    b'"stop_reason": "end_turn","usage":{"input_tokens":3,"output_tokens":4,"cache_read_input_tokens":null},"x":1e2}'
)
RESERVED = Amounts(1, 10, 10)
LONG = " and a prompt that is long enough for an answer in several pieces"

REFUSED_AS: dict[str, tuple[type[ProviderError], int]] = {
    "invalid": (RejectedError, 400),
    "usage_limit": (SpendLimitError, 400),
    "authentication": (RejectedError, 401),
    "billing": (SpendLimitError, 402),
    "permission": (RejectedError, 403),
    "not_found": (RejectedError, 404),
    "too_large": (RejectedError, 413),
    "rate_limited retry_after=none": (RateLimitedError, 429),
    "acceleration": (RateLimitedError, 429),
    "spend_limit": (SpendLimitError, 429),
    "server_error": (TransientError, 500),
    "unavailable": (TransientError, 503),
    "overloaded": (OverloadedError, 529),
}
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
    "not_a_message": ("broken_answer", "broken_stream"),
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


async def test_an_answer_without_streaming_is_the_providers_bytes(answering: Answering, asked: AskedFor) -> None:
    async def answer(_: web.BaseRequest) -> web.Response:
        return web.Response(body=MESSAGE, headers={"request-id": "req_9"}, content_type="application/json")

    async with answering(answer) as provider:
        got = await provider.stream(asked(), timeout_s=60, parts=None)

    assert got.body == MESSAGE
    assert (got.model, got.provider, got.request_id, got.stop_reason) == ("claude-x", "anthropic", "req_9", "end_turn")
    assert (got.usage.input_tokens, got.usage.output_tokens, got.usage.cache_read_input_tokens) == (3, 4, 0)


async def test_a_compressed_answer_is_decompressed(answering: Answering, asked: AskedFor) -> None:
    async def answer(_: web.BaseRequest) -> web.Response:
        return web.Response(body=gzip.compress(MESSAGE), headers={"content-encoding": "gzip"})

    async with answering(answer) as provider:
        assert (await provider.stream(asked(), timeout_s=60, parts=None)).body == MESSAGE


async def test_the_request_is_sent_byte_for_byte(
    api: SimulatedAPI, provider: AnthropicProvider, asked: AskedFor
) -> None:
    raw = (
        b'{"model": "claude-haiku-5-5",  "max_tokens":10, "unknown": {"a": 1.10, "b": 1e3},\n'
        b' "messages": [{"role": "user", "content": "h\xc3\xa9 \\u00e9"}]}'
    )

    await provider.stream(asked(raw=raw), timeout_s=60, parts=None)

    assert api.calls[0].body == raw


@pytest.mark.parametrize(
    ("body", "streamed", "sent"),
    [
        (b'{"a": 1}', False, b'{"a": 1}'),
        (b' {"a": 1}', True, b' {"stream":true,"a": 1}'),
        (b'{"a": {"stream": 1}}', False, b'{"a": {"stream": 1}}'),
        (b'{"a": {"stream": 1}}', True, b'{"stream":true,"a": {"stream": 1}}'),
        (b'{"stream": true,  "a": 1}', True, b'{"stream": true,  "a": 1}'),
        (b'{"stream" : false, "a": 1}', False, b'{"stream" : false, "a": 1}'),
        (b'{"stream": true, "a": "\xc3\xa9"}', False, b'{"stream": false, "a": "\\u00e9"}'),
        (b'{"stream": false, "a": 1}', True, b'{"stream": true, "a": 1}'),
        (b'{"str\\u0065am": false, "a": 1}', True, b'{"stream": true, "a": 1}'),
        (b'{"stream": null}', False, b'{"stream": false}'),
    ],
)
def test_the_body_gets_the_right_stream_field_and_is_otherwise_unchanged(
    body: bytes, streamed: bool, sent: bytes
) -> None:
    assert set_stream(body, streamed) == sent


async def test_a_stream_is_forwarded_event_by_event_and_assembled(
    api: SimulatedAPI, provider: AnthropicProvider, asked: AskedFor
) -> None:
    received = Received()

    got = await provider.stream(asked("tell me" + LONG), timeout_s=60, parts=received)

    assert received.kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert received.kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    message = json.loads(got.body)
    assert message["content"] == [{"type": "text", "text": "echo: tell me" + LONG}]
    assert (got.stop_reason, got.usage.output_tokens) == ("end_turn", message["usage"]["output_tokens"])
    assert (api.calls[0].stream, got.request_id) == (True, api.calls[0].request_id)


async def test_with_and_without_streaming_the_message_is_the_same(provider: AnthropicProvider, asked: AskedFor) -> None:
    tools = [{"name": "f", "input_schema": {"properties": {"q": {}}}}]
    for request in (asked(LONG), asked(LONG, thinking={"type": "adaptive"}), asked(LONG, tools=tools)):
        at_once = json.loads((await provider.stream(request, timeout_s=60, parts=None)).body)
        streamed = json.loads((await provider.stream(request, timeout_s=60, parts=Received())).body)

        for each in (at_once, streamed):
            del each["id"], each["usage"]["input_tokens"]
        assert streamed == at_once


@pytest.mark.parametrize(("max_tokens", "streamed"), [(MAX_TOKENS_AT_ONCE, False), (MAX_TOKENS_AT_ONCE + 1, True)])
async def test_a_call_that_may_take_longer_than_ten_minutes_is_streamed(
    api: SimulatedAPI, provider: AnthropicProvider, asked: AskedFor, max_tokens: int, streamed: bool
) -> None:
    got = await provider.stream(asked(max_tokens=max_tokens), timeout_s=60, parts=None)

    assert api.calls[0].stream is streamed
    assert json.loads(got.body)["content"][0]["text"] == "echo: hello"


async def test_the_only_headers_are_key_version_beta_and_traceparent(api: SimulatedAPI, asked: AskedFor) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    parents: list[str | None] = [parent, None]
    provider = AnthropicProvider.at(api.base_url, api_key=KEY, traceparent=lambda: parents.pop(0))

    await provider.stream(asked(beta="one-2026-01-01,two"), timeout_s=60, parts=None)
    await provider.stream(asked(), timeout_s=60, parts=None)
    await provider.aclose()

    first, second = (call.headers for call in api.calls)
    assert first["authorization"] == f"Bearer {KEY}"
    assert (first["anthropic-beta"], first["traceparent"]) == ("one-2026-01-01,two", parent)
    assert "anthropic-version" in first
    assert not {"anthropic-beta", "traceparent", "tracestate", "baggage"} & {name.lower() for name in second}


async def test_environment_variables_change_neither_key_nor_address_nor_use_a_proxy_for_this_machine(
    api: SimulatedAPI, asked: AskedFor, monkeypatch: pytest.MonkeyPatch
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


def test_every_fault_of_the_simulated_provider_is_tested_here() -> None:
    assert {name.split()[0] for name in REFUSED_AS} == set(REFUSED)
    assert {name.split()[0] for name in BROKEN_AS} == set(BROKEN)


@pytest.mark.parametrize("fault", REFUSED_AS)
async def test_each_error_answer_becomes_the_matching_failure(
    api: SimulatedAPI, provider: AnthropicProvider, asked: AskedFor, fault: str
) -> None:
    expected, status = REFUSED_AS[fault]
    for parts in (None, Received()):
        with pytest.raises(ProviderError) as caught:
            await provider.stream(asked(f"[[fault: {fault}]]"), timeout_s=60, parts=parts)

        assert caught.value.__class__ is expected
        assert caught.value.status == status
        assert caught.value.request_id == api.calls[-1].request_id
        assert caught.value.__cause__ is not None
    assert len(api.calls) == 2


@pytest.mark.slow
@pytest.mark.parametrize("fault", BROKEN_AS)
async def test_a_broken_answer_is_a_transient_failure_and_closes_the_connection(
    api: SimulatedAPI, provider: AnthropicProvider, asked: AskedFor, fault: str
) -> None:
    kinds = BROKEN_AS[fault]
    for parts, kind in zip((None, Received()), kinds, strict=True):
        with pytest.raises(TransientError) as caught:
            await provider.stream(
                asked(f"[[fault: {fault}]]" + LONG), timeout_s=1 if kind == "timeout" else 60, parts=parts
            )

        assert caught.value.type == kind
        assert LONG not in caught.value.detail
        await api.until(lambda: api.running == 0)
    assert len(api.calls) == 2


async def test_an_error_event_is_classified_by_its_type_and_not_forwarded(
    provider: AnthropicProvider, asked: AskedFor
) -> None:
    received = Received()
    with pytest.raises(OverloadedError) as caught:
        await provider.stream(asked("[[fault: error_mid_stream]]" + LONG), timeout_s=60, parts=received)

    assert (caught.value.status, caught.value.type) == (529, "overloaded_error")
    assert "content_block_delta" in received.kinds
    assert "error" not in received.kinds


@pytest.mark.parametrize(
    ("fault", "expected", "told_s"),
    [
        ("rate_limited retry_after=7", RateLimitedError, 7.0),
        ("rate_limited retry_after=none", RateLimitedError, None),
        ("overloaded retry_after=3", OverloadedError, 3.0),
        ("unavailable retry_after=4", OverloadedError, 4.0),
    ],
)
async def test_a_failure_keeps_the_providers_retry_after(
    provider: AnthropicProvider, asked: AskedFor, fault: str, expected: type[ProviderError], told_s: float | None
) -> None:
    with pytest.raises(expected) as caught:
        await provider.stream(asked(f"[[fault: {fault}]]"), timeout_s=60, parts=None)

    assert caught.value.retry_after_s == told_s


@pytest.mark.slow
async def test_a_stream_may_take_longer_than_the_limit_for_a_pause(
    provider: AnthropicProvider, asked: AskedFor
) -> None:
    got = await provider.stream(asked("[[latency: 2s]]" + LONG), timeout_s=1, parts=Received())

    assert got.stop_reason == "end_turn"


@pytest.mark.slow
async def test_the_time_that_forwarding_takes_does_not_count_against_the_provider(
    provider: AnthropicProvider, asked: AskedFor
) -> None:
    received = Received()

    async def slow_at_first(part: bytes) -> None:
        if not received.parts:
            await asyncio.sleep(1.2)
        await received(part)

    got = await provider.stream(asked(LONG), timeout_s=1, parts=slow_at_first)

    assert got.stop_reason == "end_turn"


async def test_an_error_while_forwarding_does_not_count_as_the_providers_failure(
    api: SimulatedAPI, provider: AnthropicProvider, asked: AskedFor
) -> None:
    for error in (TimeoutError("ours"), OSError("ours"), ValueError("ours")):

        async def failing(_: bytes, error: Exception = error) -> None:
            raise error

        with pytest.raises(error.__class__, match="ours"):
            await provider.stream(asked(LONG), timeout_s=60, parts=failing)
    await api.until(lambda: api.running == 0)


@pytest.mark.parametrize("streamed", [False, True])
async def test_cancelling_closes_the_providers_socket(
    api: SimulatedAPI, provider: AnthropicProvider, asked: AskedFor, streamed: bool
) -> None:
    asking = asyncio.create_task(
        provider.stream(asked("[[fault: stall]]" + LONG), timeout_s=60, parts=Received() if streamed else None)
    )
    await api.until(lambda: api.running == 1)
    asking.cancel()

    with pytest.raises(asyncio.CancelledError):
        await asking

    await api.until(lambda: api.running == 0)


async def test_a_connection_is_reused_after_an_answer_and_after_a_stream(
    answering: Answering, asked: AskedFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumers.providers.anthropic.DRAIN_S", 60.0)  # a busy machine may be late with a body's end
    peers = set()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        if not json.loads(await request.read()).get("stream"):
            return web.Response(body=MESSAGE)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(stream_of("one"))
        await asyncio.sleep(0.01)
        return response

    async with answering(answer) as provider:
        for _ in range(3):
            await provider.stream(asked(), timeout_s=60, parts=None)
            await provider.stream(asked(), timeout_s=60, parts=Received())

    assert len(peers) == 1


async def test_the_environments_proxy_is_used_for_other_hosts(asked: AskedFor, monkeypatch: pytest.MonkeyPatch) -> None:
    through = []

    async def proxy(request: web.BaseRequest) -> web.Response:
        through.append(request.host)
        return web.Response(body=MESSAGE)

    runner = web.ServerRunner(web.Server(proxy))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{runner.addresses[0][1]}")
    provider = AnthropicProvider.at("http://elsewhere.invalid", api_key=KEY)

    await provider.stream(asked(), timeout_s=60, parts=None)
    await provider.aclose()
    await runner.cleanup()

    assert through == ["elsewhere.invalid"]


async def test_a_refused_connection_is_a_transient_failure(asked: AskedFor, unused_tcp_port: int) -> None:
    provider = AnthropicProvider.at(f"http://127.0.0.1:{unused_tcp_port}", api_key=KEY)

    with pytest.raises(TransientError, match="no connection to the provider") as caught:
        await provider.stream(asked(), timeout_s=60, parts=None)
    await provider.aclose()

    assert caught.value.spent(RESERVED) == NOTHING


async def test_a_request_sent_before_the_connection_was_lost_may_have_been_paid(
    api: SimulatedAPI, provider: AnthropicProvider, asked: AskedFor
) -> None:
    with pytest.raises(TransientError, match="connection to the provider was lost") as caught:
        await provider.stream(asked("[[fault: reset at=start]]"), timeout_s=60, parts=None)

    assert len(api.calls) == 1
    assert caught.value.spent(RESERVED) == RESERVED


async def test_a_request_that_could_not_be_signed_was_not_sent(asked: AskedFor) -> None:
    class Unsigned:
        async def post(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("no credentials")

        async def close(self) -> None: ...

    provider = AnthropicProvider(Unsigned(), name="aws", secret="", dialect=Dialect(signing_errors=(RuntimeError,)))

    with pytest.raises(TransientError, match="no credentials for aws") as caught:
        await provider.stream(asked(), timeout_s=60, parts=None)

    assert caught.value.spent(RESERVED) == NOTHING


async def test_a_failure_in_the_middle_of_an_answer_may_have_been_paid(
    provider: AnthropicProvider, asked: AskedFor
) -> None:
    with pytest.raises(OverloadedError) as caught:
        await provider.stream(asked("a story [[fault: error_mid_stream]]"), timeout_s=60, parts=Received())

    assert caught.value.spent(RESERVED) == RESERVED
    assert not caught.value.is_outage
    assert caught.value.request_id is not None


async def test_an_unknown_host_and_a_failed_handshake_are_transient(api: SimulatedAPI, asked: AskedFor) -> None:
    for address in ("http://no-such-host.invalid", api.base_url.replace("http:", "https:")):
        provider = AnthropicProvider.at(address, api_key=KEY)
        with pytest.raises(TransientError, match="no connection"):
            await provider.stream(asked(), timeout_s=60, parts=None)
        await provider.aclose()


@pytest.mark.slow
@pytest.mark.parametrize(("streamed", "most"), [(False, 1_000_000), (True, 4_000_000)])
async def test_an_endless_answer_is_abandoned(answering: Answering, asked: AskedFor, streamed: bool, most: int) -> None:
    async def endless(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b'data: {"type": "ping"}\n\n' * 1000)

    async with answering(endless) as provider:
        with pytest.raises(AnswerTooLargeError, match=f"has more than {most} bytes") as caught:
            await provider.stream(asked(), timeout_s=60, parts=Received() if streamed else None)

    assert caught.value.type == "too_large"


async def test_an_endless_error_answer_is_classified_by_its_status(answering: Answering, asked: AskedFor) -> None:
    async def endless(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(status=413)
        await response.prepare(request)
        while True:
            await response.write(b"x" * 10_000)

    async with answering(endless) as provider:
        started = time.monotonic()
        with pytest.raises(RejectedError) as caught:
            await provider.stream(asked(), timeout_s=60, parts=None)

    assert caught.value.status == 413
    assert time.monotonic() - started < 30, "long before the time limit"


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


async def test_the_key_is_in_no_failures_detail(answering: Answering, asked: AskedFor) -> None:
    async def echo(_: web.BaseRequest) -> web.Response:
        error = {"type": "authentication_error", "message": f"{KEY} is wrong"}
        return web.Response(status=401, text=json.dumps({"type": "error", "error": error}))

    async with answering(echo) as provider:
        with pytest.raises(RejectedError) as caught:
            await provider.stream(asked(), timeout_s=60, parts=None)

    assert caught.value.detail == "401 authentication_error: *** is wrong"


async def test_a_request_that_cannot_be_sent_is_refused_without_retry(
    api: SimulatedAPI, provider: AnthropicProvider, asked: AskedFor
) -> None:
    with pytest.raises(RejectedError, match="cannot be sent"):
        await provider.stream(asked(beta="bad\r\nx-injected: 1"), timeout_s=60, parts=None)

    assert not api.calls


@pytest.mark.timing
async def test_concurrent_calls_each_get_their_own_answer(provider: AnthropicProvider, asked: AskedFor) -> None:
    async def one(n: int) -> str:
        got = await provider.stream(asked(f"number {n}"), timeout_s=10, parts=Received() if n % 2 else None)
        text: str = json.loads(got.body)["content"][0]["text"]
        return text

    assert await asyncio.gather(*(one(n) for n in range(150))) == [f"echo: number {n}" for n in range(150)]


def stream_of(text: str) -> bytes:
    start: dict[str, Any] = {
        "type": "message",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "usage": {"input_tokens": 1},
    }
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": start},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": text}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ]
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
