"""While replies cannot be sent, pools are paused and calls wait."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import structlog

from consumers.capacity.pausing import Pausing
from lanekeeper.telemetry import signals
from tests.support.virtual_time import virtually
from tests.support.waiting import until


class Taker:
    """A pool that records what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.hands_full = False

    @property
    def is_paused(self) -> bool:
        return bool(self.told) and self.told[-1] != "resume"

    async def pause(self, reason: str) -> None:
        self.told.append(reason)

    async def resume(self) -> None:
        if not self.hands_full:
            self.told.append("resume")


class World:
    def __init__(self) -> None:
        self.broker: str | None = None
        self.store: str | None = None
        self.pausing = Pausing({"publish connection": lambda: self.broker, "store": lambda: self.store})
        self.taker = Taker()

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        running = asyncio.create_task(self.pausing.run([self.taker]))
        yield
        running.cancel()
        await asyncio.wait([running])


async def test_without_a_reason_to_pause_no_call_waits_even_if_run_was_not_started() -> None:
    world = World()
    await asyncio.wait_for(world.pausing.opened(), 30)
    assert world.pausing.reasons() == {}


async def test_pools_are_paused_once_with_all_reasons_and_resumed_when_the_last_reason_is_gone() -> None:
    world = World()
    async with world.watched():
        world.broker, world.store = "connection lost", "locked"
        await until(lambda: world.taker.told)
        world.broker = None
        await asyncio.sleep(0.12)
        assert world.taker.told == ["publish connection: connection lost; store: locked"]
        assert world.pausing.reasons() == {"store": "locked"}
        world.store = None
        await until(lambda: world.taker.told[1:] == ["resume"])


async def test_a_call_waits_from_the_moment_a_reason_to_pause_exists() -> None:
    world = World()
    async with world.watched():
        await asyncio.sleep(0)
        world.store = "locked"
        waiting = asyncio.create_task(world.pausing.opened())
        await asyncio.sleep(0.12)
        assert not waiting.done()
        world.store = None
        await asyncio.wait_for(waiting, 30)


async def test_a_pool_that_could_not_resume_is_asked_again() -> None:
    world = World()
    world.taker.hands_full = True
    world.store = "locked"
    async with world.watched():
        await until(lambda: world.taker.told)
        world.store = None
        await asyncio.sleep(0.12)
        assert world.taker.is_paused
        world.taker.hands_full = False
        await until(lambda: not world.taker.is_paused)


@pytest.mark.parametrize(("paused_s", "is_told"), [(0.3, False), (0.45, False), (0.7, True), (30.0, True)])
def test_a_long_pause_is_logged_once_and_its_end_with_its_length(paused_s: float, is_told: bool) -> None:
    async def story() -> None:
        world = World()
        async with world.watched():
            for _ in range(2):
                await asyncio.sleep(5)
                world.store = "locked"
                await asyncio.sleep(paused_s)
                world.store = None
                await asyncio.sleep(5)

    with structlog.testing.capture_logs() as logs:
        virtually(story())

    begun = [each["reasons"] for each in logs if each["event"] == signals.TAKING_PAUSED]
    ended = [each["paused_s"] for each in logs if each["event"] == signals.TAKING_RESUMED]
    assert begun == [{"store": "locked"}] * (2 if is_told else 0)
    assert ended == pytest.approx([paused_s] * (2 if is_told else 0), abs=0.11)


def test_a_pause_from_the_start_is_logged_too() -> None:
    async def story() -> None:
        world = World()
        world.store = "locked"
        async with world.watched():
            await asyncio.sleep(5)

    with structlog.testing.capture_logs() as logs:
        virtually(story())

    assert [each["event"] for each in logs] == [signals.TAKING_PAUSED]
