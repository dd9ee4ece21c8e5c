"""Whether a user may publish is checked without delivering a message to anybody."""

from collections.abc import AsyncIterator

import pytest

from lanekeeper.amqp.connection import Connection
from lanekeeper.contract.problems import AccessRefused, TopologyMismatch
from tests.support.brokers import Vhost
from topology.broker.admin import check_write_rights

pytestmark = pytest.mark.oldest_version


@pytest.fixture
async def connection(vhost: Vhost) -> AsyncIterator[Connection]:
    async with Connection(vhost.amqp_url, name="rights") as connection:
        yield connection


async def test_the_check_of_the_right_to_publish_delivers_nothing(connection: Connection) -> None:
    channel = await connection.channel(confirms=True)
    queue = (await channel.queue_declare("", exclusive=True)).queue or ""
    await channel.queue_bind(queue, "amq.topic", "#")
    await check_write_rights(connection, (("", queue), ("amq.topic", "some.key")))
    await channel.basic_publish(b"after", exchange="amq.topic", routing_key="after")
    found = (await channel.queue_declare(queue, passive=True)).message_count
    assert found == 1, "that which was published after it"


@pytest.mark.parametrize("exchange", ["", "amq.topic"])
async def test_a_missing_right_is_reported_each_time(connection: Connection, vhost: Vhost, exchange: str) -> None:
    allowed = {"": "^amq.topic$", "amq.topic": "^amq.default$"}[exchange]
    vhost.api("PUT", f"permissions/{vhost.quoted}/{vhost.user}", {"configure": "", "write": allowed, "read": ""})
    for _ in range(20):
        with pytest.raises(AccessRefused, match=exchange or "amq.default"):
            await check_write_rights(connection, (("", "some"), ("amq.topic", "some")))


async def test_a_missing_exchange_is_reported_with_the_command_that_declares_it(connection: Connection) -> None:
    with pytest.raises(TopologyMismatch, match="lanekeeper topology apply"):
        await check_write_rights(connection, (("not-there", "some"),))
