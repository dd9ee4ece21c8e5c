"""A broker's exchanges, queues and bindings as frozen dataclasses.

Other files of this package declare these values on a broker, compare, export and draw them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["queue", "exchange"]

Value = str | int | float | bool
Arguments = Mapping[str, Value]

QUORUM: Arguments = {"x-queue-type": "quorum", "x-queue-leader-locator": "balanced"}
"""The arguments that all our quorum queues share. Without `balanced`, the leaders of all quorum queues, such as the 29
wait queues for delays, would be on the node where they are declared."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange, either declared by us or found on a broker. The default values are those of most exchanges that we
    declare."""

    name: str
    type: str
    internal: bool = False
    """True: no client can publish to this exchange, whatever its rights. Messages reach it only through bindings and by
    dead-lettering."""
    arguments: Arguments = field(default_factory=dict)
    durable: bool = True
    auto_delete: bool = False


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue, either declared by us or found on a broker. Its type is the argument `x-queue-type`."""

    name: str
    arguments: Arguments = field(default_factory=dict)
    durable: bool = True
    auto_delete: bool = False
    exclusive: bool = False
    policy: Arguments = field(default_factory=dict)
    """The arguments that policies on the broker add. Empty in a declared topology. The management API shows a change
    about 5 s after it was made."""
    members: tuple[str, ...] = ()
    """The nodes that have a replica of a quorum queue. Empty in a declared topology. The management API shows a change
    about 5 s after it was made."""

    @property
    def type(self) -> str:
        """The queue's type: `quorum`, `classic` or `stream`."""
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
        """One line of text that identifies the binding: `lane.due → queue lane.batch.due, key 'batch.#'`."""
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
    """The first word of the names of all exchanges and queues. Empty in a topology found on a broker: a virtual host
    may have several namespaces."""
    lanes: tuple[str, ...] = ()
    """The lanes that the topology is declared for. Empty in a topology found on a broker."""
    broker_version: str = ""
    """The RabbitMQ version that the topology is declared for. Empty in a topology found on a broker."""
    nodes: tuple[str, ...] = ()
    """All nodes of the cluster, running or not. Empty in a declared topology, or if the user may not see the nodes."""
    note: str = ""
    """A line for people: which features of queues this RabbitMQ version offers or lacks."""

    def queue(self, name: str) -> Queue:
        """The queue with this name. Raises KeyError."""
        return {queue.name: queue for queue in self.queues}[name]
