"""How long slots are idle before they are lent, and after how long a scout goes out: in virtual time."""

import asyncio
from collections.abc import Mapping

import pytest

from consumers.slots.activity import LaneActivity
from consumers.slots.lane_slots import LaneSlots, QueueSlots
from consumers.slots.scaling import QueueLoad, ScaledQueue, Scaling
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
            ready=self._depths,
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
            shared=LaneSlots().queue(slots),
        )

    async def _depths(self, queues: list[str]) -> Mapping[str, int]:
        self.asked_s.append(round(self.passed_s, 3))
        return dict.fromkeys(queues, self.waiting)

    async def end(self) -> None:
        await self.slots.stop()
        await self._running


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


QUEUE = "lane.normal"


class Lane:
    """A lane of two slots, looked at four times a second."""

    def __init__(self, waiting: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.waiting = waiting
        self.slots: QueueSlots = LaneSlots().queue(2)
        self.scouts: list[FakePool] = []
        queue = ScaledQueue(
            lane="low",
            pool=FakePool(QUEUE, 2),
            new_pool=lambda count: FakePool(QUEUE, count),
            load=QueueLoad(slots=2, reserved=1, max_slots=2, target_wait_s=2),
            activity=LaneActivity("low", slots=2, due_slots=0),
            shared=self.slots,
            new_scout=self._scout,
        )
        self.scaling = Scaling([queue], depths=self._depths, ready=self._depths, now_ms=lambda: NOW_MS)
        self._running = asyncio.create_task(self.scaling.run())
        self.began_s = self.loop.time()

    def _scout(self) -> FakePool:
        self.scouts.append(FakePool(QUEUE))
        return self.scouts[-1]

    async def _depths(self, queues: list[str]) -> Mapping[str, int]:
        return dict.fromkeys(queues, self.waiting)

    def fill(self) -> None:
        while self.slots.begin("crm"):
            pass

    async def end(self) -> None:
        await self.scaling.stop()
        await self._running


def test_a_scout_goes_out_after_a_second_in_which_no_slot_became_free() -> None:
    async def story() -> None:
        lane = Lane(waiting=1)
        await asyncio.sleep(5.1)
        lane.fill()
        full_s = lane.loop.time()
        await asyncio.sleep(3)
        (scout,) = lane.scouts
        assert 1.0 <= scout.began_s - full_s <= 1.26
        await lane.end()

    virtually(story())


def test_no_scout_goes_out_in_a_shorter_burst() -> None:
    async def story() -> None:
        lane = Lane(waiting=1)
        for _ in range(5):
            lane.fill()
            await asyncio.sleep(0.74)
            lane.slots.end("crm")
            await asyncio.sleep(0.3)
        assert not lane.scouts
        await lane.end()

    virtually(story())


def test_a_scout_comes_back_when_slots_were_free_for_two_seconds() -> None:
    async def story() -> None:
        lane = Lane(waiting=1)
        lane.fill()
        await asyncio.sleep(3.1)
        (scout,) = lane.scouts
        free_s = lane.loop.time()
        lane.slots.end("crm")
        await asyncio.sleep(1.5)
        assert not scout.stopped_s
        await asyncio.sleep(1.5)
        assert 1.75 <= scout.stopped_s - free_s <= 2.01
        await lane.end()

    virtually(story())


@pytest.mark.parametrize(("tenants", "goes"), [(("crm",), False), (("crm", "chat"), True)])
def test_while_slots_become_free_a_scout_goes_out_only_between_several_tenants(
    tenants: tuple[str, ...], goes: bool
) -> None:
    async def story() -> None:
        lane = Lane(waiting=1000)
        lane.slots.begin("crm")  # one slot is held, the other one turns over
        for _ in range(40):
            await asyncio.sleep(0.2)
            for tenant in (*tenants, *tenants):
                assert lane.slots.begin(tenant)
                lane.slots.end(tenant)
            assert lane.slots.begin("crm")
            await asyncio.sleep(0.06)
            lane.slots.end("crm")
        assert bool(lane.scouts) == goes
        await lane.end()

    virtually(story())


def test_while_a_scout_is_out_requests_over_their_tenants_share_are_set_aside() -> None:
    async def story() -> None:
        lane = Lane(waiting=10)
        lane.fill()
        await asyncio.sleep(2)
        assert lane.slots.sets_surplus_aside
        await lane.end()
        assert not lane.slots.sets_surplus_aside

    virtually(story())


def test_with_several_tenants_no_scout_goes_out_for_a_queue_shorter_than_what_begins_in_a_second() -> None:
    async def story() -> None:
        lane = Lane(waiting=8)
        lane.fill()
        for _ in range(40):
            await asyncio.sleep(0.2)
            for tenant in ("crm", "chat"):
                lane.slots.end("crm")
                assert lane.slots.begin(tenant)
                lane.slots.end(tenant)
                assert lane.slots.begin("crm")
        assert not lane.scouts
        await lane.end()

    virtually(story())


def test_no_scout_is_out_while_the_lane_is_paused() -> None:
    async def story() -> None:
        lane = Lane(waiting=10)
        lane.fill()
        await asyncio.sleep(2)
        await lane.scaling.pause("store is away")
        await asyncio.sleep(10)
        assert [each.is_over for each in lane.scouts] == [True]
        await lane.scaling.resume()
        await asyncio.sleep(2)
        assert [each.is_over for each in lane.scouts] == [True, False]
        await lane.end()

    virtually(story())


def test_no_scout_is_sent_while_no_request_waits() -> None:
    async def story() -> None:
        lane = Lane(waiting=0)
        lane.fill()
        await asyncio.sleep(10)
        assert not lane.scouts
        lane.waiting = 1
        await asyncio.sleep(0.5)
        assert len(lane.scouts) == 1
        await lane.end()

    virtually(story())
