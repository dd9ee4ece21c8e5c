"""A lane has as many slots after trouble as before, and one that stands still is put right."""

import time
from itertools import count

from service.simulated.app import SimulatedOptions
from tests.support.brokers import Vhost
from tests.support.meeting import meeting
from tests.support.waiting import until

SLOTS = 4
TENANTS = ("a", "b", "c", "d")
BACKLOG = 100
"""At least so many requests wait, however many are answered between two cuts."""
CUTS = 40


async def test_closed_connections_cost_a_lane_no_slots(vhost: Vhost) -> None:
    lanes = {"batch": {"slots": SLOTS, "side_queues": 8}}
    quick = SimulatedOptions(latency_ms=300)
    async with meeting(vhost.amqp_url, simulated=quick, lanes=lanes, speakers=(vhost.user,)) as (own, app, _):

        async def ask(tenant: str, prompt: str) -> str:
            sent_ms = time.time_ns() // 1_000_000
            headers = {"x-lane-tenant": tenant, "x-lane-sent-ms": sent_ms}
            return await app.publish({"prompt": prompt}, key="batch.tests.slots", headers=headers, user_id=vhost.user)

        numbers = count()
        for _ in range(CUTS):
            while (number := next(numbers)) < len(own.api.calls) + BACKLOG:
                await ask(TENANTS[number % len(TENANTS)], f"job {number}")
            before = len(own.api.calls)
            connection = await own.parts.broker.consuming.underlying()
            await connection.underlay.close()
            await until(lambda before=before: len(own.api.calls) >= before + 2 * SLOTS)
        held = [await ask(tenant, "[[held]]") for tenant in TENANTS * 2]
        await until(lambda: len(own.calls("[[held]]")) == SLOTS, within_s=120)
        own.api.release()
        for each in held:
            assert (await app.final(each)).status == "ok"
        await until(lambda: own.parts.lane_slots["batch"].running == 0, within_s=120)
