"""The outcome of a request can be fetched by its id later."""

import asyncio
import os
import time
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from consumers.state.base import Identity
from lanekeeper import Client, NotEnded
from lanekeeper.replies import Problem
from tests.support.brokers import Vhost
from tests.support.meeting import meeting
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.stores import store_url
from tests.support.waiting import until


async def test_a_fetched_answer_equals_the_one_that_was_sent(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app, Client(vhost.amqp_url) as client:
        reply = await app.ask({"prompt": "three rivers"}, message_id="a-1")
        result = await client.result("a-1")

        assert result.body == reply.body
        assert result.replayed
        told = {"x-lane-name", "x-lane-model", "x-lane-provider", "x-lane-attempt", "x-lane-wait-ms", "x-lane-run-ms"}
        assert {name: result.headers[name] for name in told} == {name: reply.headers[name] for name in told}
        assert (result.request_id, result.lane) == ("a-1", "critical")
        assert len(worker.api.calls) == 1


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"prompt": "x", "model": "claude-nope"}, "provider_rejected"),
        ({"prompt": "[[fault: overloaded]]"}, "attempts_exhausted"),
        (b"not JSON", "invalid_request"),
    ],
)
async def test_a_fetched_error_equals_the_one_that_was_sent(vhost: Vhost, body: object, code: str) -> None:
    async with serving(vhost.amqp_url), requester(vhost.amqp_url) as app, Client(vhost.amqp_url) as client:
        reply = await app.ask(body, message_id="a-1")
        with pytest.raises(Problem) as caught:
            await client.result("a-1")

        assert caught.value.code == code
        assert caught.value.fields == reply.json


async def test_fetching_a_running_request_waits_as_long_as_requested(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, Client(vhost.amqp_url) as client:
        await client.publish({"prompt": "slow [[held]]"}, key="critical.tests.x", message_id="s-1")
        await until(lambda: worker.calls("slow"))
        with pytest.raises(NotEnded) as caught:
            await client.result("s-1")
        began = time.monotonic()
        with pytest.raises(NotEnded):
            await client.result("s-1", wait_s=0.5)

        assert caught.value.status == "running"
        assert time.monotonic() - began >= 0.5
        worker.api.release("slow")
        assert (await client.result("s-1", wait_s=60)).text.startswith("echo: slow")


async def test_a_request_between_two_attempts_is_reported_as_waiting(vhost: Vhost) -> None:
    pause_s = 60
    async with serving(vhost.amqp_url) as worker, Client(vhost.amqp_url) as client:
        prompt = f"again [[fault: rate_limited retry_after={pause_s} x1]]"
        began = datetime.now(UTC)
        await client.publish({"prompt": prompt}, key="normal.tests.x", message_id="w-1")
        await until(lambda: worker.calls("again") and worker.api.running == 0)

        async def waits() -> NotEnded | None:
            with pytest.raises(NotEnded) as caught:
                await client.result("w-1")
            return caught.value if (caught.value.status, caught.value.attempts) == ("waiting", 1) else None

        waiting = await until(waits)
        assert waiting.due_at is not None
        assert pause_s <= (waiting.due_at - began).total_seconds()
        assert (waiting.due_at - datetime.now(UTC)).total_seconds() < 1.1 * pause_s, "at most a tenth is added"
        assert await client.cancel("w-1") == "recorded"

        retried = await client.request({"prompt": "again [[fault: overloaded x1]]"}, key="normal.tests.x")
        assert (await client.result(retried.request_id)).attempt == 2


@pytest.mark.parametrize("lane", ["critical", "batch"])
async def test_a_delayed_request_is_reported_as_waiting_until_its_due_time(vhost: Vhost, lane: str) -> None:
    async with serving(vhost.amqp_url), Client(vhost.amqp_url) as client:
        began = datetime.now(UTC)
        await client.publish({"prompt": "later"}, key=f"{lane}.tests.x", message_id="d-1", delay_s=60)
        published = datetime.now(UTC)

        async def waits() -> NotEnded | None:
            with pytest.raises(NotEnded) as caught:
                await client.result("d-1")
            return caught.value if caught.value.status == "waiting" else None

        waiting = await until(waits)
        assert (waiting.attempts, waiting.due_at is not None) == (0, True)
        assert waiting.due_at is not None
        millisecond = timedelta(milliseconds=1)
        assert began - millisecond <= waiting.due_at - timedelta(seconds=60) <= published
        assert await client.cancel("d-1") == "recorded"
        with pytest.raises(Problem, match="cancelled"):
            await client.result("d-1")


async def test_a_delayed_request_runs_although_the_store_has_forgotten_it(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, Client(vhost.amqp_url) as client:
        for delay_s in (1, 4, 16):  # on a busy machine it may begin before the store has forgotten it
            id = await client.publish({"prompt": f"after {delay_s} s"}, key="normal.tests.x", delay_s=delay_s)
            await until(partial(worker.parts.store.find, Identity("", id)))
            os.unlink(store_url(vhost.amqp_url).removeprefix("sqlite:///"))
            if not worker.calls(f"after {delay_s} s"):
                break

        assert (await client.result(id, wait_s=60)).text == f"echo: after {delay_s} s"


async def test_a_speaker_can_fetch_results_of_its_tenants(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url, speakers=(vhost.user,)), Client(vhost.amqp_url) as client:
        for tenant in ("acme", "bell"):
            await client.request({"prompt": tenant}, key="critical.tests.x", message_id="t-1", tenant=tenant)

        assert [(await client.result("t-1", tenant=tenant)).text for tenant in ("acme", "bell")] == [
            "echo: acme",
            "echo: bell",
        ]


async def test_results_can_be_fetched_while_every_slot_is_in_use(vhost: Vhost) -> None:
    async with meeting(vhost.amqp_url, lanes={"critical": {"slots": 1}}, works=("critical",)) as (worker, _, client):
        await client.request({"prompt": "x"}, key="critical.tests.x", message_id="a-1")
        await client.publish({"prompt": "[[latency: 60s]]"}, key="critical.tests.x")
        await until(lambda: worker.api.running == 1)
        results = await asyncio.gather(*(client.result("a-1") for _ in range(50)))

        assert {each.text for each in results} == {"echo: x"}
        assert worker.api.running == 1
