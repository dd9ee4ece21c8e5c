"""Compares a broker's topology with the declared one.

It reads the topology from the management API, which shows all properties. Without this API, it checks over AMQP only
whether each exchange and queue exists. A successful declaration would not prove that the topologies are equal: it does
not show additional bindings and policies, and the broker silently ignores unknown arguments.
"""

from dataclasses import dataclass
from typing import Literal

from aio_pika.abc import AbstractConnection
from aiormq.exceptions import ChannelAccessRefused, ChannelNotFoundEntity

from lanekeeper.contract.problems import BrokerError
from topology.broker.admin.apply import DECLARE_TIMEOUT_S, broker_errors
from topology.broker.admin.management import Management, is_same_broker
from topology.model import Exchange, Queue, Topology
from topology.plan import Difference, compare

_SHOWN = 5
"""The largest number of objects that the note of a `Verification` names as not checked. The note would be long without
this limit: for a user with few permissions, about sixty objects cannot be checked."""
NO_NODES = (
    "the nodes of the cluster could not be seen, nor so whether each queue has its replicas; "
    "the management API shows them to a user that has the tag `monitoring`"
)


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of `verify`: the differences, and how much was checked."""

    differences: tuple[Difference, ...]
    seen: Literal["everything", "existence"]
    """How much was checked. `everything`: all properties of all objects. `existence`: only whether the exchanges and
    queues exist."""
    note: str | None = None
    """A text for people: what could not be checked, why, and what to do about it. None if everything was checked."""

    @property
    def missing(self) -> tuple[Difference, ...]:
        """The exchanges, queues and bindings that are missing on the broker. They are listed separately because
        requests cannot be served without them, whereas an operator may have changed the properties of other objects on
        purpose."""
        return tuple(difference for difference in self.differences if difference.change == "missing")


async def verify(topology: Topology, management: Management | None, connection: AbstractConnection) -> Verification:
    """Compare a broker with the declared topology. Raises BrokerUnreachable if the connection is lost meanwhile.

    Without a management API, or if it fails or belongs to another broker, only the existence of exchanges and queues is
    checked, over AMQP, and the result's `note` says why.
    """
    note = "no management API was found"
    if management is not None:
        try:
            if is_same_broker(await management.cluster_name(), connection):
                found = await management.topology()
                return Verification(tuple(compare(topology, found)), "everything", None if found.nodes else NO_NODES)
            note = f"the management API at {management.url} is another broker's"
        except BrokerError as error:
            note = str(error)
    missing, hidden = await _check_existence(topology, connection)
    shown = ", ".join(hidden[:_SHOWN]) + (f" and {len(hidden) - _SHOWN} more" if len(hidden) > _SHOWN else "")
    return Verification(
        missing,
        "existence",
        f"{note}, so that arguments and bindings could not be seen"
        + (f", nor whether these exist, which the user has no rights to: {shown}" if hidden else "")
        + "; set LANEKEEPER_MANAGEMENT_URL, with a user that has the tag `management`",
    )


async def _check_existence(
    topology: Topology, connection: AbstractConnection
) -> tuple[tuple[Difference, ...], list[str]]:
    """Check over AMQP whether each exchange and queue exists. Returns the missing objects, and the names of those that
    could not be checked, because from RabbitMQ 4.3 on, the user needs some right to an object to check it."""
    missing: list[Difference] = []
    hidden: list[str] = []
    with broker_errors():
        channel = await connection.channel()
        things: tuple[Exchange | Queue, ...] = (*topology.exchanges, *topology.queues)
        for thing in things:
            if channel.is_closed:
                channel = await connection.channel()  # each refusal closes the channel
            try:
                if isinstance(thing, Queue):
                    await channel.declare_queue(thing.name, passive=True, timeout=DECLARE_TIMEOUT_S)
                else:
                    await channel.declare_exchange(thing.name, passive=True, timeout=DECLARE_TIMEOUT_S)
            except ChannelNotFoundEntity:
                missing.append(Difference("missing", "queue" if isinstance(thing, Queue) else "exchange", thing.name))
            except ChannelAccessRefused:
                if thing.name not in hidden:  # an exchange and a queue may have the same name
                    hidden.append(thing.name)
        if not channel.is_closed:
            await channel.close()
    return tuple(missing), hidden
