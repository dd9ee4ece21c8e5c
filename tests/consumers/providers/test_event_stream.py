"""Amazon's event stream: bytes in any pieces are split as botocore splits them, and damage is a failure."""

import base64
import json
import struct
import zlib
from contextlib import suppress

import pytest
from botocore.eventstream import EventStreamBuffer
from hypothesis import given
from hypothesis import strategies as st

from consumers.failures import AnswerTooLargeError, ProviderError, TransientError
from consumers.providers.event_stream import FrameSplitter

EVENTS = [b'{"type":"message_start","message":{}}', b'{"type":"ping"}', b'{"type":"message_stop"}']


def frame(payload: bytes, *, before: bytes = b"", **headers: str) -> bytes:
    """A frame. `before`: the bytes of further headers, which come first."""
    said = before + b"".join(
        bytes([len(name) + 1])
        + b":"
        + name.replace("_", "-").encode()
        + b"\x07"
        + struct.pack(">H", len(value))
        + value.encode()
        for name, value in headers.items()
    )
    prelude = struct.pack(">II", 16 + len(said) + len(payload), len(said))
    body = prelude + struct.pack(">I", zlib.crc32(prelude)) + said + payload
    return body + struct.pack(">I", zlib.crc32(body))


def event(data: bytes) -> bytes:
    payload = json.dumps({"bytes": base64.b64encode(data).decode(), "p": "abcdef"}).encode()
    return frame(payload, message_type="event", event_type="chunk", content_type="application/json")


def fault(name: str, message: str = "Too many") -> bytes:
    return frame(json.dumps({"message": message}).encode(), message_type="exception", exception_type=name)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_the_events_are_the_same_however_the_bytes_are_cut(sizes: list[int]) -> None:
    stream, splitter, found, at = b"".join(map(event, EVENTS)), FrameSplitter(max_event_bytes=1000), [], 0
    for size in [*sizes, len(stream)]:
        found += splitter.feed(stream[at : at + size])
        at += size

    assert found == EVENTS


def test_botocore_reads_the_same_frames() -> None:
    buffer = EventStreamBuffer()
    buffer.add_data(b"".join(map(event, EVENTS)))

    assert [base64.b64decode(json.loads(each.payload)["bytes"]) for each in buffer] == EVENTS


@pytest.mark.parametrize(
    ("name", "type"),
    [
        ("throttlingException", "rate_limit_error"),
        ("serviceUnavailableException", "overloaded_error"),
        ("validationException", "invalid_request_error"),
        ("modelStreamErrorException", "api_error"),
        ("internalServerException", "api_error"),
    ],
)
def test_an_error_frame_becomes_an_error_event_in_anthropics_form(name: str, type: str) -> None:
    (data,) = FrameSplitter(max_event_bytes=1000).feed(fault(name))

    assert json.loads(data) == {"type": "error", "error": {"type": type, "message": "Too many"}}


def test_frames_of_other_types_are_ignored() -> None:
    other = frame(b"{}", message_type="event", event_type="initial-response")

    assert FrameSplitter(max_event_bytes=1000).feed(other + event(EVENTS[1])) == [EVENTS[1]]


@pytest.mark.parametrize(
    ("type", "value"),
    [
        (0, b""),
        (1, b""),
        (2, b"1"),
        (3, b"12"),
        (4, b"1234"),
        (5, b"12345678"),
        (6, b"\x00\x05bytes"),
        (6, b"\x00\x02\xff\xfe"),
        (6, b"\x01\x04" + b"x" * 260),
        (7, b"\x00\x04text"),
        (8, b"12345678"),
        (9, b"1234567890123456"),
    ],
)
def test_a_header_of_any_type_may_come_before_those_that_are_read(type: int, value: bytes) -> None:
    header = b"\x05:more" + bytes([type]) + value
    payload = b'{"message": "Too many"}'

    (data,) = FrameSplitter(max_event_bytes=1000).feed(
        frame(payload, before=header, message_type="exception", exception_type="throttlingException")
    )

    assert json.loads(data)["error"] == {"type": "rate_limit_error", "message": "Too many"}


@given(st.integers(0, 200), st.integers(1, 255))
def test_a_damaged_byte_is_detected(at: int, flip: int) -> None:
    damaged = bytearray(event(EVENTS[0]))
    damaged[at % len(damaged)] ^= flip

    with pytest.raises(TransientError):
        FrameSplitter(max_event_bytes=1000).feed(bytes(damaged))


@given(st.binary(min_size=12, max_size=300))
def test_bytes_that_are_no_event_stream_fail_or_wait_for_more(junk: bytes) -> None:
    with suppress(ProviderError):
        assert FrameSplitter(max_event_bytes=1000).feed(junk) == []


def test_an_event_that_is_too_large_is_refused_before_it_is_complete() -> None:
    with pytest.raises(AnswerTooLargeError, match="more than 1000 bytes"):
        FrameSplitter(max_event_bytes=1000).feed(event(b"x" * 2000)[:12])
