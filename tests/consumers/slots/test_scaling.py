"""Idle slots are lent to the lanes whose requests wait, and taken back when they are needed; a lane that waits too long
gets more; and scouting. In virtual time."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from consumers.background import background_task
from consumers.slots.activity import LaneActivity
from consumers.slots.admission import LaneSlots
from consumers.slots.scaling import AT_MOST, SCOUT_PREFETCH, ExtraSlots, QueueLoad, ScaledQueue, Scaling, share_out
from lanekeeper.contract.problems import BrokerUnreachable
from lanekeeper.telemetry import signals
from tests.support.virtual_time import in_virtual_time

pytestmark = pytest.mark.slow

SECOND = 1.1


class SizedPool:
    """Notes its prefetch."""

    def __init__(self, queue: str, prefetch: int) -> None:
        self.queue = queue
        self.prefetch = prefetch
        self.is_taking = True
        self.in_hand = self.running = self.resizes = 0

    async def resize(self, prefetch: int) -> None:
        self.resizes += prefetch != self.prefetch
        self.prefetch = prefetch


class Lane:
    """A lane whose requests run as long as the test likes: `wanted` of them at a time, if it has the slots."""

    def __init__(self, name: str, *, slots: int, reserved: int, most: int) -> None:
        self.pool = SizedPool(name, slots)
        self.slots = LaneSlots().queue(slots)
        self.activity = LaneActivity(name, slots=slots, due_slots=0)
        self.wanted = 0
        self.queue = ScaledQueue(
            lane=name,
            pool=self.pool,
            can_scout=True,
            shared=self.slots,
            load=QueueLoad(slots=slots, reserved=reserved, max_slots=most),
            target_wait_s=10,
            activity=self.activity,
        )

    def take(self) -> None:
        while self.slots.running > self.wanted:
            self.slots.end("crm")
        while self.slots.running < self.wanted and self.slots.begin("crm"):
            pass

    @property
    def ready(self) -> int:
        return max(0, self.wanted - self.slots.running)


class World:
    """Two lanes: one with eight slots, of which it keeps two, and a less urgent one with two slots, of twenty at
    most."""

    def __init__(self) -> None:
        self.high = Lane("high", slots=8, reserved=2, most=16)
        self.low = Lane("low", slots=2, reserved=1, most=20)
        self.limited: dict[str, str] = {}
        self.asked = 0
        self.is_broker_away = False
        self.scaling = Scaling([self.high.queue, self.low.queue], ready=self._ready, waiting_for=lambda: self.limited)

    async def _ready(self, queues: list[str]) -> Mapping[str, int]:
        self.asked += 1
        if self.is_broker_away:
            raise BrokerUnreachable("no connection")
        return {lane.pool.queue: lane.ready for lane in (self.high, self.low) if lane.pool.queue in queues}

    async def _work(self) -> None:
        while True:
            for lane in (self.high, self.low):
                lane.take()
            await asyncio.sleep(0.05)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        async with background_task(self.scaling.run(), name="slots"), background_task(self._work(), name="work"):
            await asyncio.sleep(2)
            yield


@in_virtual_time
async def test_idle_slots_are_lent_within_a_second_and_the_lane_that_lends_keeps_some() -> None:
    world = World()
    async with world.watched():
        world.low.wanted = 500
        await asyncio.sleep(1)
        assert world.low.slots.running == world.low.pool.prefetch == 2 + 8 - 2
        assert (world.low.activity.extra_slots, world.high.pool.prefetch) == (6, 8)


@in_virtual_time
async def test_lent_slots_are_taken_back_within_a_second_what_runs_on_them_ends_and_is_not_lent_twice() -> None:
    world = World()
    async with world.watched():
        world.low.wanted = 500
        await asyncio.sleep(1)
        world.high.wanted = 8
        await asyncio.sleep(0.3)
        assert (world.high.slots.running, world.low.slots.running) == (8, 8), "nothing waits for the lent slots"
        assert world.low.slots.size == 2, "none of them is used again"
        world.low.wanted = 0
        await asyncio.sleep(SECOND)
        world.low.wanted = 500
        await asyncio.sleep(SECOND)
        assert (world.low.slots.running, world.low.pool.prefetch) == (2, 2)


@in_virtual_time
async def test_while_a_load_goes_up_and_down_the_consumers_stay() -> None:
    world = World()
    async with world.watched():
        world.low.wanted = 500
        await asyncio.sleep(1)
        world.low.pool.resizes = 0
        for _ in range(12):
            world.high.wanted = 3
            await asyncio.sleep(0.3)
            world.high.wanted = 0
            await asyncio.sleep(0.3)
        assert world.low.pool.resizes < 5
        assert world.low.slots.size == 5


@in_virtual_time
async def test_if_the_broker_cannot_be_asked_nothing_changes() -> None:
    world = World()
    world.is_broker_away = True
    async with world.watched():
        world.low.wanted = 500
        await asyncio.sleep(5)
        assert world.asked
        assert world.low.pool.resizes == 0


@in_virtual_time
async def test_a_lane_that_waits_longer_than_its_target_gets_what_it_may_have_and_then_says_what_limits_it() -> None:
    world = World()
    with structlog.testing.capture_logs() as logs:
        async with world.watched():
            world.high.wanted, world.low.wanted = 8, 500
            await asyncio.sleep(9.5)
            assert world.low.slots.size == 2
            await asyncio.sleep(1.5)
            assert world.low.slots.running == 20
            await asyncio.sleep(1)
            assert world.low.activity.slots_limit == AT_MOST
            await asyncio.sleep(60)
    found = [each for each in logs if each["event"] == signals.SLOTS_LIMITED]
    assert [each["limit"] for each in found] == [AT_MOST] * 2, "once a minute"


@in_virtual_time
async def test_a_lane_that_waits_for_a_providers_budget_gets_no_more() -> None:
    world = World()
    async with world.watched():
        world.high.wanted, world.low.wanted = 8, 500
        world.limited["low"] = "itpm"
        await asyncio.sleep(20)
        assert (world.low.slots.size, world.low.activity.slots_limit) == (2, "itpm")
        world.limited.clear()
        await asyncio.sleep(3)
        assert world.low.slots.size == 20


@st.composite
def seen(draw: st.DrawFn) -> tuple[QueueLoad, ExtraSlots]:
    slots = draw(st.integers(1, 20))
    running = draw(st.integers(0, 60))
    load = QueueLoad(
        slots=slots,
        reserved=draw(st.integers(0, slots)),
        max_slots=slots + draw(st.integers(0, 60)),
        running=running,
        busiest=running + draw(st.integers(0, 9)),
        waiting=draw(st.integers(0, 50)),
        is_late=draw(st.booleans()),
        bottleneck=draw(st.sampled_from([None, None, "rpm"])),
    )
    return load, ExtraSlots(lent=draw(st.integers(0, 20)), grown=draw(st.integers(0, 20)))


@given(st.lists(seen(), min_size=1, max_size=6))
def test_no_reserve_is_lent_no_slot_is_lent_twice_and_no_queue_exceeds_slots_max(
    queues: list[tuple[QueueLoad, ExtraSlots]],
) -> None:
    found = share_out(queues)

    assert sum(each.lent for each in found) <= sum(
        max(0, load.slots - load.reserved - load.busiest) for load, _ in queues
    )
    for (load, had), extra in zip(queues, found, strict=True):
        assert extra.lent >= 0
        assert extra.grown >= 0
        assert load.slots + extra.total <= load.max_slots
        if load.bottleneck is not None:
            assert extra.total <= had.total
        if not load.is_late:
            assert extra.grown <= had.grown


class Crowd(Lane):
    """A lane of two slots, looked at four times a second."""

    def __init__(self, waiting: int) -> None:
        super().__init__("lane.normal", slots=2, reserved=1, most=2)
        self.waiting = waiting
        self.scaling = Scaling([self.queue], ready=self._ready)

    async def _ready(self, queues: list[str]) -> Mapping[str, int]:
        return dict.fromkeys(queues, self.waiting)

    def fill(self) -> None:
        while self.slots.begin("crm"):
            pass

    def is_scouted(self) -> bool:
        assert self.slots.sets_surplus_aside is (self.pool.prefetch == 2 + SCOUT_PREFETCH)
        return self.slots.sets_surplus_aside

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        async with background_task(self.scaling.run(), name="slots"):
            await asyncio.sleep(0.1)
            yield


@in_virtual_time
async def test_a_queue_is_scouted_after_a_second_in_which_no_slot_became_free_until_some_are_free_for_two() -> None:
    lane = Crowd(waiting=1)
    async with lane.watched():
        lane.fill()
        await asyncio.sleep(0.9)
        assert not lane.is_scouted()
        await asyncio.sleep(0.5)
        assert lane.is_scouted()
        lane.slots.end("crm")
        await asyncio.sleep(1.5)
        assert lane.is_scouted()
        await asyncio.sleep(1)
        assert not lane.is_scouted()


@pytest.mark.parametrize(("tenants", "is_scouted"), [(("crm",), False), (("crm", "chat"), True)])
@in_virtual_time
async def test_while_slots_become_free_quickly_a_queue_is_scouted_only_between_several_tenants(
    tenants: tuple[str, ...], is_scouted: bool
) -> None:
    lane = Crowd(waiting=1000)
    async with lane.watched():
        lane.slots.begin("crm")  # one slot is held, the other one turns over
        for _ in range(40):
            assert lane.slots.begin("crm")
            await asyncio.sleep(0.2)
            lane.slots.end("crm")
            for tenant in (*tenants, *tenants):
                assert lane.slots.begin(tenant)
                lane.slots.end(tenant)
            assert lane.slots.begin("crm")
            await asyncio.sleep(0.06)
            lane.slots.end("crm")
        assert lane.is_scouted() == is_scouted


@in_virtual_time
async def test_a_side_queue_is_prefetched_only_as_far_as_its_requests_run() -> None:
    lane, side = Crowd(waiting=0), SizedPool("lane.normal.side.00", 1)
    lane.queue.sides = [side]
    lane.queue.load = replace(lane.queue.load, slots=16, max_slots=16)
    lane.slots.resize(16)
    async with lane.watched():
        side.in_hand = 1
        await asyncio.sleep(1)
        assert side.prefetch == 1, "it waits for a slot"
        for _ in range(200):
            side.in_hand = side.running = side.prefetch
            await asyncio.sleep(0.01)
        assert side.prefetch == 16
        side.running = 3
        await asyncio.sleep(1)
        assert side.prefetch == 16
        side.in_hand = side.running = 0
        await asyncio.sleep(0.3)
        assert side.prefetch == 1
