"""A request can be cancelled wherever it is, by its caller's leaving too, and ends once; a flood of cancellations by
one tenant delays neither requests nor other tenants' cancellations."""

import asyncio
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiormq
import pytest
from aiormq.abc import ChannelFrame
from aiormq.channel import Channel
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from consumers.state.base import Identity
from lanekeeper import Client, Final, Problem
from tests.support.brokers import Vhost
from tests.support.requester import Got, Requester, requester
from tests.support.serving import RunningWorker, meeting, serving
from tests.support.waiting import STARTED_S, until

LONG = "[[latency: 60s]]"


def cancelled(reply: Got, id: str) -> bool:
    """Whether this is the problem document of a cancelled request."""
    document = reply.json
    return (reply.status, document["code"], document["status"], document["request"]) == ("error", "cancelled", 499, id)


async def ended_once(app: Requester, *correlations: str) -> bool:
    """Whether each request has exactly one final reply, after a time in which a second could arrive."""
    await app.ask({"prompt": "after"})
    await asyncio.sleep(0.3)  # a second one must not come, so there is no condition to wait for
    return [len(app.finals(each)) for each in correlations] == [1] * len(correlations)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_running_call_is_interrupted_within_a_second(vhost: Vhost, stream: bool) -> None:
    async with meeting(vhost) as (worker, app, client):
        await app.read_events()
        headers = {"x-lane-stream": True} if stream else None
        running = await app.publish(
            {"prompt": f"running, word by word, for a long time {LONG}"}, message_id="c-1", headers=headers
        )
        await until(lambda: worker.calls("running"))
        if stream:
            await until(lambda: app.parts(running))
        began = time.monotonic()
        assert await client.cancel("c-1") == "told"
        await until(lambda: worker.calls("running")[0].outcome == "client_gone")
        took_s = time.monotonic() - began

        assert took_s < 15
        assert cancelled(await app.final(running), "c-1")
        assert await ended_once(app, running)
        assert len(worker.calls("running")) == 1
        await until(lambda: app.events_of("c-1") == ["started", "cancelled"])


async def test_a_cancellation_read_by_another_worker_reaches_the_one_that_runs_the_request(vhost: Vhost) -> None:
    async with (
        serving(vhost, works=("normal",)) as first,
        serving(vhost, works=("critical",)) as second,
        requester(vhost) as app,
        Client(vhost.amqp_url) as client,
    ):
        asked = [
            await app.publish({"prompt": f"{lane} {LONG}"}, key=f"{lane}.tests.x", message_id=lane)
            for lane in ("normal", "critical")
        ]
        await until(lambda: first.calls("normal") and second.calls("critical"))
        began = time.monotonic()
        assert [await client.cancel(lane) for lane in ("normal", "critical")] == ["told", "told"]
        calls = (*first.calls("normal"), *second.calls("critical"))
        await until(lambda: all(call.outcome == "client_gone" for call in calls))

        assert time.monotonic() - began < 15
        for correlation, lane in zip(asked, ("normal", "critical"), strict=True):
            assert cancelled(await app.final(correlation), lane)


async def test_a_cancellation_after_the_end_has_no_effect(vhost: Vhost) -> None:
    async with meeting(vhost) as (worker, app, client):
        asked = await app.publish({"prompt": "quick"}, message_id="e-1")
        assert (await app.final(asked)).status == "ok"

        assert await client.cancel("e-1") == "ended"
        assert (await client.result("e-1")).text == "echo: quick"
        assert await ended_once(app, asked)
        assert len(worker.calls("quick")) == 1


async def test_a_request_that_arrives_after_its_cancellation_is_answered_cancelled(vhost: Vhost) -> None:
    async with meeting(vhost) as (worker, app, client):
        assert await client.cancel("u-1") == "unseen"
        late = await app.publish({"prompt": "late"}, message_id="u-1")

        assert cancelled(await app.final(late), "u-1")
        assert not worker.calls("late")
        assert await ended_once(app, late)


MALFORMED = {
    "not JSON": b"\xff{",
    "no id": b"{}",
    "an id that is no string": b'{"cancel": {"a": 1}}',
    "a huge id": json.dumps({"cancel": "x" * 100_000}).encode(),
    "a forged tenant": b'{"cancel": "m-1", "tenant": "acme"}',
}


