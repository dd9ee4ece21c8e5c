"""Who takes from which queue: the lanes' pools, whose slots follow the work, and that of the fallen."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from consumers.activity import LaneActivity
from consumers.fallen import Fallen
from consumers.handler import Handler
from consumers.job import Job, is_trusted, now_ms
from consumers.pool import Pool
from consumers.retelling import Retelling
from consumers.settle import Settler
from consumers.slots import Line
from topology.broker.deliveries import Deliveries
from topology.broker.session import Delivery
from topology.lanes import LaneSpec
from topology.names import Names
from topology.tracing import Tracing

FALLEN_SLOTS = 8


class Pools:
    """All that were made. `deliveries` makes those of a queue; `counted`: queues that count deliveries."""

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
    ) -> None:
        self.made: list[Pool] = []
        self.lines: list[Line] = []
        self.activities: list[LaneActivity] = []
        self._deliveries = deliveries
        self._counted = counted
        self._names = names
        self._speakers = speakers
        self._settler = settler
        self._retelling = retelling
        self._tracing = tracing

    def add_lane(self, lane: LaneSpec, handler: Handler) -> None:
        """Its two: what comes back goes ahead of its peers, and none of those slots is lent."""
        activity = LaneActivity(lane.name, slots=lane.slots, due_slots=lane.due_slots)
        self.activities.append(activity)
        for queue, own, kept, most in (
            (self._names.due(lane.name), lane.due_slots, lane.due_slots, lane.most_due_slots),
            (self._names.intake(lane.name), lane.slots, lane.kept_slots, lane.most_slots),
        ):
            of = partial(
                self._pool,
                partial(self._deliveries, queue=queue, counted=queue in self._counted),
                job_of=self._job_maker(lane),
                handle=self._retelling.first(handler.handle),
                activity=activity,
            )
            self.made.append(of(own))
            self.lines.append(
                Line(
                    lane=lane.name,
                    pool=self.made[-1],
                    more=of,
                    kept=kept,
                    most=most,
                    target_wait_s=lane.target_wait_s,
                    activity=activity,
                )
            )

    def add_fallen(self, lanes: Sequence[LaneSpec]) -> None:
        """Of what the broker itself took out of a queue. `lanes`: all, worked here or not."""
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

    def _pool(self, deliveries: Callable[..., Deliveries], slots: int, **of: Any) -> Pool:
        return Pool(deliveries(prefetch=slots), settler=self._settler, tracing=self._tracing, **of)

    def _job_maker(self, lane: LaneSpec) -> Callable[[Delivery], Job]:
        return lambda delivery: Job(
            delivery,
            lane=lane,
            trusted=is_trusted(delivery.message, self._names),
            taken_ms=now_ms(),
            speakers=self._speakers,
        )
