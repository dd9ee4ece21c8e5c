"""Runs a private broker in a Docker container of its own, on loopback ports.

This file uses Docker's command, not its API, so that no library has to be installed, and because the command also
handles Docker contexts and rootless engines.
"""

import os
import secrets
import shutil
import socket
from contextlib import suppress
from pathlib import Path

from service.private_broker.source import (
    ERLANG_ARGUMENTS,
    USER,
    Access,
    Steps,
    TooSlow,
    Unavailable,
    free_ports,
    version_if_ready,
)

OFFICIAL = "rabbitmq:4.3-management"
LOCAL = "debian-rabbitmq:4.3-management"
"""The name of the RabbitMQ image for machines that reach no registry: tests/support/rabbitmq-image builds it from
Debian's packages."""
LABEL = "org.lanekeeper.broker"
"""A Docker label of every container that this file or a test creates. Its value is the container's owner: host name and
process id."""
ANSWER_S = 10
PULL_S = 300
START_S = 60


def engine_answers(steps: Steps) -> bool:
    """Whether Docker is installed and its engine answers."""
    if shutil.which("docker") is None:
        return False
    with suppress(Unavailable):
        return steps.run(["docker", "version", "--format", "{{.Server.Version}}"], within_s=ANSWER_S)[0] == 0
    return False


def find_image(steps: Steps, *, official: str = OFFICIAL, local: str = LOCAL) -> str | None:
    """The name of a RabbitMQ image that this machine has. If it has none, the official image is pulled, and its name is
    returned; None if this fails.

    The manifest is requested before the image, so that a registry that does not answer is noticed within seconds.
    """
    for image in (official, local):
        if steps.run(["docker", "image", "inspect", image], within_s=ANSWER_S)[0] == 0:
            return image
    with suppress(Unavailable):
        if steps.run(["docker", "manifest", "inspect", official], within_s=ANSWER_S)[0] == 0:
            steps.say(f"pulling {official}")
            if steps.run(["docker", "pull", "--quiet", official], within_s=PULL_S)[0] == 0:
                return official
    return None


def owner() -> str:
    """This process as `host:process id`: the value of the Docker label `LABEL` on the containers that it starts."""
    return f"{socket.gethostname()}:{os.getpid()}"


def sweep(steps: Steps) -> None:
    """Remove broker containers whose owning process was killed before it could remove them. Only containers whose owner
    ran on this machine are removed, because several machines can share a Docker engine."""
    mine, _, _ = owner().rpartition(":")
    listed = steps.run(
        ["docker", "ps", "--all", f"--filter=label={LABEL}", f'--format={{{{.ID}}}} {{{{.Label "{LABEL}"}}}}'],
        within_s=ANSWER_S,
    )[1]
    for line in listed.splitlines():
        identity, _, its_owner = line.partition(" ")
        host, _, process = its_owner.rpartition(":")
        if host == mine and process.isdigit() and not _is_running(int(process)):
            steps.run(["docker", "rm", "--force", "--volumes", identity], within_s=START_S)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


class Container:
    """A private broker in a Docker container. `folder` is used by this broker only; the caller, who created the folder,
    must also remove it."""

    def __init__(self, folder: Path, *, image: str, steps: Steps) -> None:
        self._image = image
        self._steps = steps
        self._name = f"lanekeeper-{secrets.token_hex(6)}"
        self._created = False
        amqp, management = free_ports(2)
        self.access = Access(amqp_port=amqp, management_port=management)
        self._settings = folder / "settings.env"  # a file, so that lists of processes do not show the password
        self._settings.write_text(
            f"RABBITMQ_DEFAULT_USER={USER}\n"
            f"RABBITMQ_DEFAULT_PASS={self.access.password}\n"
            f"RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS={ERLANG_ARGUMENTS}\n"
        )

    def start(self) -> str:
        """Start the broker, wait until it is ready, and return its version. After `kill`, the broker starts again with
        the same data, ports and name. Raises Unavailable."""
        command = ["docker", "start", self._name] if self._created else self._create()
        # This command runs in new `Steps`, which nobody interrupts, even if the broker is no longer needed. Otherwise
        # Docker might create the container after `remove` was called, and the container would stay.
        self._created = True
        code, output = Steps().run(command, within_s=START_S)
        if code:
            raise Unavailable(f"Docker did not start {self._image}: {output}")
        for _ in self._steps.until(START_S):
            if version := version_if_ready(self.access):
                return version
        raise TooSlow(f"{self._image} was not ready within {START_S} s")

    def kill(self) -> None:
        Steps().run(["docker", "kill", self._name], within_s=START_S)

    def remove(self) -> None:
        if self._created:
            Steps().run(["docker", "rm", "--force", "--volumes", self._name], within_s=START_S)

    def _create(self) -> list[str]:
        ports = ((self.access.amqp_port, 5672), (self.access.management_port, 15672))
        published = [word for ours, its in ports for word in ("--publish", f"127.0.0.1:{ours}:{its}")]
        return [
            "docker",
            "run",
            "--detach",
            "--pull=never",
            f"--name={self._name}",
            f"--hostname={self._name}",  # the host name is part of the node's name, and so of the path to its data
            f"--label={LABEL}={owner()}",
            f"--env-file={self._settings}",
            *published,
            self._image,
        ]
