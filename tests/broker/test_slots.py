"""Scaling move between lanes on a real broker: a flooded lane borrows idle slots, and returns them when needed."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
from typing_extensions import override

from consumers.capacity.activity import LaneActivity
from consumers.capacity.lending import QueueLoad
from consumers.capacity.scaling import ScaledQueue, Scaling
from consumers.job import Job, Source, now_ms
from consumers.outcomes import Answered, Outcome
from consumers.pool import Pool
from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.depth import depths
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract.messages import Message
from lanekeeper.telemetry.tracing import Tracing
from tests.support.brokers import Vhost
from tests.support.waiting import until
from topology.broker.deliveries import Deliveries
from topology.broker.session import Delivery
from topology.lanes import BATCH, CRITICAL, NORMAL, LaneSpec

LANES = (CRITICAL, NORMAL, BATCH)
ANSWERED = Answered(body=b"{}", model="m", provider="p")


class Acking:
    """A settler that only acknowledges."""

    async def settle(self, job: Job, outcome: Outcome) -> Outcome:
        await job.delivery.ack()
        return outcome

    async def nack(self, delivery: Delivery) -> None:
        await delivery.nack()


class Noting(Deliveries):
    """Records how many slots were taken back, as soon as the broker has ended their consumer."""

    def __init__(self, connection: Connection, queue: str, prefetch: int, taken_back: list[int]) -> None:
        super().__init__(connection, queue=queue, prefetch=prefetch)
        self._taken_back = taken_back

    @override
    async def stop(self) -> None:
        await super().stop()
        self._taken_back.append(self.prefetch)


@dataclass
class Work:
    """Three running lanes; a request runs until its lane is released."""

    publisher: Publisher
    lines: dict[str, ScaledQueue] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)
    running: Counter[str] = field(default_factory=Counter)
    started: list[tuple[str, int, float]] = field(default_factory=list)
    taken_back: list[int] = field(default_factory=list)
    go: dict[str, asyncio.Event] = field(default_factory=lambda: {lane.name: asyncio.Event() for lane in LANES})

    async def handle(self, job: Job) -> Outcome:
        lane = job.delivery.queue
        self.started.append((lane, job.message.priority or 0, time.monotonic()))
        self.running[lane] += 1
        try:
            await self.go[lane].wait()
        finally:
            self.running[lane] -= 1
        return ANSWERED

    async def publish(self, lane: str, count: int, **properties: Any) -> float:
        await asyncio.gather(
            *(
                self.publisher.publish(
                    Message(body=b"%d" % at, message_id=f"{lane} {at} {time.monotonic_ns()}", **properties),
                    exchange="",
                    routing_key=lane,
                )
                for at in range(count)
            )
        )
        return time.monotonic()

    @property
    def overfull(self) -> list[str]:
        """Pools with more deliveries than slots: one of them waits for a slot."""
        pools = [pool for line in self.lines.values() for pool in (line.pool, *line.added, *line.taken_back)]
        return [pool.queue for pool in pools if pool.in_hand > pool.slots]


@pytest.fixture
async def work(vhost: Vhost) -> AsyncIterator[Work]:
    async with AsyncExitStack() as stack:
        consuming = await stack.enter_async_context(Connection(vhost.amqp_url, name=f"{vhost.name} consume"))
        publishing = await stack.enter_async_context(Connection(vhost.amqp_url, name=f"{vhost.name} publish"))
        work = Work(Publisher(publishing, tracing=Tracing()))
        channel = await publishing.channel(confirms=False)
        for lane in LANES:
            await channel.queue_declare(lane.name, durable=True, arguments={"x-queue-type": "quorum"})
            work.lines[lane.name] = line_of(lane, consuming, work)

        async def waiting(queues: list[str]) -> Mapping[str, int]:
            return {queue: depth.ready for queue, depth in (await depths(consuming, queues)).items()}

        slots = Scaling(list(work.lines.values()), depths=waiting, waiting_for=lambda: work.held, now_ms=now_ms)
        parts: list[Pool | Scaling] = [*(line.pool for line in work.lines.values()), slots]  # type: ignore[list-item]
        running = [asyncio.create_task(part.run()) for part in parts]
        yield work
        for each in work.go.values():
            each.set()
        await asyncio.gather(*(part.stop() for part in reversed(parts)))
        await asyncio.wait_for(asyncio.gather(*running), 60)


def line_of(lane: LaneSpec, consuming: Connection, work: Work) -> ScaledQueue:
    activity = LaneActivity(lane.name, slots=lane.slots, due_slots=0)

    def pool(count: int) -> Pool:
        return Pool(
            Noting(consuming, lane.name, count, work.taken_back),
            job_of=lambda delivery: Job(delivery, lane=lane, source=Source.REQUESTER, taken_ms=now_ms()),
            handle=work.handle,
            settler=Acking(),  # type: ignore[arg-type]
            activity=activity,
            tracing=Tracing(),
        )

    return ScaledQueue(
        lane=lane.name,
        pool=pool(lane.slots),
        new_pool=pool,
        load=QueueLoad(
            slots=lane.slots,
            reserved=lane.reserved_slots,
            max_slots=lane.most_slots,
            target_wait_s=lane.target_wait_s,
        ),
        activity=activity,
    )


async def steady(value: Callable[[], int], *, for_s: float) -> int:
    """The value once it has not changed for this long."""
    last, since = value(), time.monotonic()
    while time.monotonic() < since + for_s:
        await asyncio.sleep(0.02)
        if value() != last:
            last, since = value(), time.monotonic()
    return last


async def test_a_flood_borrows_all_idle_slots_except_the_reserves_and_a_burst_of_a_higher_lane_does_not_wait(
    work: Work,
) -> None:
    await work.publish("batch", 200)
    await until(lambda: work.running["batch"] == 4 + 14 + 7)
    assert await steady(lambda: work.running["batch"], for_s=2) == 25, "all but two of critical's and one of normal's"
    assert sum(work.running.values()) <= 16 + 8 + 4

    published_s = await work.publish("critical", 16)
    await until(lambda: work.running["critical"] == 16)
    waits = [at - published_s for lane, _, at in work.started if lane == "critical"]
    print(f"critical: started {1000 * max(waits):.0f} ms after its publish at the latest")
    assert max(waits) < 10
    await until(lambda: work.taken_back == [16])  # of 16, 4 and 1; the 7 of normal may stay lent
    assert work.running["batch"] == 25, "what runs on them goes on"
    assert not work.overfull

    work.go["batch"].set()  # and it ends
    work.go["batch"].clear()
    await until(lambda: work.running["batch"] == 4 + 7)  # normal's slots, which are still idle
    assert await steady(lambda: work.running["batch"], for_s=1.5) == 11
    assert not work.overfull


async def test_a_lane_limited_by_the_provider_borrows_nothing_and_the_reason_is_reported(work: Work) -> None:
    work.held["batch"] = "itpm"
    await work.publish("batch", 50)
    assert await steady(lambda: work.running["batch"], for_s=4.5) == 4
    work.held.clear()
    await until(lambda: work.running["batch"] == 25)


@pytest.mark.every_version
async def test_inside_a_lane_the_highest_priority_goes_first_over_all_its_consumers(work: Work, vhost: Vhost) -> None:
    """Among waiting messages only: those delivered earlier already run."""
    if tuple(map(int, vhost.version.split(".")[:2])) < (4, 3):
        pytest.skip("quorum queues are not strict before 4.3 (docs/facts.md, section 1)")
    await work.publish("batch", 60, priority=1)
    await until(lambda: work.running["batch"] == 25)
    await work.publish("batch", 20, priority=9)
    work.go["batch"].set()
    await until(lambda: len(work.started) == 80)
    first = [priority for _, priority, _ in work.started[25:55]]
    print("then:", first)
    assert first.count(9) == 20, "consumers have channels of their own: a few frames may overtake, no more"
