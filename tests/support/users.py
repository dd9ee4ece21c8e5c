"""Users as `topology export` makes them, one for each role, imported into a virtual host.

async with imported_users(vhost) as it:
    assert not await it.may("application", act)
"""

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection
from aiormq.exceptions import ChannelAccessRefused
from yarl import URL

from lanekeeper.contract.names import Names
from tests.support.brokers import Vhost
from tests.support.defaults import LANES
from topology.broker.management import Management, discover
from topology.declaration import Topology, declare
from topology.export import User, definitions, hash_password

PASSWORD = secrets.token_urlsafe()
HASH = hash_password(PASSWORD, salt=secrets.token_bytes(4))


@dataclass(frozen=True)
class Act:
    what: str
    do: Callable[[AbstractChannel], Awaitable[object]]


class Broker:
    """A virtual host set up only by importing definitions, and a connection for each of its users."""

    def __init__(self, vhost: Vhost, management: Management, stack: AsyncExitStack) -> None:
        mark = secrets.token_hex(4)  # users belong to the whole broker, which other tests share
        self.app = f"support-{mark}"
        self.users = {
            "application": User(self.app, "application", HASH, lanes=("normal", "batch")),
            "pager": User(f"pager-{mark}", "application", HASH, lanes=("critical",)),
            "client": User(f"client-{mark}", "client", HASH, lanes=("critical",)),
            "worker": User(f"worker-{mark}", "worker", HASH),
            "operator": User(f"operator-{mark}", "operator", HASH),
            "deployer": User(f"deployer-{mark}", "deployer", HASH),
        }
        self.topology: Topology = declare(LANES, names=Names(), broker_version=vhost.version)
        self.management = management
        self.version = vhost.version
        self._url = URL(vhost.amqp_url)
        self._stack = stack
        self._connections: dict[str, AbstractConnection] = {}

    def url(self, role: str) -> str:
        return str(self._url.with_user(self.users[role].name).with_password(PASSWORD))

    async def connection(self, role: str) -> AbstractConnection:
        if role not in self._connections:
            self._connections[role] = await aio_pika.connect(self.url(role))
            self._stack.push_async_callback(self._connections[role].close)
        return self._connections[role]

    async def may(self, role: str, act: Act) -> bool:
        """Whether the broker allows the user to do this; raises any error other than a refusal."""
        channel = await (await self.connection(role)).channel()
        try:
            await act.do(channel)
        except ChannelAccessRefused:
            return False
        await channel.close()
        return True


@asynccontextmanager
async def imported_users(vhost: Vhost) -> AsyncIterator[Broker]:
    async with AsyncExitStack() as stack:
        management = await discover(vhost.amqp_url, vhost.management_url)
        assert management is not None
        broker = Broker(vhost, management, stack)
        await management.import_definitions(definitions(broker.topology, vhost.name, list(broker.users.values())))
        for user in broker.users.values():
            stack.callback(vhost.api, "DELETE", f"users/{user.name}")
        yield broker
