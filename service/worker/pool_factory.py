"""Creates the pools: those of the lanes, and the one of the queue of fallen messages."""

from collections.abc import Callable, Collection, Sequence
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


class Pools:
    """The pools created so far. `deliveries` creates the deliveries of a queue; `counted`: queues whose broker counts
    deliveries."""

    def __init__(
        self,
        *,
        deliveries: Callable[..., Deliveries],
        counted: Collection[str],
        names: Names,
        speakers: Sequence[str],
        settler: Settler,
        retelling: Retelling,
        tracing: Tracing,
        publisher: Publisher,
        shares: Shares,
    ) -> None:
        self.made: list[Pool] = []
        self.scouted: list[Scouted] = []
        self.turns: dict[str, Turns] = {}
        """By lane."""
        self.heads: dict[str, Heads] = {}
        """The heads of the side queues, by intake."""
        self.lines: list[Line] = []
        self.activities: list[LaneActivity] = []
        self._deliveries = deliveries
        self._counted = counted
        self._names = names
        self._speakers = speakers
        self._settler = settler
        self._retelling = retelling
        self._tracing = tracing
        self._publisher = publisher
        self._shares = shares

    def add_lane(self, lane: LaneSpec, handler: Handler) -> None:
        """Create a lane's pools: of its due queue (whose slots are never lent), of its intake, and of its side queues,
        which use the intake's slots."""
        activity = LaneActivity(lane.name, slots=lane.slots, due_slots=lane.due_slots)
        self.activities.append(activity)
        heads = Heads(self._names.side(lane.name, each) for each in range(lane.side_queues))
        aside = self._aside(lane, heads) if heads.queues else None
        turns = Turns(self._shares, aside)
        self.turns[lane.name] = turns
        self.heads[self._names.intake(lane.name)] = heads
        common: dict[str, Any] = {
            "job_of": self._job_maker(lane),
            "handle": self._retelling.first(handler.handle),
            "activity": activity,
        }
        intake, due = turns.bench(lane.slots), turns.bench(lane.due_slots)
        side = None
        if aside is not None:
            name = f"{self._names.intake(lane.name)}.side"
            deliveries = partial(self._deliveries, queue=name, counted=heads.queues[0] in self._counted, heads=heads)
            side = self._pool(deliveries, 0, prefetch=MOST, entering=FromAside(intake, aside), **common)
            self.made.append(side)
        for queue, bench, worked_too, own, kept, most in (
            (self._names.due(lane.name), due, None, lane.due_slots, lane.due_slots, lane.most_due_slots),
            (self._names.intake(lane.name), intake, side, lane.slots, lane.kept_slots, lane.most_slots),
        ):
            of: Callable[..., Pool] = partial(
                self._pool,
                partial(self._deliveries, queue=queue, counted=queue in self._counted),
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
        fallen = Fallen(lanes, names=self._names, now_ms=now_ms, speakers=self._speakers)
        self.made.append(
            self._pool(
                partial(self._deliveries, queue=self._names.fallen),
                FALLEN_SLOTS,
                job_of=fallen.job_of,
                handle=self._retelling.first(fallen.handle),
                activity=LaneActivity("fallen", slots=FALLEN_SLOTS, due_slots=0),
            )
        )

    def _pool(
        self, deliveries: Callable[..., Deliveries], slots: int, *, prefetch: int | None = None, **of: Any
    ) -> Pool:
        made = deliveries(prefetch=slots if prefetch is None else prefetch)
        return Pool(made, slots=slots, settler=self._settler, tracing=self._tracing, **of)

    def _aside(self, lane: LaneSpec, heads: Heads) -> Aside:
        return Aside(lane, heads, publisher=self._publisher, names=self._names, now_ms=now_ms)

    def _job_maker(self, lane: LaneSpec) -> Callable[[Delivery], Job]:
        return lambda delivery: Job(
            delivery,
            lane=lane,
            trusted=is_trusted(delivery.message, self._names),
            taken_ms=now_ms(),
            speakers=self._speakers,
        )
