"""Any properties that a client writes can be read as a `Message`, and a `Message` that was read can be written
again."""

import struct
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from aiormq.abc import DeliveredMessage
from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp import frame
from pamqp.commands import Basic, Channel, Connection
from pamqp.header import ContentHeader

from lanekeeper.amqp.tolerant import encoded, message_of, readable_header, readable_method, write_table
from lanekeeper.contract.messages import UNREADABLE, Headers, Message
from tests.support.examples import examples

CONTENT_TYPE, HEADERS, CORRELATION_ID, REPLY_TO, TIMESTAMP, USER_ID = (1 << bit for bit in (15, 13, 10, 9, 6, 4))


def read(payload: bytes, *, kind: int) -> Any:
    """A frame's payload, read by pamqp."""
    _, _, found = frame.unmarshal(struct.pack(">BHI", kind, 1, len(payload)) + payload + b"\xce")
    return found


def delivered(flags: int, data: bytes) -> Message:
    """The message whose property bytes are `data`, through the same calls as frames from the socket."""
    header = read(readable_header(struct.pack(">HHQH", 60, 0, 2, flags) + data, of_return=False), kind=2)
    assert isinstance(header, ContentHeader)
    assert header.body_size == 2
    deliver = Basic.Deliver(consumer_tag="c", delivery_tag=1, exchange="lane.requests", routing_key="critical.a.b")
    return message_of(DeliveredMessage(delivery=deliver, header=header, body=b"{}", channel=None))  # type: ignore[arg-type]


def round_trip(message: Message) -> Message:
    properties = encoded(message)
    return delivered(int.from_bytes(properties[:2], "big"), properties[2:])


def short(text: bytes) -> bytes:
    return bytes([len(text)]) + text


def table(fields: bytes) -> bytes:
    return struct.pack(">I", len(fields)) + fields


def test_a_property_that_is_not_utf_8_is_named_and_the_others_are_read() -> None:
    message = delivered(
        CONTENT_TYPE | CORRELATION_ID | REPLY_TO, short(b"application/json") + short(b"\xff\xfe") + short(b"answers")
    )
    assert message.headers == {UNREADABLE: "correlation_id (UnicodeDecodeError)"}
    assert message.correlation_id is None
    assert (message.content_type, message.reply_to) == ("application/json", "answers")


@pytest.mark.parametrize(
    ("value", "when"),
    [
        (1_790_000_000, datetime(2026, 9, 21, 14, 13, 20, tzinfo=UTC)),
        (2**32 - 1, datetime(2106, 2, 7, 6, 28, 15, tzinfo=UTC)),
        (2**32, datetime(1970, 2, 19, 17, 2, 47, 296_000, tzinfo=UTC)),
        (1_790_000_000_123, datetime(2026, 9, 21, 14, 13, 20, 123_000, tzinfo=UTC)),
    ],
)
def test_a_time_in_a_header_is_in_seconds_unless_it_is_too_late_for_that(value: int, when: datetime) -> None:
    assert delivered(HEADERS, table(b"\x01kT" + struct.pack(">Q", value))).headers["k"] == when


@pytest.mark.parametrize("seconds", [2**64 - 1, 2**60, 253_402_300_800_000])
def test_a_timestamp_past_the_calendar_is_named(seconds: int) -> None:
    message = delivered(TIMESTAMP, struct.pack(">Q", seconds))
    assert UNREADABLE in message.headers
    assert message.timestamp_s is None


@pytest.mark.parametrize(
    "fields",
    [
        b"\x01k?1234",  # no such type
        b"\x09k",
        b"\x02\xff\xfeV",  # a name that is not UTF-8
        b"\x01kT" + b"\xff" * 8,
        b"\x01kA\x7f\xff\xff\xff",
    ],
)
def test_unreadable_headers_are_named_and_later_properties_are_read(fields: bytes) -> None:
    message = delivered(HEADERS | REPLY_TO, table(fields) + short(b"answers"))
    assert set(message.headers) == {UNREADABLE}
    assert message.reply_to == "answers"


@pytest.mark.parametrize("kind", [b"A", b"F"], ids=["arrays", "tables"])
def test_nested_arrays_and_tables_have_a_maximum_depth(kind: bytes) -> None:
    def deep(levels: int) -> bytes:
        inner = b"V"
        for _ in range(levels):
            inside = inner if kind == b"A" else b"\x01k" + inner
            inner = kind + table(inside)
        return table(b"\x01k" + inner)

    assert list(delivered(HEADERS, deep(15)).headers) == ["k"]
    assert list(delivered(HEADERS, deep(16)).headers) == [UNREADABLE]


def test_a_header_that_was_not_changed_is_passed_on_in_the_bytes_in_which_it_came() -> None:
    headers = delivered(HEADERS, table(b"\x01aI\x00\x00\x00\x07" + b"\x01bt\x01")).headers
    assert isinstance(headers, Headers)
    headers["c"] = 5
    assert [headers.encoded(name) for name in "abc"] == [b"I\x00\x00\x00\x07", b"t\x01", 5]


