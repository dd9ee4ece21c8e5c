"""Definitions imported into an empty virtual host equal the declared topology, and each change by hand is reported."""

import asyncio

import pytest
from aio_pika.abc import AbstractConnection

from tests.support.brokers import Vhost
from topology.broker.admin import apply
from topology.broker.management import Management
from topology.declaration import Topology
from topology.export import definitions
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
