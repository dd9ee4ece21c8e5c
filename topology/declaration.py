"""START HERE: computes all exchanges, queues and bindings that Lanekeeper needs on the broker, as one value.

    declare(lanes, names=Names(), broker_version="4.3.6") -> Topology

    lane.requests (topic) ── <lane>.# ──► lane.<lane>      intake: limited length, ordered by priority
    lane.side.00 … (topic) ── <lane>.# ──► lane.<lane>.side.00 …    requests of tenants that have many waiting
    lane.delay.28 … .00   ──► lane.due (topic, internal) ── <lane>.# ──► lane.<lane>.due
    lane.fallen           messages that expired, were delivered too often, or had no lane
    lane.webhooks         final outcomes to post; a retry comes back through lane.due
    lane.batches          requests that are gathered for a provider's batch
    lane.tickets          the batches, each with its requests; one that waits comes back through lane.due
    lane.dead, lane.events, lane.control

Only `Broker` knows the differences between RabbitMQ versions.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lanekeeper.contract.names import CONTROL_BINDING_KEYS, TICKETS_KEY, Names
from topology import delays
from topology.lanes import LaneSpec

Kind = Literal["queue", "exchange"]
Value = str | int | float | bool
Arguments = Mapping[str, Value]
QUORUM: Arguments = {"x-queue-type": "quorum", "x-queue-leader-locator": "balanced"}
"""Without `balanced`, the leaders of all quorum queues, such as the 29 wait queues for delays, would be on the node
where they are declared."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange, declared by us or found on a broker."""

    name: str
    type: str
    internal: bool = False
    """True: no client can publish to it, whatever its rights; messages come only through bindings and
    dead-lettering."""
    arguments: Arguments = field(default_factory=dict)
    durable: bool = True
    auto_delete: bool = False


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue, declared by us or found on a broker."""

    name: str
    arguments: Arguments = field(default_factory=dict)
    durable: bool = True
    auto_delete: bool = False
    exclusive: bool = False
    policy: Arguments = field(default_factory=dict)
    """What policies add, and the nodes with a replica (`members`): empty in a declared topology. The management API
    shows a change after about 5 s."""
    members: tuple[str, ...] = ()

    @property
    def type(self) -> str:
        return str(self.arguments.get("x-queue-type", "classic"))


@dataclass(frozen=True, slots=True)
class Binding:
    """A binding from an exchange to a queue or another exchange."""

    source: str
    destination: str
    destination_kind: Kind = "queue"
    routing_key: str = ""
    arguments: Arguments = field(default_factory=dict)

    @property
    def label(self) -> str:
        text = f"{self.source} → {self.destination_kind} {self.destination}, key {self.routing_key!r}"
        matches = ", ".join(f"{key}={str(value).lower()}" for key, value in sorted(self.arguments.items()))
        return f"{text}, {matches}" if matches else text


@dataclass(frozen=True, slots=True)
class Topology:
    """Exchanges, queues and bindings: those that one installation declares, or those found in a virtual host."""

    exchanges: tuple[Exchange, ...] = ()
    queues: tuple[Queue, ...] = ()
    bindings: tuple[Binding, ...] = ()
    namespace: str = ""
    """Empty, like `lanes` and `broker_version`, in a topology found on a broker."""
    lanes: tuple[str, ...] = ()
    broker_version: str = ""
    nodes: tuple[str, ...] = ()
    """All nodes of the cluster, running or not. Empty in a declared topology, or if the user may not see the nodes."""
    note: str = ""

    def queue(self, name: str) -> Queue:
        return {queue.name: queue for queue in self.queues}[name]


OLDEST = (3, 10)
RECOMMENDED = (4, 3, 5)
"""Earlier versions have security holes; for example, a publish to a forged direct reply-to address kills the connection
of the publisher."""
DELIVERY_LIMIT = 20
"""After this many deliveries the broker moves a message to `lane.fallen`: for requests that kill their worker before it
has recorded in the store that it works on them. Later deaths of workers end a request at its fifth delivery."""
LIMITED: Arguments = {"x-delivery-limit": DELIVERY_LIMIT, "x-dead-letter-strategy": "at-least-once"}
"""With `at-least-once`, a message over the limit is not lost on its way to `lane.fallen` if the broker fails."""
ONE_CONSUMER: Arguments = {"x-single-active-consumer": True}
"""However many workers consume the queue, one of them gets its messages: so batches are full, and collected once."""
CLASSIC_PRIORITIES = 9
_VERSION = re.compile(r"\d+\.\d+")


@dataclass(frozen=True, slots=True)
class Broker:
    """The features of a RabbitMQ version on which the declaration depends (docs/facts.md). `version`: as a broker
    reports it ("4.3.6", "3.10.8+deb"). Raises ValueError for a version before 3.10."""

    version: str

    def __post_init__(self) -> None:
        if _VERSION.match(self.version) is None:
            raise ValueError(f"not a RabbitMQ version: {self.version!r}; expected one like '4.3.6'")
        if is_before(self.version, OLDEST):
            raise ValueError(
                f"RabbitMQ {self.version} is too old: 3.10 or later is needed (quorum queues with message TTL and "
                f"at-least-once dead-lettering), {'.'.join(map(str, RECOMMENDED))} or later is recommended"
            )

    @property
    def quorum_intake(self) -> bool:
        """Before RabbitMQ 4.0, only classic queues support priorities."""
        return not is_before(self.version, (4,))

    @property
    def priorities(self) -> str:
        if not self.quorum_intake:
            return f"strict, 0 to {CLASSIC_PRIORITIES}"
        return "two classes, above 4 is high" if is_before(self.version, (4, 3)) else "strict, 0 to 31"

    @property
    def note(self) -> str:
        intakes = "quorum intakes" if self.quorum_intake else "classic intakes, each on one node alone"
        return f"{intakes}, priorities {self.priorities}; in a cluster, quorum queues are kept on three nodes"


def is_before(version: str, floor: tuple[int, ...]) -> bool:
    """Whether a broker's version ("4.3.6+deb") is older than the version `floor`."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[: len(floor)]) < floor


