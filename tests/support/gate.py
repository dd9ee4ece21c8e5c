"""A gateway in the test's own process, before the lanes of a worker (`serving`).

async with serving(vhost.amqp_url) as worker, gate(worker.settings) as url:
    …                               an HTTP client, or the vendor's own with `base_url=url`
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from consumers.state.following import FollowedStore
from consumers.state.opening import open_store
from service.config.gateway_section import GatewaySettings
from service.config.settings import Settings
from service.gateway.app import Gateway, client_for
from service.gateway.server import Server


def opened(settings: Settings) -> FollowedStore:
    """The store of its workers, opened as another process does it."""
    return open_store(settings.store, namespace=settings.namespace, spec=settings.store_spec())


@asynccontextmanager
async def gate(settings: Settings, *, port: int = 0, **spec: Any) -> AsyncIterator[str]:
    """Its URL. `port`: 0 is any free one; `spec`: settings of the gateway."""
    made = settings.model_copy(update={"gateway": GatewaySettings(port=port, **spec)})
    async with client_for(made) as client, opened(made) as store:
        routes = Gateway(made, client, store)
        async with Server(routes.reasons, host=made.gateway.host, port=port, routes=routes) as server:
            yield server.url
