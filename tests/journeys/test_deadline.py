"""A delayed request does not run before its due time, and runs soon after it. A request past its deadline is answered
`deadline_exceeded`, wherever it is. Wait and deadline start at the broker's time stamp, else the sender's, else the
first delivery."""

import asyncio
import itertools
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from consumers.state.base import Identity
from lanekeeper.amqp.connection import Connection
from lanekeeper.contract.names import Names
from service.checks import replies
from tests.support.brokers import RunningBroker, Vhost, fresh_vhost
from tests.support.defaults import LANES
from tests.support.engine import Steps, Unavailable, image_here, remove_node, start_rabbitmq
from tests.support.requester import Requester, requester
from tests.support.serving import meeting, serving
from tests.support.waiting import until
from topology.broker.admin import apply
from topology.declaration import declare

LATE_S = 0.5
TRIES = 5


async def least(late_s: Callable[[], Awaitable[float]]) -> float:
    """The least of some measured times, until one is small enough: a busy machine delays some requests, a fault all."""
    found_s = await late_s()
    for _ in range(1, TRIES):
        if found_s <= LATE_S:
            break
        found_s = min(found_s, await late_s())
    return found_s


@pytest.mark.every_version
async def test_a_delayed_request_does_not_start_before_it_is_due(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:

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
    async with serving(vhost) as worker, requester(vhost) as app:
        await app.ask({"prompt": "warm up"})

        async def late_s() -> float:
            due_s = time.monotonic() + delay_ms / 1000
            headers = {"x-lane-delay-ms": delay_ms, "x-lane-sent-ms": time.time_ns() // 1_000_000}
            reply = await app.ask({"prompt": "later"}, headers=headers)
            # the wait counts from the due time
            return max(worker.calls("later")[-1].started_s - due_s, int(reply.headers["x-lane-wait-ms"]) / 1000)

        assert await least(late_s) <= LATE_S


@pytest.mark.timing
async def test_a_request_with_a_start_time_runs_at_that_time(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        await app.read_events()
        ids = (f"at-{number}" for number in itertools.count())

        async def late_s() -> float:
            id, at = next(ids), datetime.now(UTC) + timedelta(seconds=1.6)
            there = at.astimezone(tz=None).isoformat(timespec="milliseconds")
            at_s = time.monotonic() - (datetime.now(UTC) - at).total_seconds()  # the start time on the monotonic clock
            headers = {"x-lane-at": there}
            reply = await app.ask({"prompt": "on time"}, headers=headers, key="normal.tests.x", message_id=id)
            began_s = worker.calls("on time")[-1].started_s - at_s
            assert began_s >= -0.005
            await until(lambda: sorted(app.events_of(id)) == ["completed", "deferred", "started"])
            return max(began_s, int(reply.headers["x-lane-wait-ms"]) / 1000)

        assert await least(late_s) <= LATE_S


async def test_a_delay_is_not_shortened_by_a_timestamp_in_whole_seconds(vhost: Vhost) -> None:
    """`timestamp` has whole seconds: a delay counted from the beginning of that second would end early."""
    async with serving(vhost) as worker, requester(vhost) as app:
        await app.ask({"prompt": "warm up"})
        await until(lambda: time.time() % 1 > 0.9)
        before_s = time.monotonic()
        await app.ask({"prompt": "stamped"}, headers={"x-lane-delay-ms": 700}, timestamp=datetime.now(UTC))
        assert worker.calls("stamped")[0].started_s - before_s >= 0.698


async def test_the_deadline_counts_from_the_due_time(vhost: Vhost) -> None:
    async with serving(vhost), requester(vhost) as app:
        headers = {"x-lane-delay-ms": 4500, "x-lane-deadline-ms": 4000}
        late = await app.publish({"prompt": "due after its deadline"}, headers=headers)
        reply = await app.ask({"prompt": "too slow [[fault: hang]]"}, headers={**headers, "x-lane-delay-ms": 300})
        assert reply.code == "deadline_exceeded"
        assert "4000 ms" in reply.json["detail"]
        assert (await app.final(late)).status == "ok"


@pytest.mark.all_delay_levels
async def test_beyond_the_limit_of_waiting_requests_a_long_delay_is_refused_and_a_short_one_is_not(
    vhost: Vhost,
) -> None:
    long, short = {"x-lane-delay-ms": 3_600_000}, {"x-lane-delay-ms": 200}
    async with meeting(vhost, waiting={"per_tenant": 2, "in_all": 3}) as (worker, app, _):
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


async def test_a_request_whose_deadline_passes_in_the_queue_is_never_sent_to_the_provider(vhost: Vhost) -> None:
    async with serving(vhost, lanes={"batch": {"slots": 1}}) as worker, requester(vhost) as app:
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
    async with serving(vhost) as worker, requester(vhost) as app:
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
    async with serving(vhost), requester(vhost) as app:
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
    async with serving(vhost) as worker, requester(vhost) as app:
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
    async with serving(vhost, lanes={"normal": {"slots": 1}}) as worker, requester(vhost) as app:
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
    async with serving(vhost), requester(vhost) as app:
        reply = await app.ask(
            {"prompt": "x [[fault: server_error x2]]"}, expiration="2000", headers={"x-lane-delay-ms": 2100}
        )
        assert reply.status == "ok"


CONFIGURATION = Path(__file__).parents[2] / "deploy" / "rabbitmq.conf"
SENT = "x-lane-sent-ms"
DEADLINE_MS = 4000
"""Longer than a request takes on a busy machine."""
NOBODY_S = 4.5
"""How long no worker runs."""


async def published_before_any_worker(app: Requester, **how: Any) -> str:
    """Publish with a deadline of `DEADLINE_MS`, which is over when it returns."""
    began_s = time.monotonic()
    asked = await app.publish({"prompt": "too late"}, message_id="late", **how)
    await until(lambda: time.monotonic() - began_s > NOBODY_S)
    return asked


async def declared(url: str) -> None:
    async with Connection(url, name="deploy") as connection:
        topology = declare(LANES, names=Names(), broker_version=connection.version)
        await apply(topology, await connection.underlying())


@pytest.fixture(scope="module")
def stamping() -> Iterator[RunningBroker]:
    """A broker configured as in docker-compose.yml."""
    steps = Steps()
    try:
        image = image_here(steps)
    except Unavailable as error:
        pytest.skip(f"a broker with deploy/rabbitmq.conf needs Docker: {error}")
    with ExitStack() as stack:
        yield start_rabbitmq(
            image,
            steps=steps,
            keep=lambda name: stack.callback(remove_node, steps, name),
            configuration=CONFIGURATION,
        )


@pytest.fixture
def stamped(stamping: RunningBroker) -> Iterator[Vhost]:
    with fresh_vhost(stamping) as made:
        yield made


@pytest.mark.oldest_version
@pytest.mark.parametrize("headers", [{}, {SENT: 4_000_000_000_000}], ids=["says nothing", "says nonsense"])
async def test_wait_and_deadline_count_from_the_brokers_time_stamp_if_there_is_one(
    stamped: Vhost, headers: dict[str, int]
) -> None:
    await declared(stamped.amqp_url)
    async with requester(stamped) as app:
        asked = await published_before_any_worker(app, headers={"x-lane-deadline-ms": DEADLINE_MS, **headers})
        async with serving(stamped) as worker:
            reply = await app.final(asked)
            assert reply.code == "deadline_exceeded"
            assert reply.headers["x-lane-wait-from"] == "broker"
            assert reply.headers["x-lane-wait-ms"] >= NOBODY_S * 1000 - 100
            assert reply.headers["x-lane-run-ms"] == 0
            assert not worker.api.calls


@pytest.mark.oldest_version
async def test_a_dead_letter_with_a_time_stamp_has_a_new_deadline_when_it_is_published_again(stamped: Vhost) -> None:
    async with serving(stamped, lanes={"critical": {"max_attempts": 1}}) as worker, requester(stamped) as app:
        await app.read_dead()
        headers = {"x-lane-deadline-ms": DEADLINE_MS}
        await app.ask({"prompt": "x [[fault: server_error x1]]"}, headers=headers, message_id="twice")
        dead = await app.buried("twice")
        stamp_ms = dead.headers["timestamp_in_ms"]
        long_ago = {**dead.headers, "timestamp_in_ms": stamp_ms - 3_600_000}  # as if it were published an hour later
        again = await app.ask(dead.body, headers=long_ago, message_id="twice")
        assert (again.status, again.headers["x-lane-wait-from"]) == ("ok", "delivery")
        assert len(worker.api.calls) == 2


@pytest.mark.oldest_version
async def test_check_reports_a_broker_that_adds_time_stamps(stamped: Vhost) -> None:
    async with Connection(stamped.amqp_url, name="check") as connection:
        permissions, found = await replies(connection)
    assert permissions.well
    assert found.well
    assert "the broker writes timestamp_in_ms" in found.text


@pytest.mark.oldest_version
async def test_check_recommends_time_stamps_if_the_broker_could_add_them(vhost: Vhost) -> None:
    async with Connection(vhost.amqp_url, name="check") as connection:
        permissions, found = await replies(connection)
    assert permissions.well
    assert found.well
    advice = (
        "cannot tell when it came" if vhost.version.startswith("3.10") else "set_header_timestamp.overwrite = false"
    )
    assert advice in found.text


@pytest.mark.oldest_version
async def test_without_time_stamps_wait_and_deadline_count_from_the_first_delivery_and_the_reply_says_so(
    vhost: Vhost,
) -> None:
    await declared(vhost.amqp_url)
    async with requester(vhost) as app:
        asked = await published_before_any_worker(app, headers={"x-lane-deadline-ms": DEADLINE_MS})
        async with serving(vhost):
            reply = await app.final(asked)
            assert (reply.status, reply.headers["x-lane-wait-from"]) == ("ok", "delivery")
            told = await app.ask({"prompt": "told"}, headers={SENT: time.time_ns() // 1_000_000})
            assert told.headers["x-lane-wait-from"] == "sender"


@pytest.mark.oldest_version
async def test_without_the_brokers_time_stamp_the_deadline_counts_from_the_senders(vhost: Vhost) -> None:
    await declared(vhost.amqp_url)
    async with requester(vhost) as app:
        headers = {"x-lane-deadline-ms": DEADLINE_MS, SENT: time.time_ns() // 1_000_000}
        asked = await published_before_any_worker(app, headers=headers)
        async with serving(vhost):
            reply = await app.final(asked)
            assert (reply.code, reply.headers["x-lane-wait-from"]) == ("deadline_exceeded", "sender")
            assert reply.headers["x-lane-wait-ms"] >= NOBODY_S * 1000 - 100
