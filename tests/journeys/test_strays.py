"""Requests that the broker takes out of a queue, cannot route or refuses are answered and parked, and block no
others."""

import asyncio
import time

import aiormq
import pytest
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic

from lanekeeper import Client
from lanekeeper.contract.problems import PublishRefused
from tests.support.brokers import Vhost
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.waiting import until

pytestmark = pytest.mark.oldest_version

LIMIT = 20
"""The broker's delivery limit; the next delivery removes the message from the queue."""


async def rejecting(url: str, queue: str) -> int:
    """A worker that rejects everything until the broker removes it; counts the deliveries."""
    connection = await aiormq.connect(url)
    times = 0
    fallen = asyncio.Event()

    async def refuse(delivered: DeliveredMessage) -> None:
        nonlocal times
        times += 1
        assert isinstance(delivered.delivery, Basic.Deliver)
        await delivered.channel.basic_reject(delivered.delivery.delivery_tag or 0, requeue=True)
        if times > LIMIT:
            fallen.set()

    try:
        channel = await connection.channel()
        await channel.basic_qos(prefetch_count=1)
        await channel.basic_consume(queue, refuse)
        await asyncio.wait_for(fallen.wait(), timeout=60)
        return times
    finally:
        await connection.close()


@pytest.mark.parametrize("queue", ["lane.critical", "lane.critical.due"])
async def test_a_request_that_exceeds_the_delivery_limit_is_answered_as_poison_and_parked(
    vhost: Vhost, queue: str
) -> None:
    """Workers that die at once cannot count deliveries; then the broker's limit ends the request: not the first time,
    because it may only have waited in workers that another request killed."""
    if queue == "lane.critical" and vhost.version.startswith("3."):
        pytest.skip("a classic intake has no delivery limit: the due queue counts")
    async with serving(vhost, works=("normal",)), requester(vhost) as app:
        await app.read_dead()
        due = {"exchange": "lane.delay.00", "headers": {"lane-d00": False, "mine": "kept"}}
        intake = {"headers": {"mine": "kept"}}
        asked = await app.publish(
            {"prompt": "again and again"},
            key="critical.shop.chat",
            message_id="often-1",
            **(due if queue.endswith(".due") else intake),
        )
        assert await rejecting(vhost.amqp_url, queue) == LIMIT + 1
        await until(lambda: app.holds(1, "lane.critical.due"))
        assert not app.finals(asked)
        queue = "lane.critical.due"
        assert await rejecting(vhost.amqp_url, queue) == LIMIT + 1
        reply = await app.final(asked)
        assert reply.code == "poison"
        assert queue in reply.json["detail"]
        assert reply.headers["x-lane-name"] == "critical"
        buried = await app.buried("often-1")
        assert buried.routing_key == "critical.shop.chat"
        assert buried.headers["x-lane-dead-code"] == "poison"
        assert buried.headers["mine"] == "kept"
        assert "x-death" not in buried.headers
        assert buried.json == {"prompt": "again and again"}
        assert len(app.dead_of("often-1")) == len(app.finals(asked)) == 1
        await until(lambda: app.holds(0, queue, "lane.fallen"))


