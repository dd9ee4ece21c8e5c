"""Requests and answers made to block the worker do not block it, and each ends as the contract says."""

import asyncio
import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.support.brokers import Vhost
from tests.support.corpus.answers import Asked, Piece, deltas, head, streamed, whole
from tests.support.corpus.requests import REQUESTS
from tests.support.malicious_provider import MaliciousProvider, malicious_provider
from tests.support.requester import Requester, raw_properties, requester, table
from tests.support.serving import serving
from tests.support.stalls import Stalls

STALL_S = 0.9
"""CPU time, with a margin for a busy machine; alone under 0.1 s. Without the limits: 1.8 s for one message."""
WITHIN_S = 60.0
TOO_LARGE = (
    "a huge array",
    "huge numbers",
    "a tool's input that is a huge array",
    "an endless body",
    "a gzip bomb",
)


@pytest.fixture(scope="module")
def malicious() -> Iterator[str]:
    """A provider in its own process, so that it takes no time from the measured event loop."""
    with malicious_provider() as base_url:
        yield base_url


async def chat(app: Requester, until_done: "asyncio.Future[Any]") -> list[float]:
    """How long critical requests take meanwhile."""
    took = []
    while not until_done.done():
        began_s = time.perf_counter()
        assert (await app.ask({"prompt": "hello"}, within_s=WITHIN_S)).status == "ok"
        took.append(time.perf_counter() - began_s)
    return took


async def test_malicious_bodies_end_as_documented_and_delay_no_other_request(vhost: Vhost, malicious: str) -> None:
    bodies = {name: (each.body, each.content_encoding) for name, each in REQUESTS.items()}
    async with serving(vhost.amqp_url, base_url=malicious) as worker, requester(vhost.amqp_url) as app:
        await app.ask({"prompt": "hello"})

        async def send(name: str) -> str | None:
            body, encoding = bodies[name]
            reply = await app.ask(body, key="batch.tests.nasty", content_encoding=encoding, within_s=WITHIN_S)
            return None if reply.status == "ok" else reply.code

        with Stalls() as stalls:
            sending = asyncio.gather(*(send(name) for name in bodies))
            took = await chat(app, sending)
        codes = dict(zip(bodies, await sending, strict=True))

        assert codes == {name: each.code for name, each in REQUESTS.items()}
        assert stalls.longest_s < STALL_S
        assert len(took) > 2, "others were answered meanwhile"
        assert worker.is_well


async def test_a_burst_of_messages_full_of_headers_is_refused_and_delays_no_other_request(
    vhost: Vhost, malicious: str
) -> None:
    full = b"A" + (60_000).to_bytes(4, "big") + b"V" * 60_000
    properties = {"headers": table((b"x-app", full))}
    async with serving(vhost.amqp_url, base_url=malicious) as worker, requester(vhost.amqp_url) as app:
        await app.ask({"prompt": "hello"})
        with Stalls() as stalls:
            for n in range(16):
                await app.publish_raw(
                    b'{"prompt": "hello"}',
                    key=b"batch.tests.nasty",
                    properties=raw_properties(correlation_id=b"%d" % n, reply_to=app.reply_to.encode(), **properties),
                )
            replies = [await app.final(str(n)) for n in range(16)]

        assert {reply.code for reply in replies} == {"invalid_request"}
        assert all("headers" in reply.json["detail"] and "4000 values" in reply.json["detail"] for reply in replies)
        assert stalls.longest_s < STALL_S
        assert worker.is_well


@pytest.mark.parametrize("name", TOO_LARGE)
async def test_an_answer_that_would_take_long_to_parse_ends_at_once(vhost: Vhost, malicious: str, name: str) -> None:
    body = {"prompt": f"[[answer: {name}]]"}
    async with serving(vhost.amqp_url, base_url=malicious) as worker, requester(vhost.amqp_url) as app:
        await app.read_dead()
        with Stalls() as stalls:
            reply = await app.ask(body, message_id="large", headers={"x-lane-stream": True}, within_s=WITHIN_S)

        assert reply.code == "answer_too_large"
        assert reply.json["attempts"] == 1
        assert "ask for less" in reply.json["detail"]
        assert (await app.buried("large")).body == json.dumps(body).encode()
        assert stalls.longest_s < STALL_S
        assert worker.is_well


@pytest.mark.parametrize("stream", [False, True])
async def test_a_lone_surrogate_in_a_providers_error_or_answer_ends_the_request_after_one_call(
    vhost: Vhost, stream: bool
) -> None:
    error = b'{"type":"error","error":{"type":"invalid_request_error","message":"no \\ud83d"}}'
    delta = b'{"type":"text_delta","text":"cut \\ud83d"}'

    def answer(asked: Asked) -> Iterable[Piece]:
        if b"refused" in asked.body:
            return [head(400, body=error)]
        return streamed(deltas(1, delta)) if stream else whole(b'[{"type":"text","text":"cut \\ud83d"}]')

    async with (
        MaliciousProvider(answer) as provider,
        serving(vhost.amqp_url, base_url=provider.base_url) as worker,
        requester(vhost.amqp_url) as app,
    ):
        refused = await app.ask({"prompt": "refused"}, headers={"x-lane-stream": stream})
        answered = await app.ask({"prompt": "x"}, headers={"x-lane-stream": stream})

        assert (refused.code, refused.json["detail"]) == ("provider_rejected", "400 invalid_request_error: no \ufffd")
        assert (answered.status, answered.text) == ("ok", "cut \ud83d")
        assert len(provider.asked) == 2
        assert worker.is_well
