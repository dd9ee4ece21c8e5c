"""A RabbitMQ cluster of three nodes in Docker, which tests may kill, freeze, disconnect and restart.

    async with cluster() as c:
        c.amqp_urls, c.amqp_url         each node's URL; all of them, joined by commas
        c.management_url                the first node's (each has its own: `node.management_url`)
        node = await c.leader_of("lane.critical")
        await node.kill()               SIGKILL; `start()` brings it back with its data, name and address
        await node.pause()              frozen, like a machine that hangs; undone by `unpause()`
        await node.partition()          disconnected from its peers and from us; undone by `heal()`
        await node.drain()              as before an upgrade; undone by `restart()`
        await c.whole()                 waits until all three run and know it

Nodes are reached at their containers' addresses, not at published ports: `partition` disconnects clients too, and the
address stays the same afterwards. Without a Docker engine or an image, `cluster` raises Unavailable.
"""

import asyncio
import json
import os
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from service.private_broker import ERLANG_ARGUMENTS, OFFICIAL, USER
from tests.support import keeper
from tests.support.engine import LABEL, Steps, Unavailable, engine_answers, find_image, owner, sweep
from tests.support.nodes import COMMAND_S, READY_S, SIZE, Node, docker
from tests.support.waiting import until

KEEPER = "LANEKEEPER_TESTS_KEEPER"


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

    async def whole(self, *, within_s: float = READY_S) -> None:
        """Wait until every node runs and sees its peers."""
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
    password = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="lanekeeper-cluster-") as folder:
        try:
            prefix = await _network(name)
            nodes = tuple(Node(host, f"{prefix}.{10 + at}", name, password) for at, host in enumerate(hosts))
            settings, configuration = _files(Path(folder), nodes, password)
            await asyncio.gather(*(_run(node, image, settings, configuration) for node in nodes))
            made = Cluster(nodes, "")
            await made.whole()
            yield Cluster(nodes, str((await nodes[0].api("GET", "overview"))["rabbitmq_version"]))
        finally:  # blocking calls, so that no cancellation interrupts them
            steps.run(["docker", "rm", "--force", "--volumes", *hosts], within_s=COMMAND_S)
            steps.run(["docker", "network", "rm", name], within_s=COMMAND_S)


def _image(steps: Steps) -> str:
    if folder := os.environ.get(KEEPER):
        return keeper.ask(folder, "image", "4.3")["image"]
    if not engine_answers(steps):
        raise Unavailable("a cluster needs Docker, and no engine answers")
    if found := find_image(steps):
        return found
    raise Unavailable(f"{OFFICIAL} is not here and cannot be pulled; tests/support/rabbitmq-image 4.3 makes one")


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


def _files(folder: Path, nodes: tuple[Node, ...], password: str) -> tuple[Path, Path]:
    """A file of environment variables and one of RabbitMQ's configuration. They are files so that the password is in no
    list of processes."""
    settings = folder / "settings.env"
    settings.write_text(
        f"RABBITMQ_DEFAULT_USER={USER}\n"
        f"RABBITMQ_DEFAULT_PASS={password}\n"
        f"RABBITMQ_ERLANG_COOKIE={secrets.token_hex(16)}\n"
        f"RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS={ERLANG_ARGUMENTS}\n"
    )
    configuration = folder / "cluster.conf"
    peers = "".join(
        f"cluster_formation.classic_config.nodes.{at} = {node.name}\n" for at, node in enumerate(nodes, start=1)
    )
    configuration.write_text(
        "cluster_formation.peer_discovery_backend = classic_config\n"
        f"{peers}"
        "cluster_partition_handling = pause_minority\n"  # 4.3 ignores it, and has no other partition handling
    )
    configuration.chmod(0o644)
    return settings, configuration


async def _run(node: Node, image: str, settings: Path, configuration: Path) -> None:
    await docker(
        "run",
        "--detach",
        "--pull=never",
        f"--name={node.host}",
        f"--hostname={node.host}",  # is part of the node's name, and so of the path to its data
        f"--network={node.network}",
        f"--ip={node.address}",
        f"--label={LABEL}={owner()}",
        f"--env-file={settings}",
        f"--volume={configuration}:/etc/rabbitmq/conf.d/20-cluster.conf:ro",
        image,
    )
