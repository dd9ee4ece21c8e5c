"""A pause or a stop takes effect even if it comes between opening a session and using it."""

import asyncio
from contextlib import aclosing
from typing import cast

import pytest
from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel
from aiormq.exceptions import AMQPConnectionError, ChannelClosed, ChannelNotFoundEntity
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.tolerant import AS_READ, Properties
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import BrokerError, BrokerUnreachable, TopologyMismatch
from tests.support.waiting import until
from topology.broker.admin import broker_errors
from topology.broker.consume import ChannelLost, Deliveries, Delivery, Session, Share
from topology.broker.memory import HeldBytes


class FakeConnection(Connection):
    is_open = True
    trouble = None

    def __init__(self) -> None: ...


class SlowSession:
    """A session that takes long to pause, as when the broker has just come back."""

    cancelled = False
    prefetch = 1

    def __init__(self) -> None:
        self.log: list[str] = []
        self.paused = asyncio.Event()
        self._turn = asyncio.Lock()

    async def pause(self) -> None:
        async with self._turn:
            self.log.append("pausing")
            await self.paused.wait()

    async def resume(self, *, prefetch: int) -> None:
        async with self._turn:
            self.log.append("resumed")

    async def stop(self) -> None:
        self.log.append("stopped")

    async def close(self) -> None:
        self.log.append("closed")


@pytest.mark.parametrize(("then", "came_to"), [("resume", "resumed"), ("stop", "stopped")])
async def test_a_resume_or_stop_during_the_opening_of_a_paused_session_takes_effect(then: str, came_to: str) -> None:
    deliveries = Deliveries(FakeConnection(), queue="lane.critical", prefetch=1)
    session = SlowSession()

    async def opening() -> SlowSession:
        await deliveries.pause("no store")
        return session

    deliveries._open = opening  # type: ignore[assignment]
    async with aclosing(deliveries.sessions()) as sessions:
        first = asyncio.create_task(anext(sessions))
        await until(lambda: session.log == ["pausing"])
        said = asyncio.create_task(getattr(deliveries, then)())
        await asyncio.sleep(0)
        session.paused.set()
        await asyncio.wait_for(asyncio.gather(first, said), 30)
        assert session.log == ["pausing", came_to]
        assert not deliveries.is_paused or then == "stop"
    assert session.log[-1] == "closed"


async def test_a_pause_while_the_queue_is_consumed_again_takes_effect() -> None:
    deliveries = Deliveries(FakeConnection(), queue="lane.critical", prefetch=1)
    session = SlowSession()

    async def opening() -> SlowSession:
        return session

    deliveries._open = opening  # type: ignore[assignment]
    async with aclosing(deliveries.sessions()) as sessions:
        await anext(sessions)
        again = asyncio.create_task(deliveries.consume_again(keeps_channel=True))
        await until(lambda: session.log == ["pausing"])
        said = asyncio.create_task(deliveries.pause("no store"))
        await asyncio.sleep(0)
        session.paused.set()
        await asyncio.wait_for(asyncio.gather(again, said), 30)
        assert session.log == ["pausing", "pausing"]


@pytest.mark.parametrize(
    "error",
    [AMQPConnectionError("gone"), Exception(), asyncio.CancelledError(), TimeoutError(), RuntimeError("closed")],
    ids=repr,
)
def test_a_connection_that_is_lost_while_declaring_is_an_unreachable_broker(error: BaseException) -> None:
    """Also as a bare `Exception`, or as a cancellation that nobody asked for: aiormq raises both."""

    async def declare() -> None:
        with broker_errors():
            raise error

    with pytest.raises(BrokerUnreachable):
        asyncio.run(declare())


@pytest.mark.parametrize(
    ("error", "ours"),
    [(ChannelNotFoundEntity("no queue"), TopologyMismatch), (ChannelClosed(404, "why"), BrokerError)],
    ids=repr,
)
def test_a_refused_declaration_and_a_lost_connection_have_different_errors(
    error: Exception, ours: type[BrokerError]
) -> None:
    async def declare() -> None:
        with broker_errors():
            raise error

    with pytest.raises(ours) as raised:
        asyncio.run(declare())
    assert not isinstance(raised.value, BrokerUnreachable)


class FakeChannel:
    """A channel that says nothing."""

    def __init__(self) -> None:
        self.closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_consumer_cancel_callbacks: set[object] = set()

    async def basic_qos(self, **_: object) -> None: ...

    async def basic_consume(self, *_: object, **__: object) -> Basic.ConsumeOk:
        return Basic.ConsumeOk("tag")

    async def basic_ack(self, tag: int, *, wait: bool) -> None: ...


def found(body: bytes, tag: int = 1) -> DeliveredMessage:
    properties = Properties(Message(body=body)).marshal()
    header = ContentHeader(body_size=len(body), properties=Basic.Properties(headers={AS_READ: properties}))
    delivery = Basic.Deliver(consumer_tag="tag", delivery_tag=tag)
    return DeliveredMessage(delivery=delivery, header=header, body=body, channel=cast("Channel", None))


async def started(held: HeldBytes) -> Session:
    share = Share(held=held, holder="lane.batch", most_bytes=1000)
    session = Session(cast("Channel", FakeChannel()), queue="lane.batch", counted=True, share=share)
    await session.start(prefetch=10)
    return session


async def loading(held: HeldBytes, count: int) -> tuple[Session, list[Delivery], list[asyncio.Task[None]]]:
    """Deliveries that want to load as much as one may."""
    session, deliveries = await started(held), []
    for tag in range(1, count + 1):
        await session._on_delivery(found(b"x" * 20, tag))
        deliveries.append(await anext(session))
    tasks = [asyncio.create_task(each.room(10**9)) for each in deliveries]
    await asyncio.sleep(0)
    return session, deliveries, tasks


async def test_deliveries_that_all_wait_for_room_get_it_one_after_the_other() -> None:
    held = HeldBytes(1000)
    _, deliveries, tasks = await loading(held, 5)
    for number, each in enumerate(deliveries):
        await asyncio.sleep(0)
        assert [task.done() for task in tasks] == [at <= number for at in range(5)]
        await each.ack()
    assert (held.in_all, held.waiting) == (0, 0)


@pytest.mark.parametrize("ends", ["cancelled", "channel lost", "settled"])
async def test_a_delivery_that_ends_while_it_waits_for_room_leaves_nothing_counted(ends: str) -> None:
    held = HeldBytes(1000)
    session, deliveries, tasks = await loading(held, 3)
    deliveries[0].count(50)
    match ends:
        case "cancelled":
            tasks[1].cancel()
        case "channel lost":
            session._on_cancelled(Basic.Cancel("tag"))
            for task in tasks:
                task.cancel()
        case _:
            await deliveries[1].ack()
    await asyncio.sleep(0)
    for each in deliveries:
        await each.ack()
    await asyncio.sleep(0)
    assert (held.in_all, held.waiting) == (0, 0)


async def test_what_was_on_its_way_when_the_broker_ended_the_consumer_leaves_nothing_counted() -> None:
    held = HeldBytes(1000)
    session = await started(held)
    session._on_cancelled(Basic.Cancel("tag"))  # aiormq calls it before the task of a message that came just before
    await session._on_delivery(found(b"x" * 100))
    assert held.in_all == 0
    with pytest.raises(ChannelLost):
        await anext(session)
