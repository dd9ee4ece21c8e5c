"""Text in headers and properties cannot become an HTTP header, a second log line or a terminal command."""

import io
import json
from typing import Any, Literal

import pytest

from service.telemetry import logs
from tests.support.brokers import Vhost
from tests.support.requester import requester
from tests.support.serving import RunningWorker, serving

ESCAPE = "\x1b[2J\x1b]0;owned\x07"
CRLF = '\r\nx-injected: yes\r\n{"event":"forged"}\n'
TRACE = {
    "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01",
    "tracestate": "vendor=value",
    "baggage": "user=canary,tenant=canary",
}
OURS = {
    "traceparent",
    "anthropic-beta",
    "anthropic-version",
    "x-api-key",
    "authorization",
    "user-agent",
    "host",
    "connection",
}
"""The headers that our calls to the provider have."""
CLIENTS = ("x-stainless-", "content-", "accept")


def foreign(worker: RunningWorker) -> list[str]:
    """All other headers of the provider's calls."""
    names = {name.lower() for call in worker.api.calls for name in call.headers}
    return sorted(name for name in names - OURS if not name.startswith(CLIENTS))


async def test_the_provider_gets_our_own_traceparent_and_neither_tracestate_nor_baggage(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        await app.ask({"prompt": "x"}, headers={**TRACE, "x-api-key": "stolen", "host": "elsewhere", "x-own": "1"})
        (call,) = worker.api.calls
        assert foreign(worker) == []
        assert "stolen" not in str(dict(call.headers))
        assert call.headers["host"].startswith("127.0.0.1")
        assert "canary" not in str(dict(call.headers))


@pytest.mark.parametrize(
    "text", [CRLF, ESCAPE, "x" * 60_000, "\u2028\u202e\u0085"], ids=["CRLF", "ESC", "long", "lines"]
)
@pytest.mark.parametrize("format", ["json", "console"])
async def test_hostile_text_in_any_property_becomes_one_log_line_and_no_header(
    vhost: Vhost, text: str, format: Literal["json", "console"]
) -> None:
    """Each property is tested alone, so that not always the same one is refused."""
    out = io.StringIO()
    short = text[:100]
    places: list[dict[str, Any]] = [
        *({"headers": {name: value + text}} for name, value in TRACE.items()),
        {"headers": {"anthropic-beta": "a" + text}},
        {"headers": {"x-lane-deadline-ms": text}},
        {"headers": {"x-lane-tenant": text}},
        {"headers": {f"x-lane-{short[:60]}": 1}},
        {"headers": {"x-own": text}},
        {"message_id": short},
        {"correlation_id": short},
        {"message_type": short},
        {"content_type": short},
        {"content_encoding": short},
        {"app_id": short},
        {"reply_to": short},
        {"key": f"critical.{short}.x"},
        {"key": f"nowhere.{short}.x"},
    ]
    with logs.configured(service="worker", level="debug", stream=out, format=format):
        async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
            for each in places:
                await app.publish({"prompt": "x"}, **each)
            assert (await app.ask({"prompt": "a good one"})).status == "ok"
            assert worker.is_well
    assert foreign(worker) == []
    written = out.getvalue()
    assert "\x1b" not in written
    lines = written.splitlines()  # split at every character that some program treats as the end of a line
    if format == "json":
        events = [json.loads(line)["event"] for line in lines]
        assert "forged" not in events
    assert all(len(line) < 10_000 for line in lines)
    assert not any(line.startswith(("x-injected", '{"event":"forged"')) for line in lines)
