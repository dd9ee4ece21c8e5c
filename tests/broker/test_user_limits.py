"""An exported application's use of the broker itself is limited (threat T21)."""

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress

import aio_pika
import pytest
from aio_pika.exceptions import AMQPError
from yarl import URL

from lanekeeper.contract.names import Names
from tests.support.brokers import Vhost
from tests.support.lanes import LANES
from tests.support.users import HASH, PASSWORD
from tests.support.waiting import until
from topology.declaration import declare
from topology.export import User, definitions

pytestmark = pytest.mark.every_version

CONNECTIONS, CHANNELS = 2, 3


@pytest.fixture
async def url(vhost: Vhost) -> AsyncIterator[str]:
    """The URL of an application that may have only few connections and channels."""
    name = f"app-{secrets.token_hex(4)}"
    topology = declare(LANES, names=Names(), broker_version=vhost.version)
    user = User(name, "application", HASH, connections=CONNECTIONS, channels=CHANNELS)
    vhost.api("POST", "definitions", definitions(topology, vhost.name, [user]))
    yield str(URL(vhost.amqp_url).with_user(name).with_password(PASSWORD))
    vhost.api("DELETE", f"users/{name}")


async def refused(opening: object) -> bool:
    try:
        await opening  # type: ignore[misc]
    except (AMQPError, ConnectionError, RuntimeError):
        return True
    return False


async def test_connections_and_channels_above_the_users_limits_are_refused(url: str) -> None:
    async with AsyncExitStack() as stack:
        made = []
        for _ in range(CONNECTIONS):
            made.append(await aio_pika.connect(url))
            stack.push_async_callback(_closed, made[-1])
        await until(lambda: refused(_connected(url)))  # the broker counts a moment after it has let somebody in
        for _ in range(CHANNELS):
            await made[0].channel()
        await until(lambda: refused(_with_a_channel(made[1])))


async def _connected(url: str) -> None:
    await (await aio_pika.connect(url)).close()


async def _with_a_channel(connection: aio_pika.abc.AbstractConnection) -> None:
    await (await connection.channel()).close()


async def _closed(connection: aio_pika.abc.AbstractConnection) -> None:
    with suppress(AMQPError, ConnectionError, RuntimeError):
        await connection.close()


def test_workers_have_no_such_limits() -> None:
    topology = declare(LANES, names=Names(), broker_version="4.3.6")
    users = definitions(topology, "/", [User("w", "worker", HASH), User("a", "client", HASH)])["users"]
    assert [each.get("limits") for each in users] == [None, {"max-connections": 200, "max-channels": 2000}]
