"""AMQP types of headers: a requester's headers keep their types, our integers are signed 64-bit."""

import struct
from typing import Any

import pytest

from lanekeeper.contract.messages import Headers
from tests.support.brokers import Vhost
from tests.support.meeting import meeting
from tests.support.requester import Got, Requester, raw_properties, requester, table
from tests.support.serving import serving
from tests.support.waiting import until

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
    async with meeting(vhost.amqp_url, lanes={"critical": {"max_attempts": 2}}) as (worker, app, _):
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
    async with serving(vhost.amqp_url, lanes={"critical": {"max_attempts": 2}}), requester(vhost.amqp_url) as app:
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
    async with serving(vhost.amqp_url), requester(vhost.amqp_url) as app:
        await app.ask({"prompt": "now"}, message_id="now")
        how: dict[str, Any] = {"exchange": "lane.control", "key": "result", "message_type": "result"}
        asked = await app.publish({"result": "now"}, **how)
        again = await until(lambda: app.replies[asked])
        assert again[0].headers["x-lane-replayed"] is True
        assert set(integers(again[0]).values()) == {b"l"}
