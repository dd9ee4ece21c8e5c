"""While replies cannot be sent, pools are paused and calls wait."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import structlog

from consumers.slots.pausing import STILL_S, Pausing, Watchdog
from lanekeeper.contract.problems import BrokerUnreachable
from lanekeeper.telemetry import signals
from tests.support.virtual_time import virtually
from tests.support.waiting import until


class Taker:
    """A pool that records what it is told."""

    brake: str | None = None

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


QUEUE = "lane.batch"
LATE_S = STILL_S + 4


@dataclass
class FakePool:
    queue: str = QUEUE
    trouble: str | None = None
    has_room: bool = True
    taken: int = 0
    is_paused: bool = False
    repairs_s: list[float] = field(default_factory=list)
    is_mended: bool = True
    """Whether deliveries come once it consumes again."""

    async def consume_again(self) -> None:
        self.repairs_s.append(asyncio.get_running_loop().time() - 1000)
        self.taken += self.is_mended


class Bench:
    """A lane with one pool and five waiting messages."""

    def __init__(self) -> None:
        self.pool = FakePool()
        self.ready = 5
        self.lost = 0
        self.is_broker_away = False
        self.asked = 0
        self.watchdog = Watchdog([self.pool], unfetched=self._unfetched, lost_slots=lambda: {"batch": self.lost})

    async def _unfetched(self, queues: list[str]) -> Mapping[str, int]:
        self.asked += 1
        if self.is_broker_away:
            raise BrokerUnreachable("away")
        return {QUEUE: self.ready}

    def errors(self, seconds: float, *, each_second: Callable[["Bench"], object] = lambda _: None) -> list[str]:
        """What it has logged after so many seconds."""

        async def story() -> list[str]:
            watching = asyncio.create_task(self.watchdog.run())
            with structlog.testing.capture_logs() as logs:
                for _ in range(round(seconds)):
                    each_second(self)
                    await asyncio.sleep(1)
            self.has_ended = watching.done()
            watching.cancel()
            return [each["reason"] for each in logs if each["event"] == signals.LANE_STUCK]

        return virtually(story())


def test_a_queue_that_is_not_delivered_is_consumed_again_and_the_process_is_ready_again() -> None:
    bench = Bench()
    troubles: list[str | None] = []
    told = bench.errors(LATE_S + 10, each_second=lambda on: troubles.append(on.watchdog.trouble))
    assert told == [f"{QUEUE} is not delivered"]
    assert len(bench.pool.repairs_s) == 1
    assert bench.pool.repairs_s[0] == pytest.approx(STILL_S, abs=4)
    assert f"{QUEUE} is not delivered" in troubles
    assert troubles[-1] is None


def test_a_lane_that_has_lost_slots_ends_the_process() -> None:
    bench = Bench()
    bench.ready, bench.lost = 0, 1
    assert bench.errors(LATE_S) == ["lane batch has lost slots"]
    assert bench.has_ended
    assert bench.watchdog.trouble == "lane batch has lost slots"
