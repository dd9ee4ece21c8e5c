"""Check whether a broker is as declared.

A declaration that succeeds proves little: it does not show further bindings and policies, and the broker silently
ignores arguments that it does not know. The management API shows everything. Without it, one sees only what exists.
"""

from dataclasses import dataclass
from typing import Literal

from aio_pika.abc import AbstractChannel, AbstractConnection
from aiormq.exceptions import ChannelAccessRefused, ChannelNotFoundEntity

from lanekeeper.contract.problems import BrokerError
from topology.broker.admin.apply import DECLARE_TIMEOUT_S, broker_errors
from topology.broker.admin.management import Management, is_same_broker
from topology.model import Exchange, Queue, Topology
from topology.plan import Difference, compare

_SHOWN = 5  # names of what could not be checked; for a user with few rights there are about sixty
NO_NODES = (
    "the nodes of the cluster could not be seen, nor so whether each queue has its replicas; "
    "the management API shows them to a user that has the tag `monitoring`"
)


@dataclass(frozen=True, slots=True)
class Verification:
    """The differences that were found, and what could not be checked."""

    differences: tuple[Difference, ...]
    seen: Literal["everything", "existence"]
    note: str | None = None
    """What could not be checked, why, and what to do about it; None if everything was."""

    @property
    def missing(self) -> tuple[Difference, ...]:
        """The missing objects, without which requests cannot be served. Differing and extra objects may be intended."""
        return tuple(each for each in self.differences if each.change == "missing")


async def verify(topology: Topology, management: Management | None, connection: AbstractConnection) -> Verification:
    """Compare a broker with the declared topology. Raises BrokerUnreachable if the connection is lost meanwhile.

    If the management API fails or belongs to another broker, the result says so in `note`.
    """
    note = "no management API was found"
    if management is not None:
        try:
            if is_same_broker(await management.overview(), connection):
                found = await management.topology()
                return Verification(tuple(compare(topology, found)), "everything", None if found.nodes else NO_NODES)
            note = f"the management API at {management.address} is another broker's"
        except BrokerError as error:
            note = str(error)
    missing, hidden = await _exist(topology, connection)
    shown = ", ".join(hidden[:_SHOWN]) + (f" and {len(hidden) - _SHOWN} more" if len(hidden) > _SHOWN else "")
    return Verification(
        missing,
        "existence",
        f"{note}, so that arguments and bindings could not be seen"
        + (f", nor whether these exist, which the user has no rights to: {shown}" if hidden else "")
        + "; set LANEKEEPER_MANAGEMENT_URL, with a user that has the tag `management`",
    )


async def _exist(topology: Topology, connection: AbstractConnection) -> tuple[tuple[Difference, ...], list[str]]:
    """The missing objects, and those that could not be checked: from 4.3 on, the check needs some right to the queue or
    exchange."""
    missing: list[Difference] = []
    hidden: list[str] = []
    with broker_errors():
        channel = await connection.channel()
        things: tuple[Exchange | Queue, ...] = (*topology.exchanges, *topology.queues)
        for thing in things:
            if channel.is_closed:
                channel = await connection.channel()  # each refusal closes the channel
            try:
                await _ask(thing, channel)
            except ChannelNotFoundEntity:
                missing.append(Difference("missing", "queue" if isinstance(thing, Queue) else "exchange", thing.name))
            except ChannelAccessRefused:
                if thing.name not in hidden:  # an exchange and a queue of one name
                    hidden.append(thing.name)
        if not channel.is_closed:
            await channel.close()
    return tuple(missing), hidden


async def _ask(thing: Exchange | Queue, channel: AbstractChannel) -> None:
    if isinstance(thing, Queue):
        await channel.declare_queue(thing.name, passive=True, timeout=DECLARE_TIMEOUT_S)
    else:
        await channel.declare_exchange(thing.name, passive=True, timeout=DECLARE_TIMEOUT_S)
