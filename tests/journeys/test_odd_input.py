"""Unusual but allowed input is processed, passed on unchanged, and affects no other request."""

import struct
import time

import pytest

from tests.support.brokers import Vhost
from tests.support.requester import CRITICAL, raw_properties, requester, table
from tests.support.serving import serving
from tests.support.waiting import until

VALUES = {
    b"bool": b"t\x01",
    b"int8": b"b\x80",
    b"uint8": b"B\xff",
    b"int16": b"s\x80\x00",
    b"uint16": b"u\xff\xff",
    b"int32": b"I\x80\x00\x00\x00",
    b"uint32": b"i\xff\xff\xff\xff",
    b"int64": b"l\x80" + bytes(7),
    b"large": b"l\x7f" + b"\xff" * 7,
    b"float": b"f" + struct.pack(">f", 1.5),
    b"double": b"d" + struct.pack(">d", 0.1),
    b"huge": b"d" + struct.pack(">d", 1e300),
    b"decimal": b"D\x02" + struct.pack(">i", 12345),
    b"negative decimal": b"D\x02" + struct.pack(">i", -12345),
    b"text": b"S" + struct.pack(">I", 7) + "Grüße".encode(),
    b"bytes": b"S" + struct.pack(">I", 3) + b"\xff\xfe\x00",
    b"array": b"A" + struct.pack(">I", 4) + b"t\x00" + b"b\x01",
    b"time": b"T" + struct.pack(">Q", 1_763_726_400),
    b"late": b"T" + struct.pack(">Q", 4_294_967_295),
    b"table": b"F" + table((b"inner", b"F" + table((b"x", b"b\x05")))),
    b"nothing": b"V",
    b"raw": b"x" + struct.pack(">I", 2) + b"\x01\x02",
    b"k" * 128: b"t\x00",
    "schlüssel".encode(): b"t\x00",
    b"": b"t\x00",
}


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
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
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
