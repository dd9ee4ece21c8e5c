"""Every malformed message is answered and parked as the contract says, unusual ones that are allowed are processed and
passed on unchanged, and the worker continues (docs/contract.md).

One worker takes all of them: what one leaves behind would show at the next."""

import gzip
import json
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiormq.exceptions import AMQPError

from lanekeeper.contract.messages import Headers
from tests.support.brokers import Vhost
from tests.support.requester import CRITICAL, Got, Requester, raw_properties, requester, table
from tests.support.serving import RunningWorker, meeting, serving
from tests.support.waiting import until

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


def header(name: str, value: Any, *words: str) -> Bad:
    return bad(f"{name} is {str(value)[:20]!r} ({type(value).__name__})", name, *words, headers={name: value})


# one of each kind; tests/topology/codec has them all

BODIES = [
    bad("empty", "empty", body=b""),
    bad("a pickle", "JSON", body=b"\x80\x04\x95\x0e\x00\x00\x00\x00\x00\x00\x00\x8c\x05hello\x94."),
    bad("duplicate keys", "prompt", body=b'{"prompt": "a", "prompt": "b"}'),
    bad("a lone surrogate", "JSON", body=rb'{"prompt": "\ud800"}'),
    bad("a thousand arrays deep", "nested too deeply", body=b'{"messages": ' + b"[" * 1000 + b"]" * 1000 + b"}"),
    bad("null", "object", "null", body=None),
    bad("prompt and messages", "both", body={"prompt": "a", "messages": []}),
    bad("no messages", "messages", body={"messages": [], "max_tokens": 10}),
    bad("one byte over 1 MiB", str(MIB + 1), code="too_large", body=b" " * (MIB + 1)),
    bad("a gzip bomb", "8388608", code="too_large", body=gzip.compress(b" " * 64 * MIB), content_encoding="gzip"),
    bad("gzip that is not", "gzip", body=b"hello", content_encoding="gzip"),
]

PROPERTIES = [
    bad("content type", "content_type", code="unsupported_media", content_type="text/json\r\nx: y"),
    bad("encoding", "content_encoding", "gzip", code="unsupported_media", content_encoding="gzip, gzip"),
    bad("another type", "type", "no handler has this name", message_type="resize"),
    bad("an id with a line break", "message_id", message_id="a\r\nb"),
    bad("a priority above nine", "priority: found 200, allowed are 0 to 9", priority=200),
    bad("a key for another lane, by CC", "CC", headers={"CC": ["nobody.x"]}),
]

