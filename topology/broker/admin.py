"""Declares a topology on a broker over AMQP, compares the broker with it, once or again and again (`TopologyWatch`),
removes it, and checks permissions. Only `remove` and `remove_lane` delete anything; nothing changes an existing
object."""

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Literal

import structlog
from aio_pika.abc import AbstractConnection
from aiormq.exceptions import (
    AMQPConnectionError,
    AMQPError,
    ChannelAccessRefused,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
)

from lanekeeper.amqp.connection import Connection, depths
from lanekeeper.amqp.driver import RPC_TIMEOUT_S, asks_to_stop, close, open_channel, translate_broker_errors
from lanekeeper.amqp.publisher import CONFIRM_TIMEOUT_S
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import AccessRefused, BrokerError, BrokerUnreachable, TopologyMismatch
from lanekeeper.telemetry import signals
from topology.broker.management import Management, is_same_broker
from topology.declaration import Exchange, Queue, Topology
from topology.plan import Difference, What, compare

_DIFFERENT = re.compile(
    r"inequivalent arg '(?P<field>[^']+)' for (?P<what>\w+) '(?P<name>[^']*)' in vhost '(?P<vhost>[^']*)': "
    r"received (?P<wanted>.+?) but current is (?P<found>.+)"
)
log = structlog.get_logger()
_VALUE = re.compile(r"(?:the value )?'(.*?)'")


async def apply(topology: Topology, connection: AbstractConnection) -> None:
    """Declare a topology. It can be repeated, and several processes can do it at the same time. Success says nothing of
    additional bindings, policies, or arguments that the broker ignores; `verify` detects these. Raises TopologyMismatch
    at the first object that exists with other properties, before it changes anything; AccessRefused, BrokerUnreachable,
    BrokerError.
    """
    absent = await _absent(topology, connection)
    things: tuple[Exchange | Queue, ...] = (*topology.exchanges, *topology.queues)
    with broker_errors():
        channel = await open_channel(connection, confirms=False)
        try:
            # First what exists: declaring it again changes nothing, and is refused if it has other properties.
            for thing in sorted(things, key=lambda thing: _identity(thing) in absent):
                if isinstance(thing, Exchange):
                    await channel.exchange_declare(
                        thing.name, exchange_type=thing.type, durable=thing.durable, auto_delete=thing.auto_delete,
                        internal=thing.internal, arguments=dict(thing.arguments), timeout=RPC_TIMEOUT_S,
                    )  # fmt: skip
                else:
                    await channel.queue_declare(
                        thing.name, durable=thing.durable, auto_delete=thing.auto_delete,
                        arguments=dict(thing.arguments), timeout=RPC_TIMEOUT_S,
                    )  # fmt: skip
            for binding in topology.bindings:
                bind = channel.queue_bind if binding.destination_kind == "queue" else channel.exchange_bind
                await bind(
                    binding.destination, binding.source, binding.routing_key, arguments=dict(binding.arguments),
                    timeout=RPC_TIMEOUT_S,
                )  # fmt: skip
        finally:
            await close(channel)


async def _absent(topology: Topology, connection: AbstractConnection) -> set[tuple[What, str]]:
    """What is missing in a namespace that exists. In a new one, where the first exchange and the first queue are
    missing, nothing else is looked for, because each refusal closes the channel."""
    first = Topology(exchanges=topology.exchanges[:1], queues=topology.queues[:1])
    if len((await _check_existence(first, connection))[0]) == 2:
        return set()
    missing, _ = await _check_existence(topology, connection)
    return {(each.what, each.name) for each in missing}


@contextmanager
def broker_errors() -> Iterator[None]:
    """Turn the exceptions that aiormq raises for a failed declaration into BrokerErrors."""
    with translate_broker_errors("declaring"):
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
        + (_MIGRATE_QUEUE if what == "queue" else _MIGRATE_EXCHANGE).format(name=name, vhost=vhost)
    )


