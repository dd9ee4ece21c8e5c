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
