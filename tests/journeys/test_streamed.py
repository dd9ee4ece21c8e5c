"""A streamed request gets its parts as they are produced, and a final reply equal to all parts together. If a stream
breaks, the requester gets a restart, and a partial answer is never sent as a complete one."""

import asyncio
from typing import Any

import pytest

from lanekeeper import Client, Final
from lanekeeper.requests import ANSWER_LATE_S
from tests.support.brokers import Vhost
from tests.support.requester import put_together, requester
from tests.support.serving import HeldProvider, serving
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
    async with serving(vhost), requester(vhost) as app:
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
    async with HeldProvider(parts=2) as provider, serving(vhost, base_url=provider.base_url), requester(vhost) as app:
        asked = await app.publish({"prompt": "slowly, please"}, headers={"x-lane-stream": True})
        await until(lambda: app.parts(asked))
        assert not app.finals(asked)
        provider.go_on()
        final = await app.final(asked)
        assert final.json == put_together([part.json for part in app.parts(asked)])


async def test_each_of_many_streams_that_run_at_the_same_time_gets_every_event_once(vhost: Vhost) -> None:
    words = " ".join(f"word-{number}" for number in range(400))

    async def read(client: Client, number: int) -> None:
        said, seqs = "", list[int]()
        async for reply in client.stream({"prompt": f"{number}: {words}"}, key="normal.tests.x"):
            if isinstance(reply, Final):
                assert reply.text == said == f"echo: {number}: {words}"
            else:
                seqs.append(reply.seq)
                said += reply.text
        assert seqs == list(range(len(seqs)))

    async with (
        serving(vhost, lanes={"normal": {"slots": 40}}),
        Client(vhost.amqp_url) as client,
        asyncio.timeout(120),
        asyncio.TaskGroup() as group,
    ):
        for number in range(80):
            group.create_task(read(client, number))


async def test_a_stream_that_flows_passes_its_deadline(vhost: Vhost) -> None:
    async with serving(vhost) as worker, Client(vhost.amqp_url) as client:
        story = client.stream({"prompt": "[[latency: 9s]] in many pieces"}, key="normal.tests.x", deadline_s=3)
        replies = [reply async for reply in story]

        assert isinstance(replies[-1], Final)
        assert replies[-1].run_ms > 3000 + 1000 * ANSWER_LATE_S
        assert len(worker.api.calls) == 1


async def test_an_answer_that_may_take_longer_than_ten_minutes_is_streamed_from_the_provider_but_answered_whole(
    vhost: Vhost,
) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        asked = await app.publish({"prompt": "a long one", "max_tokens": 21_334})
        final = await app.final(asked)
        assert final.text == "echo: a long one"
        assert final.json["stop_reason"] == "end_turn"
        assert app.parts(asked) == []
        assert worker.api.calls[0].stream


