"""START HERE: what is on the broker, as one value.

    declare(lanes, names=Names(), broker_version="4.3.6") -> Topology

    lane.requests (topic) ── <lane>.# ──► lane.<lane>      intake: bounded, by priority
    lane.side.00 … (topic) ── <lane>.# ──► lane.<lane>.side.00 …    what workers set aside, by tenant
    lane.delay.28 … .00   ──► lane.due (topic, internal) ── <lane>.# ──► lane.<lane>.due
    lane.fallen           what expired, was delivered too often, or had no lane
    lane.dead, lane.events, lane.control

What differs by broker version is in `Broker`, and nowhere else.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lanekeeper.contract.names import KEPT_KEYS, Names
from topology import delays
from topology.lanes import LaneSpec
from topology.model import Arguments, Binding, Exchange, Queue, Topology, Value

OLDEST = (3, 10)
RECOMMENDED = (4, 3, 5)
"""Earlier versions have security holes; for example, a forged direct reply-to address kills the connection that answers
it."""
DELIVERY_LIMIT = 20
"""For requests that kill their worker before it claims them; a worker buries others at their fifth delivery."""
NO_DELIVERY_LIMIT = -1
CLASSIC_PRIORITIES = 9
REPLICATION = "in a cluster, quorum queues are kept on three nodes"
_VERSION = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class Broker:
    """What a RabbitMQ version can do, as far as the declaration depends on it (docs/broker.md)."""

    major: int
    minor: int

    @classmethod
    def of(cls, version: str) -> "Broker":
        """Read a version as a broker reports it ("4.3.6", "3.10.8+deb"). Raises ValueError for one before 3.10."""
        found = _VERSION.match(version)
        if found is None:
            raise ValueError(f"not a RabbitMQ version: {version!r}; expected one like '4.3.6'")
        broker = cls(int(found[1]), int(found[2]))
        if (broker.major, broker.minor) < OLDEST:
            raise ValueError(
                f"RabbitMQ {version} is too old: 3.10 or later is needed "
                "(quorum queues with message TTL and at-least-once dead-lettering), 4.3.5 or later is recommended"
            )
        return broker

    @property
    def quorum_intake(self) -> bool:
        """Quorum queues have priorities from 4.0 on; before, only classic queues have."""
        return self.major >= 4

    @property
    def intakes(self) -> str:
        """What the intakes are, and what that means in a cluster."""
        return "quorum intakes" if self.quorum_intake else "classic intakes, each on one node alone"

    @property
    def priorities(self) -> str:
        """What a requester may expect of `priority` inside a lane (docs/contract.md)."""
        if (self.major, self.minor) >= (4, 3):
            return "strict, 0 to 31"
        return "two classes, above 4 is high" if self.quorum_intake else f"strict, 0 to {CLASSIC_PRIORITIES}"


def is_before(version: str, floor: tuple[int, ...]) -> bool:
    """Whether a broker's version, as it reports it ("4.3.6+deb"), is older than `floor`."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[: len(floor)]) < floor


def declare(lanes: Sequence[LaneSpec], *, names: Names, broker_version: str) -> Topology:
    """Everything that `lanes` need on a broker of that version. Raises ValueError for a version that is too old."""
    broker = Broker.of(broker_version)
    most_sides = max((lane.side_queues for lane in lanes), default=0)
    return Topology(
        exchanges=(
            *_exchanges(names),
            *(Exchange(names.side_exchange(number), "topic") for number in range(most_sides)),
            *delays.exchanges(names),
        ),
        queues=(
            *(queue for lane in lanes for queue in (_intake(lane, names, broker), _due(lane, names))),
            *(_side(lane, number, names, broker) for lane in lanes for number in range(lane.side_queues)),
            *delays.queues(names, quorum=_quorum()),
            *(Queue(name, _kept(broker)) for name in (names.fallen, names.dead, names.control)),
        ),
        bindings=(
            *(binding for lane in lanes for binding in _lane_bindings(lane.name, names)),
            *(binding for lane in lanes for binding in _side_bindings(lane, names)),
            *delays.bindings(names),
            Binding(names.fallen, names.fallen),
            Binding(names.dead, names.dead, routing_key="#"),
            *(Binding(names.control, names.control, routing_key=key) for key in KEPT_KEYS),
        ),
        namespace=names.namespace,
        lanes=tuple(lane.name for lane in lanes),
        broker_version=broker_version,
        note=f"{broker.intakes}, priorities {broker.priorities}; {REPLICATION}",
    )


