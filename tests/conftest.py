"""Fixtures for what runs against a real broker.

broker        the broker that tests share: LANEKEEPER_AMQP_URL, else one that is started (`./dev test` starts it once)
vhost         a virtual host of the test's own on it
own_broker    a broker of the test's own, which it may kill and start again

Tests in tests/broker and tests/journeys that use one of them run four times: on that broker, and on RabbitMQ 3.10, 4.0
and 4.3 in containers (`-m "not versions"` leaves those out, `-k 4.3` takes one of them).
"""

import os
from collections.abc import AsyncIterator, Iterator

import pytest

from service.demo.broker import PrivateBroker, guarded_broker, private_broker
from tests.support.brokers import RunningBroker, Vhost, fresh_vhost


@pytest.fixture(scope="session")
def broker() -> Iterator[RunningBroker]:
    """The broker that all tests share."""
    if url := os.environ.get("LANEKEEPER_AMQP_URL"):
        yield RunningBroker.at(url, os.environ.get("LANEKEEPER_MANAGEMENT_URL"))
        return
    with guarded_broker() as started:
        yield RunningBroker(started.amqp_url, started.management_url, started.version)


@pytest.fixture
def vhost(broker: RunningBroker) -> Iterator[Vhost]:
    """A virtual host of the test's own: `.amqp_url`, `.management_url`, `.name`, `.version`, `.api(…)`."""
    with fresh_vhost(broker) as made:
        yield made


@pytest.fixture
async def own_broker() -> AsyncIterator[PrivateBroker]:
    """A broker of the test's own: `await own_broker.kill()`, `await own_broker.start()`."""
    async with private_broker() as started:
        yield started