HEADERS = [
    bad("a typo", "x-lane-stram", "did you mean x-lane-stream", headers={"x-lane-stram": True}),
    *(
        header("x-lane-deadline-ms", value)
        for value in (-1, "soon", 1.5, True, bytearray(b"5"), [5], datetime(2026, 1, 1, tzinfo=UTC))
    ),
    header("x-lane-deadline-ms", 10_000_000, "3600000"),
    header("x-lane-at", (datetime.now(UTC) + timedelta(days=400)).isoformat()),
    *(header("x-lane-stream", value) for value in ("yes", 1, None)),
    header("x-lane-tenant", 5),
    header("anthropic-beta", "a\r\nx-api-key: b"),
    header("anthropic-version", "latest", "a date such as 2023-06-01"),
    header("anthropic-new-thing", "x" * 8193, "8193 bytes, allowed are 8192"),
    bad("101 headers", "101 headers anthropic-*", headers={f"anthropic-{n}": "x" for n in range(101)}),
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
    assert dead[0].body == (sent if len(sent) <= MIB else b""), f"{case.what}: what is too large is not kept"
    assert not worker.api.calls, f"{case.what}: the provider was called"
    assert worker.is_well, f"{case.what}: {worker.losses} {worker.parts.reasons()}"


@pytest.mark.oldest_version
@pytest.mark.parametrize(
    "cases", [BODIES, PROPERTIES, HEADERS, RAW], ids=["bodies", "properties", "headers", "raw frames"]
)
async def test_a_malformed_message_is_answered_parked_and_never_sent_to_the_provider(
    vhost: Vhost, cases: list[Bad]
) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        await app.read_dead()
        for n, case in enumerate(cases):
            await check(case, n, worker, app)
        assert (await app.ask({"prompt": "a good one"})).text == "echo: a good one"
        assert worker.is_well
        assert await app.holds(0, *CRITICAL)


KEY = b"critical.tests.x"
RUNS = [
    ("a routing key that is not UTF-8", b"critical.\xff\xfe." + b"\xfd" * 200, {}),
    ("a thousand headers", KEY, {"headers": table(*((b"h-%d" % n, b"I\x00\x00\x00\x01") for n in range(1000)))}),
    ("a long header", KEY, {"headers": table((b"x-app", b"S" + struct.pack(">I", 60_000) + b"a" * 60_000))}),
    (
        "a trace context of bytes",
        KEY,
        {
            "headers": table(
                (b"traceparent", b"S\x00\x00\x00\x02\xff\xfe"), (b"tracestate", b"t\x01"), (b"baggage", b"V")
            )
        },
    ),
    # an hour in the future: other tests run before this one, and a time in the past could be over the deadline
    ("a timestamp in milliseconds", KEY, {"timestamp": struct.pack(">Q", time.time_ns() // 1_000_000 + 3_600_000)}),
    ("a timestamp of zero", KEY, {"timestamp": bytes(8)}),
    ("empty strings", b"critical.", dict.fromkeys(("content_type", "content_encoding", "message_id", "type"), b"")),
]
REFUSED = [
    ("a correlation id that is not UTF-8", KEY, {"correlation_id": b"\xff" * 250}),
    ("a reply address that is not UTF-8", KEY, {"reply_to": b"\xff" * 250}),
    (
        "a frame full of headers",
        KEY,
        {"headers": table((b"x-app", b"S" + struct.pack(">I", 130_500) + b"a" * 130_500))},
    ),
    ("many empty headers", KEY, {"headers": table(*((b"%d" % n, b"V") for n in range(15_000)))}),
]


@pytest.mark.oldest_version
async def test_unusual_messages_are_answered_or_parked_and_the_worker_continues(vhost: Vhost) -> None:
    """Each is published three times, to be answered, retried and parked: the three ways in which it can be passed
    on."""
    bodies = (b'{"prompt": "odd"}', b'{"prompt": "odd %d [[fault: server_error x1]]"}', b"not json %d")
    async with serving(vhost) as worker, requester(vhost) as app:
        await app.read_dead()
        for number, (what, key, given) in enumerate(RUNS + REFUSED):
            parked = len(app.dead)
            for n, body in enumerate(bodies):
                properties = {"correlation_id": b"%d-%d" % (number, n), "reply_to": app.reply_to.encode(), **given}
                whole = body % number if b"%d" in body else body
                await app.publish_raw(whole, key=key, properties=raw_properties(**properties))
            expected = 1 if (what, key, given) in RUNS else 3
            await until(lambda parked=parked, expected=expected: len(app.dead) == parked + expected)
            assert {each.headers["x-lane-dead-code"] for each in app.dead[parked:]} == {"invalid_request"}, what
            if expected == 1:
                assert (await app.final(f"{number}-0")).status == "ok", what
                assert (await app.final(f"{number}-1")).headers["x-lane-attempt"] == 2, what
                assert (await app.final(f"{number}-2")).code == "invalid_request", what
            assert (await app.ask({"prompt": "a good one"})).status == "ok", what
            assert worker.is_well, (what, worker.losses, worker.parts.reasons())
        await until(lambda: app.holds(0, *CRITICAL))


EVERY_TYPE = {
    b"boolean": b"t\x01",
    b"int8": b"b\xff",
    b"uint8": b"B\xff",
    b"int16": b"s" + struct.pack(">h", 5),
    b"uint16": b"u" + struct.pack(">H", 5),
    b"int32": b"I" + struct.pack(">i", 5),
    b"uint32": b"i" + struct.pack(">I", 5),
    b"int64": b"l" + struct.pack(">q", 5),
    b"float": b"f" + struct.pack(">f", 0.1),
    b"double": b"d" + struct.pack(">d", 0.1),
    b"large double": b"d" + struct.pack(">d", 1e300),
    b"decimal": b"D\x02" + struct.pack(">i", 12345),
    b"string": b"S\x00\x00\x00\x05zw\xc3\xb6l",
    b"bytes in a string": b"S\x00\x00\x00\x02\xff\xfe",
    b"byte array": b"x\x00\x00\x00\x02\x00\xff",
    b"time": b"T" + struct.pack(">Q", 1_790_000_000),
    b"void": b"V",
    b"array": b"A\x00\x00\x00\x09" + b"d" + struct.pack(">d", 0.1),
    b"table": b"F" + table((b"in", b"F" + table((b"n", b"b\x05"), (b"m", b"I" + struct.pack(">i", 5))))),
}


def integers(got: Got) -> dict[str, bytes]:
    """The AMQP types of our integer headers."""
    assert isinstance(got.headers, Headers)
    return {
        name: got.headers.encoded(name)[:1]
        for name, value in got.headers.items()
        if name.startswith("x-lane-") and type(value) is int
    }


async def copies_in_delays(app: Requester, level: int) -> list[Got]:
    """The copies that workers publish to one level of the delays from now on."""
    found: list[Got] = []
    queue = (await app.channel.queue_declare(exclusive=True)).queue or ""
    bit: dict[str, Any] = {"x-match": "all", f"lane-d{level:02d}": True}
    await app.channel.queue_bind(queue, f"lane.delay.{level:02d}", "", arguments=bit)

    async def keep(delivered: Any) -> None:
        found.append(Got.of(delivered))

    await app.channel.basic_consume(queue, keep, no_ack=True)
    return found


@pytest.mark.every_version
async def test_a_requesters_headers_keep_value_and_type_through_delay_retry_and_dead_letter(vhost: Vhost) -> None:
    async with meeting(vhost, lanes={"critical": {"max_attempts": 2}}) as (worker, app, _):
        await app.read_dead()
        properties = raw_properties(
            headers=table((b"x-lane-delay-ms", b"s\x00\x64"), *EVERY_TYPE.items()),
            message_id=b"typed",
            correlation_id=b"typed",
            reply_to=app.reply_to.encode(),
        )
        await app.publish_raw(b'{"prompt": "x [[fault: server_error]]"}', key=b"critical.a.b", properties=properties)
        assert (await app.final("typed")).code == "attempts_exhausted"
        dead = await app.buried("typed")
        assert len(worker.calls("x [[fault")) == 2
    assert isinstance(dead.headers, Headers)
    found = {name: dead.headers.encoded(name.decode()) for name in EVERY_TYPE}
    assert found == EVERY_TYPE
    assert dead.headers.encoded("x-lane-delay-ms") == b"s\x00\x64"


async def test_all_our_integer_headers_are_signed_64_bit_whatever_their_value(vhost: Vhost) -> None:
    async with serving(vhost, lanes={"critical": {"max_attempts": 2}}), requester(vhost) as app:
        await app.read_dead()
        on_its_way = await copies_in_delays(app, level=0)
        answer = await app.ask({"prompt": "now"}, message_id="now")
        assert integers(answer) == dict.fromkeys(("x-lane-attempt", "x-lane-wait-ms", "x-lane-run-ms"), b"l")

        story = await app.publish({"prompt": "a story"}, headers={"x-lane-stream": True}, message_id="story")
        await app.final(story)
        assert [integers(part) for part in app.parts(story)]
        for part in app.parts(story):
            assert integers(part) == {"x-lane-attempt": b"l", "x-lane-seq": b"l"}

        headers = {"x-lane-delay-ms": 100}
        failed = await app.ask({"prompt": "x [[fault: server_error]]"}, headers=headers, message_id="failed")
        assert integers(failed) == dict.fromkeys(("x-lane-attempt", "x-lane-wait-ms", "x-lane-run-ms"), b"l")
        assert integers(await app.buried("failed"))["x-lane-attempt"] == b"l"

        sent = await until(lambda: [each for each in on_its_way if each.properties.message_id == "failed"])
        for copy in sent:
            ours = {name: kind for name, kind in integers(copy).items() if name != "x-lane-delay-ms"}
            assert ours.keys() == {
                "x-lane-attempt",
                "x-lane-first-seen-ms",
                "x-lane-due-ms",
                "x-lane-hop-ms",
                "x-lane-ran-ms",
                "x-lane-back-ms",
            }
            assert set(ours.values()) == {b"l"}


async def test_integers_in_answers_to_control_messages_are_signed_64_bit(vhost: Vhost) -> None:
    async with serving(vhost), requester(vhost) as app:
        await app.ask({"prompt": "now"}, message_id="now")
        how: dict[str, Any] = {"exchange": "lane.control", "key": "result", "message_type": "result"}
        asked = await app.publish({"result": "now"}, **how)
        again = await until(lambda: app.replies[asked])
        assert again[0].headers["x-lane-replayed"] is True
        assert set(integers(again[0]).values()) == {b"l"}


FLAGS = {
    "flags that go on, and end": b"\x00\x01",
    "flags that go on for ever": b"\x00\x01" * 200,
    "a second word of flags": b"\x00\x01\x80\x00",
    "flags that nobody knows": b"\x00\x02",
}


@pytest.mark.oldest_version
async def test_property_flags_that_no_client_sends_close_at_most_the_senders_connection(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        for what, flags in FLAGS.items():
            with suppress(AMQPError):
                async with requester(vhost) as hostile:
                    await hostile.publish_raw(b'{"prompt": "odd"}', key=b"critical.tests.odd", properties=flags)
            assert (await app.ask({"prompt": "a good one"})).status == "ok", what
            assert worker.is_well, what