def _value(text: str) -> str:
    """`10000` from the broker's phrase `the value '10000' of type 'short'`, `5` from `'5'`, `nothing` from `none`."""
    quoted = _VALUE.match(text)
    return quoted[1] if quoted else "nothing" if text == "none" else text


# Deleting a queue destroys its messages. An operator must check first that it is empty, because quorum queues do not
# support AMQP's `if-empty`.
_MIGRATE_QUEUE = (
    "To migrate it: stop what publishes to it, let the workers empty it until `rabbitmqctl -p '{vhost}' "
    "list_queues name messages` shows 0 for it, then `rabbitmqctl -p '{vhost}' delete_queue '{name}'` "
    "and `lanekeeper topology apply`."
)
_MIGRATE_EXCHANGE = (
    "To migrate it: stop what publishes to it, delete exchange {name} in the management UI (it holds no "
    "messages), then `lanekeeper topology apply`, which brings its bindings back."
)


_SHOWN = 5
NO_NODES = (
    "the nodes of the cluster could not be seen, nor so whether each queue has its replicas; "
    "the management API shows them to a user that has the tag `monitoring`"
)


@dataclass(frozen=True, slots=True)
class Verification:
    """The differences, and how much was checked."""

    differences: tuple[Difference, ...]
    seen: Literal["everything", "existence"]
    note: str | None = None

    @property
    def missing(self) -> tuple[Difference, ...]:
        return tuple(difference for difference in self.differences if difference.change == "missing")


