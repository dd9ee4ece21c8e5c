"""Shared by tests of the topology: a connection to a virtual host, its management API, the declared topology."""

from collections.abc import AsyncIterator

import aio_pika
import pytest
from aio_pika.abc import AbstractConnection

from lanekeeper.contract.names import Names
from tests.support.brokers import Vhost, version_of
from tests.support.defaults import LANES
from topology.broker.management import Management, discover
from topology.declaration import Topology, declare


@pytest.fixture
async def connection(vhost: Vhost) -> AsyncIterator[AbstractConnection]:
    connection = await aio_pika.connect(vhost.amqp_url)
    yield connection
    await connection.close()


@pytest.fixture
async def management(vhost: Vhost) -> Management:
    found = await discover(vhost.amqp_url, vhost.management_url)
    assert found is not None
    return found


@pytest.fixture
def declared(connection: AbstractConnection) -> Topology:
    return declare(LANES, names=Names(), broker_version=version_of(connection))
