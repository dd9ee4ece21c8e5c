"""How a delivery gets its slot: one from a queue may be set aside, one from a side queue waits where it is."""

import asyncio
import dataclasses
from typing import Any

import pytest

from consumers.job import Job
from consumers.outcomes import Deferred
from consumers.slots import admission as admission_module
from consumers.slots.admission import Admission, LaneSlots, QueueAdmitter, QueueSlots, SideQueueAdmitter, SideQueues
from tests.support.jobs import NAMES, NOW_MS, Bench
from topology.lanes import CRITICAL

LANE = dataclasses.replace(CRITICAL, side_queues=2)
SIDE = NAMES.side(LANE.name, 1)


class World:
    """A lane of one slot that tenant `crm` holds, while requests over their tenant's share are set aside."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.aside = SideQueues(LANE, publisher=self.bench.publisher, names=NAMES, now_ms=lambda: NOW_MS)
        self.slots: QueueSlots = LaneSlots(has_aside=self.aside.has).queue(1)
        self.slots.set_surplus_aside(True)
        self.slots.begin("crm")

    def job(self, *, queue: str = "lane.critical") -> Job:
        delivery = self.bench.delivery(queue=queue, user_id="crm")
        return self.bench.job(lane=LANE, delivery=delivery)


async def test_a_request_from_a_side_queue_waits_for_its_slot_although_its_tenant_is_over_its_share() -> None:
    world = World()
    admitter = SideQueueAdmitter(world.slots, world.aside)
    waiting = asyncio.create_task(admitter.admit(job := world.job(queue=SIDE)))
    await asyncio.sleep(0)

    assert not waiting.done()
    world.slots.end("crm")
    assert await waiting is Admission.BEGIN
    assert world.aside.has("crm")
    admitter.leave(job)
    assert world.slots.running == 0


@pytest.mark.parametrize("has_side_queues", [False, True])
@pytest.mark.parametrize(
    ("properties", "admission"), [({}, Admission.ASIDE), ({"headers": {"CC": []}}, Admission.BACK)]
)
async def test_a_request_without_a_slot_for_long_is_moved_or_deferred_unless_a_copy_would_pass_the_checks(
    has_side_queues: bool, properties: dict[str, Any], admission: Admission, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_module, "HELD_S", 0.01)
    world = World()
    world.slots.set_surplus_aside(False)
    admitter = QueueAdmitter(world.slots, world.aside if has_side_queues else None, names=NAMES)
    job = world.bench.job(lane=LANE, user_id="crm", **properties)

    assert await admitter.admit(job) is admission
    if admission is Admission.ASIDE:
        outcome = await admitter.set_aside(job)
        assert outcome is None if has_side_queues else isinstance(outcome, Deferred)
