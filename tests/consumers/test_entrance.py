"""How a delivery gets its slot: one from a queue may be set aside, the head of a side queue waits where it is."""

import asyncio
import dataclasses

from consumers.fairness.aside import SideQueues
from consumers.fairness.entrance import QueueEntrance, SideQueueEntrance
from consumers.fairness.lane_slots import Admission, LaneSlots, QueueSlots
from consumers.job import Job
from tests.support.jobs import NAMES, NOW_MS, Bench
from topology.broker.heads import Heads
from topology.lanes import CRITICAL

LANE = dataclasses.replace(CRITICAL, side_queues=2)
HEAD = NAMES.side(LANE.name, 1)


class World:
    """A lane of one slot that tenant `crm` holds, while requests over their tenant's share are set aside."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.heads = Heads(NAMES.side(LANE.name, each) for each in range(2))
        self.aside = SideQueues(LANE, self.heads, publisher=self.bench.publisher, names=NAMES, now_ms=lambda: NOW_MS)
        self.slots: QueueSlots = LaneSlots(has_aside=self.aside.has).queue(1)
        self.slots.set_surplus_aside(True)
        self.slots.begin("crm")

    def job(self, *, queue: str = "lane.critical") -> Job:
        delivery = self.bench.delivery(queue=queue, user_id="crm")
        return self.bench.job(lane=LANE, delivery=delivery)

    def head(self) -> Job:
        self.heads.fetched(HEAD, left=3)
        return self.job(queue=HEAD)


async def test_over_its_tenants_share_a_request_from_the_queue_is_set_aside() -> None:
    world = World()
    entrance = QueueEntrance(world.slots, world.aside)
    job = world.job()

    assert await entrance.enter(job) is Admission.ASIDE
    assert await entrance.set_aside(job) is None
    assert world.slots.running == 1


async def test_the_head_of_a_side_queue_waits_for_its_slot_although_its_tenant_is_over_its_share() -> None:
    world = World()
    entrance = SideQueueEntrance(world.slots, world.aside)
    waiting = asyncio.create_task(entrance.enter(head := world.head()))
    await asyncio.sleep(0)

    assert not waiting.done()
    assert world.heads.next() is None
    world.slots.end("crm")
    assert await waiting is Admission.BEGIN
    assert world.heads.next() == HEAD
    entrance.leave(head)
    assert world.slots.running == 0


async def test_when_the_head_gives_up_waiting_the_next_one_is_fetched() -> None:
    world = World()
    waiting = asyncio.create_task(SideQueueEntrance(world.slots, world.aside).enter(world.head()))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])

    assert world.heads.next() == HEAD
    assert world.slots.waiting == 0


async def test_without_side_queues_every_delivery_waits() -> None:
    world = World()
    entrance = QueueEntrance(world.slots)
    waiting = asyncio.create_task(entrance.enter(world.job()))
    await asyncio.sleep(0)

    assert not waiting.done()
    world.slots.end("crm")
    assert await waiting is Admission.BEGIN