async def test_a_stream_field_in_the_body_must_agree_with_the_header(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        both = await app.publish({"prompt": "x", "stream": True}, headers={"x-lane-stream": True})
        assert (await app.final(both)).status == "ok"
        assert app.parts(both)
        odd = await app.ask({"prompt": "x", "stream": True})
        assert odd.code == "invalid_request"
        assert "x-lane-stream" in odd.json["detail"]
        assert len(worker.api.calls) == 1


BROKEN = [
    "error_mid_stream",
    "error_mid_stream type=api_error",
    "error_mid_stream type=rate_limit_error",
    "cut",
    "truncated",
    "reset",
    "broken_json",
    "not_a_message",
    "unfinished",
    "stall",
]
SHORT = {"normal": {"call_timeout_s": 2.5}}
"""Shorter than a stall, and longer than a busy machine pauses. It is not the lane of the other faults."""


def key_of(fault: str) -> str:
    return "normal.tests.broken" if fault == "stall" else "critical.tests.broken"


async def test_a_broken_stream_is_started_again_after_a_restart(vhost: Vhost) -> None:
    async with serving(vhost, lanes=SHORT) as worker, requester(vhost) as app:
        for fault in BROKEN:
            body = {"prompt": f"a story [[fault: {fault} x1]]"}
            await app.publish(body, key=key_of(fault), headers={"x-lane-stream": True}, correlation_id=fault)
            final = await app.final(fault)
            parts = app.parts(fault)

            assert final.status == "ok", (fault, final)
            assert final.headers["x-lane-attempt"] == 2, fault
            assert len(worker.calls(f"[[fault: {fault} x1]]")) == 2, fault
            kinds = [part.headers["x-lane-part"] for part in parts]
            told, restart = kinds.index("restart"), len(kinds) - 1 - kinds[::-1].index("restart")
            assert restart - told == ("event" in kinds[:told]), f"{fault}: the first attempt says so, if it had begun"
            assert bool(parts[told].json) == fault.startswith("error_mid_stream"), fault
            assert [part.headers["x-lane-seq"] for part in parts[:told]] == list(range(told))
            assert [part.headers["x-lane-seq"] for part in parts[restart:]] == list(range(len(parts) - restart))
            assert {part.headers["x-lane-attempt"] for part in parts[:restart]} <= {1}
            assert {part.headers["x-lane-attempt"] for part in parts[restart:]} == {2}
            assert final.json == put_together([part.json for part in parts[restart + 1 :]]), fault
            if fault != "unfinished":  # which sends the stream's end without a stop reason
                assert "message_stop" not in [part.json["type"] for part in parts[:told]], fault


async def test_a_stream_that_breaks_every_time_ends_as_an_error(vhost: Vhost) -> None:
    lanes: dict[str, dict[str, Any]] = {
        "critical": {"max_attempts": 2},
        "normal": {"call_timeout_s": 0.6, "max_attempts": 2},
    }
    async with serving(vhost, lanes=lanes) as worker, requester(vhost) as app:
        for fault in BROKEN:
            body = {"prompt": f"a story [[fault: {fault}]]"}
            await app.publish(body, key=key_of(fault), headers={"x-lane-stream": True}, correlation_id=fault)
            assert (await app.final(fault)).code == "attempts_exhausted", fault
            assert len(worker.calls(f"[[fault: {fault}]]")) == 2, fault
            assert (await app.ask({"prompt": "all is well"})).status == "ok", "or the breaker would open"


async def test_a_permanent_error_in_the_middle_of_a_stream_ends_the_request(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        for type, status in (("invalid_request_error", 400), ("permission_error", 403)):
            body = {"prompt": f"a story [[fault: error_mid_stream type={type}]]"}
            final = await app.ask(body, headers={"x-lane-stream": True})
            assert final.code == "provider_rejected"
            assert final.json["status"] == status
            assert len(worker.calls(type)) == 1


async def test_an_answer_streamed_only_for_its_length_is_retried_too(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        asked = await app.publish({"prompt": "long [[fault: cut x1]]", "max_tokens": 30_000})
        assert (await app.final(asked)).text.startswith("echo: long")
        assert app.parts(asked) == []
        assert len(worker.api.calls) == 2


async def test_a_slow_stream_without_long_pauses_is_not_interrupted(vhost: Vhost) -> None:
    """The lane's time limit applies to the first event and every pause, not to the whole stream."""
    async with serving(vhost, lanes=SHORT) as worker, requester(vhost) as app:
        body = {"prompt": "a long breath [[latency: 5s]]"}
        asked = await app.publish(body, key="normal.tests.slow", headers={"x-lane-stream": True})
        assert (await app.final(asked)).status == "ok"
        assert len(worker.api.calls) == 1


async def test_after_a_worker_lost_the_broker_in_the_middle_of_a_stream_the_requester_gets_a_restart(
    vhost: Vhost,
) -> None:
    async with (
        HeldProvider(parts=2) as provider,
        serving(vhost, base_url=provider.base_url) as worker,
        requester(vhost) as app,
    ):
        asked = await app.publish({"prompt": "to be continued"}, headers={"x-lane-stream": True})
        await until(lambda: len(app.parts(asked)) > 3)
        await (await worker.parts.broker.consuming.underlying()).close()
        await until(lambda: provider.calls == 2)
        provider.go_on()
        final = await app.final(asked)
        kinds = [part.headers["x-lane-part"] for part in app.parts(asked)]
        assert kinds.count("restart") == 1
        restart = kinds.index("restart")
        assert app.parts(asked)[restart].headers["x-lane-seq"] == 0
        assert final.json == put_together([part.json for part in app.parts(asked)[restart + 1 :]])
        assert len(app.finals(asked)) == 1
        assert provider.calls == 2
        await until(lambda: provider.running == 0)
