"""A request can be cancelled wherever it is, and ends once."""

import asyncio
import json
import time

import pytest

from consumers.state.base import Identity
from lanekeeper import Client
from tests.support.brokers import Vhost
from tests.support.meeting import meeting
from tests.support.requester import Got, Requester, requester
from tests.support.serving import RunningWorker, serving
from tests.support.waiting import until

LONG = "[[latency: 60s]]"
DELAY_MS = 4000
"""Longer than a cancellation takes on a busy machine."""


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
    async with meeting(vhost.amqp_url) as (worker, app, client):
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
        serving(vhost.amqp_url, works=("normal",)) as first,
        serving(vhost.amqp_url, works=("critical",)) as second,
        requester(vhost.amqp_url) as app,
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
    async with meeting(vhost.amqp_url) as (worker, app, client):
        asked = await app.publish({"prompt": "quick"}, message_id="e-1")
        assert (await app.final(asked)).status == "ok"

        assert await client.cancel("e-1") == "ended"
        assert (await client.result("e-1")).text == "echo: quick"
        assert await ended_once(app, asked)
        assert len(worker.calls("quick")) == 1


async def test_a_request_that_arrives_after_its_cancellation_is_answered_cancelled(vhost: Vhost) -> None:
    async with meeting(vhost.amqp_url) as (worker, app, client):
        assert await client.cancel("u-1") == "unseen"
        late = await app.publish({"prompt": "late"}, message_id="u-1")

        assert cancelled(await app.final(late), "u-1")
        assert not worker.calls("late")
        assert await ended_once(app, late)


MALFORMED = {
    "no body": b"",
    "not JSON": b"\xff{",
    "deep": b"[" * 3000,
    "a list": b"[]",
    "a number": b"1",
    "no id": b"{}",
    "an empty id": b'{"cancel": ""}',
    "an id that is no string": b'{"cancel": {"a": 1}}',
    "null": b'{"cancel": null}',
    "a huge id": json.dumps({"cancel": "x" * 100_000}).encode(),
    "a huge body": json.dumps({"cancel": "m-1", "more": "x" * 1_000_000}).encode(),
    "an odd tenant": b'{"cancel": "m-1", "tenant": 3}',
    "a forged tenant": b'{"cancel": "m-1", "tenant": "acme"}',
}


ODD = [
    ("cancel", None), ("cancel", ""), ("cancel", "reboot"), ("cancel", "result"), ("cancel", "status"),
    ("cancel.twice", "cancel"), ("status", "cancel"), ("cancle", "cancle"), ("", None), ("change", "change"),
]  # fmt: skip
"""Pairs of a routing key and a type."""


async def test_every_answer_to_a_control_message_says_what_it_is(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url), requester(vhost.amqp_url) as app:
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
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
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


@pytest.mark.parametrize("reply_to", ["lane.critical", "lane.dead", "lane.control", "no.such"])
async def test_a_control_message_is_answered_only_to_queues_named_by_the_broker(vhost: Vhost, reply_to: str) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        await app.publish(
            {"cancel": "z-1"},
            exchange="lane.control",
            key="cancel",
            message_type="cancel",
            reply_to=reply_to,
            mandatory=True,
        )
        await until(lambda: worker.parts.store.find(Identity("", "z-1")))
        late = await app.publish({"prompt": "late"}, message_id="z-1")

        assert cancelled(await app.final(late), "z-1")
        await until(lambda: app.holds(0, "lane.control"))
        await until(lambda: app.holds(0, "lane.critical", "lane.dead"))
        assert _is_quiet(worker)


def _is_quiet(worker: RunningWorker) -> bool:
    return worker.is_well and not worker.api.calls
