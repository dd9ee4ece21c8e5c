"""A streamed request gets its parts as they are produced, and a final reply equal to all parts together."""

from typing import Any

import pytest

from lanekeeper import Client, Final
from lanekeeper.requests import ANSWER_LATE_S
from tests.support.brokers import Vhost
from tests.support.held_provider import HeldProvider
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.stream import put_together
from tests.support.waiting import until


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"thinking": {"type": "enabled", "budget_tokens": 50}},
        {"tools": [{"name": "look", "input_schema": {"type": "object", "required": ["at"]}}]},
    ],
    ids=["text", "thinking", "tool"],
)
async def test_parts_come_in_order_and_the_final_reply_equals_them(vhost: Vhost, extra: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "tell me a “story” 🦊"}], **extra}
    async with serving(vhost.amqp_url), requester(vhost.amqp_url) as app:
        asked = await app.publish(body, headers={"x-lane-stream": True}, message_id="s-1")
        final = await app.final(asked)
        parts = app.parts(asked)

        assert app.replies[asked][-1] is final
        assert [part.headers["x-lane-seq"] for part in parts] == list(range(len(parts)))
        assert {part.headers["x-lane-part"] for part in parts} == {"event"}
        assert {part.headers["x-lane-request-id"] for part in parts} == {"s-1"}
        assert {part.properties.delivery_mode for part in parts} == {1}
        events = [part.json for part in parts]
        assert events[0]["type"] == "message_start"
        assert events[-1]["type"] == "message_stop"
        assert sum(event["type"] == "content_block_delta" for event in events) > 2
        assert final.status == "ok"
        assert final.json == put_together(events)


async def test_parts_are_sent_when_the_provider_sends_them_and_not_at_the_end(vhost: Vhost) -> None:
    async with (
        HeldProvider(parts=2) as provider,
        serving(vhost.amqp_url, base_url=provider.base_url),
        requester(vhost.amqp_url) as app,
    ):
        asked = await app.publish({"prompt": "slowly, please"}, headers={"x-lane-stream": True})
        await until(lambda: app.parts(asked))
        assert not app.finals(asked)
        provider.go_on()
        final = await app.final(asked)
        assert final.json == put_together([part.json for part in app.parts(asked)])


async def test_a_stream_that_flows_passes_its_deadline(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, Client(vhost.amqp_url) as client:
        story = client.stream({"prompt": "[[latency: 9s]] in many pieces"}, key="normal.tests.x", deadline_s=3)
        replies = [reply async for reply in story]

        assert isinstance(replies[-1], Final)
        assert replies[-1].run_ms > 3000 + 1000 * ANSWER_LATE_S
        assert len(worker.api.calls) == 1


async def test_an_answer_that_may_take_longer_than_ten_minutes_is_streamed_from_the_provider_but_answered_whole(
    vhost: Vhost,
) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        asked = await app.publish({"prompt": "a long one", "max_tokens": 21_334})
        final = await app.final(asked)
        assert final.text == "echo: a long one"
        assert final.json["stop_reason"] == "end_turn"
        assert app.parts(asked) == []
        assert worker.api.calls[0].stream


async def test_a_stream_field_in_the_body_must_agree_with_the_header(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        both = await app.publish({"prompt": "x", "stream": True}, headers={"x-lane-stream": True})
        assert (await app.final(both)).status == "ok"
        assert app.parts(both)
        odd = await app.ask({"prompt": "x", "stream": True})
        assert odd.code == "invalid_request"
        assert "x-lane-stream" in odd.json["detail"]
        assert len(worker.api.calls) == 1


@pytest.mark.every_version
async def test_a_stream_can_be_received_by_direct_reply_to(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url), requester(vhost.amqp_url, direct=True) as app:
        asked = await app.publish({"prompt": "hello there, how are you"}, headers={"x-lane-stream": True})
        final = await app.final(asked)
        assert final.json == put_together([part.json for part in app.parts(asked)])
