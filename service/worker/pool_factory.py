"""Creates a worker's pools, each of which consumes a queue: several for each lane, and one for `lane.fallen` (messages
that the broker dead-lettered or could not route)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from consumers.capacity.activity import LaneActivity
from consumers.capacity.lending import QueueLoad
from consumers.capacity.scaling import ScaledQueue
from consumers.fairness.aside import SideQueues
from consumers.fairness.entrance import QueueEntrance, SideQueueEntrance
from consumers.fairness.lane_slots import LaneSlots, TenantShare
from consumers.fairness.scouting import SCOUT_PREFETCH, Scouted
from consumers.fallen import Fallen
from consumers.handler import Handler
from consumers.job import Job, now_ms, source_of
from consumers.pool import Pool
from consumers.replies.reply_retries import ReplyRetries
from consumers.settle import Settler
from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.depth import depths
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract.names import Names
from lanekeeper.telemetry.tracing import Tracing
from topology.broker.deliveries import Deliveries
from topology.broker.heads import Heads
from topology.lanes import LaneSpec

FALLEN_SLOTS = 8
"""How many messages of `lane.fallen` (those that the broker dead-lettered or could not route) are worked on at a
time."""
SIDE_PREFETCH = 10_000
"""The prefetch of the pool that consumes a lane's side queues. It equals the largest number of slots that a lane can
have, because the pool works on the messages of its side queues with the slots of the lane's intake queue."""


@dataclass(slots=True, kw_only=True)
class PoolFactory:
    """Creates the pools of a worker, each of which consumes a queue and works on its requests, and collects them in
    `made`."""

    deliveries: Callable[..., Deliveries]
    """A function that creates the consumer of a queue."""
    counted: Collection[str]
    """The names of the quorum queues: for their messages the broker counts the deliveries."""
    names: Names
    speakers: Sequence[str]
    settler: Settler
    reply_retries: ReplyRetries
    tracing: Tracing
    publisher: Publisher
    shares: Mapping[str, TenantShare]
    made: list[Pool] = field(default_factory=list)
    scouted: list[Scouted] = field(default_factory=list)
    """The queues that may get a scout, that is, a further consumer that moves requests over their tenant's share to
    side queues (`consumers/fairness/scouting.py`)."""
    lane_slots: dict[str, LaneSlots] = field(default_factory=dict)
    """The slots of each lane (how many requests it may work on at a time), by the lane's name."""
    heads: dict[str, Heads] = field(default_factory=dict)
    """What this process knows of each lane's side queues (for requests over their tenant's share), that is, their
    lengths and first messages, by the name of the lane's intake queue."""
    scaled: list[ScaledQueue] = field(default_factory=list)
    activities: list[LaneActivity] = field(default_factory=list)

    def add_lane(self, lane: LaneSpec, handler: Handler) -> None:
        """Create a lane's pools (consumers): one for its due queue (retried and delayed requests; its slots are never
        lent), one for its intake (new requests), and one for all its side queues (requests over their tenant's share),
        which uses the intake's slots."""
        activity = LaneActivity(lane.name, slots=lane.slots, due_slots=lane.due_slots)
        self.activities.append(activity)
        heads = Heads(self.names.side(lane.name, number) for number in range(lane.side_queues))
        side_queues = None
        if heads.queues:
            side_queues = SideQueues(lane, heads, publisher=self.publisher, names=self.names, now_ms=now_ms)
        lane_slots = LaneSlots(self.shares, None if side_queues is None else side_queues.has)
        self.lane_slots[lane.name] = lane_slots
        self.heads[self.names.intake(lane.name)] = heads
        common: dict[str, Any] = {
            "job_of": lambda delivery: Job(
                delivery,
                lane=lane,
                source=source_of(delivery.message, self.names),
                taken_ms=now_ms(),
                speakers=self.speakers,
            ),
            "handle": self.reply_retries.wrap(partial(handler.handle, lane=lane)),
            "activity": activity,
        }
        intake, due = lane_slots.queue(lane.slots), lane_slots.queue(lane.due_slots)
        side_pool = None
        if side_queues is not None:
            name = f"{self.names.intake(lane.name)}.side"
            deliveries = partial(self.deliveries, queue=name, counted=heads.queues[0] in self.counted, heads=heads)
            entrance = SideQueueEntrance(intake, side_queues)
            side_pool = self._pool(deliveries, 0, prefetch=SIDE_PREFETCH, entrance=entrance, **common)
            self.made.append(side_pool)
        for queue, queue_slots, its_side_pool, slots, reserved, max_slots in (
            (self.names.due(lane.name), due, None, lane.due_slots, lane.due_slots, lane.most_due_slots),
            (self.names.intake(lane.name), intake, side_pool, lane.slots, lane.reserved_slots, lane.most_slots),
        ):
            new_pool: Callable[..., Pool] = partial(
                self._pool,
                partial(self.deliveries, queue=queue, counted=queue in self.counted),
                entrance=QueueEntrance(queue_slots, side_queues),
                **common,
            )
            self.made.append(new_pool(slots))
            if side_queues is not None:
                scout = partial(new_pool, 0, prefetch=SCOUT_PREFETCH)
                self.scouted.append(Scouted(queue=queue, slots=queue_slots, scout=scout))
            self.scaled.append(
                ScaledQueue(
                    lane=lane.name,
                    pool=self.made[-1],
                    new_pool=new_pool,
                    load=QueueLoad(
                        slots=slots, reserved=reserved, max_slots=max_slots, target_wait_s=lane.target_wait_s
                    ),
                    activity=activity,
                    side=its_side_pool,
                    resize=queue_slots.resize,
                )
            )

    def add_fallen(self, lanes: Sequence[LaneSpec]) -> None:
        """Create the pool that consumes `lane.fallen`, the queue of messages that the broker dead-lettered or could not
        route. `lanes`: all lanes, including those that this worker does not consume."""
        fallen = Fallen(lanes, names=self.names, now_ms=now_ms, speakers=self.speakers)
        self.made.append(
            self._pool(
                partial(self.deliveries, queue=self.names.fallen),
                FALLEN_SLOTS,
                job_of=fallen.job_of,
                handle=self.reply_retries.wrap(fallen.handle),
                activity=LaneActivity("fallen", slots=FALLEN_SLOTS, due_slots=0),
            )
        )

    async def ready_with_sides(self, connection: Connection, queues: list[str]) -> Mapping[str, int]:
        """Ask the broker how many messages wait in each queue. The number for a lane's intake queue includes the
        messages in the lane's side queues, as far as this process knows of them. Raises BrokerError."""
        ready = await ready_in(connection, queues)
        return {
            queue: count + (self.heads[queue].ready if queue in self.heads else 0) for queue, count in ready.items()
        }

    def _pool(
        self, deliveries: Callable[..., Deliveries], slots: int, *, prefetch: int | None = None, **options: Any
    ) -> Pool:
        consumer = deliveries(prefetch=slots if prefetch is None else prefetch)
        return Pool(consumer, slots=slots, settler=self.settler, tracing=self.tracing, **options)


async def ready_in(connection: Connection, queues: list[str]) -> Mapping[str, int]:
    """Ask the broker how many messages wait in each queue. Raises BrokerError."""
    return {queue: depth.ready for queue, depth in (await depths(connection, queues)).items()}
