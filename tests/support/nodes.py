"""One node of a cluster in Docker, which can be killed, frozen, disconnected, drained and restarted
(tests/support/cluster.py)."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from service.private_broker import USER
from tests.support.brokers import Vhost
from tests.support.engine import Steps
from tests.support.waiting import until

SIZE = 3
COMMAND_S = 60
"""Time limit of one command, of Docker or of RabbitMQ in a container."""
READY_S = 120
"""Time limit for three nodes to start at once on two busy cores; on two idle cores it takes about 12 s."""
LOOK_EVERY_S = 0.25


async def docker(*words: str, within_s: float = COMMAND_S) -> str:
    """Run a Docker command; returns its output. Raises AssertionError if it fails, Unavailable after `within_s`."""
    code, said = await asyncio.to_thread(Steps().run, ["docker", *words], within_s=within_s)
    assert code == 0, f"docker {' '.join(words[:3])}: {said}"
    return said


@dataclass(frozen=True, slots=True)
class Node:
    """One node. Its methods return when the command has ended; `start` and `restart` when the node is ready."""

    host: str
    address: str
    network: str
    password: str = field(repr=False)

    @property
    def name(self) -> str:
        """The node's name in RabbitMQ."""
        return f"rabbit@{self.host}"

    @property
    def amqp_url(self) -> str:
        return f"amqp://{USER}:{self.password}@{self.address}:5672/"

    @property
    def management_url(self) -> str:
        """Without credentials: they are the same as in `amqp_url`."""
        return f"http://{self.address}:15672"

    async def kill(self) -> None:
        """SIGKILL, like a power cut."""
        await docker("kill", self.host)

    async def start(self) -> None:
        """Start it after `kill`, with the same data, name and address."""
        await docker("start", self.host)
        await self.ready()

    async def restart(self) -> None:
        """Stop it cleanly (SIGTERM) and start it again."""
        await docker("restart", "--time=45", self.host)
        await self.ready()

    async def pause(self) -> None:
        """Freeze all its processes; connections to it stay open but silent."""
        await docker("pause", self.host)

    async def unpause(self) -> None:
        await docker("unpause", self.host)

    async def partition(self) -> None:
        """Disconnect it from its peers and from clients; their connections are not closed."""
        await docker("network", "disconnect", self.network, self.host)

    async def heal(self) -> None:
        """Undo `partition`."""
        await docker("network", "connect", f"--ip={self.address}", self.network, self.host)

    async def drain(self) -> None:
        """Move its leaders elsewhere, close its connections and take no new ones, until `restart`: as before an
        upgrade."""
        await self.run("rabbitmq-upgrade", "drain")

    async def run(self, *command: str, within_s: float = COMMAND_S) -> str:
        """Run a command in its container: `rabbitmqctl`, `rabbitmq-queues`, … Raises AssertionError if it fails."""
        return await docker("exec", self.host, *command, within_s=within_s)

    async def ready(self, *, within_s: float = READY_S) -> None:
        """Wait until it accepts connections, its management API answers, and it sees all three nodes running."""
        await until(self._sees_all, within_s=within_s)

    async def api(self, method: str, path: str, body: object = None) -> Any:
        """Call this node's management API. Raises OSError if it cannot be reached."""
        return await asyncio.to_thread(self._root().api, method, path, body)

    async def _sees_all(self) -> bool:
        await asyncio.sleep(LOOK_EVERY_S)
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(self.address, 5672), timeout=2)
            writer.close()
            found = await self.api("GET", "nodes")
        except (OSError, TimeoutError, AssertionError, ValueError):  # AssertionError: the API refused
            return False
        return sum(bool(each.get("running")) for each in found) == SIZE

    def _root(self) -> Vhost:
        return Vhost("/", self.amqp_url, self.management_url, "")
