"""A full reply queue occupies no slot: the reply is sent again later, and the result stays in the store."""

import asyncio
import statistics
from typing import Any

import pytest

from tests.support.brokers import Vhost
from tests.support.requester import Requester, requester
from tests.support.serving import serving
from tests.support.waiting import until

FULL: dict[str, Any] = {"x-max-length": 1, "x-overflow": "reject-publish", "x-queue-type": "classic"}
FLOOD_S = 5.0
A_SECOND = 50


async def make_full(app: Requester, queue: str) -> None:
    await app.channel.queue_declare(queue, durable=True, arguments=FULL)
    await app.channel.basic_publish(b"full", routing_key=queue)


@pytest.mark.oldest_version
async def test_a_reply_to_a_full_queue_is_sent_when_there_is_room_without_another_call(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        await app.read_dead()
        await app.read_events()
        await make_full(app, "shop.full")
        await app.publish({"prompt": "an answer"}, reply_to="shop.full", message_id="r-1", correlation_id="c-1")
        await app.publish({"prompt": "x [[fault: invalid]]"}, reply_to="shop.full", message_id="r-2")
        await app.publish(b"!", reply_to="shop.full", message_id="r-3")
        await app.publish(b"!", reply_to="shop.full", key="nowhere.x", message_id="r-4")
        await until(lambda: "completed" in app.events_of("r-1"))
        assert (await app.control({"result": "r-1"}, key="result")).status == "ok", "kept, while its queue is full"
        for each in ("r-2", "r-3", "r-4"):
            await app.buried(each)
        await app.channel.queue_purge("shop.full")
        found = {}
        for _ in range(4):  # it has room for one message at a time
            await until(lambda: app.depth("shop.full"))
            got = await app.channel.basic_get("shop.full", no_ack=True)
            assert got.header is not None
            found[(got.header.properties.headers or {})["x-lane-request-id"]] = got
        assert found.keys() == {"r-1", "r-2", "r-3", "r-4"}
        first = found["r-1"].header.properties
        assert (first.correlation_id, (first.headers or {})["x-lane-status"]) == ("c-1", "ok")
        assert b"unroutable" in found["r-4"].body
        assert len(worker.calls("an answer")) == 1
        assert len(app.dead) == 3, "each was parked once"
        assert worker.is_well


async def test_a_flood_of_invalid_requests_for_a_full_reply_queue_does_not_delay_others_and_is_limited(
    vhost: Vhost,
) -> None:
    """With two slots; without the control each such reply would occupy one for three seconds."""
    few, most = {"critical": {"slots": 2}}, {"waiting": 100}
    async with (
        serving(vhost.amqp_url, lanes=few, reply_to=most) as worker,
        requester(vhost.amqp_url) as app,
        requester(vhost.amqp_url) as flood,
    ):
        await make_full(app, "shop.full")
        usual = await app.waits_s(10, pause_s=0.1)
        flooding = asyncio.create_task(_flood(flood))
        meanwhile = await app.waits_s(20, pause_s=0.1)
        await flooding
        print(f"waits in the same lane: usual {max(usual):.3f} s, meanwhile {sorted(meanwhile)[-3:]} s")
        assert statistics.median(meanwhile) < max(1.5, 5 * max(usual))
        assert max(meanwhile) < 30, "nothing waits for a slot: that would be minutes"
        await until(lambda: worker.parts.settler.reply_retries.given_up >= FLOOD_S * A_SECOND - 10 * 6)
        delayed = [await app.depth(f"lane.delay.{level:02d}") for level in range(10)]
        # A tenth of 100 for one queue, by the worker's clock: on a busy broker a few come back later than it counts.
        assert sum(delayed) <= 20, "without a bound these would be hundreds"
        assert worker.is_well


async def _flood(app: Requester) -> None:
    end = asyncio.get_running_loop().time() + FLOOD_S
    count = 0
    while asyncio.get_running_loop().time() < end or count < FLOOD_S * A_SECOND:
        count += 1
        await app.publish(b"!", reply_to="shop.full")
        await asyncio.sleep(1 / A_SECOND)
