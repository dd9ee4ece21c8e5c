"""A flood of cancellations by one tenant holds up no requests."""

import pytest

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
            return await app.depth("lane.control") > FLOOD_PER_S

        await until(has_piled_up)
        asked = await app.publish({"prompt": "urgent"})
        async with house(vhost.amqp_url, waits=False, control={"per_tenant_s": 10}) as home:
            assert (await app.final(asked, within_s=25)).status == "ok"
            for _ in range(10):
                assert (await app.ask({"prompt": "urgent too"}, within_s=20)).status == "ok"
            assert home.parts.answers.refused
