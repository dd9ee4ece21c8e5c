"""What tests of the topology have in common: a connection to a virtual host, its API, what it should hold."""

from collections.abc import AsyncIterator

import aiormq
import pytest
from aiormq.abc import AbstractConnection

from lanekeeper.contract.names import Names
from tests.support.lanes import LANES
from topology.broker.admin.management import Management, discover
from topology.declaration import declare
from topology.model import Topology


@pytest.fixture
async def connection(vhost) -> AsyncIterator[AbstractConnection]:
    connection = await aiormq.connect(vhost.amqp_url)
    yield connection
    await connection.close()


@pytest.fixture
async def management(vhost) -> Management:
    found = await discover(vhost.amqp_url, vhost.management_url)
    assert found is not None
    return found


@pytest.fixture
def declared(connection: AbstractConnection) -> Topology:
    return declare(LANES, names=Names(), broker_version=str(connection.server_properties["version"]))