def _exchanges(names: Names) -> tuple[Exchange, ...]:
    to_fallen: Arguments = {"alternate-exchange": names.fallen}
    return (
        Exchange(names.fallen, "fanout"),
        Exchange(names.requests, "topic", arguments=to_fallen),
        Exchange(names.due_exchange, "topic", internal=True, arguments=to_fallen),
        Exchange(names.dead, "topic"),
        Exchange(names.events, "topic"),
        Exchange(names.control, "topic"),
    )


def _intake(lane: LaneSpec, names: Names, broker: Broker) -> Queue:
    """The queue that takes what is published. If it is full, it refuses publishers and drops nothing."""
    bounds: dict[str, Value] = {
        "x-max-length": lane.max_length,
        "x-max-length-bytes": lane.max_length_bytes,
        "x-overflow": "reject-publish",
        "x-dead-letter-exchange": names.fallen,
    }
    if broker.quorum_intake:
        return Queue(names.intake(lane.name), {**_quorum(), **bounds, **_counted()})
    # On 3.x quorum queues ignore priorities, so the intake is classic. Classic queues have neither a delivery limit
    # nor at-least-once dead-lettering: the worker moves a redelivered request to the due queue, which counts.
    return Queue(
        names.intake(lane.name),
        {
            "x-queue-type": "classic",
            "x-queue-master-locator": "min-masters",  # `x-queue-leader-locator` is refused for classic queues of 3.10
            "x-max-priority": CLASSIC_PRIORITIES,
            **bounds,
        },
    )


def _due(lane: LaneSpec, names: Names) -> Queue:
    """The queue for what comes back from a delay. It has no limit: an accepted request must never be refused."""
    return Queue(
        names.due(lane.name),
        {**_quorum(), "x-overflow": "reject-publish", "x-dead-letter-exchange": names.fallen, **_counted()},
    )


def _side(lane: LaneSpec, number: int, names: Names, broker: Broker) -> Queue:
    """A side queue has the arguments of the lane's intake: a limit, and priorities."""
    return Queue(names.side(lane.name, number), _intake(lane, names, broker).arguments)


def _side_bindings(lane: LaneSpec, names: Names) -> tuple[Binding, ...]:
    return tuple(
        Binding(names.side_exchange(number), names.side(lane.name, number), routing_key=names.lane_pattern(lane.name))
        for number in range(lane.side_queues)
    )


def _lane_bindings(lane: str, names: Names) -> tuple[Binding, Binding]:
    key = names.lane_pattern(lane)
    return (
        Binding(names.requests, names.intake(lane), routing_key=key),
        Binding(names.due_exchange, names.due(lane), routing_key=key),
    )


def _quorum() -> dict[str, Value]:
    """Arguments of every quorum queue. Without `balanced` the node that declares leads all 29 wait queues."""
    return {"x-queue-type": "quorum", "x-queue-leader-locator": "balanced"}


def _counted() -> dict[str, Value]:
    """Arguments by which a message that exceeds the delivery limit goes to `lane.fallen`, without a loss on the way."""
    return {"x-delivery-limit": DELIVERY_LIMIT, "x-dead-letter-strategy": "at-least-once"}


def _kept(broker: Broker) -> dict[str, Value]:
    """Arguments of queues that must never lose a message: they have no limit of any kind.

    From 4.0 on the default delivery limit is 20, and -1 means none. 3.x has no default limit, and with -1 it would
    discard a message when it is first returned.
    """
    return {**_quorum(), "x-delivery-limit": NO_DELIVERY_LIMIT} if broker.quorum_intake else _quorum()
