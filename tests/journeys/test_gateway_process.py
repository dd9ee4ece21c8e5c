"""`lanekeeper gateway` beside `lanekeeper consume`: two processes, one of which stops in an orderly way."""

import asyncio
import signal
from pathlib import Path

import aiohttp
import pytest

from service.simulated.app import SimulatedAPI
from tests.support.brokers import Vhost
from tests.support.processes import environment, interpreter

pytestmark = pytest.mark.slow
BODY = {
    "model": "claude-sonnet-5-5",
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "[[latency: 2s]] to the end"}],
}


async def test_a_gateway_that_is_stopped_answers_what_is_under_way_and_exits_with_0(
    vhost: Vhost, tmp_path: Path
) -> None:
    async with SimulatedAPI() as api, aiohttp.ClientSession() as session:
        environ = environment(vhost.amqp_url, vhost.management_url, ANTHROPIC_BASE_URL=api.base_url)
        async with (
            interpreter("serve", "--port", "0", environ=environ, folder=tmp_path) as worker,
            interpreter("gateway", "--port", "0", environ=environ, folder=tmp_path) as gateway,
        ):
            both = [await worker.ready(), (await gateway.tells("gateway.ready"))["url"]]
            for url in both:
                async with session.post(
                    f"{url}/v1/messages", json={**BODY, "messages": [{"role": "user", "content": "x"}]}
                ) as got:
                    assert got.status == 200
                async with session.get(f"{url}/readyz") as got:
                    assert (await got.json()) == {"ready": True, "reasons": {}}

            call = asyncio.create_task(session.post(f"{both[1]}/v1/messages", json=BODY))
            await api.until(lambda: api.running == 1)
            gateway.send(signal.SIGTERM)

            assert (await call).status == 200
            assert await gateway.ended() == 0
            assert gateway.told("service.stopped", orphaned=0)
