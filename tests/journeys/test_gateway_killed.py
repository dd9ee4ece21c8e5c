"""A gateway or a worker is killed in the middle of a call of the SDK: its `Idempotency-Key` gets one answer."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic

from service.simulated.app import SimulatedAPI
from tests.support.brokers import Vhost
from tests.support.processes import Running, environment, lanekeeper

pytestmark = pytest.mark.slow
HEADERS = {"Idempotency-Key": "once-and-only", "x-lane-name": "normal"}
PATIENT = 60
"""Tries; the SDK waits up to 8 s before each, and a gateway may need a minute to start on a busy machine."""


def sdk(url: str, *, max_retries: int = 0) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=url, api_key="any", max_retries=max_retries)


async def asked(client: AsyncAnthropic, prompt: str) -> Any:
    message = await client.messages.create(
        model="claude-haiku-5-5",
        max_tokens=50,
        messages=[{"role": "user", "content": prompt}],
        extra_headers=HEADERS,
    )
    return message.to_dict()


@dataclass
class Service:
    """A simulated provider, a worker with a gateway of its own, and a gateway by itself."""

    api: SimulatedAPI
    worker: Running
    worker_url: str
    gateway: Running
    gateway_url: str
    start: Callable[..., AbstractAsyncContextManager[Running]]
    """Starts a further process with the same settings."""


@pytest.fixture
async def service(vhost: Vhost, tmp_path: Path) -> AsyncIterator[Service]:
    async with SimulatedAPI() as api:
        environ = environment(vhost.amqp_url, vhost.management_url, ANTHROPIC_BASE_URL=api.base_url)
        start = partial(lanekeeper, environ=environ, folder=tmp_path)
        async with start("serve", "--port", "0") as worker, start("gateway", "--port", "0") as gateway:
            worker_url = await worker.ready()
            gateway_url = (await gateway.tells("gateway.ready"))["url"]
            yield Service(api, worker, worker_url, gateway, gateway_url, start)


async def test_after_a_killed_gateway_the_sdks_retry_gets_the_answer_of_the_one_call(service: Service) -> None:
    prompt, api = "[[latency: 2s]] in the middle", service.api
    async with sdk(service.gateway_url, max_retries=PATIENT) as first, sdk(service.worker_url) as second:
        call = asyncio.create_task(asked(first, prompt))
        await api.until(lambda: api.running == 1)
        service.gateway.send(signal.SIGKILL)
        await service.gateway.ended()
        async with service.start("gateway", "--port", service.gateway_url.rpartition(":")[2]):
            answer = await call

        assert answer == await asked(second, prompt)
        assert [each.outcome for each in api.calls] == ["ok"]


async def test_after_a_killed_worker_the_same_call_is_answered_by_another(service: Service) -> None:
    """The killed worker's call was paid for: calls to the provider are at least once."""
    prompt, api = "[[fault: hang x1]] in the middle", service.api
    async with sdk(service.gateway_url) as client:
        call = asyncio.create_task(asked(client, prompt))
        await api.until(lambda: api.running == 1)
        service.worker.send(signal.SIGKILL)
        async with service.start("serve", "--port", "0"):
            answer = await call

            assert answer == await asked(client, prompt)
            assert [each.outcome for each in api.calls] == ["hang", "ok"]
