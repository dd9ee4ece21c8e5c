"""Whatever lies on a queue that a worker reads, with headers of every AMQP type and any body: it ends no worker, and
the worker answers what comes behind it."""

import json
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from lanekeeper.contract import names as n
from lanekeeper.contract.names import Names
from tests.support.brokers import Vhost
from tests.support.requester import Requester, raw_properties, table
from tests.support.serving import RunningWorker, meeting
from tests.support.waiting import until

NAMES = Names()
KEY = "batch.tests.sum"


def long(kind: bytes, content: bytes) -> bytes:
    return kind + struct.pack(">I", len(content)) + content


def nested(depth: int) -> bytes:
    found = b"V"
    for _ in range(depth):
        found = long(b"A", found)
    return found


VALUES = {
    "true": b"t\x01",
    "int8": b"b\xff",
    "uint8": b"B\xff",
    "int16": b"s\x80\x00",
    "uint16": b"u\xff\xff",
    "int32": b"I\x80\x00\x00\x00",
    "uint32": b"i\xff\xff\xff\xff",
    "least int64": b"l\x80" + bytes(7),
    "most int64": b"l\x7f" + b"\xff" * 7,
    "float": b"f" + struct.pack(">f", -1.5),
    "double": b"d" + struct.pack(">d", 1e300),
    "decimal": b"D\xff\x7f\xff\xff\xff",
    "empty text": long(b"S", b""),
    "text": long(b"S", b"hello"),
    "long text": long(b"S", b"7" * 1000),
    "digits": long(b"S", b"-9"),
    "no utf-8": long(b"S", b"\xff\xfe\x00\x80"),
    "bytes": long(b"x", b"\x00\xff"),
    "array": long(b"A", b"V" + long(b"S", b"a") + b"t\x00"),
    "table": b"F" + table((b"code", b"V"), (b"\xff", b"t\x01")),
    "deep": nested(60),
    "timestamp": b"T" + b"\xff" * 8,
    "void": b"V",
}
"""A value of every type of AMQP 0-9-1; RabbitMQ takes no NaN and no infinity."""
HEADERS = sorted(
    {*n.PUBLIC, *n.OURS, *n.TRACE_CONTEXT, n.ORDER, n.ANTHROPIC_BETA, n.CODE, n.TYPE, n.BROKER_TIMESTAMP_MS}
    | {n.DELIVERY_COUNT, n.ACQUIRED_COUNT, "x-lane-unknown", "lane-d05"}
)
BATCH: dict[str, Any] = {
    "account": "a", "provider": "anthropic", "model": "m", "tokens": 9, "deadline_ms": 2**42, "tenant": "t",
    "params_bytes": 2, "tries": 1, "held": [1.0, 2.0, 3.0],
}  # fmt: skip
FLOW: dict[str, Any] = {"step": "one", "deadline_ms": 2**42, "item_of": "p-1", "items": 3}
ODD: tuple[Any, ...] = ("28", -1, 2**70, 1.5, True, None, [], ["x"], {}, "\ud800", float("nan"))
BODIES = (
    b"", b"{}", b"[]", b"null", b"7", b"\xff\xfe", b"[" * 5000, b'{"prompt": "\\ud800"}', b'{"prompt": 1e999}',
    b'{"cancel": ["x"], "result": {}}', b'{"pause": {"kind": 7}}', b"\x00\x00\x00\x02{}\x1f\x8b\x08", bytes(200),
)  # fmt: skip


