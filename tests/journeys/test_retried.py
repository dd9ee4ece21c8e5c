"""A failed attempt is retried, and the retry goes ahead of newer requests. A request that cannot succeed is answered
with a problem document and parked with its cause."""

import asyncio
import json
import time
from typing import Any

import pytest

from tests.support.brokers import Vhost
from tests.support.requester import requester
from tests.support.serving import meeting, serving
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
    async with serving(vhost) as worker, requester(vhost) as app:
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
    async with meeting(vhost, lanes={"critical": {"call_timeout_s": 1}}) as (worker, app, _):
        asked_s = time.monotonic()
        reply = await app.ask({"prompt": "wake up [[fault: hang x1]]"})
        assert reply.status == "ok"
        assert reply.headers["x-lane-attempt"] > 1  # on a busy machine the second may take a second too
        first, second, *_ = worker.api.calls
        assert 1 <= second.started_s - asked_s < 20, "its time begins before the call reaches the provider"
        assert first.outcome == "client_gone" or first.status == 0


@pytest.mark.every_version
async def test_a_retried_request_goes_ahead_of_others_in_its_lane(vhost: Vhost) -> None:
    """The lane is full of requests of the highest priority; the retried one does not wait behind them."""
    strict = {"batch": {"slots": 1, "side_queues": 0}}  # requests that are set aside are worked on in another order
    async with serving(vhost, lanes=strict) as worker, requester(vhost) as app:
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
    async with serving(vhost) as worker, requester(vhost) as app:
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
    async with serving(vhost, retry=retry) as worker, requester(vhost) as app:
        await worker.api.stop()
        asked = await app.publish({"prompt": "are you there?"}, headers=deadline)
        await asyncio.sleep(down_s)  # this is the outage; it waits for nothing
        assert not app.finals(asked), "nobody has given up"
        await worker.api.start()
        reply = await app.final(asked)
        assert reply.status == "ok", reply
        assert 3 <= reply.headers["x-lane-attempt"] <= 4


async def test_a_lane_continues_while_a_request_waits_for_its_retry(vhost: Vhost) -> None:
    async with serving(vhost, lanes={"critical": {"slots": 1}}), requester(vhost) as app:
        await app.read_events()
        waiting = await app.publish({"prompt": "later [[fault: unavailable retry_after=50 x1]]"}, message_id="later")
        await until(lambda: "retrying" in app.events_of("later"))
        others = await asyncio.gather(*(app.ask({"prompt": f"now {n}"}) for n in range(5)))
        assert [each.status for each in others] == ["ok"] * 5
        assert not app.finals(waiting)


async def test_after_all_attempts_failed_the_requester_gets_an_error_and_the_request_is_parked_with_its_errors(
    vhost: Vhost,
) -> None:
    async with meeting(vhost, lanes={"critical": {"max_attempts": 7}}) as (worker, app, _):
        await app.read_dead()
        await app.read_events()
        faults = "[[fault: overloaded x2]] [[fault: server_error x3]] [[fault: html x1]] [[fault: unavailable]]"
        body = {"prompt": f"hopeless {faults}"}
        reply = await app.ask(body, message_id="x-1", headers={"x-app": "mine"}, app_id="shop", priority=7)

        assert reply.status == "error"
        assert reply.headers["x-lane-attempt"] == 7
        document = reply.json
        assert document == {
            "type": "urn:lanekeeper:problem:attempts-exhausted",
            "title": "All attempts failed",
            "status": 502,
            "detail": document["detail"],
            "code": "attempts_exhausted",
            "request": "x-1",
            "attempts": 7,
            "retryable": True,
            "provider_status": 503,
            "provider_type": "api_error",
            "provider_error": document["provider_error"],
            "provider_request_id": document["provider_request_id"],
        }
        assert json.loads(document["provider_error"])["error"]["message"] == "Service unavailable"
        assert "503" in document["detail"]
        assert "hopeless" not in document["detail"]
        assert len(worker.calls("hopeless")) == 7

        dead = await app.buried("x-1")
        assert json.loads(dead.body) == body
        assert dead.routing_key == "critical.tests.ask"
        assert dead.headers["x-lane-dead-code"] == "attempts_exhausted"
        assert document["detail"].startswith(dead.headers["x-lane-dead-detail"])
        assert "a new message_id, or its dead letter as it is" in document["detail"]
        assert dead.headers["x-lane-dead-at"].endswith("Z")
        assert dead.headers["x-lane-attempt"] == 7
        assert dead.headers["x-lane-routing-key"] == "critical.tests.ask"
        assert dead.headers["x-app"] == "mine"
        errors = dead.headers["x-lane-errors"]
        assert len(errors) == 5
        assert [word in error for word, error in zip(("503", "502", "500", "500", "500"), errors, strict=True)] == [
            True
        ] * 5, errors
        properties = dead.properties
        assert (properties.app_id, properties.priority, properties.reply_to) == ("shop", 7, app.reply_to)
        assert properties.correlation_id == reply.properties.correlation_id
        assert not [name for name in dead.headers if name.startswith(("x-death", "lane-d", "x-first-death"))]
        told = await until(lambda: len(app.events_of("x-1")) == 15 and app.events_of("x-1"))
        assert sorted(told) == ["dead", "failed", *["retrying"] * 6, *["started"] * 7]


