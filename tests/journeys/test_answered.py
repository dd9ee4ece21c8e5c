"""A request is published, and its answer comes back."""

import json
import time
from typing import Any

import pytest

from tests.support.brokers import Vhost
from tests.support.requester import CRITICAL, requester
from tests.support.serving import serving
from tests.support.waiting import until

WHOLE = {
    "model": "claude-opus-5-5",
    "max_tokens": 200,
    "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
                {"type": "text", "text": "what is this? “ünïcödé” \u2028 🦊"},
            ],
        }
    ],
    "tools": [{"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}],
    "thinking": {"type": "enabled", "budget_tokens": 100},
    "metadata": {"user_id": "u-1", "nested": [1, 1.50, 1e-7, None, True]},
    "some_beta_field": {"kept": "as it is"},
}


@pytest.mark.every_version
async def test_the_answer_is_the_providers_message_with_every_documented_header(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        before_s = time.monotonic()
        reply = await app.ask(
            {"prompt": "hello"}, key="critical.tests.ask", message_id="req-1", correlation_id="corr-1"
        )
        took_ms = 1000 * (time.monotonic() - before_s)

        assert reply.text == "echo: hello"
        assert reply.properties.content_type == "application/json"
        assert reply.properties.correlation_id == "corr-1"
        assert reply.properties.delivery_mode == 2
        assert reply.properties.message_id not in (None, "", "req-1")
        headers = dict(reply.headers)
        wait_ms, run_ms = headers.pop("x-lane-wait-ms"), headers.pop("x-lane-run-ms")
        assert isinstance(wait_ms, int)
        assert isinstance(run_ms, int)
        assert 0 <= wait_ms + run_ms <= took_ms + 5
        headers.pop("traceparent", None)  # only if spans are recorded
        assert headers.pop("x-lane-provider-request-id").startswith("req_")
        assert headers == {
            "x-lane-status": "ok",
            "x-lane-request-id": "req-1",
            "x-lane-name": "critical",
            "x-lane-model": "claude-sonnet-5-5",
            "x-lane-provider": "anthropic",
            "x-lane-stop-reason": "end_turn",
            "x-lane-attempt": 1,
            "x-lane-wait-from": "delivery",
        }
        assert len(worker.api.calls) == 1
        await until(lambda: app.holds(0, *CRITICAL, "lane.dead"))


async def test_a_messages_body_reaches_the_provider_unchanged(vhost: Vhost) -> None:
    """With unknown and beta fields, tools, system prompt, images and thinking."""
    raw = ("  " + json.dumps(WHOLE, ensure_ascii=False, indent=2).replace("1.5", "1.500") + "\n").encode()
    async with serving(vhost) as worker, requester(vhost) as app:
        reply = await app.ask(raw, headers={"anthropic-beta": "context-1m-2026-08-07,files-api-2026-04-14"})
        assert [block["type"] for block in reply.json["content"]] == ["thinking", "tool_use"]
        assert worker.api.calls[0].body == raw
        assert worker.api.calls[0].headers["anthropic-beta"] == "context-1m-2026-08-07,files-api-2026-04-14"
        assert "x-stainless-retry-count" not in worker.api.calls[0].headers or (
            worker.api.calls[0].headers["x-stainless-retry-count"] == "0"
        )


async def test_the_providers_headers_are_passed_on_as_they_came_and_the_version_is_stated_by_the_lane(
    vhost: Vhost,
) -> None:
    given = {"anthropic-version": "2026-10-21", "anthropic-beta": "a," * 2000, "Anthropic-User-Profile-Id": "uprof_1"}
    async with serving(vhost, lanes={"batch": {"anthropic_version": "2025-02-03"}}) as worker, requester(vhost) as app:
        for lane, headers in (("critical", given), ("critical", {}), ("batch", {})):
            assert (await app.ask({"prompt": "x"}, key=f"{lane}.tests.x", headers=headers)).status == "ok"

        first, *others = (call.headers for call in worker.api.calls)
        assert {name: first[name] for name in given} == given
        assert [call["anthropic-version"] for call in others] == ["2023-06-01", "2025-02-03"]


async def test_a_given_model_and_max_tokens_are_kept_and_missing_ones_are_the_lanes(vhost: Vhost) -> None:
    lanes: dict[str, dict[str, Any]] = {
        "critical": {"max_tokens": 77},
        "batch": {"max_tokens": 78, "model": "claude-haiku-4-5"},
    }
    expected = {
        "critical": ("claude-sonnet-5-5", 77),
        "normal": ("claude-sonnet-5-5", 1024),
        "batch": ("claude-haiku-4-5", 78),
    }
    async with serving(vhost, lanes=lanes) as worker, requester(vhost) as app:
        for lane, (model, max_tokens) in expected.items():
            body = {"messages": [{"role": "user", "content": "a"}], "x": [0.1, 1e22]}
            filled = await app.ask(body, key=f"{lane}.tests.ask")
            assert filled.headers["x-lane-name"] == lane
            assert filled.headers["x-lane-model"] == model
            assert json.loads(worker.api.calls[-1].body) == {**body, "model": model, "max_tokens": max_tokens}

            short = {"prompt": "b", "system": "S", "model": "claude-opus-5", "max_tokens": 5}
            given = await app.ask(short, key=f"{lane}.x")
            assert given.headers["x-lane-model"] == "claude-opus-5"
            assert json.loads(worker.api.calls[-1].body) == {
                "model": "claude-opus-5",
                "max_tokens": 5,
                "system": "S",
                "messages": [{"role": "user", "content": "b"}],
            }


async def test_a_request_without_reply_to_is_worked_on_and_acknowledged(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        await app.read_events()
        await app.publish({"prompt": "tell nobody"}, reply_to=None, correlation_id="c", message_id="quiet")
        await until(lambda: app.events_of("quiet") == ["started", "completed"])
        assert len(worker.calls("tell nobody")) == 1
        await until(lambda: app.holds(0, *CRITICAL, "lane.dead"))


async def test_headers_sent_as_strings_are_accepted(vhost: Vhost) -> None:
    async with serving(vhost), requester(vhost) as app:
        headers = {"x-lane-deadline-ms": "60000", "x-lane-stream": "false", "x-lane-no-batch": "true"}
        assert (await app.ask({"prompt": "hello"}, headers=headers)).status == "ok"
