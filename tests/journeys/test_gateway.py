"""Calls by HTTP: the gateway publishes them to the lanes, and a client meets what it would meet at the provider, also
if the broker is away, the client goes, or a gateway or a worker is killed or stopped."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from anthropic import AsyncAnthropic
from pydantic import SecretStr

from consumers.replies import Replies
from service.gateway.access import hash_of
from service.gateway.app import ABSENT_WITHIN_S
from tests.faults.proxy import Proxy
from tests.support.brokers import Vhost, close_connection
from tests.support.faulty_api import FaultyAPI
from tests.support.gate import gate
from tests.support.malicious import Asked, MaliciousProvider, Piece, deltas, head, streamed
from tests.support.processes import Running, environment, interpreter, lanekeeper
from tests.support.requester import requester
from tests.support.serving import RunningWorker, serving
from tests.support.waiting import until

CRM, SHOP = "lane-crm", "lane-shop"


def body(prompt: str = "hello", **extra: Any) -> dict[str, Any]:
    return {
        "model": "claude-sonnet-5-5",
        "max_tokens": 50,
        "messages": [{"role": "user", "content": prompt}],
        **extra,
    }


async def post(url: str, said: Any, **headers: str) -> tuple[int, Any, Any]:
    """Status, headers and body of one call."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with aiohttp.ClientSession() as session, session.post(url + "/v1/messages", json=said, headers=named) as got:
        return got.status, got.headers, await got.json()


async def events(url: str, said: Any, **headers: str) -> list[dict[str, Any]]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with aiohttp.ClientSession() as session, session.post(url + "/v1/messages", json=said, headers=named) as got:
        text = (await got.read()).decode()
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def types(found: list[dict[str, Any]]) -> list[str]:
    return [each["type"] for each in found]


async def test_with_an_idempotency_key_it_goes_on_and_the_next_try_gets_its_answer(vhost: Vhost) -> None:
    said = body("[[latency: 500ms]] once")
    async with serving(vhost) as worker, gate(worker) as url:
        call = asyncio.create_task(post(url, said, idempotency_key="k-1"))
        await worker.api.until(lambda: worker.api.running == 1)
        call.cancel()
        status, headers, message = await post(url, said, idempotency_key="k-1")

        assert (status, headers["request-id"]) == (200, "k-1")
        assert len(worker.calls("once")) == 1
        again = await post(url, said, idempotency_key="k-1")
        assert again[2] == message
        assert again[1]["x-lane-replayed"] == "true"
        status, headers, problem = await post(url, body("another"), idempotency_key="k-1")
        assert (status, problem["error"]["type"], headers["x-should-retry"]) == (409, "conflict_error", "false")


ODD_ERROR = (
    b'{"type":"error","error":{"type":"invalid_request_error","message":"line one\\nline two",'
    b'"details":{"error_code":"x_y"}},\n"request_id":"req_odd"}'
)


def odd(status: int, body: bytes, **headers: str) -> MaliciousProvider:
    return MaliciousProvider(lambda _: [head(status, body=body, request_id="req_odd", **headers)])


async def raw_post(url: str, said: Any) -> tuple[int, Any, bytes]:
    async with aiohttp.ClientSession() as session, session.post(url + "/v1/messages", json=said) as got:
        return got.status, got.headers, await got.read()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_providers_refusal_is_the_callers_byte_for_byte_and_leaves_no_dead_letter(
    vhost: Vhost, stream: bool
) -> None:
    async with (
        odd(400, ODD_ERROR) as provider,
        serving(vhost, base_url=provider.base_url) as worker,
        gate(worker) as url,
        requester(vhost) as app,
    ):
        status, headers, found = await raw_post(url, body("refused", stream=stream))

        assert (status, found) == (400, ODD_ERROR)
        assert headers["x-lane-provider-request-id"] == "req_odd"
        assert headers["x-should-retry"] == "false"
        await until(lambda: app.holds(0, "lane.normal", "lane.dead"))
        over_amqp = await app.ask(body("refused"))
        assert over_amqp.json["provider_error"].encode() == ODD_ERROR
        assert (over_amqp.json["provider_status"], over_amqp.json["provider_type"]) == (400, "invalid_request_error")
        assert over_amqp.headers["x-lane-provider-request-id"] == "req_odd"
        await until(lambda: app.holds(1, "lane.dead"))
        await app.ask(body("refused"), headers={"x-lane-park-invalid": False})
        await until(lambda: app.holds(1, "lane.dead"))


