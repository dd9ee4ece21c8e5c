"""Which request gets a free slot, and which is set aside instead of waiting for one."""

import asyncio
from collections.abc import Callable

from consumers.slots import admission
from consumers.slots.admission import Admission, LaneSlots, QueueSlots
from tests.support.virtual_time import virtually


def aside(*tenants: str) -> Callable[[str], bool]:
    """Whether a tenant is one of these, which have requests in side queues."""
    return lambda tenant: tenant in tenants


def full(has_aside: Callable[[str], bool], **running: int) -> QueueSlots:
    slots = LaneSlots(has_aside=has_aside).queue(sum(running.values()))
    for tenant, count in running.items():
        assert all(slots.begin(tenant) for _ in range(count))
    return slots


def test_a_request_that_has_waited_too_long_is_given_no_slot_that_becomes_free_at_that_moment() -> None:
    async def story() -> tuple[Admission, int, int]:
        slots = full(aside(), flood=1)
        waiting = asyncio.create_task(slots.wait("small", movable=True))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(admission.HELD_S, slots.end, "flood")
        return await waiting, slots.running, slots.waiting

    assert virtually(story()) == (Admission.ASIDE, 0, 0)
