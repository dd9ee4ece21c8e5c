"""How long the queues are that a worker knows of."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Final

from lanekeeper.amqp.connection import Connection, depths
from lanekeeper.contract.messages import Depth
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import AccessRefused, BrokerError
from topology.lanes import LaneSpec

READ_EVERY_S: Final = 5.0
IDLE: Final = 2
REFUSED_FOR_S: Final = 300.0
"""After the broker has refused to tell the length of a queue, it is asked again after this time."""


def side_of(intake: str) -> str:
    """The name under which the deliveries of all side queues of a lane are counted."""
    return f"{intake}.side"


class QueueLengths:
    """Lengths of queues, read from time to time; what the broker does not tell is missing."""

    def __init__(
        self,
        connection: Connection,
        lanes: Sequence[LaneSpec],
        *,
        names: Names,
        others: Sequence[LaneSpec] = (),
    ) -> None:
        """`others`: the lanes that this worker does not consume; it tells if nobody does."""
        self._connection = connection
        self.others = others
        self._intakes = {lane.name: names.intake(lane.name) for lane in (*lanes, *others)}
        self._queues = {lane.name: [names.intake(lane.name), names.due(lane.name)] for lane in lanes}
        self._sides = {
            lane.name: [names.side(lane.name, number) for number in range(lane.side_queues)] for lane in lanes
        }
        self._others = (names.dead, names.batches, *(names.intake(lane.name) for lane in others))
        self._depths: Mapping[str, Depth] = {}
        self._empty_ms: dict[str, int] = {}

    async def run(self) -> None:
        lanes = [queue for of_lane in (self._queues, self._sides) for queues in of_lane.values() for queue in queues]
        while True:
            pause_s, asked_ms, found = READ_EVERY_S, time.time_ns() // 1_000_000, dict[str, Depth]()
            for queues in (lanes, *([queue] for queue in self._others)):
                try:
                    found |= await depths(self._connection, queues)
                except AccessRefused:
                    pause_s = REFUSED_FOR_S
                except BrokerError:
                    pass
            self._depths = found
            if pause_s == READ_EVERY_S and not any(found[queue].ready for queue in lanes if queue in found):
                pause_s *= IDLE  # many idle lanes are to cost little
            for lane, (intake, _) in self._queues.items():
                for queue, count in ((intake, self._ready(intake)), (side_of(intake), self._in_sides(lane))):
                    if count == 0:
                        self._empty_ms[queue] = asked_ms
            await asyncio.sleep(pause_s)

    @property
    def dead(self) -> int | None:
        return self._ready(self._others[0])

    @property
    def batches(self) -> int | None:
        """How many requests wait in `lane.batches` until they are gathered."""
        return self._ready(self._others[1])

    def _ready(self, queue: str) -> int | None:
        depth = self._depths.get(queue)
        return None if depth is None else depth.ready

    def waiting(self, lane: str) -> int | None:
        queues = self._queues[lane]
        if not self._depths.keys() >= set(queues):
            return None
        return sum(self._depths[queue].ready for queue in queues) + (self._in_sides(lane) or 0)

    def _in_sides(self, lane: str) -> int | None:
        found = [depth.ready for queue in self._sides[lane] if (depth := self._depths.get(queue)) is not None]
        return sum(found) if found else None

    def intake(self, lane: str) -> Depth | None:
        return self._depths.get(self._intakes[lane])

    def oldest_s(self, lane: str, *, delivered_ms: Mapping[str, int]) -> float | None:
        """At most: since the last delivery (`delivered_ms`, by pool), and since its queue was empty."""
        oldest_s = 0.0
        intake = self._queues[lane][0]
        if intake not in self._depths:
            return None
        for queue, ready in ((intake, self._depths[intake].ready), (side_of(intake), self._in_sides(lane))):
            if ready:
                known_ms = max(delivered_ms.get(queue, 0), self._empty_ms.get(queue, 0))
                if not known_ms:
                    return None
                oldest_s = max(oldest_s, time.time() - known_ms / 1000)
        return oldest_s