async def test_a_lane_says_that_refused_requests_are_not_parked(vhost: Vhost) -> None:
    async with serving(vhost, lanes={"batch": {"park_invalid": False}}), requester(vhost) as app:
        for asked in ("[[fault: invalid]]", 5):
            reply = await app.ask({"prompt": asked}, key="batch.tests.x")
            assert reply.json["status"] == 400
        await until(lambda: app.holds(0, "lane.batch", "lane.dead"))


async def test_an_error_of_ten_megabytes_is_bounded_and_one_that_says_not_to_retry_is_not_retried(vhost: Vhost) -> None:
    huge = b'{"type":"error","error":{"type":"api_error","message":"%b"}}' % (b"x" * 10_000_000)
    async with (
        odd(500, huge, x_should_retry="false") as provider,
        serving(vhost, base_url=provider.base_url) as worker,
        gate(worker) as url,
        requester(vhost) as app,
    ):
        status, _, found = await raw_post(url, body("huge"))

        assert (status, len(provider.asked)) == (500, 1)
        error = json.loads(found)["error"]
        assert (error["type"], "an error body of more than 65536 bytes" in error["message"]) == ("api_error", True)
        reply = await app.ask(body("huge"))
        assert len(reply.json["provider_error"]) == 16 * 1024


async def test_a_rate_limit_is_answered_with_its_retry_after(vhost: Vhost) -> None:
    limited = ODD_ERROR.replace(b"invalid_request_error", b"rate_limit_error")
    async with (
        odd(429, limited, retry_after="7200") as provider,
        serving(vhost, base_url=provider.base_url) as worker,
        gate(worker) as url,
    ):
        status, headers, found = await raw_post(url, body("limited"))

        assert (status, found) == (429, limited)
        assert 7200 <= int(headers["retry-after"]) <= 7201


def replies_of(worker: RunningWorker, is_here: bool) -> Replies | None:
    return worker.parts.settler.replies if is_here else None


def sse(**event: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json.dumps(event).encode())


@pytest.mark.parametrize("is_here", [True, False], ids=["the worker is here", "elsewhere"])
async def test_one_event_of_three_megabytes_reaches_the_client_and_is_paid_once(vhost: Vhost, is_here: bool) -> None:
    text = "x" * 3_000_000
    message: dict[str, Any] = {
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "usage": {},
    }
    stream = b"".join(
        (
            sse(type="message_start", message=message),
            sse(type="content_block_start", index=0, content_block={"type": "text", "text": ""}),
            sse(type="content_block_delta", index=0, delta={"type": "text_delta", "text": text}),
            sse(type="content_block_stop", index=0),
            sse(type="message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 5}),
            b"data: [DONE]\n\n",
        )
    )
    async with (
        MaliciousProvider(lambda _: [head(body=stream, content_type="text/event-stream")]) as provider,
        serving(vhost, base_url=provider.base_url) as worker,
        gate(worker, replies=replies_of(worker, is_here)) as url,
    ):
        status, _, found = await raw_post(url, body("large", stream=True))

        assert status == 200
        assert found.endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
        assert text.encode() in found
        assert len(provider.asked) == 1


@pytest.mark.parametrize("is_here", [True, False], ids=["the worker is here", "elsewhere"])
async def test_a_client_that_reads_slowly_holds_nobody_up_and_its_call_ends(vhost: Vhost, is_here: bool) -> None:
    delta = b'{"type":"text_delta","text":"%b"}' % (b"x" * 10_000)

    def answer(asked: Asked) -> Iterator[Piece]:
        return streamed(deltas(1200 if b"endless" in asked.body else 3, delta, at_once=10))

    async with (
        MaliciousProvider(answer) as provider,
        serving(vhost, base_url=provider.base_url) as worker,
        gate(worker, replies=replies_of(worker, is_here)) as url,
        requester(vhost) as app,
    ):
        await app.read_events()
        content = json.dumps(body("endless", stream=True)).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port, limit=1024)
        size = f"content-length: {len(content)}"
        writer.write(f"POST /v1/messages HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\n{size}\r\n".encode())
        writer.write(b"content-type: application/json\r\n\r\n" + content)
        said = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert " 200 " in said, said + str(await reader.read(300))
        id = said.partition("request-id: ")[2].split()[0]
        for _ in range(3):
            await reader.read(1)
            async with asyncio.timeout(20):
                assert types(await events(url, body("quick", stream=True)))[-1] == "message_stop"
        await until(lambda: {"completed", "cancelled"} & {*app.events_of(id)})
        writer.transport.abort()