ODD = [("cancel", None), ("cancel", "result"), ("cancel.twice", "cancel"), ("cancle", "cancle"), ("", None)]
"""Pairs of a routing key and a type."""


async def test_every_answer_to_a_control_message_says_what_it_is(vhost: Vhost) -> None:
    async with serving(vhost), requester(vhost) as app:
        told = [await app.control({"cancel": "c-1"}, key="cancel"), await app.control({"result": "r-1"}, key="result")]
        assert [(each.control, each.headers["x-lane-request-id"]) for each in told] == [
            ("accepted", "c-1"),
            ("pending", "r-1"),
        ]
        assert {"x-lane-status" in each.headers for each in told} == {False}
        assert (told[0].json["outcome"], told[0].json["kept_until"][:2]) == ("unseen", "20")

        status = await app.control({}, key="status")
        assert (status.control, list(status.json["lanes"])) == ("accepted", ["critical", "normal", "batch"])

        await app.ask({"prompt": "x"}, message_id="r-1")
        final = await app.control({"result": "r-1"}, key="result")
        assert (final.status, final.control, final.headers["x-lane-replayed"]) == ("ok", None, True)
        change = await app.control({"change": "r-1", "start": "now"}, key="change")
        assert (change.control, "not available in this version" in change.json["detail"]) == ("error", True)


