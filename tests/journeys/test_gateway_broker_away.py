"""The gateway while its broker is away: a call is refused within seconds, and is worth another try."""

import asyncio
import json
from urllib.parse import urlsplit

import aiohttp
import pytest
from pydantic import SecretStr

from service.gateway.app import ABSENT_WITHIN_S
from tests.faults.proxy import Proxy
from tests.support.brokers import Vhost
from tests.support.gate import gate
from tests.support.serving import serving
from tests.support.waiting import until

SAID = {"model": "claude-haiku-5-5", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}


async def answered(session: aiohttp.ClientSession, url: str, **extra: object) -> bool:
    async with session.post(f"{url}/v1/messages", json={**SAID, **extra}) as got:
        return got.status == 200


async def is_unready(session: aiohttp.ClientSession, url: str) -> bool:
    async with session.get(f"{url}/readyz") as got:
        return got.status == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_is_refused_within_seconds_and_the_next_one_succeeds_when_it_is_back(
    vhost: Vhost, stream: bool
) -> None:
    at = urlsplit(vhost.amqp_url)
    loop = asyncio.get_running_loop()
    async with (
        serving(vhost.amqp_url) as worker,
        Proxy(at.hostname or "", at.port or 5672) as line,
        aiohttp.ClientSession() as session,
    ):
        passed = vhost.amqp_url.replace(f":{at.port}/", f":{line.port}/")
        settings = worker.settings.model_copy(update={"amqp_url": SecretStr(passed)})
        async with gate(settings) as url:
            assert await answered(session, url, stream=stream)
            await line.refuse()
            line.reset()
            await until(lambda: is_unready(session, url))
            began = loop.time()
            async with session.post(f"{url}/v1/messages", json={**SAID, "stream": stream}) as got:
                error = json.loads(await got.read())["error"]
            took_s = loop.time() - began

            assert (got.status, error["type"]) == (503, "api_error")
            assert int(got.headers["retry-after"]) > 0
            assert "x-should-retry" not in got.headers
            assert took_s < 3 * ABSENT_WITHIN_S  # far below the 30 s that a publisher waits by default
            assert len(worker.api.calls) == 1
            await line.mend()
            await until(lambda: answered(session, url, stream=stream))