@pytest.mark.parametrize("is_here", [True, False], ids=["the worker is here", "elsewhere"])
async def test_an_attempt_that_fails_in_the_middle_ends_the_stream_so_that_the_client_tries_again(
    vhost: Vhost, is_here: bool
) -> None:
    async with serving(vhost) as worker, gate(worker, replies=replies_of(worker, is_here)) as url:
        found = await events(url, body("[[fault: cut x1]] [[latency: 3s]] a longer story in many pieces", stream=True))

        assert types(found)[0] == "message_start"
        assert types(found)[-1] == "error"
        assert found[-1]["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize("system", ["short", "l" + 1_500_000 * "o" + "ng"], ids=["small", "large"])
async def test_a_lost_connection_is_not_noticed_before_the_first_piece(vhost: Vhost, system: str) -> None:
    async with serving(vhost) as worker, gate(worker, ping_every_s=0.05) as url:
        call = asyncio.create_task(
            events(url, body("[[fault: slow_first_byte delay=15s]] held", stream=True, system=system))
        )
        await worker.api.until(lambda: worker.api.running == 1)
        await close_connection(vhost, "lanekeeper client")
        assert worker.api.running == 1

        found = types(await call)
        assert (found.count("message_start"), found[-1]) == (1, "message_stop")
        assert len(worker.calls("held")) == 1


@pytest.mark.parametrize("is_here", [True, False], ids=["the worker is here", "elsewhere"])
async def test_a_connection_lost_in_the_middle_ends_the_stream_and_its_call(vhost: Vhost, is_here: bool) -> None:
    async with serving(vhost) as worker, gate(worker, replies=replies_of(worker, is_here)) as url:
        said = body(f"[[latency: 60s]] [[tokens: 50]] broken {'off ' * 50}", stream=True)
        async with aiohttp.ClientSession() as session, session.post(url + "/v1/messages", json=said) as got:
            await got.content.readuntil(b"content_block_delta")
            await close_connection(vhost, "lanekeeper client")

            assert b"overloaded_error" in await got.read()
        await worker.api.until(lambda: worker.api.running == 0)
        assert [each.outcome for each in worker.calls("broken")] == ["client_gone"]


async def test_a_key_tells_whose_the_request_is_and_what_it_may(vhost: Vhost) -> None:
    keys = {
        hash_of(CRM): {"tenant": "crm", "lanes": ["batch", "normal"]},
        hash_of(SHOP): {"tenant": "shop", "models": ["claude-haiku-5-5"]},
    }
    said = body("mine", model="claude-haiku-5-5")
    user = urlsplit(vhost.amqp_url).username
    async with serving(vhost, speakers=(user,)) as worker, gate(worker, keys=keys) as url:
        _, headers, ours = await post(url, said, x_api_key=CRM, idempotency_key="same")
        assert headers["x-lane-name"] == "batch"
        _, headers, theirs = await post(url, said, authorization=f"Bearer {SHOP}", idempotency_key="same")
        assert headers["x-lane-name"] == "normal"
        assert ours["id"] != theirs["id"]
        assert "x-lane-replayed" not in headers
        assert len(worker.calls("mine")) == 2

        assert (await post(url, said, x_api_key="lane-nobody"))[0] == 401
        assert (await post(url, said))[0] == 401
        assert (await post(url, said, x_api_key=CRM, x_lane_name="critical"))[0] == 403
        assert (await post(url, body(), x_api_key=SHOP))[0] == 403
        assert len(worker.api.calls) == 2


async def test_without_the_workers_consent_no_call_is_taken_for_a_tenant(vhost: Vhost) -> None:
    keys = {hash_of(CRM): {"tenant": "crm"}}
    async with serving(vhost) as worker, gate(worker, keys=keys) as url:
        status, _, problem = await post(url, body(), x_api_key=CRM)

        assert status == 500
        assert "LANEKEEPER_SPEAKERS" in problem["error"]["message"]
        assert not worker.api.calls


SAID = {"model": "claude-haiku-5-5", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}


async def answered(session: aiohttp.ClientSession, url: str, **extra: object) -> bool:
    async with session.post(f"{url}/v1/messages", json={**SAID, **extra}) as got:
        return got.status == 200


async def is_unready(session: aiohttp.ClientSession, url: str) -> bool:
    async with session.get(f"{url}/readyz") as got:
        return got.status == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_is_refused_within_seconds_and_the_next_one_succeeds_when_it_is_back(
    vhost: Vhost, stream: bool
) -> None:
    at = urlsplit(vhost.amqp_url)
    loop = asyncio.get_running_loop()
    async with (
        serving(vhost) as worker,
        Proxy(at.hostname or "", at.port or 5672) as line,
        aiohttp.ClientSession() as session,
    ):
        passed = vhost.amqp_url.replace(f":{at.port}/", f":{line.port}/")
        settings = worker.settings.model_copy(update={"amqp_url": SecretStr(passed)})
        async with gate(settings) as url:
            assert await answered(session, url, stream=stream)
            await line.refuse()
            line.reset()
            await until(lambda: is_unready(session, url))
            began = loop.time()
            async with session.post(f"{url}/v1/messages", json={**SAID, "stream": stream}) as got:
                error = json.loads(await got.read())["error"]
            took_s = loop.time() - began

            assert (got.status, error["type"]) == (503, "api_error")
            assert int(got.headers["retry-after"]) > 0
            assert "x-should-retry" not in got.headers
            assert took_s < 3 * ABSENT_WITHIN_S  # far below the 30 s that a publisher waits by default
            assert len(worker.api.calls) == 1
            await line.mend()
            await until(lambda: answered(session, url, stream=stream))


SLOW = "[[latency: 60s]]"


@asynccontextmanager
async def stream_of(url: str, prompt: str, **headers: str) -> AsyncIterator[aiohttp.ClientResponse]:
    """A streamed call that has begun: a ping came. Leaving the block closes its connection."""
    said = {"model": "claude-haiku-5-5", "max_tokens": 50, "messages": [{"role": "user", "content": prompt}]}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/messages", json={**said, "stream": True}, headers=named) as got,
    ):
        assert got.status == 200
        yield got


