"""A pause or a stop takes effect even if it comes between opening a session and using it."""

import asyncio
from contextlib import aclosing

import pytest

from lanekeeper.amqp.connection import Connection
from tests.support.waiting import until
from topology.broker.deliveries import Deliveries


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
