"""Life-cycle events report the steps of each request, under routing keys that a queue can be bound with."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.brokers import Vhost
from tests.support.faulty_api import FaultyAPI
from tests.support.processes import environment, lanekeeper
from tests.support.requester import Requester, requester
from tests.support.serving import serving
from tests.support.waiting import until


async def test_each_step_is_an_event_with_lane_application_and_attempt(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        await app.read_events()
        before_ms = time.time() * 1000
        headers = {"x-lane-delay-ms": 100}
        await app.ask(
            {"prompt": "secret [[fault: server_error x1]]"}, key="normal.shop.ask", message_id="v.1", headers=headers
        )
        await until(lambda: len(app.events_of("v.1")) == 5)
        steps = ["deferred", "started", "retrying", "started", "completed"]
        assert sorted(app.events_of("v.1")) == sorted(steps)
        # an event after a step may arrive before an event of the next step
        events = [each for each in app.events if each.json["id"] == "v.1"]
        events.sort(key=lambda each: (each.json["attempt"], steps.index(each.json["event"])))
        assert [each.routing_key for each in events] == [f"normal.shop.{each.json['event']}.v.1" for each in events]
        assert [each.json["attempt"] for each in events] == [0, 1, 1, 2, 2]
        for each in events:
            assert each.properties.content_type == "application/json"
            assert each.properties.delivery_mode == 1
            assert (each.json["lane"], each.json["app"]) == ("normal", "shop")
            assert before_ms - 1 <= each.json["at_ms"] <= time.time() * 1000 + 1
            assert b"secret" not in each.body
        assert events[-1].json["model"] == "claude-sonnet-5-5"
        assert events[-1].json["run_ms"] >= 0
        assert len(worker.api.calls) == 2


@pytest.mark.parametrize("state", ["unseen", "delayed", "running", "between two attempts"])
async def test_a_request_that_is_cancelled_has_one_event_of_its_end_and_a_repetition_none(
    vhost: Vhost, state: str
) -> None:
    prompt, headers = {
        "unseen": ("a", None),
        "delayed": ("a [[latency: 60s]]", {"x-lane-delay-ms": 1000}),
        "running": ("a [[latency: 60s]]", None),
        "between two attempts": ("a [[fault: rate_limited retry_after=2]]", None),
    }[state]
    how: dict[str, Any] = {"key": "normal.tests.x", "message_id": "c", "headers": headers}
    seen_before = {"delayed": "deferred", "running": "started", "between two attempts": "retrying"}
    async with serving(vhost), requester(vhost) as app:
        await app.read_events()
        if state == "unseen":
            assert (await app.control({"cancel": "c"}, key="cancel")).json["outcome"] == "unseen"
        asked = await app.publish({"prompt": prompt}, **how)
        if state != "unseen":
            await until(lambda: seen_before[state] in app.events_of("c"))
            assert (await app.control({"cancel": "c"}, key="cancel")).json["outcome"] in ("recorded", "told")
        assert (await app.final(asked)).code == "cancelled"
        await until(lambda: ends_of(app, "c") == ["cancelled"])

        for _ in range(2):
            await app.ask({"prompt": prompt}, **how)
        await until(lambda: len(ends_of(app, "c")) == 3)
        assert ends_of(app, "c") == ["cancelled", "replayed", "replayed"]


def ends_of(app: Requester, id: str) -> list[str]:
    """The events of a request that say how it ended."""
    return [each for each in app.events_of(id) if each not in ("deferred", "started", "retrying")]


@pytest.mark.slow
async def test_after_a_crash_between_storing_and_acknowledging_the_end_is_told_as_replayed(
    vhost: Vhost, tmp_path: Path
) -> None:
    async with FaultyAPI() as api, requester(vhost) as app:
        environ = environment(vhost, api)
        dying = {**environ, "LANEKEEPER_FAILPOINTS": "after_store:1"}
        async with lanekeeper("serve", environ=dying, folder=tmp_path) as worker:
            await worker.ready()
            await app.read_events()
            asked = await app.publish({"prompt": "a"}, message_id="one")
            await until(lambda: worker.has_ended, within_s=60)
        async with lanekeeper("serve", environ=environ, folder=tmp_path):
            reply = await app.final(asked)
            await until(lambda: ends_of(app, "one"))

        assert (reply.status, reply.headers["x-lane-replayed"]) == ("ok", True)
        assert (ends_of(app, "one"), len(api.calls)) == (["replayed"], 1)


async def test_a_worker_that_starts_sends_no_event_about_itself(vhost: Vhost) -> None:
    """Anybody who may read events could read it."""
    async with requester(vhost) as app:
        async with serving(vhost):
            await app.read_events()
        async with serving(vhost):
            await app.ask({"prompt": "a"}, message_id="first")
            await until(lambda: app.events_of("first")[-1:] == ["completed"])
        assert {len(each.routing_key.split(".")) for each in app.events} == {4}
        assert {each.json["id"] for each in app.events} == {"first"}


async def test_a_request_with_the_longest_possible_names_does_not_suppress_other_events(vhost: Vhost) -> None:
    """The routing key of its events would be longer than AMQP allows."""
    async with serving(vhost), requester(vhost) as app:
        await app.read_events()
        await app.publish({"prompt": "a"}, message_id="plain")
        await app.publish({"prompt": "a"}, key="critical." + "🦊" * 61, message_id="x" * 128)
        await app.publish({"prompt": "a"}, key="critical.tests.x", message_id="ü" * 127)
        await app.publish({"prompt": "a"}, message_id="plain too")
        await app.publish({"prompt": "a"}, message_id="plain-3")
        for name, last in (("plain", "completed"), ("plain too", "dead"), ("plain-3", "completed")):
            await until(lambda name=name, last=last: app.events_of(name)[-1:] == [last])
