"""Starts RabbitMQ with testcontainers, on loopback ports."""

import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import cast

from testcontainers.community.rabbitmq import RabbitMqContainer
from testcontainers.core.config import ConnectionMode, testcontainers_config

from service.private_broker import ERLANG_ARGUMENTS, LOOPBACK, USER, version_if_ready
from tests.support.brokers import RunningBroker
from tests.support.engine import LABEL, Steps, Unavailable, owner

READY_S = 60
DATA = "/var/lib/rabbitmq"
DATA_OPTIONS = "size=4g"
"""In memory: nobody starts these brokers again, and quorum queues would wait for the disk at each declaration."""
SMALL = "+S 1:1 +SDcpu 1:1 +SDio 1"
"""One thread of each kind. Most of these brokers' work is to declare queues, which then takes a third less CPU time."""


def start_rabbitmq(
    image: str, *, steps: Steps, keep: Callable[[RabbitMqContainer], object], configuration: Path | None = None
) -> RunningBroker:
    """Start a container and wait until it is ready. `keep` gets it before the start, so that it is always stopped."""
    # The reaper of testcontainers needs a separate image, from a registry that not every machine can reach. The keeper
    # stops all containers instead.
    testcontainers_config.ryuk_disabled = True
    testcontainers_config.connection_mode_override = ConnectionMode.docker_host
    logging.getLogger("pika").setLevel(logging.CRITICAL)  # says ERROR each second until the broker is up
    password = secrets.token_urlsafe(18)
    made = RabbitMqContainer(image, username=USER, password=password).with_kwargs(labels={LABEL: owner()})
    made.with_tmpfs_mount(DATA, DATA_OPTIONS)
    made.with_env("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", f"{ERLANG_ARGUMENTS} {SMALL}")
    # Ports that the engine chooses, on loopback; testcontainers' own method would publish them on every address.
    made.ports = cast(dict[str, int | None], {"5672/tcp": (LOOPBACK, None), "15672/tcp": (LOOPBACK, None)})
    if configuration is not None:
        made.with_volume_mapping(str(configuration), "/etc/rabbitmq/conf.d/30-lanekeeper.conf", "ro")
    keep(made)
    made.start()
    amqp_url = f"amqp://{USER}:{password}@{LOOPBACK}:{made.get_exposed_port(5672)}/"
    management_url = f"http://{LOOPBACK}:{made.get_exposed_port(15672)}"
    for _ in steps.until(READY_S):
        if version := version_if_ready(management_url, password):
            return RunningBroker(amqp_url, management_url, version)
    raise Unavailable(f"{image} was not ready within {READY_S} s")
