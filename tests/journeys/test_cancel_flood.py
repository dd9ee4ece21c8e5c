"""A flood of cancellations by one tenant holds up nobody else: neither requests, nor another's cancellation."""

import asyncio
import time

import pytest

from service.client import Client
from tests.support.flooding import flooding
from tests.support.house import house
from tests.support.requester import requester
from tests.support.waiting import until

FLOOD_PER_S = 1500


@pytest.mark.default_broker_only
async def test_a_worker_that_starts_under_a_flood_of_cancellations_answers_requests(vhost) -> None:
    async with house(vhost.amqp_url):
        pass  # the topology is there, and nobody works
    async with flooding(vhost.amqp_url, per_s=FLOOD_PER_S, user=vhost.user), requester(vhost.amqp_url) as app:

        async def has_piled_up() -> bool:
            return await app.depth("lane.control") > 2 * FLOOD_PER_S

        await until(has_piled_up, within_s=30)
        asked = await app.publish({"prompt": "urgent"})
        async with house(vhost.amqp_url, waits=False):
            began = time.monotonic()
            assert (await app.final(asked, within_s=25)).status == "ok"
            print(f"\nfirst critical answer after {time.monotonic() - began:.2f} s")
            took = []
            for n in range(40):
                began = time.monotonic()
                assert (await app.ask({"prompt": "urgent too"}, within_s=10)).status == "ok"
                took.append(time.monotonic() - began)
                await asyncio.sleep(0.1)
            print(
                f"critical p50 {sorted(took)[20] * 1000:.0f} ms max {max(took) * 1000:.0f} ms; control depth {await app.depth('lane.control')}"
            )
            async with Client(vhost.amqp_url) as client:
                took = []
                for n in range(20):
                    began = time.monotonic()
                    await client.cancel(f"other-{n}")
                    took.append(time.monotonic() - began)
                print(f"other tenant's cancel p50 {sorted(took)[10] * 1000:.0f} ms max {max(took) * 1000:.0f} ms")
