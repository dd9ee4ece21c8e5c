"""A flood of cancellations by one tenant delays neither requests nor other tenants' cancellations."""

import pytest

from tests.support.brokers import Vhost
from tests.support.flooding import flooding
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.waiting import until

pytestmark = pytest.mark.timing

FLOOD_PER_S = 1500
LONG = "[[latency: 60s]]"


async def test_a_worker_that_starts_during_a_flood_of_cancellations_answers_requests(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url):
        pass  # the topology is declared, and no worker runs
    async with flooding(vhost.amqp_url, per_s=FLOOD_PER_S, user=vhost.user), requester(vhost.amqp_url) as app:

        async def has_piled_up() -> bool:
            return await app.depth("lane.control") > FLOOD_PER_S

        await until(has_piled_up)
        asked = await app.publish({"prompt": "urgent"})
        async with serving(vhost.amqp_url, waits=False, control={"per_tenant_s": 10}) as worker:
            assert (await app.final(asked, within_s=25)).status == "ok"
            for _ in range(10):
                assert (await app.ask({"prompt": "urgent too"}, within_s=20)).status == "ok"
            assert worker.parts.control.answers.refused


async def test_another_tenants_cancellation_is_fast_during_a_flood_and_the_flood_is_read_to_its_end(
    vhost: Vhost,
) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        async with flooding(vhost.amqp_url, per_s=FLOOD_PER_S, user=vhost.user):
            await until(lambda: worker.parts.control.answers.unanswered > FLOOD_PER_S, within_s=60)
            for id in ("a", "b", "c", "d", "e"):
                running = await app.publish({"prompt": f"running {id} {LONG}"}, message_id=id)
                await until(lambda id=id: worker.calls(f"running {id}"), within_s=30)
                assert (await app.control({"cancel": id}, key="cancel")).json == {"id": id, "outcome": "told"}
                assert (await app.final(running)).code == "cancelled"

        async def is_read() -> bool:
            return await app.depth("lane.control") == 0

        await until(is_read, within_s=30)
        assert worker.parts.control.displaced == 0
