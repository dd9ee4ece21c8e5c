"""A gateway or a worker is killed in the middle of a call of the SDK: its `Idempotency-Key` gets one answer."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic

from service.simulated.app import SimulatedAPI
from tests.support.processes import environment, lanekeeper

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


async def test_after_a_killed_gateway_the_sdks_retry_gets_the_answer_of_the_one_call(vhost, tmp_path: Path) -> None:
    prompt = "[[latency: 2s]] in the middle"
    async with SimulatedAPI() as api:
        environ = environment(vhost.amqp_url, vhost.management_url, ANTHROPIC_BASE_URL=api.base_url)
        async with (
            lanekeeper("serve", "--port", "0", environ=environ, folder=tmp_path) as worker,
            lanekeeper("gateway", "--port", "0", environ=environ, folder=tmp_path) as gateway,
        ):
            other = await worker.ready()
            url = (await gateway.tells("gateway.ready"))["url"]
            async with sdk(url, max_retries=PATIENT) as first, sdk(other) as second:
                call = asyncio.create_task(asked(first, prompt))
                await api.until(lambda: api.running == 1)
                gateway.send(signal.SIGKILL)
                await gateway.ended()
                port = url.rpartition(":")[2]
                async with lanekeeper("gateway", "--port", port, environ=environ, folder=tmp_path):
                    answer = await call

                assert answer == await asked(second, prompt)
                assert [each.outcome for each in api.calls] == ["ok"]


async def test_after_a_killed_worker_the_same_call_is_answered_by_another(vhost, tmp_path: Path) -> None:
    """The killed worker's call was paid for: calls to the provider are at least once."""
    prompt = "[[fault: hang x1]] in the middle"
    async with SimulatedAPI() as api:
        environ = environment(vhost.amqp_url, vhost.management_url, ANTHROPIC_BASE_URL=api.base_url)
        async with (
            lanekeeper("serve", "--port", "0", environ=environ, folder=tmp_path) as worker,
            lanekeeper("gateway", "--port", "0", environ=environ, folder=tmp_path) as gateway,
        ):
            await worker.ready()
            url = (await gateway.tells("gateway.ready"))["url"]
            async with sdk(url) as client:
                call = asyncio.create_task(asked(client, prompt))
                await api.until(lambda: api.running == 1)
                worker.send(signal.SIGKILL)
                async with lanekeeper("serve", "--port", "0", environ=environ, folder=tmp_path):
                    answer = await call

                    assert answer == await asked(client, prompt)
                    assert [each.outcome for each in api.calls] == ["hang", "ok"]
