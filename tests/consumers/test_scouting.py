"""A scout consumes a queue only while its lane is full and slow."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import cycle

import pytest

from consumers.fairness import scouting
from consumers.fairness.lane_slots import LaneSlots, QueueSlots
from consumers.fairness.scouting import Scouted, Scouting
from tests.support.pools import FakePool
from tests.support.waiting import until

QUEUE = "lane.normal"


class Lane:
    """A lane of two slots; `waiting` is the length of its queue."""

    def __init__(self) -> None:
        self.slots: QueueSlots = LaneSlots().queue(2)
        self.waiting = 10
        self.scouts: list[FakePool] = []
        self.looks = 0
        self.turned = 0
        self.scouting = Scouting(
            [Scouted(queue=QUEUE, slots=self.slots, scout=self._scout)],
            depths=self._depths,
        )

    @property
    def out(self) -> int:
        return sum(bool(each.began_s) and not each.is_over for each in self.scouts)

    def fill(self) -> None:
        while self.slots.begin("crm"):
            pass

    def _scout(self) -> FakePool:
        self.scouts.append(FakePool(QUEUE))
        return self.scouts[-1]

    async def _depths(self, queues: list[str]) -> Mapping[str, int]:
        self.looks += 1
        return {QUEUE: self.waiting}

    @asynccontextmanager
    async def turning(self, *tenants: str) -> AsyncIterator[None]:
        """Fill the slots again as soon as they are free, with one tenant after the other."""

        async def turn_over() -> None:
            for tenant in cycle(tenants):
                assert self.slots.begin(tenant)
                await asyncio.sleep(0)
                self.slots.end(tenant)
                self.turned += 1

        assert self.slots.begin(tenants[0])
        turning = asyncio.create_task(turn_over())
        try:
            yield
        finally:
            turning.cancel()

    @asynccontextmanager
    async def looked_at(self) -> AsyncIterator[None]:
        running = asyncio.create_task(self.scouting.run())
        try:
            yield
        finally:
            await self.scouting.stop()
            await asyncio.wait_for(running, 30)


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scouting, "LOOK_EVERY_S", 0.005)


async def test_a_scout_starts_if_all_slots_are_busy_for_long_and_more_requests_wait() -> None:
    lane = Lane()
    lane.fill()
    async with lane.looked_at():
        await until(lambda: lane.out == 1)
        assert lane.slots.sets_surplus_aside
    assert not lane.slots.sets_surplus_aside


async def test_no_scout_starts_if_nothing_more_waits() -> None:
    lane = Lane()
    lane.waiting = 0
    lane.fill()
    async with lane.looked_at():
        await until(lambda: lane.looks >= 5)
    assert not lane.scouts


async def test_no_scout_starts_for_a_single_tenant_while_slots_become_free_quickly() -> None:
    lane = Lane()
    lane.waiting = 1_000_000
    async with lane.looked_at(), lane.turning("crm"):
        await until(lambda: lane.turned > 2000)
        assert not lane.scouts


async def test_with_several_tenants_a_scout_starts_for_a_long_queue_although_slots_become_free_quickly() -> None:
    lane = Lane()
    lane.waiting = 1_000_000
    async with lane.looked_at(), lane.turning("crm", "chat"):
        await until(lambda: lane.out == 1)


async def test_with_several_tenants_no_scout_starts_for_a_short_queue() -> None:
    lane = Lane()
    lane.waiting = 1
    async with lane.looked_at(), lane.turning("crm", "chat"):
        await until(lambda: lane.looks >= 5)
        assert not lane.scouts


async def test_the_scout_stops_when_slots_are_free_and_starts_again_later() -> None:
    lane = Lane()
    lane.fill()
    async with lane.looked_at():
        await until(lambda: lane.out == 1)
        lane.slots.end("crm")
        await until(lambda: lane.out == 0)
        assert not lane.slots.sets_surplus_aside
        lane.fill()
        await until(lambda: lane.out == 1)
    assert len(lane.scouts) == 2


async def test_no_scout_runs_while_the_lane_is_paused() -> None:
    lane = Lane()
    lane.fill()
    async with lane.looked_at():
        await until(lambda: lane.out == 1)
        await lane.scouting.pause("store is away")
        await until(lambda: lane.out == 0)
        await lane.scouting.resume()
        await until(lambda: lane.out == 1)
