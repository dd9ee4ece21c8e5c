"""Creates the pools: those of the lanes, and the one of the queue of fallen messages."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from consumers.capacity.activity import LaneActivity
from consumers.capacity.slots import Line
from consumers.fairness.aside import Aside
from consumers.fairness.entering import FromAside, FromQueue
from consumers.fairness.scouting import AHEAD, Scouted
from consumers.fairness.turns import Shares, Turns
from consumers.fallen import Fallen
from consumers.handler import Handler
from consumers.job import Job, is_trusted, now_ms
from consumers.pool import Pool
from consumers.replies.retelling import Retelling
from consumers.settle import Settler
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract.names import Names
from lanekeeper.telemetry.tracing import Tracing
from topology.broker.deliveries import Deliveries
from topology.broker.heads import Heads
from topology.broker.session import Delivery
from topology.lanes import LaneSpec

FALLEN_SLOTS = 8
MOST = 10_000
"""The prefetch of a pool that reads several queues' heads: one for each slot and for each queue."""


@dataclass(slots=True, kw_only=True)
class Pools:
    """Creates pools, and holds those created so far."""

    deliveries: Callable[..., Deliveries]
    """Creates the deliveries of a queue."""
    counted: Collection[str]
    """Queues whose broker counts deliveries."""
    names: Names
    speakers: Sequence[str]
    settler: Settler
    retelling: Retelling
    tracing: Tracing
    publisher: Publisher
    shares: Shares
    made: list[Pool] = field(default_factory=list)
    scouted: list[Scouted] = field(default_factory=list)
    turns: dict[str, Turns] = field(default_factory=dict)
    """By lane."""
    heads: dict[str, Heads] = field(default_factory=dict)
    """The heads of the side queues, by intake."""
    lines: list[Line] = field(default_factory=list)
    activities: list[LaneActivity] = field(default_factory=list)

    def add_lane(self, lane: LaneSpec, handler: Handler) -> None:
        """Create a lane's pools: of its due queue (whose slots are never lent), of its intake, and of its side queues,
        which use the intake's slots."""
        activity = LaneActivity(lane.name, slots=lane.slots, due_slots=lane.due_slots)
        self.activities.append(activity)
        heads = Heads(self.names.side(lane.name, each) for each in range(lane.side_queues))
        aside = Aside(lane, heads, publisher=self.publisher, names=self.names, now_ms=now_ms) if heads.queues else None
        turns = Turns(self.shares, aside)
        self.turns[lane.name] = turns
        self.heads[self.names.intake(lane.name)] = heads
        common: dict[str, Any] = {
            "job_of": self._job_maker(lane),
            "handle": self.retelling.first(partial(handler.handle, lane=lane)),
            "activity": activity,
        }
        intake, due = turns.bench(lane.slots), turns.bench(lane.due_slots)
        side = None
        if aside is not None:
            name = f"{self.names.intake(lane.name)}.side"
            deliveries = partial(self.deliveries, queue=name, counted=heads.queues[0] in self.counted, heads=heads)
            side = self._pool(deliveries, 0, prefetch=MOST, entering=FromAside(intake, aside), **common)
            self.made.append(side)
        for queue, bench, worked_too, own, kept, most in (
            (self.names.due(lane.name), due, None, lane.due_slots, lane.due_slots, lane.most_due_slots),
            (self.names.intake(lane.name), intake, side, lane.slots, lane.kept_slots, lane.most_slots),
        ):
            of: Callable[..., Pool] = partial(
                self._pool,
                partial(self.deliveries, queue=queue, counted=queue in self.counted),
                entering=FromQueue(bench, aside),
                **common,
            )
            self.made.append(of(own))
            if aside is not None:
                self.scouted.append(Scouted(queue=queue, bench=bench, scout=partial(of, 0, prefetch=AHEAD)))
            self.lines.append(
                Line(
                    lane=lane.name,
                    pool=self.made[-1],
                    more=of,
                    kept=kept,
                    most=most,
                    target_wait_s=lane.target_wait_s,
                    activity=activity,
                    side=worked_too,
                    resize=bench.resize,
                )
            )

    def add_fallen(self, lanes: Sequence[LaneSpec]) -> None:
        """Create the pool for messages that the broker itself took out of a queue. `lanes`: all, also those not worked
        here."""
        fallen = Fallen(lanes, names=self.names, now_ms=now_ms, speakers=self.speakers)
        self.made.append(
            self._pool(
                partial(self.deliveries, queue=self.names.fallen),
                FALLEN_SLOTS,
                job_of=fallen.job_of,
                handle=self.retelling.first(fallen.handle),
                activity=LaneActivity("fallen", slots=FALLEN_SLOTS, due_slots=0),
            )
        )

    def _pool(
        self, deliveries: Callable[..., Deliveries], slots: int, *, prefetch: int | None = None, **of: Any
    ) -> Pool:
        made = deliveries(prefetch=slots if prefetch is None else prefetch)
        return Pool(made, slots=slots, settler=self.settler, tracing=self.tracing, **of)

    def _job_maker(self, lane: LaneSpec) -> Callable[[Delivery], Job]:
        return lambda delivery: Job(
            delivery,
            lane=lane,
            trusted=is_trusted(delivery.message, self.names),
            taken_ms=now_ms(),
            speakers=self.speakers,
        )
