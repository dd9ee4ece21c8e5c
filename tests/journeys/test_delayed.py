"""A delayed request does not run before its due time, and runs soon after it."""

import asyncio
import time
from datetime import UTC, datetime, timedelta

import pytest

from consumers.state.base import Identity
from tests.support.brokers import Vhost
from tests.support.meeting import meeting
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.waiting import until

LATE_S = 0.5


@pytest.mark.every_version
async def test_a_delayed_request_does_not_start_before_it_is_due(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:

        async def waited_ms(delay_ms: int) -> float:
            before_s = time.monotonic()
            reply = await app.ask({"prompt": f"after {delay_ms} ms"}, headers={"x-lane-delay-ms": delay_ms})
            assert reply.headers["x-lane-attempt"] == 1
            return 1000 * (worker.calls(f"after {delay_ms} ms")[0].started_s - before_s)

        delays = (100, 750, 3000)
        for delay_ms, waited in zip(delays, await asyncio.gather(*map(waited_ms, delays)), strict=True):
            assert waited >= delay_ms - 2


@pytest.mark.timing
@pytest.mark.parametrize("delay_ms", [100, 3000])
async def test_a_delayed_request_starts_when_it_is_due(vhost: Vhost, delay_ms: int) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        await app.ask({"prompt": "warm up"})
        before_s = time.monotonic()
        reply = await app.ask(
            {"prompt": "later"}, headers={"x-lane-delay-ms": delay_ms, "x-lane-sent-ms": time.time_ns() // 1_000_000}
        )
        assert worker.calls("later")[0].started_s - before_s <= delay_ms / 1000 + LATE_S
        assert reply.headers["x-lane-wait-ms"] < 1000 * LATE_S, "the wait counts from the due time"


@pytest.mark.timing
async def test_a_request_with_a_start_time_runs_at_that_time(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        await app.read_events()
        at = datetime.now(UTC) + timedelta(seconds=1.6)
        there = at.astimezone(tz=None).isoformat(timespec="milliseconds")
        before_s = time.monotonic() - (datetime.now(UTC) - at).total_seconds()  # the start time on the monotonic clock
        reply = await app.ask(
            {"prompt": "on time"}, headers={"x-lane-at": there}, key="normal.tests.x", message_id="at"
        )
        late_s = worker.calls("on time")[0].started_s - before_s
        assert -0.005 <= late_s <= LATE_S
        assert reply.headers["x-lane-wait-ms"] < 1000 * LATE_S
        await until(lambda: sorted(app.events_of("at")) == ["completed", "deferred", "started"])


async def test_a_delay_is_not_shortened_by_a_timestamp_in_whole_seconds(vhost: Vhost) -> None:
    """`timestamp` has whole seconds: a delay counted from the beginning of that second would end early."""
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        await app.ask({"prompt": "warm up"})
        await until(lambda: time.time() % 1 > 0.9)
        before_s = time.monotonic()
        await app.ask({"prompt": "stamped"}, headers={"x-lane-delay-ms": 700}, timestamp=datetime.now(UTC))
        assert worker.calls("stamped")[0].started_s - before_s >= 0.698


async def test_the_deadline_counts_from_the_due_time(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url), requester(vhost.amqp_url) as app:
        headers = {"x-lane-delay-ms": 4500, "x-lane-deadline-ms": 4000}
        late = await app.publish({"prompt": "due after its deadline"}, headers=headers)
        reply = await app.ask({"prompt": "too slow [[fault: hang]]"}, headers={**headers, "x-lane-delay-ms": 300})
        assert reply.code == "deadline_exceeded"
        assert "4000 ms" in reply.json["detail"]
        assert (await app.final(late)).status == "ok"


@pytest.mark.oldest_version
async def test_delayed_requests_start_in_the_order_of_their_due_times(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url, lanes={"batch": {"slots": 4}}) as worker, requester(vhost.amqp_url) as app:
        delays = [6200, 1700, 4700, 3200]  # further apart than the publishes on a busy machine
        asked = await asyncio.gather(
            *(
                app.publish({"prompt": f"due {each:04d}"}, key="batch.tests.x", headers={"x-lane-delay-ms": each})
                for each in delays
            )
        )
        for each in asked:
            await app.final(each)
        assert [call.prompt for call in worker.api.calls] == [f"due {each:04d}" for each in sorted(delays)]


@pytest.mark.all_delay_levels
async def test_beyond_the_limit_of_waiting_requests_a_long_delay_is_refused_and_a_short_one_is_not(
    vhost: Vhost,
) -> None:
    long, short = {"x-lane-delay-ms": 3_600_000}, {"x-lane-delay-ms": 200}
    async with meeting(vhost.amqp_url, waiting={"per_tenant": 2, "in_all": 3}) as (worker, app, _):
        for id in ("w-1", "w-2"):
            await app.publish({"prompt": "later"}, message_id=id, headers=long, user_id=vhost.user)
            await until(lambda id=id: worker.parts.store.find(Identity(vhost.user, id)))
        refused = await app.ask({"prompt": "too many"}, headers=long, user_id=vhost.user)
        assert (refused.code, refused.json["status"], refused.json["retryable"]) == ("too_many_waiting", 429, True)
        assert (await app.ask({"prompt": "soon"}, headers=short, user_id=vhost.user)).status == "ok"

        await app.publish({"prompt": "of nobody"}, message_id="w-3", headers=long)
        await until(lambda: worker.parts.store.find(Identity("", "w-3")))
        in_all = await app.ask({"prompt": "all are full"}, headers=long)
        assert ("may in all" in in_all.json["detail"], in_all.code) == (True, "too_many_waiting")
        assert not worker.calls("too many")
