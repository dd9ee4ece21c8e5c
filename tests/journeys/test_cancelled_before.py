"""Cancellations that were confirmed while no worker ran are recorded before requests are taken."""

import asyncio

from tests.support.brokers import Vhost
from tests.support.requester import requester
from tests.support.serving import serving

MANY = 40


async def test_a_request_cancelled_while_no_worker_ran_is_never_called(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url):
        pass  # the topology is declared, and no worker runs
    async with requester(vhost.amqp_url) as app:
        asked = [await app.publish({"prompt": f"in vain {n}"}, message_id=f"c-{n}") for n in range(MANY)]
        kept = await app.publish({"prompt": "wanted"}, message_id="wanted")
        for n in range(MANY):
            await app.publish(
                {"cancel": f"c-{n}"}, exchange="lane.control", key="cancel", message_type="cancel", mandatory=True
            )
        async with serving(vhost.amqp_url) as worker:
            finals = await asyncio.gather(*(app.final(each) for each in asked))
            assert {final.code for final in finals} == {"cancelled"}
            assert (await app.final(kept)).status == "ok"
            assert [call.prompt for call in worker.api.calls] == ["wanted"]
