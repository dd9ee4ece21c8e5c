"""A worker is killed while it fetches a body: another one fetches it again, and the provider is called once."""

import asyncio
import hashlib
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from service.simulated.app import SimulatedAPI
from tests.support.brokers import Vhost
from tests.support.processes import environment, lanekeeper
from tests.support.requester import requester
from tests.support.waiting import until

pytestmark = pytest.mark.slow
BODY = b'{"prompt": "fetched", "system": "%b"}' % (b"x" * 2_000_000)
SHA256 = hashlib.sha256(BODY).hexdigest()


@asynccontextmanager
async def host(asked: list[web.Request]) -> AsyncIterator[str]:
    """A host with the body, which sends nothing to the first who asks."""

    async def body(request: web.Request) -> web.Response:
        asked.append(request)
        if len(asked) == 1:
            await asyncio.Event().wait()
        return web.Response(body=BODY)

    app = web.Application()
    app.router.add_get("/bodies/one", body)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/bodies"
    finally:
        await runner.cleanup()


async def test_a_worker_that_is_killed_while_it_fetches_a_body_is_replaced(vhost: Vhost, tmp_path: Path) -> None:
    asked: list[web.Request] = []
    async with SimulatedAPI() as api, host(asked) as url, requester(vhost.amqp_url) as app:
        environ = environment(
            vhost.amqp_url,
            vhost.management_url,
            ANTHROPIC_BASE_URL=api.base_url,
            LANEKEEPER_GATEWAY__PORT="0",
            LANEKEEPER_BODIES__ALLOW=url,
            LANEKEEPER_BODIES__ALLOW_PRIVATE="true",
        )
        async with lanekeeper("serve", environ=environ, folder=tmp_path) as first:
            await first.ready()
            headers = {"x-lane-body": f"{url}/one", "x-lane-body-sha256": SHA256}
            id = await app.publish(b"", headers=headers, message_id="one")
            await until(lambda: asked)
            first.send(signal.SIGKILL)
            async with lanekeeper("serve", environ=environ, folder=tmp_path):
                reply = await app.final(id)

        assert (reply.status, len(asked), len(api.calls)) == ("ok", 2, 1)
