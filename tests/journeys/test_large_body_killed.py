"""A worker is killed while it fetches a body: another one fetches it again, and the provider is called once."""

import asyncio
import hashlib
import signal

from aiohttp import web

from service.simulated.app import SimulatedAPI
from tests.support.processes import environment, lanekeeper
from tests.support.requester import requester
from tests.support.waiting import until

BODY = b'{"prompt": "fetched", "system": "%b"}' % (b"x" * 2_000_000)


async def test_a_worker_that_is_killed_while_it_fetches_is_replaced(vhost, tmp_path) -> None:
    asked: list[web.Request] = []

    async def body(request: web.Request) -> web.Response:
        asked.append(request)
        if len(asked) == 1:
            await asyncio.Event().wait()
        return web.Response(body=BODY)

    app = web.Application()
    app.router.add_get("/bodies/one", body)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host = f"http://127.0.0.1:{runner.addresses[0][1]}/bodies"
    async with SimulatedAPI() as api:
        environ = environment(
            vhost.amqp_url,
            vhost.management_url,
            ANTHROPIC_BASE_URL=api.base_url,
            LANEKEEPER_GATEWAY__PORT="0",
            LANEKEEPER_BODIES__ALLOW=host,
            LANEKEEPER_BODIES__ALLOW_PRIVATE="true",
        )
        async with lanekeeper("serve", environ=environ, folder=tmp_path) as first, requester(vhost.amqp_url) as sender:
            await first.ready()
            headers = {"x-lane-body": f"{host}/one", "x-lane-body-sha256": hashlib.sha256(BODY).hexdigest()}
            id = await sender.publish(b"", headers=headers, message_id="one")
            await until(lambda: asked)
            first.send(signal.SIGKILL)
            async with lanekeeper("serve", environ=environ, folder=tmp_path) as second:
                await second.ready()
                reply = await sender.final(id)
        assert (reply.status, len(asked), len(api.calls)) == ("ok", 2, 1)
    await runner.cleanup()
