"""Delays on a real broker end on time in the right lane; unroutable messages go to `lane.fallen`."""

import asyncio
import time
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractConnection, AbstractIncomingMessage

from lanekeeper.contract.names import Names
from topology.broker.admin import apply
from topology.declaration import Topology
from topology.delays import hop

pytestmark = pytest.mark.every_version

NAMES = Names()


@pytest.fixture
async def connection(connection: AbstractConnection, declared: Topology) -> AbstractConnection:
    """A connection to a virtual host with the whole topology."""
    await apply(declared, connection)
    return connection


Arrivals = asyncio.Queue[tuple[float, AbstractIncomingMessage]]


async def arrivals(connection: AbstractConnection, queue: str) -> Arrivals:
    """The messages that arrive in a queue, with their times (monotonic, s)."""
    arrived: Arrivals = asyncio.Queue()
    channel = await connection.channel()
    arrives = await channel.get_queue(queue, ensure=False)

    async def take(message: AbstractIncomingMessage) -> None:
        arrived.put_nowait((time.monotonic(), message))

    await arrives.consume(take, no_ack=True)
    return arrived


async def publish(connection: AbstractConnection, exchange: str, key: str, **properties: Any) -> float:
    """Publish and wait for the confirm; returns the time just before (monotonic, s)."""
    channel = await connection.channel(on_return_raises=True)
    to = await channel.get_exchange(exchange, ensure=False)
    before = time.monotonic()
    await to.publish(aio_pika.Message(b"{}", delivery_mode=2, **properties), key, timeout=10)
    return before


@pytest.mark.parametrize(
    ("delay_ms", "came_by"),
    [(0, "lane.delay.00"), (100, "lane.due"), (200, "lane.delay.00"), (700, "lane.due"), (1250, "lane.due")],
)
async def test_a_delay_ends_on_time_in_the_due_queue_with_routing_key_and_properties_kept(
    delay_ms: int, came_by: str, connection: AbstractConnection
) -> None:
    arrived = await arrivals(connection, "lane.normal.due")
    way = hop(delay_ms, NAMES)

    sent = await publish(
        connection,
        way.exchange,
        "normal.support.chat",
        headers={**way.headers, "traceparent": "kept"},
        priority=7,
        message_id="m1",
        reply_to="r1",
        correlation_id="c1",
    )
    at, message = await asyncio.wait_for(arrived.get(), 60)

    waited_ms = (at - sent) * 1000
    assert -(-delay_ms // 100) * 100 <= waited_ms < delay_ms + 15_000
    assert (message.routing_key, message.exchange) == ("normal.support.chat", came_by)
    assert (message.priority, message.message_id, message.reply_to, message.correlation_id) == (7, "m1", "r1", "c1")
    assert message.headers["traceparent"] == "kept"


async def test_dead_letters_stay_however_often_they_are_read_and_returned(connection: AbstractConnection) -> None:
    """Read 40 times, which is above the default delivery limit of 20 on 4.x."""
    await publish(connection, "lane.dead", "normal.a.b")
    dead = await (await connection.channel()).get_queue("lane.dead", ensure=False)

    for _ in range(40):
        message = await dead.get()
        assert message.body == b"{}"
        await message.reject(requeue=True)


async def test_control_messages_are_kept_whatever_their_routing_key(connection: AbstractConnection) -> None:
    for key in ("cancel", "result", "change", "status", "cancel.twice", "cancle", ""):
        await publish(connection, "lane.control", key)

    control = await (await connection.channel()).get_queue("lane.control")
    assert control.declaration_result.message_count == 7
