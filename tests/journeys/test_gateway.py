"""Calls by HTTP: the gateway publishes them to the lanes, and a client meets what it would meet at the provider."""

import asyncio
import json
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from service.gateway.access import hash_of
from service.simulated.options import SimulatedOptions
from tests.support.brokers import Vhost
from tests.support.gate import gate
from tests.support.serving import serving

SLOW = "[[latency: 60s]] slow"
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


@pytest.mark.parametrize("stream", [False, True])
async def test_when_the_client_goes_its_request_is_cancelled_at_the_provider(vhost: Vhost, stream: bool) -> None:
    async with serving(vhost.amqp_url) as worker, gate(worker.settings) as url:
        call = asyncio.create_task(post(url, body(SLOW, stream=stream)))
        await worker.api.until(lambda: worker.api.running == 1)
        call.cancel()

        await worker.api.until(lambda: worker.api.running == 0)
        assert [each.outcome for each in worker.calls("slow")] == ["client_gone"]


async def test_with_an_idempotency_key_it_goes_on_and_the_next_try_gets_its_answer(vhost: Vhost) -> None:
    said = body("[[latency: 500ms]] once")
    async with serving(vhost.amqp_url) as worker, gate(worker.settings) as url:
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


async def test_a_gateway_that_dies_takes_no_request_with_it(vhost: Vhost) -> None:
    said = body("[[latency: 8s]] survives", stream=True)
    async with serving(vhost.amqp_url) as worker:
        async with gate(worker.settings) as first:
            call = asyncio.create_task(events(first, said, idempotency_key="k-2"))
            await worker.api.until(lambda: worker.api.running == 1)
        with suppress(aiohttp.ClientError):
            await call
        async with gate(worker.settings) as second:
            found = await events(second, said, idempotency_key="k-2")

        assert types(found)[0] == "message_start"
        assert types(found)[-1] == "message_stop"
        assert len(worker.calls("survives")) == 1


async def test_while_it_waits_a_stream_gets_pings(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, gate(worker.settings, ping_every_s=0.05) as url:
        found = types(await events(url, body("[[fault: slow_first_byte delay=2s x1]] wait", stream=True)))

        assert found[:2] == ["ping", "ping"]
        assert found.count("message_start") == 1
        assert found[-1] == "message_stop"


async def test_an_attempt_that_fails_before_the_first_piece_is_not_noticed(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, gate(worker.settings) as url:
        found = await events(url, body("[[fault: overloaded x1]] again", stream=True))

        assert types(found).count("message_start") == 1
        assert types(found)[-1] == "message_stop"
        assert len(worker.calls("again")) == 2


async def test_an_attempt_that_fails_in_the_middle_ends_the_stream_so_that_the_client_tries_again(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, gate(worker.settings) as url:
        found = await events(url, body("[[fault: cut x1]] a longer story in many pieces", stream=True))

        assert types(found)[0] == "message_start"
        assert types(found)[-1] == "error"
        assert found[-1]["error"]["type"] == "overloaded_error"


async def test_what_has_failed_for_good_is_not_tried_again_by_the_client(vhost: Vhost) -> None:
    lanes = {"critical": {"max_attempts": 2}}
    async with serving(vhost.amqp_url, lanes=lanes) as worker, gate(worker.settings) as url:
        status, headers, problem = await post(url, body("[[fault: server_error]] never"))

        assert (status, problem["error"]["type"]) == (502, "api_error")
        assert (headers["x-lane-code"], headers["x-should-retry"]) == ("attempts_exhausted", "false")


async def test_a_full_lane_is_an_overload_that_passes(vhost: Vhost) -> None:
    lanes = {"batch": {"max_length": 1}}
    async with serving(vhost.amqp_url, lanes=lanes, works=("critical",)) as worker, gate(worker.settings) as url:
        async with asyncio.TaskGroup() as group:
            waiting: set[asyncio.Task[Any]] = set()
            done: set[asyncio.Task[Any]] = set()
            while not done:  # a quorum queue takes a few more than its limit, if they come at once
                call = post(url, body("x"), x_lane_name="batch", idempotency_key=f"b-{len(waiting)}")
                waiting.add(group.create_task(call))
                done, _ = await asyncio.wait(waiting, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
            for each in waiting - done:
                each.cancel()
        status, headers, problem = done.pop().result()

        assert (status, problem["error"]["type"]) == (529, "overloaded_error")
        assert int(headers["retry-after"]) > 0


async def test_a_key_tells_whose_the_request_is_and_what_it_may(vhost: Vhost) -> None:
    keys = {
        hash_of(CRM): {"tenant": "crm", "lanes": ["normal", "batch"]},
        hash_of(SHOP): {"tenant": "shop", "models": ["claude-haiku-5-5"]},
    }
    said = body("mine", model="claude-haiku-5-5")
    user = urlsplit(vhost.amqp_url).username
    async with serving(vhost.amqp_url, speakers=(user,)) as worker, gate(worker.settings, keys=keys) as url:
        _, headers, ours = await post(url, said, x_api_key=CRM, idempotency_key="same")
        assert headers["x-lane-name"] == "normal"
        _, headers, theirs = await post(url, said, authorization=f"Bearer {SHOP}", idempotency_key="same")
        assert headers["x-lane-name"] == "critical"
        assert ours["id"] != theirs["id"]
        assert "x-lane-replayed" not in headers
        assert len(worker.calls("mine")) == 2

        assert (await post(url, said, x_api_key="lane-nobody"))[0] == 401
        assert (await post(url, said))[0] == 401
        assert (await post(url, said, x_api_key=CRM, x_lane_name="critical"))[0] == 403
        assert (await post(url, body(), x_api_key=SHOP))[0] == 403
        assert len(worker.api.calls) == 2


async def test_twenty_readers_at_once_each_get_their_own_stream(vhost: Vhost) -> None:
    async with (
        serving(vhost.amqp_url, simulated=SimulatedOptions(latency_ms=200)) as worker,
        gate(worker.settings) as url,
    ):
        found = await asyncio.gather(*(events(url, body(f"reader {n}.", stream=True)) for n in range(20)))

        for number, each in enumerate(found):
            said = "".join(event["delta"]["text"] for event in each if event["type"] == "content_block_delta")
            assert said == f"echo: reader {number}."


async def test_without_the_workers_consent_no_call_is_taken_for_a_tenant(vhost: Vhost) -> None:
    keys = {hash_of(CRM): {"tenant": "crm"}}
    async with serving(vhost.amqp_url) as worker, gate(worker.settings, keys=keys) as url:
        status, _, problem = await post(url, body(), x_api_key=CRM)

        assert status == 500
        assert "LANEKEEPER_SPEAKERS" in problem["error"]["message"]
        assert not worker.api.calls