async def test_a_control_message_that_cannot_be_understood_is_refused_and_removed(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        running = await app.publish({"prompt": "running [[held]]"}, message_id="m-1")
        await until(lambda: worker.calls("running"))
        refused = [await app.control(body, key="cancel") for body in MALFORMED.values()]
        refused += [await app.control({"cancel": "m-1"}, key=key, message_type=type) for key, type in ODD]
        for reply in refused:
            assert (reply.code, reply.control, reply.status) == ("invalid_request", "error", None)
            assert reply.headers.get("x-lane-request-id", "") == reply.json["request"]

        assert worker.calls("running")[0].outcome == "running"
        worker.api.release()
        assert (await app.final(running)).status == "ok"
        await until(lambda: app.holds(0, "lane.control"))
        assert await ended_once(app, running)
        assert worker.is_well


async def test_a_control_message_is_answered_only_to_queues_named_by_the_broker(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        for reply_to in ("lane.critical", "lane.dead", "lane.control", "no.such"):
            how: dict[str, Any] = {"key": "cancel", "message_type": "cancel", "reply_to": reply_to, "mandatory": True}
            await app.publish({"cancel": reply_to}, exchange="lane.control", **how)
            await until(lambda id=reply_to: worker.parts.store.find(Identity("", id)))
            late = await app.publish({"prompt": "late"}, message_id=reply_to)

            assert cancelled(await app.final(late), reply_to)
            await until(lambda: app.holds(0, "lane.control"))
            await until(lambda: app.holds(0, "lane.critical", "lane.dead"))
        assert worker.is_well
        assert not worker.api.calls


MANY = 40


async def test_a_request_cancelled_while_no_worker_ran_is_never_called(vhost: Vhost) -> None:
    async with serving(vhost):
        pass  # the topology is declared, and no worker runs
    async with requester(vhost) as app:
        asked = [await app.publish({"prompt": f"in vain {n}"}, message_id=f"c-{n}") for n in range(MANY)]
        kept = await app.publish({"prompt": "wanted"}, message_id="wanted")
        for n in range(MANY):
            await app.publish(
                {"cancel": f"c-{n}"}, exchange="lane.control", key="cancel", message_type="cancel", mandatory=True
            )
        async with serving(vhost) as worker:
            finals = await asyncio.gather(*(app.final(each) for each in asked))
            assert {final.code for final in finals} == {"cancelled"}
            assert (await app.final(kept)).status == "ok"
            assert [call.prompt for call in worker.api.calls] == ["wanted"]


KEY = "critical.tests.abandoned"
WORDS = "running, word by word, for a long time [[latency: 60s]]"


async def is_closed(worker: RunningWorker, *, within_s: float = 15.0) -> None:
    """Wait until the provider has seen the connection of the running call close."""
    began = time.monotonic()
    await until(lambda: [call.outcome for call in worker.calls("running")] == ["client_gone"])
    assert time.monotonic() - began < within_s


async def ends_as_cancelled(client: Client, id: str) -> None:
    with pytest.raises(Problem, match="cancelled"):
        await client.result(id, wait_s=60)


@pytest.mark.parametrize("how", ["cancel", "wait_for", "task group"])
async def test_cancelling_the_calling_task_cancels_its_request(vhost: Vhost, how: str) -> None:
    async with serving(vhost) as worker, Client(vhost.amqp_url) as client:

        async def ask() -> None:
            await client.request({"prompt": WORDS}, key=KEY, message_id="a-1")

        async def fail() -> None:
            await until(lambda: worker.calls("running"))
            raise ZeroDivisionError

        async def fail_beside() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(ask())
                group.create_task(fail())

        if how == "cancel":
            asking = asyncio.create_task(ask())
            await until(lambda: worker.calls("running"))
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking
        elif how == "wait_for":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ask(), 5)
        else:
            with pytest.raises(ExceptionGroup):
                await fail_beside()

        await is_closed(worker)
        await ends_as_cancelled(client, "a-1")


@pytest.mark.parametrize("how", ["break", "aclose"])
async def test_leaving_a_stream_cancels_its_request(vhost: Vhost, how: str) -> None:
    async with serving(vhost) as worker, Client(vhost.amqp_url) as client:
        stream = client.stream({"prompt": WORDS}, key=KEY, message_id="a-1")
        async for _ in stream:
            break
        if how == "aclose":
            await stream.aclose()
        else:
            del stream

        await is_closed(worker)
        await ends_as_cancelled(client, "a-1")


async def test_a_request_that_was_answered_is_not_cancelled(vhost: Vhost) -> None:
    async with serving(vhost) as worker, Client(vhost.amqp_url) as client:
        await client.request({"prompt": "one"}, key=KEY, message_id="a-1")
        async for _ in client.stream({"prompt": "two"}, key=KEY, message_id="a-2"):
            pass
        async for each in client.stream({"prompt": "three"}, key=KEY, message_id="a-3"):
            if isinstance(each, Final):
                break
        with pytest.raises(Problem, match="provider_rejected"):
            await client.request({"prompt": "[[fault: invalid]]"}, key=KEY, message_id="a-4")

        for id in ("a-1", "a-2", "a-3"):
            assert (await client.result(id, wait_s=60)).attempt == 1
        assert worker.is_well


async def test_a_request_keeps_running_if_the_caller_chose_that(vhost: Vhost) -> None:
    async with serving(vhost) as worker, Client(vhost.amqp_url, cancel_abandoned=False) as client:
        asking = asyncio.create_task(client.request({"prompt": "running [[held]]"}, key=KEY, message_id="a-1"))
        await until(lambda: worker.calls("running"))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        worker.api.release()

        assert (await client.result("a-1", wait_s=60)).text.startswith("echo: running")
        assert [call.outcome for call in worker.calls("running")] == ["ok"]


async def test_cancelling_the_calling_task_does_not_wait_for_the_broker(
    vhost: Vhost, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_be_sent = asyncio.Event()
    async with serving(vhost) as worker, Client(vhost.amqp_url) as client:
        send = client._transport.send_cancellation

        async def send_later(id: str, **how: Any) -> None:
            await may_be_sent.wait()
            await send(id, **how)

        monkeypatch.setattr(client._transport, "send_cancellation", send_later)
        asking = asyncio.create_task(client.request({"prompt": WORDS}, key=KEY))
        await until(lambda: worker.calls("running"))
        asking.cancel()
        await asyncio.wait([asking], timeout=60)
        assert asking.cancelled(), "although nothing was sent to the broker yet"
        may_be_sent.set()
        await is_closed(worker)


STEP_S = 0.02
AT_ONCE = 500
"""Largest number sent at once, when it is behind its rate on a busy machine."""
PILED_UP_AT_MOST = 5000
"""Most messages waiting in the queue, as the exported policy sets it."""


async def flood(url: str, *, per_s: int, user: str) -> None:
    """Publish without confirms until killed, with a reply address as an application would."""
    connection = await aiormq.connect(url)
    channel = await connection.channel(publisher_confirms=False)
    assert isinstance(channel, Channel)
    declared = await channel.queue_declare(exclusive=True, auto_delete=True, arguments={"x-max-length": 1000})

    async def drop(_: object) -> None:
        """Ignore the answers."""

    await channel.basic_consume(declared.queue or "", drop, no_ack=True)
    properties = Basic.Properties(message_type="cancel", user_id=user or None, reply_to=declared.queue, delivery_mode=2)
    began, sent = time.monotonic(), 0
    while True:
        waiting = (await channel.queue_declare("lane.control", passive=True)).message_count or 0
        due = min(round((time.monotonic() - began) * per_s) - sent, AT_ONCE, PILED_UP_AT_MOST - waiting)
        if due > 0:
            await channel.write_queue.put(_cancellations(due, channel.number, properties))
            if not sent:
                print("flooding", flush=True)
            sent += due
        await asyncio.sleep(STEP_S)


def _cancellations(count: int, channel: int, properties: Basic.Properties) -> ChannelFrame:
    """The messages as one write, so that making the flood costs little CPU time."""
    publish = Basic.Publish(exchange="lane.control", routing_key="cancel")
    bodies = [b'{"cancel": "%s"}' % uuid.uuid4().hex.encode() for _ in range(count)]
    frames = [each for body in bodies for each in (publish, ContentHeader(0, len(body), properties), ContentBody(body))]
    return ChannelFrame.marshall(channel_number=channel, frames=frames)


@asynccontextmanager
async def flooding(url: str, *, per_s: int, user: str = "") -> AsyncIterator[None]:
    """Flood while the block lasts; it begins once the first messages are written."""
    command = (sys.executable, "-m", "tests.journeys.test_cancelled", url, str(per_s), user)
    process = await asyncio.create_subprocess_exec(*command, stdout=-1)
    assert process.stdout is not None
    try:
        assert await asyncio.wait_for(process.stdout.readline(), timeout=STARTED_S) == b"flooding\n"
        yield
    finally:
        process.kill()
        await process.wait()


FLOOD_PER_S = 1500


@pytest.mark.timing
async def test_a_worker_that_starts_during_a_flood_of_cancellations_answers_requests(vhost: Vhost) -> None:
    async with serving(vhost):
        pass  # the topology is declared, and no worker runs
    async with flooding(vhost.amqp_url, per_s=FLOOD_PER_S, user=vhost.user), requester(vhost) as app:

        async def has_piled_up() -> bool:
            return await app.depth("lane.control") > FLOOD_PER_S

        await until(has_piled_up)
        asked = await app.publish({"prompt": "urgent"})
        async with serving(vhost, waits=False, control={"per_tenant_s": 10}) as worker:
            assert (await app.final(asked)).status == "ok"
            for _ in range(10):
                assert (await app.ask({"prompt": "urgent too"})).status == "ok"
            assert worker.parts.control.answers.refused


@pytest.mark.timing
async def test_another_tenants_cancellation_is_fast_during_a_flood_and_the_flood_is_read_to_its_end(
    vhost: Vhost,
) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        async with flooding(vhost.amqp_url, per_s=FLOOD_PER_S, user=vhost.user):
            await until(lambda: worker.parts.control.answers.unanswered > FLOOD_PER_S, within_s=60)
            for id in ("a", "b", "c", "d", "e"):
                running = await app.publish({"prompt": f"running {id} {LONG}"}, message_id=id)
                await until(lambda id=id: worker.calls(f"running {id}"))
                assert (await app.control({"cancel": id}, key="cancel")).json == {"id": id, "outcome": "told"}
                assert (await app.final(running)).code == "cancelled"

        async def is_read() -> bool:
            return await app.depth("lane.control") == 0

        await until(is_read)
        assert worker.parts.control.displaced == 0


if __name__ == "__main__":
    asyncio.run(flood(sys.argv[1], per_s=int(sys.argv[2]), user=sys.argv[3]))