async def first_piece(got: aiohttp.ClientResponse) -> None:
    async for line in got.content:
        if line.startswith(b"event: content_block_delta"):
            return
    raise AssertionError("it ended before its first piece")


@pytest.mark.parametrize("has_piece", [False, True], ids=["running", "streaming"])
async def test_a_call_to_the_provider_is_closed(vhost: Vhost, has_piece: bool) -> None:
    async with serving(vhost) as worker, gate(worker, ping_every_s=0.05) as url, requester(vhost) as app:
        await app.read_events()
        latency = "[[latency: 30s]]" if has_piece else SLOW
        async with stream_of(url, f"{latency} a story of some words, in several pieces, that takes its time") as got:
            id = got.headers["request-id"]
            await worker.api.until(lambda: worker.api.running == 1)
            if has_piece:
                await first_piece(got)
        await worker.api.until(lambda: worker.api.running == 0)
        await until(lambda: "cancelled" in app.events_of(id))

        assert [each.outcome for each in worker.calls("story")] == ["client_gone"]


HEADERS = {"Idempotency-Key": "once-and-only", "x-lane-name": "normal"}
PATIENT = 60
"""Tries; the SDK waits up to 8 s before each, and a gateway may need a minute to start on a busy machine."""


def sdk(url: str, *, max_retries: int = 0) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=url, api_key="any", max_retries=max_retries)


