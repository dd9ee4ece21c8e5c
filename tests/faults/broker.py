"""One node of RabbitMQ in Docker that faults can affect, with the same methods as a node of a cluster."""

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from service.private_broker import ERLANG_ARGUMENTS, LOOPBACK, OFFICIAL, USER, free_ports, version_if_ready
from tests.support.cluster import Cluster
from tests.support.engine import LABEL, Steps, Unavailable, engine_answers, find_image, owner, sweep
from tests.support.nodes import COMMAND_S, LOOK_EVERY_S, READY_S, Node, docker
from tests.support.waiting import until


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
    with tempfile.TemporaryDirectory(prefix="lanekeeper-faults-") as folder:
        settings = Path(folder) / "settings.env"  # a file, so that the password is in no list of processes
        settings.write_text(
            f"RABBITMQ_DEFAULT_USER={USER}\n"
            f"RABBITMQ_DEFAULT_PASS={node.password}\n"
            f"RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS={ERLANG_ARGUMENTS}\n"
        )
        try:
            await docker(
                "run",
                "--detach",
                "--pull=never",
                f"--name={node.host}",
                f"--hostname={node.host}",
                f"--label={LABEL}={owner()}",
                f"--env-file={settings}",
                f"--publish={LOOPBACK}:{amqp}:5672",
                f"--publish={LOOPBACK}:{management}:15672",
                image,
            )
            await node.ready()
            overview = await node.api("GET", "overview")
            yield Cluster((node,), str(overview["rabbitmq_version"]))
        finally:  # blocking, so that no cancellation interrupts it
            steps.run(["docker", "rm", "--force", "--volumes", node.host], within_s=COMMAND_S)


def _image(steps: Steps) -> str:
    if not engine_answers(steps):
        raise Unavailable("faults are injected into brokers in Docker, and no engine answers")
    if found := find_image(steps):
        return found
    raise Unavailable(f"{OFFICIAL} is not here; tests/support/rabbitmq-image 4.3 makes one")
