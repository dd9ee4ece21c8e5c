"""While replies cannot be sent, pools are paused and calls wait."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from consumers.capacity.pausing import Pausing
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


async def test_without_a_reason_to_pause_nobody_waits_even_if_nothing_watches() -> None:
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


async def test_a_pool_that_was_busy_is_told_again() -> None:
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
