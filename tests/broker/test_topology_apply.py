"""Applying the topology to a real broker: completely, repeatedly, concurrently, and never over different objects."""

import asyncio
from dataclasses import replace

import aio_pika
import pytest
from aio_pika.abc import AbstractConnection

from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import TopologyMismatch
from tests.support.brokers import Vhost
from tests.support.lanes import LANES
from topology.broker.admin import apply
from topology.broker.management import Management
from topology.declaration import Exchange, Queue, Topology, declare
from topology.lanes import BATCH, CRITICAL, NORMAL
from topology.plan import compare

pytestmark = pytest.mark.usefixtures("few_delay_levels")


async def lines(declared: Topology, management: Management) -> list[str]:
    return [each.line for each in compare(declared, await management.topology())]


@pytest.mark.all_delay_levels
@pytest.mark.every_version
async def test_on_an_empty_virtual_host_everything_is_declared(
    declared: Topology, connection: AbstractConnection, management: Management
) -> None:
    await apply(declared, connection)

    assert await lines(declared, management) == []


async def test_applying_again_changes_nothing(
    declared: Topology, connection: AbstractConnection, management: Management
) -> None:
    await apply(declared, connection)
    await apply(declared, connection)

    assert await lines(declared, management) == []


@pytest.mark.every_version
async def test_several_processes_may_apply_at_the_same_time(
    declared: Topology, vhost: Vhost, management: Management
) -> None:
    connections = [await aio_pika.connect(vhost.amqp_url) for _ in range(4)]

    await asyncio.gather(*(apply(declared, each) for each in connections))

    assert await lines(declared, management) == []
    await asyncio.gather(*(each.close() for each in connections))


async def test_two_installations_share_a_virtual_host(
    declared: Topology, connection: AbstractConnection, management: Management
) -> None:
    other = declare(LANES, names=Names("acme"), broker_version=declared.broker_version)

    await apply(declared, connection)
    await apply(other, connection)

    assert await lines(declared, management) == []
    assert await lines(other, management) == []


@pytest.mark.every_version
async def test_a_queue_with_another_argument_is_named_and_not_changed(
    vhost: Vhost, declared: Topology, connection: AbstractConnection
) -> None:
    await apply(declared, connection)
    channel = await connection.channel()
    requests = await channel.get_exchange("lane.requests", ensure=False)
    await requests.publish(aio_pika.Message(b"kept"), "critical.a.b")
    lanes = (replace(CRITICAL, max_length=7), NORMAL, BATCH)

    with pytest.raises(TopologyMismatch) as raised:
        await apply(declare(lanes, names=Names(), broker_version=declared.broker_version), connection)

    text = str(raised.value)
    assert text.startswith(
        f"queue lane.critical in vhost {vhost.name} exists with another x-max-length: wanted 7, found 10000."
    )
    assert "`lanekeeper topology plan`" in text
    assert f"rabbitmqctl -p '{vhost.name}' delete_queue 'lane.critical'" in text
    critical = await (await connection.channel()).get_queue("lane.critical", ensure=False)
    message = await critical.get()
    assert message.body == b"kept"


@pytest.mark.oldest_version
@pytest.mark.parametrize(
    ("there", "text"),
    [
        (
            Exchange("lane.dead", "direct"),
            "exchange lane.dead in vhost {} exists with another type: wanted topic, found",
        ),
        (
            Exchange("lane.due", "topic"),
            "exchange lane.due in vhost {} exists with another internal: wanted true, found",
        ),
        (Exchange("lane.requests", "topic"), "another alternate-exchange: wanted lane.fallen, found nothing"),
        (Queue("lane.dead", {"x-queue-type": "classic"}), "another x-queue-type: wanted quorum, found classic"),
        (Queue("lane.dead", {"x-queue-type": "quorum", "x-max-length": 9}), "x-max-length: wanted nothing, found 9"),
    ],
    ids=["exchange type", "internal", "alternate exchange", "queue type", "limit"],
)
async def test_a_property_that_the_broker_compares_is_refused_by_name(
    vhost: Vhost, declared: Topology, connection: AbstractConnection, there: Exchange | Queue, text: str
) -> None:
    other = Topology(queues=(there,)) if isinstance(there, Queue) else Topology(exchanges=(there,))
    await apply(other, connection)

    with pytest.raises(TopologyMismatch) as raised:
        await apply(declared, connection)

    assert text.format(vhost.name) in str(raised.value)


@pytest.mark.oldest_version
async def test_a_name_exclusively_used_by_another_client_is_reported(
    declared: Topology, connection: AbstractConnection, vhost: Vhost
) -> None:
    other = await aio_pika.connect(vhost.amqp_url)
    await (await other.channel()).declare_queue("lane.dead", exclusive=True)

    with pytest.raises(TopologyMismatch, match="an exclusive queue of another client"):
        await apply(declared, connection)
    await other.close()
