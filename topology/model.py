"""A broker's exchanges, queues and bindings as frozen values.

Applying, comparing, exporting and drawing are functions of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["queue", "exchange"]

Value = str | int | float | bool
Arguments = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange. The defaults are what we declare; exchanges found on a broker may have other values."""

    name: str
    type: str
    internal: bool = False
    """No client can publish to it, whatever its rights: only bindings and dead-lettering reach it."""
    arguments: Arguments = field(default_factory=dict)
    durable: bool = True
    auto_delete: bool = False


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue. Its type is the argument `x-queue-type`."""

    name: str
    arguments: Arguments = field(default_factory=dict)
    durable: bool = True
    auto_delete: bool = False
    exclusive: bool = False
    policy: Arguments = field(default_factory=dict)
    """What policies on the broker set beside the arguments (seen some 5 s later); never declared, only found."""
    members: tuple[str, ...] = ()
    """The nodes that keep a quorum queue (seen some 5 s later); never declared, only found."""

    @property
    def type(self) -> str:
        """`quorum`, `classic` or `stream`."""
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
        """One line that tells it from every other binding: `lane.due → queue lane.batch.due, key 'batch.#'`."""
        text = f"{self.source} → {self.destination_kind} {self.destination}, key {self.routing_key!r}"
        matches = ", ".join(f"{key}={str(value).lower()}" for key, value in sorted(self.arguments.items()))
        return f"{text}, {matches}" if matches else text


@dataclass(frozen=True, slots=True)
class Topology:
    """All objects of one installation as declared, or all objects found in a virtual host."""

    exchanges: tuple[Exchange, ...] = ()
    queues: tuple[Queue, ...] = ()
    bindings: tuple[Binding, ...] = ()
    namespace: str = ""
    """What all names begin with. Empty if it was found on a broker: a virtual host may hold several namespaces."""
    lanes: tuple[str, ...] = ()
    """Declared: the lanes that it was made for."""
    broker_version: str = ""
    """The RabbitMQ version that it was declared for, or found on."""
    nodes: tuple[str, ...] = ()
    """Found: all nodes of the cluster, running or not; empty if the user may not see them."""
    note: str = ""
    """Declared: what follows from the version, for people."""

    def exchange(self, name: str) -> Exchange:
        """The exchange of that name. Raises KeyError."""
        return {each.name: each for each in self.exchanges}[name]

    def queue(self, name: str) -> Queue:
        """The queue of that name. Raises KeyError."""
        return {each.name: each for each in self.queues}[name]
