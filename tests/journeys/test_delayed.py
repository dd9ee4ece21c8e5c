"""A request may say when it is to run. Not before; hardly after."""

import time
from datetime import UTC, datetime, timedelta

import pytest

from tests.support.house import house
from tests.support.requester import requester
from tests.support.waiting import until

LATE_S = 0.5


@pytest.mark.parametrize("delay_ms", [100, 750, 3000])
async def test_a_delayed_request_starts_when_it_is_due(vhost, delay_ms) -> None:
    async with house(vhost.amqp_url) as home, requester(vhost.amqp_url) as app:
        await app.ask({"prompt": "warm up"})
        before_s = time.monotonic()
        reply = await app.ask(
            {"prompt": "later"}, headers={"x-lane-delay-ms": delay_ms, "x-lane-sent-ms": time.time_ns() // 1_000_000}
        )
        waited_s = home.calls("later")[0].started_s - before_s
        assert delay_ms / 1000 - 0.002 <= waited_s <= delay_ms / 1000 + LATE_S
        assert reply.headers["x-lane-wait-ms"] < 1000 * LATE_S, "the wait counts from the due time"
        assert reply.headers["x-lane-attempt"] == 1


async def test_a_request_runs_at_a_time(vhost) -> None:
    async with house(vhost.amqp_url) as home, requester(vhost.amqp_url) as app:
        await app.read_events()
        at = datetime.now(UTC) + timedelta(seconds=1.6)
        there = at.astimezone(tz=None).isoformat(timespec="milliseconds")
        before_s = time.monotonic() - (datetime.now(UTC) - at).total_seconds()  # `at` on the monotonic clock
        reply = await app.ask(
            {"prompt": "on time"}, headers={"x-lane-at": there}, key="normal.tests.x", message_id="at"
        )
        late_s = home.calls("on time")[0].started_s - before_s
        assert -0.005 <= late_s <= LATE_S
        assert reply.headers["x-lane-wait-ms"] < 1000 * LATE_S
        await until(lambda: sorted(app.events_of("at")) == ["completed", "deferred", "started"])


async def test_a_time_that_has_passed_is_at_once(vhost) -> None:
    async with house(vhost.amqp_url), requester(vhost.amqp_url) as app:
        reply = await app.ask({"prompt": "late already"}, headers={"x-lane-at": "2020-01-01T00:00:00Z"}, within_s=2)
        assert reply.status == "ok"


async def test_a_delay_is_not_cut_short_by_a_timestamp_in_whole_seconds(vhost) -> None:
    """`timestamp` says only in which second it was sent: a delay counted from the second's beginning ends early."""
    async with house(vhost.amqp_url) as home, requester(vhost.amqp_url) as app:
        await app.ask({"prompt": "warm up"})
        await until(lambda: time.time() % 1 > 0.9)
        before_s = time.monotonic()
        await app.ask({"prompt": "stamped"}, headers={"x-lane-delay-ms": 700}, timestamp=datetime.now(UTC))
        assert home.calls("stamped")[0].started_s - before_s >= 0.698


async def test_the_deadline_counts_from_the_due_time(vhost) -> None:
    async with house(vhost.amqp_url), requester(vhost.amqp_url) as app:
        headers = {"x-lane-delay-ms": 1500, "x-lane-deadline-ms": 1000}
        assert (await app.ask({"prompt": "due after its deadline"}, headers=headers)).status == "ok"
        reply = await app.ask({"prompt": "too slow [[latency: 3s]]"}, headers={**headers, "x-lane-delay-ms": 300})
        assert reply.code == "deadline_exceeded"
        assert "1000 ms" in reply.json["detail"]


async def test_delays_end_in_the_order_in_which_they_are_due(vhost) -> None:
    async with house(vhost.amqp_url, lanes={"batch": {"slots": 4}}) as home, requester(vhost.amqp_url) as app:
        delays = [1700, 200, 900, 1300, 500]
        asked = [
            await app.publish({"prompt": f"due {each:04d}"}, key="batch.tests.x", headers={"x-lane-delay-ms": each})
            for each in delays
        ]
        for each in asked:
            await app.final(each)
        assert [call.prompt for call in home.api.calls] == [f"due {each:04d}" for each in sorted(delays)]
