"""Calls by HTTP: the gateway publishes them to the lanes, and a client meets what it would meet at the provider."""

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from service.gateway.access import hash_of
from tests.support.brokers import Vhost
from tests.support.connections import close_connection
from tests.support.gate import gate
from tests.support.serving import serving

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


async def test_an_attempt_that_fails_in_the_middle_ends_the_stream_so_that_the_client_tries_again(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, gate(worker.settings) as url:
        found = await events(url, body("[[fault: cut x1]] a longer story in many pieces", stream=True))

        assert types(found)[0] == "message_start"
        assert types(found)[-1] == "error"
        assert found[-1]["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize("system", ["short", "l" + 1_500_000 * "o" + "ng"], ids=["small", "large"])
async def test_a_lost_connection_is_not_noticed_before_the_first_piece(vhost: Vhost, system: str) -> None:
    async with serving(vhost.amqp_url) as worker, gate(worker.settings, ping_every_s=0.05) as url:
        call = asyncio.create_task(
            events(url, body("[[fault: slow_first_byte delay=15s]] held", stream=True, system=system))
        )
        await worker.api.until(lambda: worker.api.running == 1)
        await close_connection(vhost, "lanekeeper client")
        assert worker.api.running == 1

        found = types(await call)
        assert (found.count("message_start"), found[-1]) == (1, "message_stop")
        assert len(worker.calls("held")) == 1


async def test_a_connection_lost_in_the_middle_ends_the_stream_and_its_call(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, gate(worker.settings) as url:
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
    async with serving(vhost.amqp_url, speakers=(user,)) as worker, gate(worker.settings, keys=keys) as url:
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
    async with serving(vhost.amqp_url) as worker, gate(worker.settings, keys=keys) as url:
        status, _, problem = await post(url, body(), x_api_key=CRM)

        assert status == 500
        assert "LANEKEEPER_SPEAKERS" in problem["error"]["message"]
        assert not worker.api.calls
