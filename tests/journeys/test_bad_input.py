"""Every malformed message is answered and parked as the contract says, and the worker continues (docs/contract.md).

One worker takes all of them: what one leaves behind would show at the next.
"""

import gzip
import json
import struct
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.support.brokers import Vhost
from tests.support.requester import CRITICAL, Requester, raw_properties, requester, table
from tests.support.serving import RunningWorker, serving
from tests.support.waiting import until

pytestmark = pytest.mark.oldest_version

GOOD = {"prompt": "fine"}
MIB = 1024 * 1024


@dataclass(frozen=True)
class Bad:
    """A wrong request: what is wrong, the code of its error, and words that the detail must contain."""

    what: str
    code: str
    words: tuple[str, ...]
    body: Any = field(default_factory=lambda: GOOD)
    how: dict[str, Any] = field(default_factory=dict)


def bad(what: str, *words: str, code: str = "invalid_request", body: Any = GOOD, **how: Any) -> Bad:
    return Bad(what, code, words, body, how)


def field_is(name: str, value: Any, *words: str) -> Bad:
    """A complete body with one wrong field."""
    whole = {"messages": [{"role": "user", "content": "hi"}], "model": "claude-sonnet-5-5", "max_tokens": 10}
    return bad(f"{name} is {str(value)[:20]}", name.split(".")[0], *words, body={**whole, name: value})


def header(name: str, value: Any, *words: str) -> Bad:
    return bad(f"{name} is {str(value)[:20]!r} ({type(value).__name__})", name, *words, headers={name: value})


def prompt(text: bytes) -> bytes:
    return b'{"prompt": ' + text + b"}"


BODIES = [
    bad("empty", "empty", body=b""),
    bad("not JSON", "JSON", body=b"hello"),
    bad("NaN", "JSON", body=b'{"messages": [{"role": "user", "content": "a"}], "x": NaN}'),
    bad("duplicate keys", "prompt", body=b'{"prompt": "a", "prompt": "b"}'),
    bad("UTF-16", "JSON", body=json.dumps(GOOD).encode("utf-16")),
    bad("a lone surrogate", "JSON", body=prompt(rb'"\ud800"')),
    bad("a pickle", "JSON", body=b"\x80\x04\x95\x0e\x00\x00\x00\x00\x00\x00\x00\x8c\x05hello\x94."),
    bad("a thousand arrays deep", "nested too deeply", body=b'{"messages": ' + b"[" * 1000 + b"]" * 1000 + b"}"),
    bad("an array", "object", body=[]),
    bad("null", "object", "null", body=None),
    bad("prompt and messages", "both", body={"prompt": "a", "messages": []}),
    bad("the short form with a field it has not", "tools", body={"prompt": "a", "tools": []}),
    bad("an empty prompt", "prompt", body={"prompt": ""}),
    field_is("messages", []),
    field_is("messages", [{"role": "user"}], "content"),
    field_is("model", 5, "5"),
    field_is("max_tokens", 1.5, "1.5"),
    field_is("max_tokens", 10**40),
    field_is("stream", True, "x-lane-stream"),
    field_is("system", 5, "5"),
    bad("2 MiB", "1048576", code="too_large", body={"prompt": "a" * 2 * MIB}),
    bad("one byte over 1 MiB", str(MIB + 1), code="too_large", body=b" " * (MIB + 1)),
    bad("a gzip bomb", "8388608", code="too_large", body=gzip.compress(b" " * 64 * MIB), content_encoding="gzip"),
    bad("gzip that is not", "gzip", body=b"hello", content_encoding="gzip"),
]

PROPERTIES = [
    *(
        bad(f"content type {each}", "content_type", "application/json", code="unsupported_media", content_type=each)
        for each in (
            "text/plain",
            "application/x-python-serialize",
            "application/jsonp",
            "application/json; charset=latin-1",
            "text/json\r\nx: y",
        )
    ),
    *(
        bad(f"encoding {each}", "content_encoding", "gzip", code="unsupported_media", content_encoding=each)
        for each in ("br", "deflate", "utf-8", "gzip, gzip", "base64")
    ),
    bad("another type", "type", "no handler has this name", message_type="resize"),
    bad("an empty id with a space", "message_id", message_id=" "),
    bad("an id with a line break", "message_id", message_id="a\r\nb"),
    bad("an id that is too long", "message_id", "128", message_id="a" * 129),
    bad("a priority above nine", "priority: found 200, allowed are 0 to 9", priority=200),
    bad("a key for another lane, by CC", "CC", headers={"CC": ["nobody.x"]}),
]

