"""If a caller stops waiting for its answer, the call to the provider ends within a second."""

import asyncio
import time
from contextlib import suppress
from typing import Any

import pytest

from lanekeeper import Client, Final, Problem
from tests.support.brokers import Vhost
from tests.support.serving import RunningWorker, serving
from tests.support.waiting import until

KEY = "critical.tests.abandoned"
WORDS = "running, word by word, for a long time [[latency: 60s]]"


async def is_closed(worker: RunningWorker, *, within_s: float = 15.0) -> None:
    """Wait until the provider has seen the connection of the running call close."""
    began = time.monotonic()
    await until(lambda: [call.outcome for call in worker.calls("running")] == ["client_gone"])
    assert time.monotonic() - began < within_s


async def ends_as_cancelled(client: Client, id: str) -> None:
    with pytest.raises(Problem, match="cancelled"):
        await client.result(id, wait_s=60)


@pytest.mark.parametrize("how", ["cancel", "wait_for", "task group"])
async def test_cancelling_the_calling_task_cancels_its_request(vhost: Vhost, how: str) -> None:
    async with serving(vhost.amqp_url) as worker, Client(vhost.amqp_url) as client:

        async def ask() -> None:
            await client.request({"prompt": WORDS}, key=KEY, message_id="a-1")

        async def fail() -> None:
            await until(lambda: worker.calls("running"))
            raise ZeroDivisionError

        async def fail_beside() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(ask())
                group.create_task(fail())

        if how == "cancel":
            asking = asyncio.create_task(ask())
            await until(lambda: worker.calls("running"))
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking
        elif how == "wait_for":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ask(), 5)
        else:
            with pytest.raises(ExceptionGroup):
                await fail_beside()

        await is_closed(worker)
        await ends_as_cancelled(client, "a-1")


@pytest.mark.parametrize("how", ["break", "aclose"])
async def test_leaving_a_stream_cancels_its_request(vhost: Vhost, how: str) -> None:
    async with serving(vhost.amqp_url) as worker, Client(vhost.amqp_url) as client:
        stream = client.stream({"prompt": WORDS}, key=KEY, message_id="a-1")
        async for _ in stream:
            break
        if how == "aclose":
            await stream.aclose()
        else:
            del stream

        await is_closed(worker)
        await ends_as_cancelled(client, "a-1")


async def test_a_request_that_was_answered_is_not_cancelled(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, Client(vhost.amqp_url) as client:
        await client.request({"prompt": "one"}, key=KEY, message_id="a-1")
        async for _ in client.stream({"prompt": "two"}, key=KEY, message_id="a-2"):
            pass
        async for each in client.stream({"prompt": "three"}, key=KEY, message_id="a-3"):
            if isinstance(each, Final):
                break
        with pytest.raises(Problem, match="provider_rejected"):
            await client.request({"prompt": "[[fault: invalid]]"}, key=KEY, message_id="a-4")

        for id in ("a-1", "a-2", "a-3"):
            assert (await client.result(id, wait_s=60)).attempt == 1
        assert worker.is_well


async def test_a_request_keeps_running_if_the_caller_chose_that(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, Client(vhost.amqp_url, cancel_abandoned=False) as client:
        asking = asyncio.create_task(client.request({"prompt": "running [[held]]"}, key=KEY, message_id="a-1"))
        await until(lambda: worker.calls("running"))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        worker.api.release()

        assert (await client.result("a-1", wait_s=60)).text.startswith("echo: running")
        assert [call.outcome for call in worker.calls("running")] == ["ok"]


async def test_cancelling_the_calling_task_does_not_wait_for_the_broker(
    vhost: Vhost, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_be_sent = asyncio.Event()
    async with serving(vhost.amqp_url) as worker, Client(vhost.amqp_url) as client:
        send = client._transport.send_cancellation

        async def send_later(id: str, **how: Any) -> None:
            await may_be_sent.wait()
            await send(id, **how)

        monkeypatch.setattr(client._transport, "send_cancellation", send_later)
        asking = asyncio.create_task(client.request({"prompt": WORDS}, key=KEY))
        await until(lambda: worker.calls("running"))
        asking.cancel()
        await asyncio.wait([asking], timeout=60)
        assert asking.cancelled(), "although nothing was sent to the broker yet"
        may_be_sent.set()
        await is_closed(worker)
