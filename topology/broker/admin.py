"""Declares a topology on a broker over AMQP, compares the broker with it, removes it, and checks permissions. Only
`remove` deletes anything; nothing changes an existing object."""

import asyncio
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from aio_pika.abc import AbstractChannel, AbstractConnection
from aiormq.exceptions import (
    AMQPConnectionError,
    AMQPError,
    ChannelAccessRefused,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
)

from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.driver import border
from lanekeeper.amqp.publisher import CONFIRM_TIMEOUT_S
from lanekeeper.contract.problems import AccessRefused, BrokerError, BrokerUnreachable, TopologyMismatch
from topology.broker.consume import CLOSE_TIMEOUT_S
from topology.broker.management import Management, is_same_broker
from topology.declaration import Binding, Exchange, Queue, Topology
from topology.plan import Difference, compare

DECLARE_TIMEOUT_S = 30
"""A declaration takes seconds while the cluster elects a leader."""

_DIFFERENT = re.compile(
    r"inequivalent arg '(?P<field>[^']+)' for (?P<what>\w+) '(?P<name>[^']*)' in vhost '(?P<vhost>[^']*)': "
    r"received (?P<wanted>.+?) but current is (?P<found>.+)"
)
_VALUE = re.compile(r"(?:the value )?'(.*?)'")


async def apply(topology: Topology, connection: AbstractConnection) -> None:
    """Declare a topology. It can be repeated, and several processes can do it at the same time.

    Raises TopologyMismatch at the first object that exists with other properties, AccessRefused if the user lacks the
    permission to configure an object, BrokerUnreachable if the connection is lost, BrokerError if the broker refuses
    for another reason. Success says nothing of additional bindings, policies, or arguments that the broker ignores;
    `verify` detects these.
    """
    with broker_errors():
        channel = await connection.channel()
        try:
            for exchange in topology.exchanges:
                await declare_exchange(channel, exchange)
            for queue in topology.queues:
                await declare_queue(channel, queue)
            for binding in topology.bindings:
                await bind(channel, binding)
        finally:
            if not channel.is_closed:
                await channel.close()


@contextmanager
def broker_errors() -> Iterator[None]:
    """Turn the exceptions that aiormq raises for a failed declaration into BrokerErrors."""
    with border("declaring"):
        try:
            yield
        except ChannelPreconditionFailed as error:
            raise _refusal(str(error)) from error
        except ChannelAccessRefused as error:
            raise AccessRefused(
                f"{error}; `lanekeeper topology apply` needs a user that may configure everything of ours "
                "(the deployer of `lanekeeper topology export`)"
            ) from error
        except ChannelNotFoundEntity as error:
            raise TopologyMismatch(
                f"{error}; somebody deleted it meanwhile: run `lanekeeper topology apply` again"
            ) from error
        except ChannelLockedResource as error:
            raise TopologyMismatch(f"{error}; an exclusive queue of another client has a name of ours") from error
        except AMQPConnectionError:
            raise
        except AMQPError as error:
            raise BrokerError(str(error)) from error


def _refusal(text: str) -> BrokerError:
    """Translate the broker's error 406 (PRECONDITION_FAILED): the object exists with other properties, or there is
    another reason, such as a limit for the number of queues."""
    found = _DIFFERENT.search(text)
    if found is None:
        return BrokerError(text)
    what, name, vhost = found["what"], found["name"], found["vhost"]
    return TopologyMismatch(
        f"{what} {name} in vhost {vhost} exists with another {found['field']}: wanted {_value(found['wanted'])}, "
        f"found {_value(found['found'])}. It was left as it is; `lanekeeper topology plan` lists every difference. "
        + (_migrate_queue(name, vhost) if what == "queue" else _migrate_exchange(name))
    )


def _value(text: str) -> str:
    """`10000` from the broker's phrase `the value '10000' of type 'short'`, `5` from `'5'`, `nothing` from `none`."""
    quoted = _VALUE.match(text)
    return quoted[1] if quoted else "nothing" if text == "none" else text


def _migrate_queue(name: str, vhost: str) -> str:
    # Deleting a queue destroys its messages. An operator must check first that it is empty, because quorum queues do
    # not support AMQP's `if-empty`.
    return (
        f"To migrate it: stop what publishes to it, let the workers empty it until `rabbitmqctl -p '{vhost}' "
        f"list_queues name messages` shows 0 for it, then `rabbitmqctl -p '{vhost}' delete_queue '{name}'` "
        "and `lanekeeper topology apply`."
    )


def _migrate_exchange(name: str) -> str:
    return (
        f"To migrate it: stop what publishes to it, delete exchange {name} in the management UI (it holds no "
        "messages), then `lanekeeper topology apply`, which brings its bindings back."
    )


async def declare_exchange(channel: AbstractChannel, exchange: Exchange) -> None:
    """Raises the errors of aio-pika, like `declare_queue` and `bind`."""
    await channel.declare_exchange(
        exchange.name,
        exchange.type,
        durable=exchange.durable,
        auto_delete=exchange.auto_delete,
        internal=exchange.internal,
        arguments=dict(exchange.arguments),
        timeout=DECLARE_TIMEOUT_S,
    )


