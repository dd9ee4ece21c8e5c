"""RabbitMQ in Docker, a single node or a cluster of three, which may be killed, frozen, disconnected and restarted.

    async with cluster() as c:
        c.amqp_urls, c.amqp_url         each node's URL; all of them, joined by commas
        c.management_url                the first node's (each has its own: `node.management_url`)
        node = await c.leader_of("lane.critical")
        await node.kill()               SIGKILL; `start()` brings it back with its data, name and address
        await node.pause()              frozen, like a machine that hangs; undone by `unpause()`
        await node.partition()          disconnected from its peers and from us; undone by `heal()`
        await node.drain()              as before an upgrade; undone by `restart()`
        await c.whole()                 waits until all three run and know it

A cluster's nodes are reached at their containers' addresses, not at published ports: `partition` disconnects clients
too, and the address stays the same afterwards. Without a Docker engine or an image they raise Unavailable."""

import asyncio
import json
import os
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support import keeper
from tests.support.brokers import Vhost
from tests.support.engine import LABEL, Steps, Unavailable, image_here, owner, remove_node, run_node, sweep
from tests.support.private_broker import LOOPBACK, USER, free_ports, version_if_ready
from tests.support.waiting import until

SIZE = 3
COMMAND_S = 60
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


@dataclass(frozen=True, slots=True)
class Cluster:
    """Three nodes, and one user with all permissions."""

    nodes: tuple[Node, ...]
    version: str

    @property
    def amqp_urls(self) -> tuple[str, ...]:
        return tuple(each.amqp_url for each in self.nodes)

    @property
    def amqp_url(self) -> str:
        """All URLs, in the form of LANEKEEPER_AMQP_URL."""
        return ",".join(self.amqp_urls)

    @property
    def management_url(self) -> str:
        return self.nodes[0].management_url

    def others(self, node: Node) -> tuple[Node, ...]:
        """The two nodes other than `node`."""
        return tuple(each for each in self.nodes if each != node)

    async def alive(self) -> tuple[Node, ...]:
        """The nodes that are not killed, frozen or disconnected."""
        words = ("--filter=status=running", f"--filter=network={self.nodes[0].network}", "--format={{.Names}}")
        running = (await docker("ps", *words)).split()
        return tuple(each for each in self.nodes if each.host in running)

    async def leader_of(self, queue: str) -> Node:
        """The node of a quorum queue's leader; waits until there is one that is alive."""
        # Read from Ra's table, which each node has: the management API and `rabbitmqctl list_queues` wait for a node
        # that hangs. For the names of members see rabbit_quorum_queue, `qname_to_internal_name`.
        member = f"%2F_{queue}"
        expression = f"ra_leaderboard:lookup_leader('{member}')."

        async def leads() -> Node | None:
            alive = await self.alive()
            for asked in alive:  # several, because a drained node knows no leader
                said = await asked.run("rabbitmqctl", "--quiet", "eval", expression)
                if leader := next((each for each in alive if each.name in said), None):
                    return leader
            return None

        found: Node = await until(leads, within_s=COMMAND_S)
        return found

    async def move_leader(self, queue: str, node: Node) -> None:
        member = f"%2F_{queue}"

        async def leads() -> bool:
            leader = await self.leader_of(queue)
            if leader != node:
                servers = (f"{{'{member}', '{each.name}'}}" for each in (leader, node))
                await leader.run("rabbitmqctl", "--quiet", "eval", f"ra:transfer_leadership({', '.join(servers)}).")
            return leader == node

        await until(leads, within_s=COMMAND_S)

    async def whole(self, *, within_s: float = READY_S) -> None:
        for node in self.nodes:
            await node.ready(within_s=within_s)


@asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    """Three nodes for as long as the block lasts; they are removed however it ends.

    If a process was killed and left its cluster behind, the next call removes it.
    """
    steps = Steps()
    image = await asyncio.to_thread(_image, steps)
    await asyncio.to_thread(_sweep, steps)
    name = f"lanekeeper-{secrets.token_hex(4)}"
    hosts = [f"{name}-{number}" for number in range(1, SIZE + 1)]
    password, cookie = secrets.token_hex(16), {"RABBITMQ_ERLANG_COOKIE": secrets.token_hex(16)}
    with tempfile.NamedTemporaryFile("w", prefix="lanekeeper-cluster-") as configuration:
        try:
            prefix = await _network(name)
            nodes = tuple(Node(host, f"{prefix}.{10 + at}", name, password) for at, host in enumerate(hosts))
            configuration.write(_configuration(nodes))
            configuration.flush()
            os.chmod(configuration.name, 0o644)
            mounted = f"--volume={configuration.name}:/etc/rabbitmq/conf.d/20-cluster.conf:ro"
            for node in nodes:
                options = [f"--network={node.network}", f"--ip={node.address}", mounted]
                await asyncio.to_thread(
                    run_node, steps, image, name=node.host, password=password, options=options, environ=cookie
                )
            made = Cluster(nodes, "")
            await made.whole()
            yield Cluster(nodes, str((await nodes[0].api("GET", "overview"))["rabbitmq_version"]))
        finally:  # blocking calls, so that no cancellation interrupts them
            for host in hosts:
                remove_node(steps, host)
            steps.run(["docker", "network", "rm", name], within_s=COMMAND_S)


def _image(steps: Steps) -> str:
    if folder := os.environ.get(keeper.FOLDER):
        return keeper.ask(folder, "image", "4.3")["image"]
    return image_here(steps)


def _sweep(steps: Steps) -> None:
    sweep(steps)
    # Remove networks of clusters once they are empty; Docker refuses to remove the others.
    label = f"--filter=label={LABEL}"
    listed = steps.run(["docker", "network", "ls", label, "--format={{.Name}}"], within_s=COMMAND_S)[1].split()
    for name in listed:
        found = steps.run(["docker", "ps", "--all", "--quiet", f"--filter=network={name}"], within_s=COMMAND_S)[1]
        if not found:
            steps.run(["docker", "network", "rm", name], within_s=COMMAND_S)


async def _network(name: str) -> str:
    """Make the network; returns the first three numbers of its addresses.

    It is made twice: first to let Docker choose a free subnet, then with that subnet given explicitly, because only
    then can containers have fixed addresses.
    """
    label = f"--label={LABEL}={owner()}"
    for _ in range(5):
        await docker("network", "create", label, name)
        (found,) = json.loads(await docker("network", "inspect", "--format={{json .IPAM.Config}}", name))
        await docker("network", "rm", name)
        prefix = str(found["Subnet"]).rsplit(".", 1)[0]
        try:
            await docker("network", "create", label, f"--subnet={prefix}.0/24", name)
            return prefix
        except AssertionError:  # another process took the subnet in between
            continue
    raise Unavailable("Docker gave no free subnet")


def _configuration(nodes: tuple[Node, ...]) -> str:
    peers = "".join(
        f"cluster_formation.classic_config.nodes.{at} = {node.name}\n" for at, node in enumerate(nodes, start=1)
    )
    return (
        "cluster_formation.peer_discovery_backend = classic_config\n"
        f"{peers}"
        "cluster_partition_handling = pause_minority\n"  # 4.3 ignores it, and has no other partition handling
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone(Node):
    """The only node; its ports on loopback stay the same."""

    amqp_port: int
    management_port: int

    @property
    def amqp_url(self) -> str:
        return f"amqp://{USER}:{self.password}@{LOOPBACK}:{self.amqp_port}/"

    @property
    def management_url(self) -> str:
        return f"http://{LOOPBACK}:{self.management_port}"

    async def ready(self, *, within_s: float = READY_S) -> None:
        async def answers() -> bool:
            await asyncio.sleep(LOOK_EVERY_S)
            return await asyncio.to_thread(version_if_ready, self.management_url, self.password) is not None

        await until(answers, within_s=within_s)


@asynccontextmanager
async def single() -> AsyncIterator[Cluster]:
    """A single node for as long as the block lasts. Raises Unavailable without Docker or an image."""
    steps = Steps()
    image = await asyncio.to_thread(_image, steps)
    await asyncio.to_thread(sweep, steps)
    amqp, management = free_ports(2)
    node = Alone(
        host=f"lanekeeper-{secrets.token_hex(6)}",
        address=LOOPBACK,
        network="bridge",
        password=secrets.token_hex(16),
        amqp_port=amqp,
        management_port=management,
    )
    ports = [f"--publish={LOOPBACK}:{amqp}:5672", f"--publish={LOOPBACK}:{management}:15672"]
    try:
        await asyncio.to_thread(run_node, steps, image, name=node.host, password=node.password, options=ports)
        await node.ready()
        yield Cluster((node,), str((await node.api("GET", "overview"))["rabbitmq_version"]))
    finally:  # blocking, so that no cancellation interrupts it
        remove_node(steps, node.host)