async def test_a_delayed_message_without_a_delay_bit_is_parked_and_others_end_on_time(vhost: Vhost) -> None:
    """As if an operator had published it by hand. Without an alternate exchange, it would block its wait queue for
    ever."""
    async with serving(vhost), requester(vhost) as app:
        await app.read_dead()
        for n in range(10):
            await app.publish(
                {"prompt": f"broken {n}"},
                key="normal.tests.x",
                exchange="lane.delay.02",
                headers={"lane-d02": n % 2 == 0, "lane-d01": True},  # the header lane-d00 is missing
                message_id=f"broken-{n}",
            )
            await app.publish(
                {"prompt": f"nowhere {n}"},
                key="express.tests.x",  # no lane has this name
                exchange="lane.delay.00",
                headers={"lane-d00": True},
                message_id=f"nowhere-{n}",
            )
        before = time.monotonic()
        delayed = [
            await app.publish({"prompt": f"whole {n}"}, key="normal.tests.x", headers={"x-lane-delay-ms": 700})
            for n in range(10)
        ]
        for each in delayed:
            assert (await app.final(each)).status == "ok"
        assert 0.7 <= time.monotonic() - before < 45
        for name, code in (("broken", "internal"), ("nowhere", "unroutable")):
            for n in range(10):
                buried = await app.buried(f"{name}-{n}")
                assert buried.headers["x-lane-dead-code"] == code
                assert buried.json == {"prompt": f"{name} {n}"}
                assert not [header for header in buried.headers if header.startswith("lane-d")]
        errors = [got.code for each in app.replies.values() for got in each if got.status == "error"]
        assert sorted(errors) == ["internal"] * 10 + ["unroutable"] * 10
        await until(lambda: app.holds(0, "lane.delay.02", "lane.fallen"))


async def test_an_unroutable_request_is_answered_and_parked_or_only_parked_without_reply_to(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        await app.read_dead()
        for n, key in enumerate(["express.tests.x", "criticalx.tests", "", "x" * 255, "#"]):
            asked = await app.publish({"prompt": "lost"}, key=key, message_id=f"lost-{n}", mandatory=True)
            await app.publish({"prompt": "lost"}, key=key, message_id=f"quiet-{n}", reply_to=None)
            reply = await app.final(asked)
            assert reply.code == "unroutable"
            assert reply.json["status"] == 404
            assert "critical" in reply.json["detail"], "what is allowed"
            for id in (f"lost-{n}", f"quiet-{n}"):
                buried = await app.buried(id)
                assert buried.headers["x-lane-dead-code"] == "unroutable"
                assert buried.headers["x-lane-routing-key"] == key
        assert not worker.api.calls
        assert worker.is_well


async def test_a_full_lane_refuses_new_requests_and_finishes_accepted_ones(vhost: Vhost) -> None:
    """Requests that return from a delay were accepted before, and are not refused; other lanes are not affected."""
    lanes = {"batch": {"slots": 1, "max_length": 10, "side_queues": 0}}  # what is set aside leaves room in the intake
    async with serving(vhost, lanes=lanes) as worker, requester(vhost) as app:
        delayed = [
            await app.publish({"prompt": f"delayed {n}"}, key="batch.tests.x", headers={"x-lane-delay-ms": 1500})
            for n in range(3)
        ]
        await until(lambda: app.holds(0, "lane.batch"))
        retried = await app.publish({"prompt": "again [[fault: rate_limited retry_after=1 x1]]"}, key="batch.tests.x")
        await until(lambda: worker.calls("again"))
        accepted = [await app.publish({"prompt": "long [[held]]"}, key="batch.tests.x")]
        refused = 0
        for n in range(40):
            try:
                accepted.append(await app.publish({"prompt": f"fill {n}"}, key="batch.tests.x"))
            except aiormq.exceptions.DeliveryError:
                refused += 1
        assert refused >= 25, "the bound is soft by a message or two"

        async with Client(vhost.amqp_url) as client:
            with pytest.raises(PublishRefused, match="full"):
                await client.publish({"prompt": "one more"}, key="batch.tests.x", full_within_s=0)
            assert (await client.request({"prompt": "urgent"}, key="critical.tests.x", timeout_s=60)).text

        for each in (*delayed, retried):
            assert (await app.final(each)).status == "ok"
        assert not app.finals(accepted[0]), "they came back while the intake was full and its only slot taken"

        async def is_full() -> bool:
            return await app.depth("lane.batch") >= 7

        await until(is_full)
        worker.api.release()
        for each in accepted:
            assert (await app.final(each)).status == "ok"
        assert (await app.ask({"prompt": "room again"}, key="batch.tests.x")).status == "ok"
        assert not worker.calls("one more"), "what was refused never ran"
