"""While replies cannot be sent, pools are paused and calls wait."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

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


class LateTaker(Taker):
    looked = 0

    async def end_late(self) -> None:
        self.looked += 1


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


async def test_a_pool_is_paused_while_an_operator_pauses_its_lane_and_calls_of_others_go_on() -> None:
    world = World()
    async with world.watched():
        world.taker.brake = "paused by an operator"
        await until(lambda: world.taker.told == ["paused by an operator"])
        await asyncio.wait_for(world.pausing.opened(), 30)
        world.store = "locked"
        await asyncio.sleep(0.12)
        world.taker.brake = None
        await asyncio.sleep(0.12)
        assert world.taker.is_paused
        world.store = None
        await until(lambda: world.taker.told[1:] == ["resume"])


@pytest.mark.parametrize(
    ("brake", "told", "store", "looks"),
    [("b", "b", None, 1), (None, "b", None, 0), ("b", "resume", None, 0), ("b", "b", "locked", 0)],
)
def test_late_requests_are_ended_only_in_a_queue_that_an_operator_pauses(
    brake: str | None, told: str, store: str | None, looks: int
) -> None:
    async def story() -> int:
        world, queue = World(), LateTaker()
        queue.brake, queue.told, world.store = brake, [told], store
        looking = asyncio.create_task(world.pausing.end_late([queue]))
        await asyncio.sleep(3)
        looking.cancel()
        return queue.looked

    assert virtually(story()) == looks


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


@pytest.mark.parametrize(("paused_s", "logged"), [(0.4, []), (0.8, [signals.TAKING_PAUSED, signals.TAKING_RESUMED])])
def test_a_pause_that_is_not_short_is_logged_with_its_end_and_length(paused_s: float, logged: list[str]) -> None:
    async def story() -> list[Any]:
        world = World()
        with structlog.testing.capture_logs() as logs:
            async with world.watched():
                world.store = "locked"
                await asyncio.sleep(paused_s)
                world.store = None
                await asyncio.sleep(60)
        return list(logs)

    found = virtually(story())
    assert [each["event"] for each in found] == logged
    assert [each["paused_s"] for each in found[1:]] == [pytest.approx(paused_s, abs=0.2)] * len(found[1:])


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


def test_a_queue_that_stays_undelivered_is_consumed_again_every_half_minute_and_named_all_the_time() -> None:
    bench = Bench()
    bench.pool.is_mended = False
    assert len(bench.errors(3 * STILL_S + 4)) == len(bench.pool.repairs_s) == 3
    assert bench.watchdog.trouble == f"{QUEUE} is not delivered"


def is_paused(on: Bench) -> None:
    on.pool.trouble = "paused: store"


def is_braked(on: Bench) -> None:
    on.pool.is_paused = True


def has_no_room(on: Bench) -> None:
    on.pool.has_room = False


def has_no_messages(on: Bench) -> None:
    on.ready = 0


def has_no_broker(on: Bench) -> None:
    on.is_broker_away = True


def is_paused_at_times(on: Bench) -> None:
    at_s = asyncio.get_running_loop().time()
    on.pool.trouble = "paused: store" if at_s % 20 < 4 else None


def gets_a_delivery_at_times(on: Bench) -> None:
    on.pool.taken += asyncio.get_running_loop().time() % 25 < 1


def counts_a_slot_a_moment_early(on: Bench) -> None:
    on.ready, on.lost = 0, int(asyncio.get_running_loop().time() % 20 < 15)


@pytest.mark.slow
@pytest.mark.parametrize(
    "why",
    [
        is_paused, has_no_room, has_no_messages, has_no_broker, is_paused_at_times, gets_a_delivery_at_times,
        counts_a_slot_a_moment_early,
    ],
)  # fmt: skip
def test_a_lane_that_waits_for_a_reason_is_left_alone(why: Callable[[Bench], None]) -> None:
    bench = Bench()
    assert bench.errors(300, each_second=why) == []
    assert (bench.pool.repairs_s, bench.watchdog.trouble, bench.has_ended) == ([], None, False)


def test_a_lane_that_has_lost_slots_ends_the_process() -> None:
    bench = Bench()
    bench.ready, bench.lost = 0, 1
    assert bench.errors(LATE_S) == ["lane batch has lost slots"]
    assert bench.has_ended
    assert bench.watchdog.trouble == "lane batch has lost slots"
