"""Delays on a real broker end on time in the right lane; unroutable messages go to `lane.fallen`."""

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractConnection, AbstractIncomingMessage
from aio_pika.exceptions import DeliveryError
from aiormq.exceptions import ChannelAccessRefused

from lanekeeper.contract.names import Names
from tests.support.brokers import Vhost, version_of
from topology.broker.admin.apply import apply
from topology.declaration import declare
from topology.delays import hop
from topology.lanes import BATCH, CRITICAL, NORMAL
from topology.model import Topology

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


async def test_a_delayed_message_without_a_lane_goes_to_lane_fallen_and_delays_no_other(
    connection: AbstractConnection,
) -> None:
    fallen, due = await arrivals(connection, "lane.fallen"), await arrivals(connection, "lane.batch.due")
    way = hop(300, NAMES)

    for key in ("nowhere.a.b", "batch.a.b"):
        await publish(connection, way.exchange, key, headers=dict(way.headers))

    _, message = await asyncio.wait_for(fallen.get(), 60)
    assert message.routing_key == "nowhere.a.b"
    _, message = await asyncio.wait_for(due.get(), 60)
    assert message.routing_key == "batch.a.b"


async def test_a_message_without_all_its_delay_bits_goes_to_lane_fallen_and_delays_no_other(
    connection: AbstractConnection,
) -> None:
    fallen, due = await arrivals(connection, "lane.fallen"), await arrivals(connection, "lane.batch.due")
    way = hop(300, NAMES)

    await publish(connection, way.exchange, "batch.broken.b", headers={"lane-d01": True})
    await publish(connection, way.exchange, "batch.bare.b")
    await publish(connection, way.exchange, "batch.whole.b", headers=dict(way.headers))

    keys = {(await asyncio.wait_for(fallen.get(), 60))[1].routing_key for _ in range(2)}
    assert keys == {"batch.broken.b", "batch.bare.b"}
    _, message = await asyncio.wait_for(due.get(), 60)
    assert message.routing_key == "batch.whole.b"


async def test_a_message_without_a_lane_goes_to_lane_fallen_at_once(connection: AbstractConnection) -> None:
    fallen = await arrivals(connection, "lane.fallen")

    await publish(connection, "lane.requests", "nowhere.a.b")

    _, message = await asyncio.wait_for(fallen.get(), 60)
    assert (message.routing_key, message.exchange) == ("nowhere.a.b", "lane.requests")
    assert "x-death" not in (message.headers or {})


def death_of(message: AbstractIncomingMessage) -> dict[str, Any]:
    """The only entry of `x-death`."""
    deaths: Any = message.headers["x-death"]
    (death,) = deaths
    return dict(death)


async def test_a_message_that_expires_in_an_intake_goes_to_lane_fallen_with_its_routing_key(
    connection: AbstractConnection,
) -> None:
    fallen = await arrivals(connection, "lane.fallen")

    await publish(connection, "lane.requests", "critical.a.b", expiration=0.05)

    _, message = await asyncio.wait_for(fallen.get(), 60)
    assert message.routing_key == "critical.a.b"
    death = death_of(message)
    assert (death["reason"], death["queue"]) == ("expired", "lane.critical")


async def test_a_message_that_exceeds_the_delivery_limit_goes_to_lane_fallen(connection: AbstractConnection) -> None:
    """It is rejected, because 4.3 does not count nacks; the due queue counts on every version."""
    fallen = await arrivals(connection, "lane.fallen")
    way = hop(0, NAMES)
    await publish(connection, way.exchange, "normal.a.b", headers=dict(way.headers))
    due = await (await connection.channel()).get_queue("lane.normal.due", ensure=False)
    deliveries = 0

    async def give_back(message: AbstractIncomingMessage) -> None:
        nonlocal deliveries
        deliveries += 1
        await message.reject(requeue=True)

    await due.consume(give_back)

    _, message = await asyncio.wait_for(fallen.get(), 60)
    death = death_of(message)
    assert (death["reason"], deliveries) == ("delivery_limit", 21)


async def test_dead_letters_stay_however_often_they_are_read_and_returned(connection: AbstractConnection) -> None:
    """Read 40 times, which is above the default delivery limit of 20 on 4.x."""
    await publish(connection, "lane.dead", "normal.a.b")
    dead = await (await connection.channel()).get_queue("lane.dead", ensure=False)

    for _ in range(40):
        message = await dead.get()
        assert message.body == b"{}"
        await message.reject(requeue=True)


async def test_a_full_lane_refuses_new_requests_and_still_accepts_returning_ones(vhost: Vhost) -> None:
    connection = await aio_pika.connect(vhost.amqp_url)
    lanes = (replace(CRITICAL, max_length=3), NORMAL, BATCH)
    await apply(declare(lanes, names=NAMES, broker_version=version_of(connection)), connection)
    due = await arrivals(connection, "lane.critical.due")

    taken = 0
    with contextlib.suppress(DeliveryError):
        while taken < 10:
            await publish(connection, "lane.requests", "critical.a.b")
            taken += 1
    way = hop(100, NAMES)
    await publish(connection, way.exchange, "critical.back.b", headers=dict(way.headers))

    assert 3 <= taken <= 4
    _, message = await asyncio.wait_for(due.get(), 60)
    assert message.routing_key == "critical.back.b"
    await connection.close()


async def test_a_publisher_cannot_reach_due_queues_directly(connection: AbstractConnection) -> None:
    with pytest.raises(ChannelAccessRefused, match="internal"):
        await publish(connection, "lane.due", "critical.a.b")


async def test_control_messages_are_kept_whatever_their_routing_key(connection: AbstractConnection) -> None:
    for key in ("cancel", "result", "change", "status", "cancel.twice", "cancle", ""):
        await publish(connection, "lane.control", key)

    control = await (await connection.channel()).get_queue("lane.control")
    assert control.declaration_result.message_count == 7
