"""A repeated message id: the provider is called once, and every copy gets the same reply."""

import asyncio
from collections import Counter

from lanekeeper import Client
from tests.support.brokers import Vhost
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.waiting import until


async def test_the_same_request_again_is_answered_from_the_store(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        first = await app.ask({"prompt": "once"}, message_id="i-1")
        second = await app.ask({"prompt": "once"}, message_id="i-1")
        streamed = await app.ask({"prompt": "once"}, message_id="i-1", headers={"x-lane-stream": True})

        assert second.body == streamed.body == first.body
        assert [each.headers.get("x-lane-replayed") for each in (first, second, streamed)] == [None, True, True]
        assert second.headers["x-lane-request-id"] == "i-1"
        assert second.properties.message_id != first.properties.message_id
        assert len(worker.calls("once")) == 1


async def test_a_repeated_request_gets_the_same_error_and_is_parked_once(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        body = {"prompt": "hopeless [[fault: invalid]]"}
        first = await app.ask(body, message_id="i-1")
        second = await app.ask(body, message_id="i-1")

        assert (first.code, second.json, second.headers["x-lane-replayed"]) == ("provider_rejected", first.json, True)
        assert len(worker.calls("hopeless")) == 1
        await until(lambda: app.holds(1, "lane.dead"))


async def test_the_same_id_with_another_body_is_a_conflict_and_does_not_affect_the_first(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app, Client(vhost.amqp_url) as client:
        first = await app.ask({"prompt": "one"}, message_id="i-1")
        other = await app.ask({"prompt": "two"}, message_id="i-1")

        assert (other.code, other.json["status"]) == ("idempotency_conflict", 409)
        assert not worker.calls("two")
        assert (await client.result("i-1")).body == first.body
        await until(lambda: app.holds(0, "lane.dead"))


async def test_requests_without_an_id_are_never_the_same(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        await app.ask({"prompt": "any"})
        await app.ask({"prompt": "any"})

        assert len(worker.calls("any")) == 2


async def test_fifty_copies_at_once_with_two_workers_make_one_call(vhost: Vhost) -> None:
    async with (
        serving(vhost.amqp_url) as one,
        serving(vhost.amqp_url) as two,
        requester(vhost.amqp_url) as app,
    ):
        body = {"prompt": "once [[latency: 500ms]]"}
        asked = await asyncio.gather(*(app.publish(body, message_id="i-1") for _ in range(50)))
        replies = [await app.final(each) for each in asked]

        assert len(one.calls("once")) + len(two.calls("once")) == 1
        assert len({reply.body for reply in replies}) == 1
        assert Counter(reply.headers.get("x-lane-replayed") for reply in replies) == {None: 1, True: 49}
        assert [len(app.finals(each)) for each in asked] == [1] * 50
