"""START HERE: computes all exchanges, queues and bindings that Lanekeeper needs on the broker, as one value.

    declare(lanes, names=Names(), broker_version="4.3.6") -> Topology

    lane.requests (topic) ── <lane>.# ──► lane.<lane>      intake: limited length, ordered by priority
    lane.side.00 … (topic) ── <lane>.# ──► lane.<lane>.side.00 …    requests of tenants that have many waiting
    lane.delay.28 … .00   ──► lane.due (topic, internal) ── <lane>.# ──► lane.<lane>.due
    lane.fallen           messages that expired, were delivered too often, or had no lane
    lane.dead, lane.events, lane.control

Only `Broker` knows the differences between RabbitMQ versions.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lanekeeper.contract.names import CONTROL_BINDING_KEYS, Names
from topology import delays
from topology.lanes import LaneSpec
from topology.model import QUORUM, Arguments, Binding, Exchange, Queue, Topology

OLDEST = (3, 10)
RECOMMENDED = (4, 3, 5)
"""The oldest RabbitMQ version that Lanekeeper recommends. Earlier versions have security holes; for example, a publish
to a forged direct reply-to address kills the connection of the publisher."""
DELIVERY_LIMIT = 20
"""After this many deliveries of a message, the broker moves it to the queue `lane.fallen`. This limit is for requests
that kill their worker before it has recorded in the store that it works on them. If workers die after they have made
this record, the request is ended earlier: at its fifth delivery."""
LIMITED: Arguments = {"x-delivery-limit": DELIVERY_LIMIT, "x-dead-letter-strategy": "at-least-once"}
"""The queue arguments for a delivery limit. A message that exceeds the limit is dead-lettered to `lane.fallen`; with
the strategy `at-least-once` it is not lost on the way if the broker fails."""
CLASSIC_PRIORITIES = 9
"""The highest message priority that the lanes' intake queues distinguish (`x-max-priority`), if they are classic
queues."""
_VERSION = re.compile(r"\d+\.\d+")


@dataclass(frozen=True, slots=True)
class Broker:
    """The features of a RabbitMQ version on which the declaration depends (docs/broker.md). `version`: as a broker
    reports it ("4.3.6", "3.10.8+deb"). Raises ValueError for a version before 3.10."""

    version: str

    def __post_init__(self) -> None:
        if _VERSION.match(self.version) is None:
            raise ValueError(f"not a RabbitMQ version: {self.version!r}; expected one like '4.3.6'")
        if is_before(self.version, OLDEST):
            raise ValueError(
                f"RabbitMQ {self.version} is too old: 3.10 or later is needed "
                "(quorum queues with message TTL and at-least-once dead-lettering), 4.3.5 or later is recommended"
            )

    @property
    def quorum_intake(self) -> bool:
        """Whether the lanes' intake queues are quorum queues. Before RabbitMQ 4.0, only classic queues support
        priorities."""
        return not is_before(self.version, (4,))

    @property
    def priorities(self) -> str:
        """A phrase for people to read: how the property `priority` orders requests inside a lane (docs/contract.md)."""
        if not self.quorum_intake:
            return f"strict, 0 to {CLASSIC_PRIORITIES}"
        return "two classes, above 4 is high" if is_before(self.version, (4, 3)) else "strict, 0 to 31"

    @property
    def note(self) -> str:
        """A line for people to read: the types of the queues, on how many nodes of a cluster they are kept, and the
        order by priority."""
        intakes = "quorum intakes" if self.quorum_intake else "classic intakes, each on one node alone"
        return f"{intakes}, priorities {self.priorities}; in a cluster, quorum queues are kept on three nodes"


def is_before(version: str, floor: tuple[int, ...]) -> bool:
    """Whether a broker's version ("4.3.6+deb") is older than the version `floor`."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[: len(floor)]) < floor


def declare(lanes: Sequence[LaneSpec], *, names: Names, broker_version: str) -> Topology:
    """Compute the exchanges, queues and bindings that `lanes` need on a broker of this version; nothing is sent to a
    broker. Raises ValueError if the version is too old."""
    broker = Broker(broker_version)
    cascade = delays.cascade(names)
    sides = [(lane, number) for lane in lanes for number in range(lane.side_queues)]
    return Topology(
        exchanges=(
            *_exchanges(names),
            *(Exchange(names.side_exchange(number), "topic") for number in sorted({number for _, number in sides})),
            *cascade.exchanges,
        ),
        queues=(
            *(queue for lane in lanes for queue in (_intake(lane, names, broker), _due(lane, names))),
            *(Queue(names.side(lane.name, number), _intake(lane, names, broker).arguments) for lane, number in sides),
            *cascade.queues,
            *(Queue(name, _unlimited(broker)) for name in (names.fallen, names.dead, names.control)),
        ),
        bindings=(
            *(binding for lane in lanes for binding in _lane_bindings(lane.name, names)),
            *(
                Binding(
                    names.side_exchange(number),
                    names.side(lane.name, number),
                    routing_key=names.lane_pattern(lane.name),
                )
                for lane, number in sides
            ),
            *cascade.bindings,
            Binding(names.fallen, names.fallen),
            Binding(names.dead, names.dead, routing_key="#"),
            *(Binding(names.control, names.control, routing_key=key) for key in CONTROL_BINDING_KEYS),
        ),
        namespace=names.namespace,
        lanes=tuple(lane.name for lane in lanes),
        broker_version=broker_version,
        note=broker.note,
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
    """The intake of a lane: the queue for the requests that applications publish to it. When it is full, it refuses
    publishes, and drops no message. The lane's side queues, to which workers move requests of tenants that have many
    waiting requests, have the same arguments."""
    bounds: Arguments = {
        "x-max-length": lane.max_length,
        "x-max-length-bytes": lane.max_length_bytes,
        "x-overflow": "reject-publish",
        "x-dead-letter-exchange": names.fallen,
    }
    if broker.quorum_intake:
        return Queue(names.intake(lane.name), {**QUORUM, **bounds, **LIMITED})
    # Before RabbitMQ 4.0, quorum queues ignore priorities, so the intake is a classic queue. Classic queues have
    # neither a delivery limit nor at-least-once dead-lettering. So a worker moves a redelivered request to the due
    # queue, which counts deliveries.
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
    """The due queue of a lane, for the requests that return to the lane after a delay or a retry pause. It has no
    length limit, because a request that was accepted once must not be refused."""
    return Queue(
        names.due(lane.name),
        {
            **QUORUM,
            "x-overflow": "reject-publish",
            "x-dead-letter-exchange": names.fallen,
            **LIMITED,
        },
    )


def _lane_bindings(lane: str, names: Names) -> tuple[Binding, Binding]:
    key = names.lane_pattern(lane)
    return (
        Binding(names.requests, names.intake(lane), routing_key=key),
        Binding(names.due_exchange, names.due(lane), routing_key=key),
    )


def _unlimited(broker: Broker) -> Arguments:
    """The arguments of a queue that must never lose a message: it has neither a length limit nor a delivery limit.

    From RabbitMQ 4.0 on, the default delivery limit is 20, and -1 means no limit. Before 4.0, no limit is the default,
    and with -1 the broker would discard a message when it is returned for the first time.
    """
    return {**QUORUM, "x-delivery-limit": -1} if broker.quorum_intake else QUORUM