def hostile() -> Iterator[tuple[bytes, dict[str, bytes]]]:
    """Bodies, and properties of messages."""
    for value in VALUES.values():
        yield b'{"prompt": "x"}', {"headers": table(*((name.encode(), value) for name in HEADERS))}
    for number, name in enumerate(HEADERS):
        for value in list(VALUES.values())[number % 3 :: 3]:
            yield b'{"prompt": "x"}', {"headers": table((name.encode(), value), *believed())}
    for header, fields in ((n.BATCH, BATCH), (n.FLOW, FLOW)):
        for name in fields:
            for odd in ODD:
                text = json.dumps({**fields, name: odd}).encode()
                yield b'{"prompt": "x"}{}', {"headers": table((header.encode(), long(b"S", text)), *believed())}
        for text in (b"[]", b"7", b"null", b"{", b"[" * 5000, b'{"params_bytes": 99999}'):
            yield b"{}", {"headers": table((header.encode(), long(b"S", text)), *believed())}
    for body in BODIES:
        yield body, {"headers": table()}
        yield body, {"headers": table(*believed()), "content_encoding": b"gzip"}
    for odd_bytes in (b"", b"\xff\x00", b"x" * 255, b"amq.rabbitmq.reply-to.forged", b"../\n"):
        for name in ("message_id", "reply_to", "correlation_id", "content_type", "content_encoding", "type", "app_id"):
            yield b'{"prompt": "x"}', {"headers": table(*believed()), name: odd_bytes}
    yield b'{"prompt": "x"}', {"headers": table(*believed()), "timestamp": b"\xff" * 8, "priority": b"\xff"}


def believed() -> list[tuple[bytes, bytes]]:
    """What makes a message of `lane.batches` look like a worker's."""
    return [(n.ROUTING_KEY.encode(), long(b"S", KEY.encode()))]


ROUTES = (
    ("", NAMES.intake("batch")),
    ("", NAMES.due("batch")),
    ("", NAMES.side("batch", 0)),
    (NAMES.side_exchange(0), KEY),
    ("", NAMES.strays),
    (NAMES.strays, ""),
    (NAMES.control, n.CANCEL_KEY),
    (NAMES.control, n.PAUSE_KEY),
    (NAMES.control, n.STATUS_KEY),
    ("", NAMES.control),
    (NAMES.webhooks, NAMES.webhook_key("batch")),
    ("", NAMES.batches),
    ("", NAMES.tickets),
    (NAMES.delay(0), KEY),
    (NAMES.delay(0), NAMES.webhook_key("batch")),
    (NAMES.delay(0), NAMES.ticket_key),
)
"""Exchanges and keys: to each queue, also by the exchanges to which only workers publish, so that it is believed."""


ROUTES_EACH = 8


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consumers.settle.RETURN_AFTER_S", 0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)  # under load
async def test_no_message_ends_a_worker(vhost: Vhost) -> None:
    lane = {"slots": 16, "batches": {"enabled": True, "window_s": 0.2, "first_poll_s": 0.1}}
    allowed = {"webhooks": {"allow_hosts": ["127.0.0.1"], "secrets": ["whsec_" + "c2VjcmV0" * 6]}}
    async with meeting(vhost, lanes={"batch": lane}, speakers=(vhost.user,), **allowed) as (worker, app, _):
        for number, (exchange, key) in enumerate(ROUTES):
            messages = addressed(number, reply_to=app.reply_to, is_delayed=exchange == NAMES.delay(0))
            await app.publish_all_raw(messages, exchange=exchange.encode(), key=key.encode())
        await answers(worker, app)


def addressed(route: int, *, reply_to: str, is_delayed: bool) -> Iterator[tuple[bytes, bytes]]:
    kinds = [b"cancel", b"result", b"pause", b"status", b"webhook", b""]
    for number, (body, properties) in enumerate(hostile()):
        if (number + route) % ROUTES_EACH:  # each message takes two of the routes: all would take five minutes
            continue
        given = {
            "message_id": b"h-%d-%d" % (route, number),
            "reply_to": reply_to.encode(),
            "type": kinds[number % len(kinds)],
        }
        found = {**given, **properties}
        if is_delayed:  # for no time
            fields = found["headers"][4:] + b"\x08lane-d00t\x00"
            found["headers"] = struct.pack(">I", len(fields)) + fields
        yield body, raw_properties(**found)


async def answers(worker: RunningWorker, app: Requester) -> None:
    """What is published behind it is answered by the same worker, and every queue gets empty."""
    for key in ("critical.tests.ask", KEY):
        assert (await app.ask({"prompt": "after"}, key=key)).text == "echo: after"
    assert (await app.control({"result": "unknown"}, key="result")).control == "pending"
    assert (await app.control({}, key="status")).json["worker"]
    queues = [NAMES.control, NAMES.batches, NAMES.tickets, NAMES.strays, NAMES.intake("batch"), NAMES.webhooks]
    await until(lambda: app.holds(0, *queues), within_s=300)
    await until(lambda: worker.is_well)