def declare(lanes: Sequence[LaneSpec], *, names: Names, broker_version: str) -> Topology:
    """Compute the exchanges, queues and bindings that `lanes` need on a broker of this version; nothing is sent to a
    broker. Raises ValueError if the version is too old."""
    broker = Broker(broker_version)
    cascade = _cascade(names)
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
            *(Queue(name, _unlimited(broker)) for name in (names.strays, names.dead, names.webhooks, names.control)),
            *(Queue(name, {**_unlimited(broker), **ONE_CONSUMER}) for name in (names.batches, names.tickets)),
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
            Binding(names.strays, names.strays),
            Binding(names.dead, names.dead, routing_key="#"),
            *(
                Binding(exchange, names.webhooks, routing_key=names.webhook_key("#"))
                for exchange in (names.webhooks, names.due_exchange)
            ),
            Binding(names.due_exchange, names.tickets, routing_key=f"{TICKETS_KEY}.#"),
            *(Binding(names.control, names.control, routing_key=key) for key in CONTROL_BINDING_KEYS),
        ),
        namespace=names.namespace,
        lanes=tuple(lane.name for lane in lanes),
        broker_version=broker_version,
        note=broker.note,
    )


def _exchanges(names: Names) -> tuple[Exchange, ...]:
    to_strays: Arguments = {"alternate-exchange": names.strays}
    return (
        Exchange(names.strays, "fanout"),
        Exchange(names.requests, "topic", arguments=to_strays),
        Exchange(names.due_exchange, "topic", internal=True, arguments=to_strays),
        Exchange(names.dead, "topic"),
        Exchange(names.webhooks, "topic"),
        Exchange(names.events, "topic"),
        Exchange(names.control, "topic"),
    )


def _intake(lane: LaneSpec, names: Names, broker: Broker) -> Queue:
    """The queue for the requests that applications publish. When it is full, it refuses publishes. Side queues are
    alike."""
    bounds: Arguments = {
        "x-max-length": lane.max_length,
        "x-max-length-bytes": lane.max_length_bytes,
        "x-overflow": "reject-publish",
        "x-dead-letter-exchange": names.strays,
    }
    if broker.quorum_intake:
        return Queue(names.intake(lane.name), {**QUORUM, **bounds, **LIMITED})
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
    """What returns after a delay. It has no length limit, because a request that was accepted must not be refused."""
    return Queue(
        names.due(lane.name),
        {
            **QUORUM,
            "x-overflow": "reject-publish",
            "x-dead-letter-exchange": names.strays,
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
    """For a queue that must never lose a message. From RabbitMQ 4.0 on, the default delivery limit is 20, and -1 means
    none. Before, none is the default, and with -1 a message would be discarded at its first return."""
    return {**QUORUM, "x-delivery-limit": -1} if broker.quorum_intake else QUORUM


def _cascade(names: Names) -> Topology:
    """Each level has a headers exchange, a wait queue of the same name, and two bindings: a message whose delay bit is
    true goes to the wait queue, one whose bit is false to the exchange of the next lower level.

    - Without an alternate exchange, a message whose delay bit is absent could not leave the wait queue of the level
      above, and would block all messages behind it, of every lane (docs/facts.md, section 3).
    - Without at-least-once dead-lettering (which needs `reject-publish`), messages that expire while the broker is down
      are lost (640 of 680 in a test). There is no length limit, because each wait queue is a dead-letter target.
    - The delay bits are booleans: a number would get another AMQP type if it is imported as a definition, and the
      broker would have two bindings, of which neither way could remove the other's.
    """
    exchanges: list[Exchange] = []
    queues: list[Queue] = []
    bindings: list[Binding] = []
    for level in range(delays.LEVELS):
        name, bit = names.delay(level), names.delay_bit(level)
        next_lower = names.delay(level - 1) if level else names.due_exchange
        exchanges.append(Exchange(name, "headers", arguments={"alternate-exchange": names.strays}))
        arguments: Arguments = {
            **QUORUM,
            "x-message-ttl": delays.wait_ms(level),
            "x-dead-letter-exchange": next_lower,
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }
        queues.append(Queue(name, arguments))
        bindings += (
            Binding(name, name, arguments={"x-match": "all", bit: True}),
            Binding(name, next_lower, destination_kind="exchange", arguments={"x-match": "all", bit: False}),
        )
    return Topology(tuple(exchanges), tuple(queues), tuple(bindings))
