"""The start of wait and deadline: the broker's time stamp, else the sender's, else the first delivery."""

import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lanekeeper.amqp.connection import Connection
from lanekeeper.contract.names import Names
from service.checks import replies
from tests.support.brokers import RunningBroker, Vhost, fresh_vhost
from tests.support.engine import Steps, engine_answers, find_image
from tests.support.lanes import LANES
from tests.support.requester import Requester, requester
from tests.support.serving import serving
from tests.support.waiting import until
from topology.broker.admin import apply
from topology.declaration import declare

pytestmark = pytest.mark.oldest_version

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
    image = find_image(steps) if engine_answers(steps) else None
    if image is None:
        pytest.skip("a broker with deploy/rabbitmq.conf needs Docker and an image of RabbitMQ 4.3")
    with warnings.catch_warnings(action="ignore"):
        from tests.support.containers import start_rabbitmq
    with ExitStack() as stack:
        yield start_rabbitmq(
            image, steps=steps, keep=lambda made: stack.callback(made.stop), configuration=CONFIGURATION
        )


@pytest.fixture
def stamped(stamping: RunningBroker) -> Iterator[Vhost]:
    with fresh_vhost(stamping) as made:
        yield made


@pytest.mark.parametrize("headers", [{}, {SENT: 4_000_000_000_000}], ids=["says nothing", "says nonsense"])
async def test_wait_and_deadline_count_from_the_brokers_time_stamp_if_there_is_one(
    stamped: Vhost, headers: dict[str, int]
) -> None:
    await declared(stamped.amqp_url)
    async with requester(stamped.amqp_url) as app:
        asked = await published_before_any_worker(app, headers={"x-lane-deadline-ms": DEADLINE_MS, **headers})
        async with serving(stamped.amqp_url) as worker:
            reply = await app.final(asked)
            assert reply.code == "deadline_exceeded"
            assert reply.headers["x-lane-wait-from"] == "broker"
            assert reply.headers["x-lane-wait-ms"] >= NOBODY_S * 1000 - 100
            assert reply.headers["x-lane-run-ms"] == 0
            assert not worker.api.calls


async def test_a_dead_letter_with_a_time_stamp_has_a_new_deadline_when_it_is_published_again(stamped: Vhost) -> None:
    async with (
        serving(stamped.amqp_url, lanes={"critical": {"max_attempts": 1}}) as worker,
        requester(stamped.amqp_url) as app,
    ):
        await app.read_dead()
        headers = {"x-lane-deadline-ms": DEADLINE_MS}
        await app.ask({"prompt": "x [[fault: server_error x1]]"}, headers=headers, message_id="twice")
        dead = await app.buried("twice")
        stamp_ms = dead.headers["timestamp_in_ms"]
        long_ago = {**dead.headers, "timestamp_in_ms": stamp_ms - 3_600_000}  # as if it were published an hour later
        again = await app.ask(dead.body, headers=long_ago, message_id="twice")
        assert (again.status, again.headers["x-lane-wait-from"]) == ("ok", "delivery")
        assert len(worker.api.calls) == 2


async def test_check_reports_a_broker_that_adds_time_stamps(stamped: Vhost) -> None:
    async with Connection(stamped.amqp_url, name="check") as connection:
        permissions, found = await replies(connection)
    assert permissions.well
    assert found.well
    assert "the broker writes timestamp_in_ms" in found.text


async def test_check_recommends_time_stamps_if_the_broker_could_add_them(vhost: Vhost) -> None:
    async with Connection(vhost.amqp_url, name="check") as connection:
        permissions, found = await replies(connection)
    assert permissions.well
    assert found.well
    advice = (
        "cannot tell when it came" if vhost.version.startswith("3.10") else "set_header_timestamp.overwrite = false"
    )
    assert advice in found.text


async def test_without_time_stamps_wait_and_deadline_count_from_the_first_delivery_and_the_reply_says_so(
    vhost: Vhost,
) -> None:
    await declared(vhost.amqp_url)
    async with requester(vhost.amqp_url) as app:
        asked = await published_before_any_worker(app, headers={"x-lane-deadline-ms": DEADLINE_MS})
        async with serving(vhost.amqp_url):
            reply = await app.final(asked)
            assert (reply.status, reply.headers["x-lane-wait-from"]) == ("ok", "delivery")
            told = await app.ask({"prompt": "told"}, headers={SENT: time.time_ns() // 1_000_000})
            assert told.headers["x-lane-wait-from"] == "sender"


async def test_without_the_brokers_time_stamp_the_deadline_counts_from_the_senders(vhost: Vhost) -> None:
    await declared(vhost.amqp_url)
    async with requester(vhost.amqp_url) as app:
        headers = {"x-lane-deadline-ms": DEADLINE_MS, SENT: time.time_ns() // 1_000_000}
        asked = await published_before_any_worker(app, headers=headers)
        async with serving(vhost.amqp_url):
            reply = await app.final(asked)
            assert (reply.code, reply.headers["x-lane-wait-from"]) == ("deadline_exceeded", "sender")
            assert reply.headers["x-lane-wait-ms"] >= NOBODY_S * 1000 - 100
