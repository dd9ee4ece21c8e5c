"""A client of the gateway goes away: its request is cancelled, whatever state it is in."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from consumers.state.base import Identity
from tests.support.brokers import Vhost
from tests.support.gate import gate
from tests.support.requester import requester
from tests.support.serving import RunningWorker, serving
from tests.support.waiting import until

ONE_SLOT = {"normal": {"slots": 1}}
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


async def is_cancelled(worker: RunningWorker, id: str) -> bool:
    """Whether this is its outcome, as it can be fetched."""
    found = await worker.parts.store.find(Identity("", id))
    return found is not None and found.completion is not None and found.completion.code == "cancelled"


async def test_a_queued_request_is_never_called(vhost: Vhost) -> None:
    async with (
        serving(vhost.amqp_url, lanes=ONE_SLOT) as worker,
        gate(worker.settings, ping_every_s=0.05) as url,
        requester(vhost.amqp_url) as app,
    ):
        await app.read_events()
        async with stream_of(url, f"{SLOW} ahead"):
            await until(lambda: worker.calls("ahead"))
            async with stream_of(url, "queued") as got:
                id = got.headers["request-id"]
            await until(lambda: worker.parts.store.find(Identity("", id)))
        await until(lambda: "cancelled" in app.events_of(id))

        assert not worker.calls("queued")


async def test_a_delayed_request_is_never_called(vhost: Vhost) -> None:
    async with (
        serving(vhost.amqp_url) as worker,
        gate(worker.settings, ping_every_s=0.05) as url,
        requester(vhost.amqp_url) as app,
    ):
        await app.read_events()
        async with stream_of(url, "delayed", x_lane_delay_ms="5000") as got:
            id = got.headers["request-id"]
            await until(lambda: worker.parts.store.find(Identity("", id)))
        await until(lambda: "cancelled" in app.events_of(id))

        assert not worker.calls("delayed")


@pytest.mark.parametrize("has_piece", [False, True], ids=["running", "streaming"])
async def test_a_call_to_the_provider_is_closed(vhost: Vhost, has_piece: bool) -> None:
    async with (
        serving(vhost.amqp_url) as worker,
        gate(worker.settings, ping_every_s=0.05) as url,
        requester(vhost.amqp_url) as app,
    ):
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


async def test_a_request_between_two_attempts_makes_no_further_one(vhost: Vhost) -> None:
    async with (
        serving(vhost.amqp_url, retry={"base_s": 1, "cap_s": 2}) as worker,
        gate(worker.settings, ping_every_s=0.05) as url,
        requester(vhost.amqp_url) as app,
    ):
        await app.read_events()
        async with stream_of(url, "failing [[fault: rate_limited retry_after=5]]") as got:
            id = got.headers["request-id"]
            await until(lambda: "retrying" in app.events_of(id))
        await until(lambda: is_cancelled(worker, id))
        await until(lambda: "cancelled" in app.events_of(id))  # it came due, and its outcome was known

        assert len(worker.calls("failing")) == 1
