"""A request past its deadline is answered `deadline_exceeded`, wherever it is."""

import re
import time

import pytest

from tests.support.brokers import Vhost
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.waiting import until


async def test_a_request_whose_deadline_passes_in_the_queue_is_never_sent_to_the_provider(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url, lanes={"batch": {"slots": 1}}) as worker, requester(vhost.amqp_url) as app:
        await app.read_dead()
        await app.publish({"prompt": "in the way [[held]]"}, key="batch.tests.x")
        await until(lambda: worker.api.running == 1)
        sent = {"x-lane-sent-ms": time.time_ns() // 1_000_000}
        asked = await app.publish(
            {"prompt": "in vain"}, key="batch.tests.x", headers={"x-lane-deadline-ms": 200, **sent}, message_id="d-1"
        )
        await until(lambda: time.time_ns() // 1_000_000 > sent["x-lane-sent-ms"] + 200)
        worker.api.release()
        reply = await app.final(asked)
        assert reply.code == "deadline_exceeded"
        document = reply.json
        assert (document["status"], document["attempts"], document["retryable"]) == (504, 0, True)
        assert "200 ms" in document["detail"]
        assert "to try again, publish it with a new message_id: under this one" in document["detail"]
        assert reply.headers["x-lane-wait-ms"] >= 200
        assert reply.headers["x-lane-run-ms"] == 0
        assert not worker.calls("in vain")
        assert not app.dead_of("d-1"), "it is not kept: trying it again makes no sense"


async def test_when_the_deadline_passes_during_an_attempt_the_providers_connection_is_closed(vhost: Vhost) -> None:
    deadline_ms = 3000  # longer than the way to the provider takes on a busy machine
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        before_s = time.monotonic()
        asked = [
            await app.publish(
                {"prompt": f"endless {stream} [[fault: hang]]"},
                headers={"x-lane-deadline-ms": deadline_ms, "x-lane-stream": stream},
            )
            for stream in (False, True)
        ]
        for each in asked:
            reply = await app.final(each)
            assert reply.code == "deadline_exceeded"
            assert deadline_ms - 10 < 1000 * (time.monotonic() - before_s) < 30_000
            assert reply.json["attempts"] == 1
            assert "attempt 1" in reply.json["detail"]
            assert reply.headers["x-lane-wait-ms"] + reply.headers["x-lane-run-ms"] >= deadline_ms - 10
            assert reply.headers["x-lane-wait-ms"] < deadline_ms
        await worker.api.until(lambda: worker.api.running == 0)
        assert len(worker.api.calls) == 2


async def test_the_times_of_all_attempts_and_pauses_add_up(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url), requester(vhost.amqp_url) as app:
        began_ms = time.time_ns() // 1_000_000
        asked = await app.publish(
            {"prompt": "late [[latency: 1s]] [[fault: cut x2]] [[fault: hang]]"},
            headers={"x-lane-deadline-ms": 6000, "x-lane-sent-ms": began_ms},
        )
        reply = await app.final(asked)
        found = re.fullmatch(
            r"not answered within 6000 ms: (\d+) ms in the queue and in pauses between attempts, "
            r"(\d+) ms in 3 attempts; .*",
            reply.json["detail"],
        )
        assert found, reply.json["detail"]
        waited_ms, ran_ms = map(int, found.groups())
        elapsed_ms = time.time_ns() // 1_000_000 - began_ms
        assert 6000 <= waited_ms + ran_ms <= elapsed_ms
        assert ran_ms > 2000
        assert reply.headers["x-lane-run-ms"] == ran_ms
        assert waited_ms <= reply.headers["x-lane-wait-ms"] <= waited_ms + 2000


async def test_a_retry_that_would_come_after_the_deadline_is_not_made(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        before_s = time.monotonic()
        reply = await app.ask(
            {"prompt": "not today [[fault: rate_limited retry_after=120]]"}, headers={"x-lane-deadline-ms": 60_000}
        )
        assert reply.code == "deadline_exceeded"
        assert time.monotonic() - before_s < 45
        assert "429" in reply.json["detail"] or "rate limit" in reply.json["detail"]
        assert len(worker.api.calls) == 1


@pytest.mark.oldest_version
async def test_a_request_that_expires_in_the_queue_by_amqp_expiration_is_answered(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url, lanes={"normal": {"slots": 1}}) as worker, requester(vhost.amqp_url) as app:
        await app.read_dead()
        await app.publish({"prompt": "in the way [[held]]"}, key="normal.tests.x")
        await until(lambda: worker.api.running == 1)
        asked = await app.publish({"prompt": "in vain"}, key="normal.tests.x", expiration="200", message_id="e-1")
        reply = await app.final(asked)
        assert reply.code == "deadline_exceeded"
        assert "200 ms" in reply.json["detail"]
        assert reply.headers["x-lane-name"] == "normal"
        assert {"x-lane-wait-ms", "x-lane-run-ms"} <= reply.headers.keys()
        assert reply.headers["x-lane-request-id"] == "e-1"
        assert not worker.calls("in vain")
        assert not app.dead_of("e-1")
        assert len(app.finals(asked)) == 1


@pytest.mark.oldest_version
async def test_expiration_limits_only_the_wait_in_the_intake(vhost: Vhost) -> None:
    """Afterwards only the deadline counts: a retry or a delay may take longer than `expiration`."""
    async with serving(vhost.amqp_url), requester(vhost.amqp_url) as app:
        reply = await app.ask(
            {"prompt": "x [[fault: server_error x2]]"}, expiration="2000", headers={"x-lane-delay-ms": 2100}
        )
        assert reply.status == "ok"
