"""Definitions imported into an empty virtual host equal the declared topology, and each change by hand is reported."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from aio_pika.abc import AbstractChannel, AbstractConnection

from tests.support.brokers import Vhost
from topology.broker.admin.apply import apply, bind, declare_exchange, declare_queue
from topology.broker.admin.management import Management
from topology.export import definitions
from topology.model import Binding, Exchange, Queue, Topology, Value
from topology.plan import compare

pytestmark = pytest.mark.usefixtures("few_delay_levels")


async def lines(declared: Topology, management: Management) -> list[str]:
    return [each.line for each in compare(declared, await management.topology())]


@pytest.mark.all_delay_levels
@pytest.mark.every_version
async def test_after_an_import_into_an_empty_virtual_host_there_is_no_difference(
    declared: Topology, connection: AbstractConnection, management: Management
) -> None:
    await management.import_definitions(definitions(declared, management.vhost))

    assert await lines(declared, management) == []
    await apply(declared, connection)
    assert await lines(declared, management) == []
    assert len((await management.topology()).bindings) == len(declared.bindings)


async def test_an_import_may_be_repeated(declared: Topology, management: Management) -> None:
    for _ in range(2):
        await management.import_definitions(definitions(declared, management.vhost))

    assert await lines(declared, management) == []


async def test_on_an_empty_virtual_host_everything_is_missing(declared: Topology, management: Management) -> None:
    differences = compare(declared, await management.topology())

    assert {each.change for each in differences} == {"missing"}
    assert len(differences) == len(declared.exchanges) + len(declared.queues) + len(declared.bindings)


Change = Callable[[AbstractChannel], Awaitable[object]]


async def unbind(channel: AbstractChannel, binding: Binding) -> None:
    found = channel.get_queue if binding.destination_kind == "queue" else channel.get_exchange
    destination = await found(binding.destination, ensure=False)
    await destination.unbind(binding.source, binding.routing_key, dict(binding.arguments))


CHANGES: dict[str, tuple[Change, list[str]]] = {
    "a queue deleted": (
        lambda channel: channel.queue_delete("lane.normal.due"),
        [
            "queue lane.normal.due is missing",
            "binding lane.due → queue lane.normal.due, key 'normal.#' is missing",
        ],
    ),
    "a wait queue deleted": (
        lambda channel: channel.queue_delete("lane.delay.07"),
        [
            "queue lane.delay.07 is missing",
            "binding lane.delay.07 → queue lane.delay.07, key '', lane-d07=true, x-match=all is missing",
        ],
    ),
    "an exchange deleted": (
        lambda channel: channel.exchange_delete("lane.events"),
        ["exchange lane.events is missing"],
    ),
    "a lane unbound": (
        lambda channel: unbind(channel, Binding("lane.requests", "lane.batch", routing_key="batch.#")),
        ["binding lane.requests → queue lane.batch, key 'batch.#' is missing"],
    ),
    "a level unbound": (
        lambda channel: unbind(
            channel, Binding("lane.delay.00", "lane.due", "exchange", "", {"x-match": "all", "lane-d00": False})
        ),
        ["binding lane.delay.00 → exchange lane.due, key '', lane-d00=false, x-match=all is missing"],
    ),
    "a lane bound to another's key": (
        lambda channel: bind(channel, Binding("lane.requests", "lane.critical", routing_key="batch.#")),
        ["binding lane.requests → queue lane.critical, key 'batch.#' is on the broker, but not declared"],
    ),
    "a level bound for any match": (
        lambda channel: bind(
            channel, Binding("lane.delay.00", "lane.due", "exchange", "", {"x-match": "any", "lane-d00": False})
        ),
        [
            "binding lane.delay.00 → exchange lane.due, key '', lane-d00=false, x-match=any "
            "is on the broker, but not declared"
        ],
    ),
    "a way into a lane from elsewhere": (
        lambda channel: bind(channel, Binding("amq.topic", "lane.critical", routing_key="#")),
        ["binding amq.topic → queue lane.critical, key '#' is on the broker, but not declared"],
    ),
    "a queue too many": (
        lambda channel: declare_queue(channel, Queue("lane.gold", {"x-queue-type": "quorum"})),
        ["queue lane.gold is on the broker, but not declared"],
    ),
    "an exchange too many": (
        lambda channel: declare_exchange(channel, Exchange("lane.old", "topic")),
        ["exchange lane.old is on the broker, but not declared"],
    ),
}


@pytest.mark.parametrize("name", CHANGES)
async def test_a_change_by_hand_is_named(
    name: str, declared: Topology, connection: AbstractConnection, management: Management
) -> None:
    await management.import_definitions(definitions(declared, management.vhost))
    change, expected = CHANGES[name]

    await change(await connection.channel())

    assert await lines(declared, management) == expected


def queue_changes(declared: Topology, name: str) -> list[tuple[Queue, str]]:
    """The queue with each argument left out or changed, with an extra one, and not durable if that is possible."""
    queue = declared.queue(name)
    other: dict[str, Value] = {
        "x-queue-leader-locator": "client-local",
        "x-queue-master-locator": "client-local",
        "x-dead-letter-exchange": "lane.dead",
        "x-dead-letter-strategy": "at-most-once",
        "x-overflow": "drop-head",
    }
    changed = []
    for key, value in queue.arguments.items():
        rest = {name: each for name, each in queue.arguments.items() if name != key}
        if key not in ("x-queue-type", "x-dead-letter-exchange"):
            changed.append((replace(queue, arguments=rest), f"argument {key} is not set"))
        if key != "x-queue-type":
            value = other[key] if isinstance(value, str) else value + 1 if value > 0 else 5
            changed.append((replace(queue, arguments={**rest, key: value}), f"argument {key} is "))
    changed.append(
        (replace(queue, arguments={**queue.arguments, "x-expires": 3_600_000}), "argument x-expires is 3600000")
    )
    changed.append((replace(queue, arguments={"x-queue-type": "stream"}), 'argument x-queue-type is "stream"'))
    return changed


@pytest.mark.oldest_version
@pytest.mark.parametrize("name", ["lane.critical", "lane.critical.due", "lane.delay.05", "lane.dead"])
async def test_each_changed_argument_is_named(
    name: str, declared: Topology, connection: AbstractConnection, management: Management
) -> None:
    channel = await connection.channel()
    for queue, expected in queue_changes(declared, name):
        await declare_queue(channel, queue)

        found = [each for each in compare(declared, await management.topology()) if each.change == "differs"]

        assert f"queue {name}: {expected}" in " | ".join(each.line for each in found)
        if queue.type != "stream":
            assert len(found) == 1
        await channel.queue_delete(name)


@pytest.mark.parametrize(
    ("there", "line"),
    [
        (Exchange("lane.dead", "direct"), 'exchange lane.dead: type is "direct", declared is "topic"'),
        (Exchange("lane.events", "topic", internal=True), "exchange lane.events: internal is true, declared is false"),
        (Exchange("lane.events", "topic", durable=False), "exchange lane.events: durable is false, declared is true"),
        (
            Exchange("lane.events", "topic", auto_delete=True),
            "exchange lane.events: auto_delete is true, declared is false",
        ),
        (
            Exchange("lane.requests", "topic"),
            'exchange lane.requests: argument alternate-exchange is not set, declared is "lane.fallen"',
        ),
        (
            Exchange("lane.fallen", "fanout", arguments={"alternate-exchange": "lane.dead"}),
            'exchange lane.fallen: argument alternate-exchange is "lane.dead", declared is not set',
        ),
    ],
)
async def test_an_exchange_of_another_type_is_named(
    there: Exchange, line: str, declared: Topology, connection: AbstractConnection, management: Management
) -> None:
    await declare_exchange(await connection.channel(), there)

    found = compare(declared, await management.topology())

    assert [each.line for each in found if each.change == "differs"] == [line]


@pytest.mark.oldest_version
async def test_a_policy_that_would_remove_messages_is_named(
    declared: Topology, connection: AbstractConnection, management: Management, vhost: Vhost
) -> None:
    await apply(declared, connection)

    policy = {"pattern": r"^lane\.dead$", "definition": {"message-ttl": 60_000}, "apply-to": "queues"}
    vhost.api("PUT", f"policies/{vhost.quoted}/trim", policy)

    for _ in range(120):
        if found := await lines(declared, management):
            break
        await asyncio.sleep(0.5)  # the API shows a policy's effect only after its next update, every 5 s
    assert found == ["queue lane.dead: policy message-ttl is 60000, declared is not set"]


async def test_objects_that_are_not_ours_are_ignored(
    declared: Topology, connection: AbstractConnection, management: Management
) -> None:
    await apply(declared, connection)
    channel = await connection.channel()
    orders = await channel.declare_queue("orders", durable=True)
    await channel.declare_queue("lane.reply.support", durable=True)
    shop = await channel.declare_exchange("shop", "topic", durable=True)
    await orders.bind(shop, "#")
    own = await channel.declare_queue(exclusive=True)
    await own.bind("lane.events", "#")
    await own.bind("lane.control", "status")

    assert await lines(declared, management) == []
