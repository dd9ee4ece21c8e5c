"""A cancellation takes effect at any moment of a dialogue with the broker."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from lanekeeper.amqp.connection import Connection
from tests.support.brokers import Vhost
from topology.broker.consume import Deliveries, Inbox

TIMES = 150
WITHIN_S = 0.015
"""About the time that opening takes; the cancellations happen within it."""


async def read_an_inbox(connection: Connection) -> None:
    async with Inbox(connection, bindings=(("amq.topic", "x"),)) as inbox:
        async for _ in inbox:
            pass


async def consume(connection: Connection) -> None:
    async for session in Deliveries(connection, queue="work", prefetch=1).sessions():
        async for _ in session:
            pass


@pytest.mark.parametrize("work", [read_an_inbox, consume])
async def test_a_cancellation_at_any_moment_takes_effect(
    vhost: Vhost, work: Callable[[Connection], Awaitable[None]]
) -> None:
    rng = random.Random(work.__name__)
    async with Connection(vhost.amqp_url, name="test") as connection:
        await (await connection.channel(confirms=False)).queue_declare("work")
        for n in range(TIMES):
            task = asyncio.ensure_future(work(connection))
            await asyncio.sleep(rng.uniform(0, WITHIN_S))
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=60)
            assert done, f"the {n}th never ended"
            assert task.cancelled()


async def test_leaving_a_connection_while_it_reconnects_takes_effect_at_once(vhost: Vhost) -> None:
    rng = random.Random(0)
    for _ in range(15):
        async with Connection(vhost.amqp_url, name="test") as connection:
            await (await connection.underlying()).close()
            await asyncio.sleep(rng.uniform(0.05, 0.3))
            leaving = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - leaving < 20
