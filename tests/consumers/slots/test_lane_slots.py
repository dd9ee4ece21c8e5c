"""Which request gets a free slot, and which is set aside instead of waiting for one."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from consumers.slots import admission
from consumers.slots.admission import Admission, LaneSlots, QueueSlots, TenantShare
from tests.support.virtual_time import virtually

Tasks = list[asyncio.Task[Any]]


def aside(*tenants: str) -> Callable[[str], bool]:
    """Whether a tenant is one of these, which have requests in side queues."""
    return lambda tenant: tenant in tenants


class Worked:
    """A queue's slots, whose tenants always have enough requests waiting."""

    def __init__(self, slots: int, shares: dict[str, TenantShare] | None = None) -> None:
        self.lane_slots = LaneSlots(shares or {})
        self.slots = self.lane_slots.queue(slots)
        self.begun: list[str] = []
        self.ended = 0

    async def fill(self, waiting: dict[str, int]) -> list["asyncio.Task[None]"]:
        """All requests arrive at once in this order; each records its start and holds its slot."""

        async def one(tenant: str) -> None:
            if not self.slots.begin(tenant):
                assert await self.slots.wait(tenant) is Admission.BEGIN
            self.begun.append(tenant)

        tasks = [asyncio.create_task(one(tenant)) for tenant, count in waiting.items() for _ in range(count)]
        await asyncio.sleep(0)
        return tasks

    async def end(self, tenant: str) -> None:
        self.slots.end(tenant)
        for _ in range(3):
            await asyncio.sleep(0)

    async def run(self, rounds: int) -> Counter[str]:
        """Slots become free in the order in which they were taken."""
        since = len(self.begun)
        for _ in range(rounds):
            await self.end(self.begun[self.ended])
            self.ended += 1
        return Counter(self.begun[since:])


@pytest.fixture
async def ended() -> AsyncIterator[Tasks]:
    """Cancel the requests that still wait after a test."""
    tasks: Tasks = []
    yield tasks
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_first_slot_that_becomes_free_goes_to_a_new_tenant(ended: Tasks) -> None:
    worked = Worked(16)
    ended += await worked.fill({"flood": 100})
    ended += await worked.fill({"small": 1})
    await worked.end("flood")
    assert worked.begun[-1] == "small"


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 8])
async def test_a_tenants_share_is_proportional_to_its_weight(ended: Tasks, slots: int) -> None:
    worked = Worked(slots, {"large": TenantShare(weight=3)})
    ended += await worked.fill({"small": 300, "large": 300})
    await worked.run(2 * slots)
    shares = await worked.run(160)
    assert 2.5 < shares["large"] / shares["small"] < 3.5


async def test_the_in_flight_limit_counts_requests_of_both_queues_of_a_lane(ended: Tasks) -> None:
    lane_slots = LaneSlots({"a": TenantShare(in_flight=1)})
    intake, due = lane_slots.queue(4), lane_slots.queue(4)
    assert intake.begin("a")
    assert not due.begin("a")
    waiting = asyncio.create_task(due.wait("a"))
    await asyncio.sleep(0)
    intake.end("a")
    assert await waiting is Admission.BEGIN


async def test_of_one_tenants_requests_the_highest_priority_goes_first_then_the_oldest() -> None:
    slots = LaneSlots().queue(1)
    slots.begin("a")
    order: list[str] = []

    async def wait(name: str, rank: int) -> None:
        await slots.wait("a", rank=rank)
        order.append(name)
        slots.end("a")

    waiting = [asyncio.create_task(wait(name, rank)) for name, rank in (("old", 1), ("high", 9), ("young", 1))]
    await asyncio.sleep(0)
    slots.end("a")
    await asyncio.gather(*waiting)
    assert order == ["high", "old", "young"]


def full(has_aside: Callable[[str], bool], **running: int) -> QueueSlots:
    slots = LaneSlots(has_aside=has_aside).queue(sum(running.values()))
    for tenant, count in running.items():
        assert all(slots.begin(tenant) for _ in range(count))
    return slots