HEADERS = [
    bad("a typo", "x-lane-stram", "did you mean x-lane-stream", headers={"x-lane-stram": True}),
    bad("an unknown one", "x-lane-zzz", "known", headers={"x-lane-zzz": None}),
    *(
        bad(name, name, "not available in this version", headers={name: value, "x-lane-delay-ms": 100})
        for name, value in (
            ("x-lane-webhook", "https://example.org/hook"),
            ("x-lane-pipeline", "summarise"),
            ("x-lane-order", "doc-1"),
        )
    ),
    *(
        header(name, value)
        for name in ("x-lane-deadline-ms", "x-lane-delay-ms", "x-lane-sent-ms")
        for value in (
            -1,
            "soon",
            "",
            1.5,
            True,
            bytearray(b"5"),
            [5],
            datetime(2026, 1, 1, tzinfo=UTC),
        )
    ),
    header("x-lane-deadline-ms", 10_000_000, "3600000"),
    header("x-lane-delay-ms", 50, "found 50, allowed is whole milliseconds from 100"),
    *(
        header("x-lane-at", value)
        for value in (
            "tomorrow",
            "2026-11-21",
            "2026-11-21T18:00:00",
            "2026-13-41T18:00:00Z",
            (datetime.now(UTC) + timedelta(days=400)).isoformat(),
            datetime(2026, 1, 1, tzinfo=UTC),
            "9" * 5000,
        )
    ),
    bad(
        "a delay and a time",
        "x-lane-at",
        "x-lane-delay-ms",
        headers={"x-lane-at": "2026-11-21T18:00:00Z", "x-lane-delay-ms": 500},
    ),
    *(
        header(name, value)
        for name in ("x-lane-stream", "x-lane-no-batch")
        for value in ("yes", 1, 0, "", None, [True])
    ),
    *(header("x-lane-tenant", value) for value in (5, ["a"], bytearray(b"a"))),
    *(header("anthropic-beta", value) for value in (5, "", "a\r\nx-api-key: b", "ü", "a" * 2000, ["a"])),
]


def raw(
    what: str, *words: str, code: str = "invalid_request", key: bytes = b"critical.tests.raw", **given: bytes
) -> Bad:
    """A request that no client library would send."""
    return Bad(what, code, words, b'{"prompt": "raw"}', {"key": key, "raw": given})


def deep(levels: int) -> bytes:
    value = b"t\x01"
    for _ in range(levels):
        inner = table((b"x", value))
        value = b"F" + inner
    return value


RAW = [
    raw("a timestamp in microseconds", "timestamp", timestamp=struct.pack(">Q", 1_763_726_400_000_000)),
    raw("tables three thousand deep", "headers", headers=table((b"x-app", deep(3000)))),
    raw(
        "a deadline that is not UTF-8",
        "x-lane-deadline-ms",
        headers=table((b"x-lane-deadline-ms", b"S\x00\x00\x00\x02\xff\xfe")),
    ),
    raw(
        "a deadline as a float",
        "x-lane-deadline-ms",
        headers=table((b"x-lane-deadline-ms", b"d" + struct.pack(">d", 5.0))),
    ),
    raw(
        "a deadline as nothing, that is absent, and a wrong one",
        "x-lane-no-batch",
        headers=table((b"x-lane-deadline-ms", b"V"), (b"x-lane-no-batch", b"V")),
    ),
    raw("an id that is not UTF-8", "message_id", message_id=b"\xff\xfe" * 60),
    raw("a content type that is not UTF-8", "content_type", content_type=b"\xff" * 200),
    raw("a header's name that is not UTF-8", "headers", headers=table((b"\xff\xfe", b"V"))),
    raw(
        "a hundred thousand bytes of headers",
        "headers",
        headers=table(*((b"h%d" % n, b"S\x00\x00\x00\x01a") for n in range(9000))),
    ),
]


async def check(case: Bad, n: int, worker: RunningWorker, app: Requester) -> None:
    """Check that it was answered and parked correctly, without a call to the provider."""
    asked = f"bad-{n}"
    how = dict(case.how)
    name = how.pop("message_id", f"id-{n}")
    if (given := how.pop("raw", None)) is not None:
        key = how.pop("key")
        given = {"message_id": name.encode(), "reply_to": app.reply_to.encode(), **given}
        properties = raw_properties(correlation_id=asked.encode(), **given)
        await app.publish_raw(case.body, key=key, properties=properties)
    else:
        await app.publish(case.body, correlation_id=asked, message_id=name, **how)
    reply = await app.final(asked)
    assert reply.status == "error", f"{case.what}: it was answered"
    assert reply.code == case.code, f"{case.what}: {reply.json}"
    detail = reply.json["detail"]
    for word in case.words:
        assert word in detail, f"{case.what}: no {word!r} in {detail!r}"
    assert 5 < len(detail) < 700, f"{case.what}: {detail!r}"
    assert reply.json["attempts"] == 0
    assert reply.json["retryable"] is False
    assert reply.headers["x-lane-run-ms"] == 0
    assert isinstance(reply.headers["x-lane-wait-ms"], int)
    dead = await until(lambda: [each for each in app.dead if each.properties.correlation_id == asked])
    assert len(dead) == 1, case.what
    assert dead[0].headers["x-lane-dead-code"] == case.code
    assert dead[0].headers["x-lane-dead-detail"] == detail
    sent = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
    assert dead[0].body == sent, case.what
    assert not worker.api.calls, f"{case.what}: the provider was called"
    assert worker.is_well, f"{case.what}: {worker.losses} {worker.parts.reasons()}"


@pytest.mark.parametrize(
    "cases", [BODIES, PROPERTIES, HEADERS, RAW], ids=["bodies", "properties", "headers", "raw frames"]
)
async def test_a_malformed_message_is_answered_parked_and_never_sent_to_the_provider(
    vhost: Vhost, cases: list[Bad]
) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        await app.read_dead()
        for n, case in enumerate(cases):
            await check(case, n, worker, app)
        assert (await app.ask({"prompt": "a good one"})).text == "echo: a good one"
        assert worker.is_well
        assert await app.holds(0, *CRITICAL)