FOR_GOOD = {
    "invalid": 400,
    "usage_limit": 400,
    "permission": 403,
    "not_found": 404,
    "too_large": 413,
}


async def test_a_request_that_the_provider_rejects_for_good_is_called_once(vhost: Vhost) -> None:
    """The problem document has the provider's status; with and without streaming."""
    async with serving(vhost) as worker, requester(vhost) as app:
        await app.read_dead()
        for stream in (False, True):
            for fault in FOR_GOOD:
                name, headers = f"{fault}-{stream}", {"x-lane-stream": stream}
                body = {"prompt": f"{name} [[fault: {fault}]]"}
                await app.publish(body, headers=headers, message_id=name, correlation_id=name)
            for fault, status in FOR_GOOD.items():
                name = f"{fault}-{stream}"
                reply = await app.final(name)
                assert reply.code == "provider_rejected", name
                assert reply.json["status"] == status, name
                assert reply.json["attempts"] == 1
                assert reply.json["retryable"] is False
                is_doubtful = fault in ("usage_limit", "permission", "not_found")  # called again after a check
                assert len(worker.calls(name)) == (2 if is_doubtful else 1), name
                assert (await app.buried(name)).headers["x-lane-dead-code"] == "provider_rejected"
        assert (await app.ask({"prompt": "next"})).status == "ok"


@pytest.mark.every_version
async def test_a_message_published_directly_to_a_queue_is_refused_and_parked(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        await app.read_dead()
        forged = {"x-lane-attempt": 1, "x-lane-user-id": "boss"}
        for queue in ("lane.critical", "lane.critical.due", "lane.batch"):
            reply = await app.ask({"prompt": "sneaky"}, exchange="", key=queue, message_id=queue, headers=forged)
            assert reply.code == "invalid_request"
            assert "lane.requests" in reply.json["detail"]
            dead = await app.buried(queue)
            assert dead.headers["x-lane-dead-code"] == "invalid_request"
            assert "x-lane-user-id" not in dead.headers
        assert not worker.api.calls
        assert worker.is_well


@pytest.mark.oldest_version
async def test_a_dead_letter_that_is_published_again_unchanged_runs(vhost: Vhost) -> None:
    async with meeting(vhost, lanes={"critical": {"max_attempts": 2}}) as (worker, app, _):
        await app.read_dead()
        for word, fault in (("unlucky", "server_error x2"), ("refused", "invalid x1")):
            asked = await app.publish({"prompt": f"{word} [[fault: {fault}]]"}, message_id=word, expiration="60000")
            assert (await app.final(asked)).status == "error"
            dead = await app.buried(word)
            assert dead.headers["x-lane-expiration"] == "60000"
            assert dead.properties.expiration in (None, "")
            await app.channel.basic_publish(
                dead.body,
                exchange="lane.requests",
                routing_key=dead.headers["x-lane-routing-key"],
                properties=dead.properties,
            )
            await until(lambda asked=asked: len(app.finals(asked)) == 2)
            again = app.finals(asked)[1]
            assert again.status == "ok"
            assert again.headers["x-lane-attempt"] == 1
            assert again.headers["x-lane-request-id"] == word
        assert len(worker.api.calls) == 5


async def test_a_model_that_the_lane_does_not_allow_is_refused(vhost: Vhost) -> None:
    only = {"critical": {"models": ("claude-sonnet-5-5", "claude-haiku-5-5")}}
    async with serving(vhost, lanes=only) as worker, requester(vhost) as app:
        await app.read_dead()
        reply = await app.ask({"prompt": "x", "model": "claude-opus-5-5"}, message_id="dear")
        assert (reply.code, reply.json["status"]) == ("forbidden_model", 403)
        assert "claude-haiku-5-5, claude-sonnet-5-5" in reply.json["detail"]
        await app.buried("dear")
        twice = b'{"model":"claude-haiku-5-5","model":"claude-opus-5-5","messages":[{"role":"user","content":"x"}]}'
        assert (await app.ask(twice)).code == "invalid_request"
        assert (await app.ask({"prompt": "x", "model": "claude-haiku-5-5"})).status == "ok"
        assert len(worker.api.calls) == 1
