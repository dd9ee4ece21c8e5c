"""A failed attempt is retried, and the retry goes ahead of newer requests."""

import asyncio
from typing import Any

import pytest

from tests.support.brokers import Vhost
from tests.support.meeting import meeting
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.waiting import until

PASSING = [
    "server_error",
    "unavailable",
    "overloaded",
    "html",
    "reset",
    "truncated",
    "cut",
    "broken_json",
    "not_a_message",
    "unfinished",
    "rate_limited retry_after=none",
]


async def test_a_request_with_a_temporary_failure_is_retried_and_answered(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        await app.read_events()
        for fault in PASSING:  # one after the other, because a provider that fails all calls at once counts as down
            name = fault.split()[0]
            reply = await app.ask({"prompt": f"try [[fault: {fault} x2]]"}, message_id=name)
            assert reply.status == "ok", (fault, reply)
            assert reply.headers["x-lane-attempt"] == 3, fault
            assert reply.headers["x-lane-request-id"] == name
            assert len(worker.calls(f"[[fault: {fault} x2]]")) == 3, fault
            told = await until(lambda name=name: len(app.events_of(name)) == 6 and app.events_of(name))
            assert sorted(told) == ["completed", *["retrying"] * 2, *["started"] * 3]


async def test_an_attempt_that_hangs_ends_at_the_lanes_time_limit_and_is_retried(vhost: Vhost) -> None:
    async with meeting(vhost.amqp_url, lanes={"critical": {"call_timeout_s": 1}}) as (worker, app, _):
        reply = await app.ask({"prompt": "wake up [[fault: hang x1]]"})
        assert reply.status == "ok"
        assert reply.headers["x-lane-attempt"] > 1  # on a busy machine the second may take a second too
        first, second, *_ = worker.api.calls
        assert 0.95 < second.started_s - first.started_s < 15
        assert first.outcome == "client_gone" or first.status == 0


@pytest.mark.every_version
async def test_a_retried_request_goes_ahead_of_others_in_its_lane(vhost: Vhost) -> None:
    """The lane is full of requests of the highest priority; the retried one does not wait behind them."""
    strict = {"batch": {"slots": 1, "side_queues": 0}}  # requests that are set aside are worked on in another order
    async with serving(vhost.amqp_url, lanes=strict) as worker, requester(vhost.amqp_url) as app:
        fill: dict[str, Any] = {"key": "batch.tests.fill", "priority": 9}
        first = await app.publish({"prompt": "peer 00 [[held]]"}, **fill)
        failing = await app.publish({"prompt": "urgent [[fault: server_error x2]]"}, **fill)
        backlog = [await app.publish({"prompt": f"peer {n:02d} [[held]]"}, **fill) for n in range(1, 24)]
        worker.api.release("peer 00")
        final = await app.final(failing)
        assert final.headers["x-lane-attempt"] == 3
        assert not any(app.finals(peer) for peer in backlog)
        worker.api.release("peer")
        for peer in [first, *backlog]:
            assert (await app.final(peer)).status == "ok"
        order = [call.prompt.split(" [[")[0] for call in worker.api.calls]
        peers = [words for words in order if words.startswith("peer")]
        assert peers == sorted(peers), "what was published first is worked first"


async def test_a_retry_waits_for_the_providers_retry_after(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        reply = await app.ask({"prompt": "patience [[fault: rate_limited retry_after=2 x1]]"})
        first, second = worker.api.calls
        assert reply.headers["x-lane-attempt"] == 2
        assert 2.0 <= second.started_s - first.started_s < 10
        assert reply.headers["x-lane-wait-ms"] >= 2000


async def test_a_single_request_outlasts_a_short_outage_of_its_provider(vhost: Vhost) -> None:
    """Five times as fast as with the defaults: the provider is down for 4 s instead of 20."""
    down_s, times = 4.0, 5
    retry = {"base_s": 1 / times, "span_s": 30 / times, "cap_s": 60 / times}
    deadline = {"x-lane-deadline-ms": 120_000 // times}
    async with serving(vhost.amqp_url, retry=retry) as worker, requester(vhost.amqp_url) as app:
        await worker.api.stop()
        asked = await app.publish({"prompt": "are you there?"}, headers=deadline)
        await asyncio.sleep(down_s)  # this is the outage; it waits for nothing
        assert not app.finals(asked), "nobody has given up"
        await worker.api.start()
        reply = await app.final(asked)
        assert reply.status == "ok", reply
        assert 3 <= reply.headers["x-lane-attempt"] <= 4


async def test_a_lane_continues_while_a_request_waits_for_its_retry(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url, lanes={"critical": {"slots": 1}}), requester(vhost.amqp_url) as app:
        await app.read_events()
        waiting = await app.publish({"prompt": "later [[fault: unavailable retry_after=50 x1]]"}, message_id="later")
        await until(lambda: "retrying" in app.events_of("later"))
        others = await asyncio.gather(*(app.ask({"prompt": f"now {n}"}) for n in range(5)))
        assert [each.status for each in others] == ["ok"] * 5
        assert not app.finals(waiting)
