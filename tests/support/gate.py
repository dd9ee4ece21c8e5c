"""A gateway in the test's own process, before the lanes of a worker (`serving`).

async with serving(vhost.amqp_url) as worker, gate(worker.settings) as url:
    …                               an HTTP client, or the vendor's own with `base_url=url`
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from service.config.gateway_section import GatewaySettings
from service.config.settings import Settings
from service.gateway.app import Gateway, client_for
from service.gateway.server import Server


@asynccontextmanager
async def gate(settings: Settings, **spec: Any) -> AsyncIterator[str]:
    """Its URL. `spec`: settings of the gateway."""
    made = settings.model_copy(update={"gateway": GatewaySettings(port=0, **spec)})
    async with client_for(made) as client:
        routes = Gateway(made, client)
        async with Server(routes.reasons, host=made.gateway.host, port=0, routes=routes) as server:
            yield server.url
