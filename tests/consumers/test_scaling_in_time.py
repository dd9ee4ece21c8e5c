"""How long slots are idle before they are lent, and how often the broker is asked: in virtual time."""

import asyncio
from collections.abc import Mapping

from structlog.testing import capture_logs

from consumers.capacity.activity import LaneActivity
from consumers.capacity.lending import QueueLoad
from consumers.capacity.scaling import ScaledQueue, Scaling
from lanekeeper.telemetry import signals
from tests.support.jobs import NOW_MS
from tests.support.pools import FakePool
from tests.support.virtual_time import virtually


class World:
    """`high` has four slots and lends all but one; `low` has two and many waiting requests."""

    def __init__(self, *, most: int = 5) -> None:
        self.loop = asyncio.get_running_loop()
        self.began_s = self.loop.time()
        self.waiting, self.held = 500, dict[str, str]()
        self.asked_s: list[float] = []
        self.added: list[FakePool] = []
        self.pools: dict[str, FakePool] = {}
        self.high, self.low = self._line("high", 4, 4), self._line("low", 2, most)
        self.pools["low"].in_hand = 2
        self.slots = Scaling(
            [self.high, self.low],
            depths=self._depths,
            waiting_for=lambda: self.held,
            now_ms=lambda: NOW_MS + round(1000 * self.passed_s),
        )
        self._running = asyncio.create_task(self.slots.run())

    @property
    def passed_s(self) -> float:
        return self.loop.time() - self.began_s

    def _line(self, lane: str, slots: int, most: int) -> ScaledQueue:
        def more(count: int) -> FakePool:
            self.added.append(FakePool(lane, count))
            return self.added[-1]

        activity = LaneActivity(lane, slots=slots, due_slots=0)
        pool = self.pools[lane] = FakePool(lane, slots)
        return ScaledQueue(
            lane=lane,
            pool=pool,
            new_pool=more,
            load=QueueLoad(slots=slots, reserved=1, max_slots=most, target_wait_s=2),
            activity=activity,
        )

    async def _depths(self, queues: list[str]) -> Mapping[str, int]:
        self.asked_s.append(round(self.passed_s, 3))
        return dict.fromkeys(queues, self.waiting)

    async def end(self) -> None:
        await self.slots.stop()
        await self._running


def test_the_broker_is_asked_once_a_second() -> None:
    async def story() -> list[float]:
        world = World(most=2)
        await asyncio.sleep(3.6)
        await world.end()
        return world.asked_s

    assert virtually(story()) == [0.0, 1.0, 2.0, 3.0]


def test_slots_are_lent_when_they_were_idle_for_three_seconds_and_the_lane_keeps_one() -> None:
    async def story() -> None:
        world = World()
        await asyncio.sleep(2.6)
        assert not world.added
        await asyncio.sleep(0.7)
        assert sum(each.slots for each in world.added) == 3
        assert all(3.0 <= each.began_s - world.began_s <= 3.01 for each in world.added)
        await world.end()

    virtually(story())


def test_lent_slots_are_given_up_when_they_were_not_used_for_three_seconds() -> None:
    async def story() -> None:
        world = World()
        await asyncio.sleep(4.1)
        assert world.added
        world.waiting = 0
        for each in world.added:
            each.in_hand = each.slots
        await asyncio.sleep(5)
        assert not any(each.stopped_s for each in world.added)
        idle_s = world.loop.time()
        for each in world.added:
            each.in_hand = 0
        await asyncio.sleep(4)
        assert all(2.7 <= each.stopped_s - idle_s <= 3.3 for each in world.added)
        await world.end()

    virtually(story())


def test_lent_slots_are_back_within_a_second_when_their_lane_needs_them() -> None:
    async def story() -> None:
        world = World()
        await asyncio.sleep(4.1)
        assert world.added
        needed_s = world.loop.time()
        world.pools["high"].in_hand = 4
        await asyncio.sleep(1)
        assert all(0 < each.stopped_s - needed_s < 0.3 for each in world.added)
        await world.end()

    virtually(story())


def test_a_provider_that_was_the_bottleneck_within_two_seconds_still_is() -> None:
    async def story() -> None:
        world = World(most=10)
        world.held["low"] = "itpm"
        await asyncio.sleep(10.1)
        assert not world.added
        world.held.clear()
        await asyncio.sleep(1.8)
        assert not world.added
        await asyncio.sleep(1.3)
        assert world.added
        await world.end()

    virtually(story())


def test_what_keeps_a_lane_from_more_slots_is_logged_once_a_minute() -> None:
    async def story() -> None:
        world = World(most=10)
        world.held["low"] = "itpm"
        await asyncio.sleep(130)
        await world.end()

    with capture_logs() as logs:
        virtually(story())
    told = [each for each in logs if each["event"] == signals.SLOTS_LIMITED]
    assert [(each["lane"], each["limit"]) for each in told] == [("low", "itpm")] * 3
    assert [round(each["wait_s"]) for each in told] == [3, 63, 123]
