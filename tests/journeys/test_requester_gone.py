"""A requester that has gone is no error."""

import pytest

from tests.support.brokers import Vhost
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.waiting import until

pytestmark = pytest.mark.oldest_version


async def test_the_request_of_a_requester_that_has_gone_runs_once_and_is_acknowledged(vhost: Vhost) -> None:
    """With an exclusive queue and with direct reply-to, with and without streaming."""
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as stays:
        await stays.read_dead()
        await stays.read_events()
        for direct in (False, True):
            names = [f"gone {direct} {stream}".replace(" ", "-") for stream in (False, True)]
            async with requester(vhost.amqp_url, direct=direct) as leaves:
                for name in names:
                    headers = {"x-lane-stream": name.endswith("True")}
                    await leaves.publish({"prompt": f"{name} [[held]]"}, message_id=name, headers=headers)
                await until(lambda: worker.api.running == 2)
            worker.api.release(f"gone-{direct}")
            for name in names:
                await until(lambda name=name: stays.events_of(name) == ["started", "completed"])
                assert len(worker.calls(name)) == 1
        assert (await stays.ask({"prompt": "still there?"})).status == "ok"
        assert not stays.dead
        assert worker.is_well
        await until(lambda: stays.holds(0, "lane.critical"))


async def test_an_error_for_a_requester_that_has_gone_is_parked_once(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as stays:
        await stays.read_dead()
        async with requester(vhost.amqp_url) as leaves:
            gone = leaves.reply_to
        await stays.publish({"prompt": "x [[fault: invalid]]"}, reply_to=gone, message_id="g-2")
        await stays.buried("g-2")
        assert (await stays.ask({"prompt": "still there?"})).status == "ok"
        assert len(stays.dead_of("g-2")) == 1
        assert worker.is_well