async def test_requests_above_their_tenants_share_are_set_aside_while_the_lane_is_being_sorted() -> None:
    slots = full(aside(), flood=4)
    slots.set_surplus_aside(True)
    assert await slots.wait("flood", movable=True) is Admission.ASIDE
    small = asyncio.create_task(slots.wait("small", movable=True))
    await asyncio.sleep(0)
    slots.end("flood")
    assert await small is Admission.BEGIN


async def test_when_sorting_begins_requests_that_already_wait_are_included() -> None:
    slots = full(aside(), flood=4)
    waiting = [asyncio.create_task(slots.wait(tenant, movable=True)) for tenant in ("flood", "small")]
    await asyncio.sleep(0)
    slots.set_surplus_aside(True)
    assert await waiting[0] is Admission.ASIDE
    assert not waiting[1].done()
    slots.end("flood")
    assert await waiting[1] is Admission.BEGIN


async def test_when_sorting_begins_a_tenants_first_requests_stay_and_the_later_ones_are_moved_in_their_order() -> None:
    slots = full(aside(), flood=4)
    moved: list[str] = []

    async def wait(name: str, rank: int) -> None:
        if await slots.wait("small", rank=rank, movable=True) is Admission.ASIDE:
            moved.append(name)

    asked = {"old": 4, "next": 4, "later": 4, "last": 4, "urgent": 9}
    waiting = [asyncio.create_task(wait(name, rank)) for name, rank in asked.items()]
    await asyncio.sleep(0)
    slots.set_surplus_aside(True)  # the share of each of the two tenants is two slots
    await asyncio.sleep(0)
    assert moved == ["next", "later", "last"]
    for each in waiting:
        each.cancel()


async def test_further_requests_of_a_tenant_with_requests_set_aside_follow_them() -> None:
    slots = full(aside("flood"), flood=2)
    assert await slots.wait("flood", movable=True) is Admission.ASIDE


async def test_nothing_is_set_aside_if_the_lane_is_not_being_sorted_or_the_request_cannot_be_moved() -> None:
    slots = full(aside(), flood=1)
    held = asyncio.create_task(slots.wait("flood", movable=True))
    slots.set_surplus_aside(False)
    await asyncio.sleep(0)
    assert not held.done()
    slots.set_surplus_aside(True)
    assert await held is Admission.ASIDE
    fixed = asyncio.create_task(slots.wait("flood", movable=False))
    await asyncio.sleep(0)
    assert not fixed.done()
    slots.end("flood")
    assert await fixed is Admission.BEGIN


def test_a_request_that_has_waited_too_long_is_given_no_slot_that_becomes_free_at_that_moment() -> None:
    async def story() -> tuple[Admission, int, int]:
        slots = full(aside(), flood=1)
        waiting = asyncio.create_task(slots.wait("small", movable=True))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(admission.HELD_S, slots.end, "flood")
        return await waiting, slots.running, slots.waiting

    assert virtually(story()) == (Admission.ASIDE, 0, 0)


async def test_a_tenants_share_of_the_slots_is_by_its_weight_and_at_least_one(ended: Tasks) -> None:
    shares = {"heavy": TenantShare(weight=3.0)}
    slots = LaneSlots(shares, aside()).queue(4)
    for tenant in ("heavy", "light", "light", "other"):
        assert slots.begin(tenant)
    slots.set_surplus_aside(True)

    for tenant in ("light", "other"):  # each has a fifth of four slots as its share
        assert await slots.wait(tenant, movable=True) is Admission.ASIDE
    ended += [asyncio.create_task(slots.wait("heavy", movable=True)) for _ in range(2)]
    await asyncio.sleep(0)
    assert slots.waiting_of("heavy") == 2
    assert await slots.wait("heavy", movable=True) is Admission.ASIDE  # three of 4 * 3 / 5


async def test_who_comes_late_does_not_make_up_for_turns_it_did_not_ask_for(ended: Tasks) -> None:
    worked = Worked(1)
    ended += await worked.fill({"early": 20})
    await worked.run(9)
    ended += await worked.fill({"late": 20})
    assert await worked.run(10) == {"early": 5, "late": 5}