def test_a_table_with_too_many_values_is_named() -> None:
    def full(values: int) -> bytes:  # the array counts as a value too
        return table(b"\x01kA" + table(b"V" * (values - 1)))

    assert list(delivered(HEADERS, full(4000)).headers) == ["k"]
    found = delivered(HEADERS, full(4001)).headers
    assert list(found) == [UNREADABLE]
    assert "more than 4000 values" in found[UNREADABLE]


def test_headers_too_large_for_a_frame_on_the_next_hop_are_named() -> None:
    def full(size: int) -> Message:
        fields = b"\x03bigS" + struct.pack(">I", size - 9) + b"y" * (size - 9)
        return delivered(HEADERS | REPLY_TO, table(fields) + short(b"answers"))

    assert list(full(65_536).headers) == ["big"]
    message = full(65_537)
    assert list(message.headers) == [UNREADABLE]
    assert "allowed are 65536" in message.headers[UNREADABLE]
    assert message.reply_to == "answers"


@pytest.mark.parametrize(
    ("flags", "data"),
    [
        (HEADERS, b"\x00\x00"),
        (HEADERS, b"\x00\x00\xff\xff"),
        (CORRELATION_ID, b""),
        (TIMESTAMP, b"\x00\x01"),
        (CONTENT_TYPE | HEADERS | CORRELATION_ID, short(b"a") + b"\x00"),
    ],
)
def test_properties_that_are_cut_short_are_named(flags: int, data: bytes) -> None:
    assert UNREADABLE in delivered(flags, data).headers


@pytest.mark.parametrize("words", [b"", b"\x00\x01" * 200, b"\x80\x00", b"\x00"], ids=len)
def test_endless_property_flags_are_named_and_do_not_close_the_connection(words: bytes) -> None:
    message = delivered(1, words)
    assert "flags" in message.headers[UNREADABLE]


@pytest.mark.parametrize(
    ("method", "after"),
    [
        (Basic.Deliver("c", 2**62, True, "xxx", "y" * 255), "exchange routing_key delivery_tag redelivered"),
        (Basic.GetOk(2**62, True, "xxx", "y" * 255, 200), "exchange routing_key delivery_tag message_count"),
        (Basic.Return(312, "xxx", "lane", "y" * 255), "reply_code reply_text routing_key"),
        (Channel.Close(404, "xxx" + "y" * 252, 60, 40), "reply_code reply_text class_id method_id"),
        (Connection.Close(530, "xxx", 200, 40), "reply_code reply_text class_id"),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_text_of_others_that_is_not_utf_8_is_read_without_becoming_longer(method: Any, after: str) -> None:
    raw = frame.marshal(method, 7)[7:-1].replace(b"xxx", b"\xffe\xff").replace(b"y" * 255, b"\xc3" * 255)
    readable = readable_method(raw)
    found = read(readable, kind=1)
    assert (len(readable), type(found)) == (len(raw), type(method))
    for name in after.split():
        expected = getattr(method, name)
        if isinstance(expected, str):
            expected = expected.replace("xxx", "?e?").replace("y" * 255, "?" * 255)
        assert getattr(found, name) == expected


@pytest.mark.parametrize("id", ["id-1", "ü" * 100, ""])
def test_a_returned_message_keeps_its_id_for_aiormq(id: str) -> None:
    payload = struct.pack(">HHQ", 60, 0, 0) + encoded(Message(body=b"", message_id=id, headers={"double": 1e300}))
    assert read(readable_header(payload, of_return=True), kind=2).properties.message_id == id
    assert not read(readable_header(payload, of_return=False), kind=2).properties.message_id


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, object(), Decimal("1E300")])
def test_a_value_without_an_amqp_type_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        write_table({"k": value})


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20).map(bytearray)
    | st.datetimes(datetime(1970, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)).map(  # noqa: DTZ001
        lambda when: when.replace(microsecond=0)
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
texts = st.none() | st.text(max_size=60)
TEXTS = (
    "content_type", "content_encoding", "message_id", "correlation_id", "reply_to", "type", "expiration", "user_id",
    "app_id",
)  # fmt: skip


def nested(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize(
    "wrong",
    [
        {"headers": {"a": nested(100_000)}}, {"headers": {"a": {1: 2}}},
        {"headers": {"a": datetime.min.replace(tzinfo=UTC)}}, {"headers": {"a": 2**63}},
        {"headers": {"a": {1}}}, {"timestamp_s": float("inf")}, {"timestamp_s": -1.0},
    ],
    ids=["deep", "name", "time", "integer", "set", "timestamp", "before 1970"],
)  # fmt: skip
def test_what_cannot_be_written_is_a_type_error_or_a_value_error(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        encoded(Message(body=b"", **wrong))


@pytest.mark.slow
@given(
    headers=st.dictionaries(st.text(max_size=20), values, max_size=6),
    properties=st.fixed_dictionaries(dict.fromkeys(TEXTS, texts)),
    priority=st.none() | st.integers(0, 255),
    timestamp_s=st.none() | st.integers(0, 2**32 - 1).map(float),
    persistent=st.booleans(),
)
@settings(max_examples=examples(60), deadline=None)
def test_any_message_is_unchanged_after_writing_and_reading(properties: dict[str, Any], **more: Any) -> None:
    message = Message(body=b"{}", exchange="lane.requests", routing_key="critical.a.b", **properties, **more)
    assert round_trip(message) == message
