"""During an alarm, or without a part of the topology, a worker makes no call whose answer it could not send."""

import asyncio
import time

import pytest

from service.private_broker import PrivateBroker
from tests.support.alarms import memory_alarm
from tests.support.brokers import Vhost
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.waiting import until

SLOW = {"critical": {"slots": 2, "slots_max": 2}}
REQUESTS = 20
"""Forty seconds of work, so that the alarm begins before its end, although `rabbitmqctl` takes ten seconds on a busy
machine. A broker tells of its alarm only those who publish."""


async def test_during_an_alarm_nothing_is_started_and_afterwards_every_request_is_answered_once(
    own_broker: PrivateBroker,
) -> None:
    async with serving(own_broker.amqp_url, lanes=SLOW) as worker, requester(own_broker.amqp_url) as app:
        for n in range(REQUESTS):
            await app.publish({"prompt": f"ask {n} [[latency: 4s]]"}, correlation_id=f"{n}")
        await until(lambda: worker.api.calls)
        async with memory_alarm(own_broker.amqp_url):
            await until(lambda: all(pool.is_paused for pool in worker.parts.pools))
            begun = len(worker.api.calls)
            await asyncio.sleep(2)
            assert len(worker.api.calls) == begun < REQUESTS, "a call was made whose answer could not be sent"
            assert worker.parts.reasons()["publish connection"] == "low on memory"
        over_s = time.monotonic()
        await until(lambda: worker.is_well)
        print(f"all queues consumed {time.monotonic() - over_s:.2f} s after the alarm")
        for n in range(REQUESTS):
            assert (await app.final(f"{n}")).status == "ok"
        assert len(worker.api.calls) == REQUESTS


@pytest.mark.oldest_version
async def test_while_a_worker_cannot_publish_it_takes_no_request_and_reports_why(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        assert (await app.ask({"prompt": "before"})).status == "ok"
        rights = f"permissions/{vhost.quoted}/{vhost.user}"
        vhost.api("DELETE", rights)  # so that it does not reconnect
        await (await worker.parts.broker.publishing.underlying()).close()
        await until(lambda: all(pool.is_paused for pool in worker.parts.pools))
        asked = await app.publish({"prompt": "meanwhile"})
        await until(lambda: "not into virtual host" in (worker.parts.reasons()["publish connection"] or ""))
        await asyncio.sleep(0.5)
        assert not worker.calls("meanwhile")

        vhost.api("PUT", rights, {"configure": ".*", "write": ".*", "read": ".*"})
        assert (await app.final(asked)).status == "ok"
        await until(lambda: not any(worker.parts.reasons().values()))
        assert len(worker.calls("meanwhile")) == 1