async def declare_queue(channel: AbstractChannel, queue: Queue) -> None:
    """See `declare_exchange`."""
    await channel.declare_queue(
        queue.name,
        durable=queue.durable,
        auto_delete=queue.auto_delete,
        arguments=dict(queue.arguments),
        timeout=DECLARE_TIMEOUT_S,
    )


async def bind(channel: AbstractChannel, binding: Binding) -> None:
    """See `declare_exchange`."""
    to_queue = binding.destination_kind == "queue"
    found = channel.get_queue if to_queue else channel.get_exchange
    destination = await found(binding.destination, ensure=False)
    await destination.bind(
        binding.source, binding.routing_key, arguments=dict(binding.arguments), timeout=DECLARE_TIMEOUT_S
    )


_SHOWN = 5
"""For a user with few permissions, about sixty objects cannot be checked."""
NO_NODES = (
    "the nodes of the cluster could not be seen, nor so whether each queue has its replicas; "
    "the management API shows them to a user that has the tag `monitoring`"
)


@dataclass(frozen=True, slots=True)
class Verification:
    """The differences, and how much was checked."""

    differences: tuple[Difference, ...]
    seen: Literal["everything", "existence"]
    """All properties of all objects, or only whether the exchanges and queues exist."""
    note: str | None = None
    """For people: what could not be checked, why, and what to do about it."""

    @property
    def missing(self) -> tuple[Difference, ...]:
        """Listed separately: requests cannot be served without them, whereas an operator may have changed properties of
        others on purpose."""
        return tuple(difference for difference in self.differences if difference.change == "missing")


async def verify(topology: Topology, management: Management | None, connection: AbstractConnection) -> Verification:
    """Compare a broker with the declared topology, over the management API, which shows all properties. Without it, or
    if it fails or belongs to another broker, only the existence of exchanges and queues is checked, over AMQP, and the
    result's `note` says why. Raises BrokerUnreachable if the connection is lost meanwhile.

    Declaring again would prove nothing: it does not show additional bindings and policies, and the broker silently
    ignores unknown arguments.
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
    """Returns the missing objects, and the names of those that could not be checked: from RabbitMQ 4.3 on, the user
    needs some right to an object."""
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


CHECK_EVERY_S = 1.0
REASON_WITHIN_S = 1.0
"""aiormq may raise its exception before it has received the broker's reason for closing the channel."""


class WritingRights:
    """Whether the worker's user may publish to all `routes` (pairs of an exchange and a routing key). During a memory
    or disk alarm this cannot be checked, because the broker reads no publishes."""

    def __init__(self, connection: Connection, routes: Sequence[tuple[str, str]]) -> None:
        self._connection = connection
        self._routes = routes
        self.trouble: str | None = "whether it may write is not known yet"
        """Why the worker must not take requests: a permission is missing, or was not checked yet."""

    async def check(self) -> None:
        """Raises the errors of `check_write_rights`."""
        try:
            await check_write_rights(self._connection, self._routes)
        except AccessRefused as error:
            self.trouble = str(error)
            raise
        self.trouble = None

    async def run(self) -> None:
        while self.trouble is not None:
            await asyncio.sleep(CHECK_EVERY_S)
            with suppress(BrokerError):
                await self.check()


async def check_write_rights(connection: Connection, routes: Iterable[tuple[str, str]]) -> None:
    """Check that the connection's user may publish to each route (a pair of an exchange and a routing key), without
    delivering a message: it publishes in a transaction and rolls it back. The broker checks rights at each publish, and
    delivers only at a commit. Raises AccessRefused, TopologyMismatch (no such exchange), or, if the rights could not be
    checked, BrokerBlocked or BrokerUnreachable.
    """
    await connection.flowing(timeout_s=CONFIRM_TIMEOUT_S)
    channel = await connection.channel(confirms=False)
    try:
        with border("whether it may write is not known"):
            async with asyncio.timeout(CONFIRM_TIMEOUT_S):
                await channel.tx_select()
                for exchange, routing_key in routes:
                    await channel.basic_publish(b"", exchange=exchange, routing_key=routing_key)
                await channel.tx_rollback()
    except BrokerUnreachable:
        closing = channel.closing
        await asyncio.wait((closing,), timeout=REASON_WITHIN_S)
        why = closing.exception() if closing.done() and not closing.cancelled() else None
        if isinstance(why, ChannelAccessRefused):
            raise AccessRefused(str(why)) from why
        if isinstance(why, ChannelNotFoundEntity):
            raise TopologyMismatch(f"{why}; run: lanekeeper topology apply") from why
        raise
    finally:
        with suppress(BrokerUnreachable), border("closing"):
            await channel.close(timeout=CLOSE_TIMEOUT_S)


RPC_TIMEOUT_S = 30


async def remove(topology: Topology, connection: Connection) -> None:
    """Delete the exchanges and queues, with all messages: for a topology of a short time, such as the demo's. Errors
    are ignored, because an object may be missing, or the connection lost."""
    with suppress(BrokerError, AMQPError, RuntimeError, OSError, TimeoutError):
        channel = await connection.channel(confirms=False, timeout_s=RPC_TIMEOUT_S)
        for queue in topology.queues:
            await channel.queue_delete(queue.name, timeout=RPC_TIMEOUT_S)
        for exchange in topology.exchanges:
            await channel.exchange_delete(exchange.name, timeout=RPC_TIMEOUT_S)
        await channel.close()
