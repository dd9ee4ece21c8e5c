"""A pause or a stop takes effect even if it comes between opening a session and using it."""

import asyncio
from contextlib import aclosing

import pytest
from aiormq.exceptions import AMQPConnectionError, ChannelClosed, ChannelNotFoundEntity

from lanekeeper.amqp.connection import Connection
from lanekeeper.contract.problems import BrokerError, BrokerUnreachable, TopologyMismatch
from tests.support.waiting import until
from topology.broker.admin import broker_errors
from topology.broker.consume import Deliveries


class FakeConnection(Connection):
    is_open = True
    trouble = None

    def __init__(self) -> None: ...


class SlowSession:
    """A session that takes long to pause, as when the broker has just come back."""

    cancelled = False

    def __init__(self) -> None:
        self.log: list[str] = []
        self.paused = asyncio.Event()
        self._turn = asyncio.Lock()

    async def pause(self) -> None:
        async with self._turn:
            self.log.append("pausing")
            await self.paused.wait()

    async def resume(self) -> None:
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
