"""Declares a topology on a broker, over AMQP. It never deletes anything, and never changes an existing object."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from aio_pika.abc import AbstractChannel, AbstractConnection
from aiormq.exceptions import (
    AMQPConnectionError,
    AMQPError,
    ChannelAccessRefused,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
)

from lanekeeper.amqp.driver.border import border
from lanekeeper.contract.problems import AccessRefused, BrokerError, TopologyMismatch
from topology.model import Binding, Exchange, Queue, Topology

DECLARE_TIMEOUT_S = 30
"""The time limit, in seconds, for declaring one queue, exchange or binding. A declaration takes seconds while the
cluster elects a leader."""

_DIFFERENT = re.compile(
    r"inequivalent arg '(?P<field>[^']+)' for (?P<what>\w+) '(?P<name>[^']*)' in vhost '(?P<vhost>[^']*)': "
    r"received (?P<wanted>.+?) but current is (?P<found>.+)"
)
_VALUE = re.compile(r"(?:the value )?'(.*?)'")


async def apply(topology: Topology, connection: AbstractConnection) -> None:
    """Declare a topology's exchanges, then its queues, then its bindings. Existing objects with the same properties
    stay as they are. `apply` can be repeated, and several processes can call it at the same time.

    Raises TopologyMismatch at the first object that exists with other properties, AccessRefused if the user lacks the
    permission to configure an object, BrokerUnreachable if the connection is lost, BrokerError if the broker refuses
    for another reason.

    If it succeeds, every object exists with the declared arguments. It does not detect additional bindings, policies,
    or arguments that the broker ignores; `verify` detects these.
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
    """Within this `with` block, turn the exceptions that aiormq raises for a failed declaration into BrokerErrors."""
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
    """Translate the broker's error 406 (PRECONDITION_FAILED) on a declaration. If the object exists with other
    properties, the result is a TopologyMismatch that names the difference and says how to migrate the object. For any
    other reason, such as a limit for the number of queues, it is a BrokerError with the broker's text."""
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
    """Extract the value from a phrase of the broker's error text. The result is `10000` for the phrase `the value
    '10000' of type 'short'`, `5` for `'5'`, and `nothing` for `none`."""
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
    """Declare one exchange on the broker. Raises the errors of aio-pika, untranslated."""
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
    """Declare one queue on the broker. Raises the errors of aio-pika, untranslated."""
    await channel.declare_queue(
        queue.name,
        durable=queue.durable,
        auto_delete=queue.auto_delete,
        arguments=dict(queue.arguments),
        timeout=DECLARE_TIMEOUT_S,
    )


async def bind(channel: AbstractChannel, binding: Binding) -> None:
    """Make one binding on the broker. Raises the errors of aio-pika, untranslated."""
    to_queue = binding.destination_kind == "queue"
    found = channel.get_queue if to_queue else channel.get_exchange
    destination = await found(binding.destination, ensure=False)
    await destination.bind(
        binding.source, binding.routing_key, arguments=dict(binding.arguments), timeout=DECLARE_TIMEOUT_S
    )