async def verify(topology: Topology, management: Management | None, connection: AbstractConnection) -> Verification:
    """Compare a broker with the declared topology, over the management API, which shows all properties. Without it, or
    if it fails or belongs to another broker, only the existence of exchanges and queues is checked, over AMQP, and the
    result's `note` says why. Raises BrokerUnreachable if the connection is lost meanwhile.
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
    missing: list[Difference] = []
    hidden: list[str] = []
    with broker_errors():
        channel = await open_channel(connection, confirms=False)
        things: tuple[Exchange | Queue, ...] = (*topology.exchanges, *topology.queues)
        for thing in things:
            if channel.is_closed:
                channel = await open_channel(connection, confirms=False)  # each refusal closes the channel
            try:
                look = channel.queue_declare if isinstance(thing, Queue) else channel.exchange_declare
                await look(thing.name, passive=True, timeout=RPC_TIMEOUT_S)
            except ChannelNotFoundEntity:
                missing.append(Difference("missing", *_identity(thing)))
            except ChannelAccessRefused:
                if thing.name not in hidden:
                    hidden.append(thing.name)
        await close(channel)
    return tuple(missing), hidden


def _identity(thing: Exchange | Queue) -> tuple[What, str]:
    """An exchange and a queue may have the same name."""
    return "queue" if isinstance(thing, Queue) else "exchange", thing.name


# ---- the watch -------------------------------------------------------------------------------------------------------

LOOK_EVERY_S = 45.0
"""So a deleted exchange or binding is noticed within a minute. A check makes 75 passive declarations: 30 ms of CPU."""
AGAIN_AFTER_S = 2.0
SOONEST_S = 0.2
MANAGEMENT_WITHIN_S = 5.0
COMMAND = "lanekeeper topology apply"
FindManagement = Callable[[Connection], Awaitable[Management | None]]


class TopologyWatch:
    """Checks whether all declared exchanges, queues and bindings exist (else messages are lost): after each reconnect,
    after the broker has ended a consumer, after a publish to a missing exchange, and every 45 s.

    Over AMQP it checks queues and exchanges. Bindings are only shown by the management API. If this API does not answer
    soon, a process that `declares` (missing objects again) makes all bindings again. Before the first check all count
    as existing, because whoever creates a watch has just applied or verified the topology.
    """

    def __init__(
        self, topology: Topology, connection: Connection, *, declares: bool, find_management: FindManagement
    ) -> None:
        self._topology = topology
        self._bindings = replace(topology, exchanges=(), queues=())
        self._connection = connection
        self._declares = declares
        self._find_management = find_management
        self._management: Management | None = None
        self._checked_opening = connection.openings
        self._searched_opening = 0
        self._missing_objects: tuple[Difference, ...] = ()
        self._missing_bindings: tuple[Difference, ...] = ()
        self._failed: str | None = None
        self._reported: dict[str, frozenset[str]] = {}
        self._watched_opening = 0
        self._check_requested = asyncio.Event()
        names = Names(topology.namespace)
        intakes = {names.intake(lane) for lane in topology.lanes}
        self._intakes = intakes | {
            each.label for each in topology.bindings if each.destination_kind == "queue" and each.destination in intakes
        }
        """In the form that `Difference.name` has."""

    @property
    def trouble(self) -> str | None:
        """For people: what is missing, why the check failed, or that none was made since the connection was opened."""
        if self._failed is not None:
            return self._failed
        if missing := (*self._missing_objects, *self._missing_bindings):
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            return f"{missing[0].line.removeprefix(missing[0].what).strip()}{more}; run: {COMMAND}"
        return None if self._is_checked else "not verified since the connection was lost"

    @property
    def hindrance(self) -> str | None:
        """Why the worker must not take requests. If only intake queues are missing, just their lanes get no requests;
        without any other object, results of requests could be lost."""
        missing = (*self._missing_objects, *self._missing_bindings)
        only_intakes = all(each.what != "exchange" and each.name in self._intakes for each in missing)
        return None if only_intakes and self._failed is None and self._is_checked else self.trouble

    def check_soon(self) -> None:
        self._check_requested.set()

    @property
    def _is_checked(self) -> bool:
        return self._connection.is_open and self._checked_opening == self._connection.openings

    async def run(self) -> None:
        while True:
            if asks_to_stop():  # aiormq may have swallowed a cancellation while it waited
                raise asyncio.CancelledError
            self._check_requested.clear()
            try:
                await self._check()
            except BrokerError as error:
                if self._connection.is_open:
                    self._failed = str(error)
            await asyncio.sleep(SOONEST_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_AFTER_S if self.trouble else LOOK_EVERY_S * random.uniform(0.8, 1.2)):
                    await self._check_requested.wait()

    async def _check(self) -> None:
        underlying = await self._connection.underlying()
        opening = self._connection.openings
        if self._watched_opening != opening:
            self._watched_opening = opening
            self._connection.loss.add_done_callback(lambda _: self.check_soon())
        missing = (await verify(self._topology, None, underlying)).missing
        self._report("things", missing)
        if missing and self._declares:
            self._missing_objects = missing
            await apply(self._topology, underlying)
            log.info(
                signals.TOPOLOGY_APPLIED,
                exchanges=len(self._topology.exchanges),
                queues=len(self._topology.queues),
                bindings=len(self._topology.bindings),
            )
            missing = (await verify(self._topology, None, underlying)).missing
        self._missing_objects, self._failed, self._checked_opening = missing, None, opening
        if not missing:
            await self._check_bindings(underlying, opening)

    async def _check_bindings(self, underlying: AbstractConnection, opening: int) -> None:
        """If the API does not answer, or bindings are missing, make all bindings again (if `declares`). Meanwhile the
        worker takes requests."""
        missing: tuple[Difference, ...] | None = None
        with suppress(BrokerError, TimeoutError):
            async with asyncio.timeout(MANAGEMENT_WITHIN_S):
                if self._searched_opening != opening:
                    self._searched_opening = opening
                    self._management = await self._find_management(self._connection)
                api = self._management
                if api is not None and is_same_broker(await api.cluster_name(), underlying):
                    found = compare(self._bindings, Topology(bindings=await api.bindings()))
                    missing = tuple(difference for difference in found if difference.change == "missing")
        if missing is not None:
            self._missing_bindings = missing
            self._report("bindings", missing)
        if self._declares and missing != ():
            await apply(self._bindings, underlying)
            self._missing_bindings = ()

    def _report(self, kind: str, missing: tuple[Difference, ...]) -> None:
        known = self._reported.get(kind, frozenset())
        self._reported[kind] = frozenset(difference.line for difference in missing)
        new = [difference for difference in missing if difference.line not in known]
        if queues := [difference.name for difference in new if difference.what == "queue"]:
            log.error(signals.QUEUE_DELETED, queues=queues, command=COMMAND)
        for difference in new:
            if difference.what != "queue":
                log.error(signals.TOPOLOGY_DIFFERS, difference=difference.line, command=COMMAND)


# ---- rights ----------------------------------------------------------------------------------------------------------

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

    async def check(self) -> None:
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
    """Check that the connection's user may publish to each route (a pair of an exchange and a routing key), in a
    transaction that is rolled back. Raises AccessRefused, TopologyMismatch (no such exchange), or, if the rights could
    not be checked, BrokerBlocked or BrokerUnreachable."""
    await connection.flowing(timeout_s=CONFIRM_TIMEOUT_S)
    channel = await connection.channel(confirms=False)
    try:
        with translate_broker_errors("whether it may write is not known"):
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
        await close(channel)


SETTLED_S = 1.0
"""After a lane is unbound, what was published before has arrived in its queues."""


async def remove_lane(lane: str, connection: Connection, management: Management, *, names: Names) -> None:
    """Delete the queues of a lane that no process has any more. Raises TopologyMismatch, and leaves the lane as it was,
    if a queue still holds messages or has consumers, or if the broker has no such lane."""
    queues = [
        queue
        for queue in await management.messages()
        if queue == names.intake(lane) or names.lane_behind(queue) == lane
    ]
    if not queues:
        raise TopologyMismatch(f"the broker has no queue of a lane {lane}: nothing is removed")
    await _require_unused(lane, queues, connection, management)
    key = names.lane_pattern(lane)
    bindings = [
        (exchange, queue)
        for exchange, queue in ((names.requests, names.intake(lane)), (names.due_exchange, names.due(lane)))
        if queue in queues
    ]
    channel = await connection.channel(confirms=False, timeout_s=RPC_TIMEOUT_S)
    with translate_broker_errors("removing a lane"):
        for exchange, queue in bindings:
            await channel.queue_unbind(queue, exchange, key, timeout=RPC_TIMEOUT_S)
    await asyncio.sleep(SETTLED_S)
    try:
        await _require_unused(lane, queues, connection, management)
        with translate_broker_errors("removing a lane"):
            for queue in queues:
                await channel.queue_delete(queue, timeout=RPC_TIMEOUT_S)
    except BaseException:
        with suppress(BrokerError), translate_broker_errors("binding again"):
            for exchange, queue in bindings:
                await channel.queue_bind(queue, exchange, key, timeout=RPC_TIMEOUT_S)
        raise
    finally:
        await close(channel)


async def _require_unused(lane: str, queues: list[str], connection: Connection, management: Management) -> None:
    held = await management.messages()
    for queue, depth in (await depths(connection, queues)).items():
        if depth.consumers:
            raise TopologyMismatch(
                f"lane {lane} is still consumed from {queue} ({depth.consumers} consumers): take the lane out of the "
                "settings of all workers, restart them one by one, and try again"
            )
        if count := max(depth.ready, held.get(queue, 0)):
            raise TopologyMismatch(
                f"lane {lane} cannot be removed: {queue} holds {count} messages. Stop publishing to it, let a worker "
                f"that still has the lane finish them (lanekeeper consume --lane {lane}), stop it, and try again"
            )


async def remove(topology: Topology, connection: Connection) -> None:
    """Delete the exchanges and queues, with all messages: for a topology of a short time, such as the demo's. Errors
    are ignored, because an object may be missing, or the connection lost."""
    with suppress(BrokerError, AMQPError, RuntimeError, OSError, TimeoutError):
        channel = await connection.channel(confirms=False, timeout_s=RPC_TIMEOUT_S)
        for queue in topology.queues:
            await channel.queue_delete(queue.name, timeout=RPC_TIMEOUT_S)
        for exchange in topology.exchanges:
            await channel.exchange_delete(exchange.name, timeout=RPC_TIMEOUT_S)
        await close(channel)