async def asked(client: AsyncAnthropic, prompt: str) -> Any:
    message = await client.messages.create(
        model="claude-haiku-5-5",
        max_tokens=50,
        messages=[{"role": "user", "content": prompt}],
        extra_headers=HEADERS,
    )
    return message.to_dict()


@dataclass
class Service:
    """A simulated provider, a worker with a gateway of its own, and a gateway by itself."""

    api: FaultyAPI
    worker: Running
    worker_url: str
    gateway: Running
    gateway_url: str
    start: Callable[..., AbstractAsyncContextManager[Running]]
    """Starts a further process with the same settings."""


@pytest.fixture
async def service(vhost: Vhost, tmp_path: Path) -> AsyncIterator[Service]:
    async with FaultyAPI() as api:
        environ = environment(vhost, api)
        start = partial(lanekeeper, environ=environ, folder=tmp_path)
        async with start("serve") as worker, start("gateway") as gateway:
            worker_url = await worker.ready()
            gateway_url = (await gateway.tells("gateway.ready"))["url"]
            yield Service(api, worker, worker_url, gateway, gateway_url, start)


@pytest.mark.slow
async def test_after_a_killed_gateway_the_sdks_retry_gets_the_answer_of_the_one_call(service: Service) -> None:
    prompt, api = "[[latency: 2s]] in the middle", service.api
    async with sdk(service.gateway_url, max_retries=PATIENT) as first, sdk(service.worker_url) as second:
        call = asyncio.create_task(asked(first, prompt))
        await api.until(lambda: api.running == 1)
        service.gateway.send(signal.SIGKILL)
        await service.gateway.ended()
        async with service.start("gateway", "--port", service.gateway_url.rpartition(":")[2]):
            answer = await call

        assert answer == await asked(second, prompt)
        assert [each.outcome for each in api.calls] == ["ok"]


@pytest.mark.slow
async def test_after_a_killed_worker_the_same_call_is_answered_by_another(service: Service) -> None:
    """The killed worker's call was paid for: calls to the provider are at least once."""
    prompt, api = "[[fault: hang x1]] in the middle", service.api
    async with sdk(service.gateway_url) as client:
        call = asyncio.create_task(asked(client, prompt))
        await api.until(lambda: api.running == 1)
        service.worker.send(signal.SIGKILL)
        async with service.start("serve"):
            answer = await call

            assert answer == await asked(client, prompt)
            assert [each.outcome for each in api.calls] == ["hang", "ok"]


BODY = {
    "model": "claude-sonnet-5-5",
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "[[latency: 2s]] to the end"}],
}


@pytest.mark.slow
async def test_a_gateway_that_is_stopped_answers_what_is_under_way_and_exits_with_0(
    vhost: Vhost, tmp_path: Path
) -> None:
    async with FaultyAPI() as api, aiohttp.ClientSession() as session:
        environ = environment(vhost, api)
        async with (
            lanekeeper("serve", environ=environ, folder=tmp_path) as worker,
            interpreter("gateway", environ=environ, folder=tmp_path) as gateway,
        ):
            both = [await worker.ready(), (await gateway.tells("gateway.ready"))["url"]]
            for url in both:
                async with session.post(
                    f"{url}/v1/messages", json={**BODY, "messages": [{"role": "user", "content": "x"}]}
                ) as got:
                    assert got.status == 200
                async with session.get(f"{url}/readyz") as got:
                    assert (await got.json()) == {"ready": True, "reasons": {}}

            call = asyncio.create_task(session.post(f"{both[1]}/v1/messages", json=BODY))
            await api.until(lambda: api.running == 1)
            gateway.send(signal.SIGTERM)

            assert (await call).status == 200
            assert await gateway.ended() == 0
            assert gateway.told("service.stopped", orphaned=0)
