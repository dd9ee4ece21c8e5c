"""Reads Amazon's event stream (`application/vnd.amazon.eventstream`), in which Bedrock sends the events of a Message.

A frame consists of its length, the length of its headers, and the CRC of these eight bytes; then the headers; then the
payload; then the CRC of all bytes before. Numbers are big-endian. The payload of an event is `{"bytes": "<base64 of
Anthropic's event>"}`; an error is a frame with other headers. (See Amazon Transcribe's documentation, "Event stream
encoding". Anthropic's client reads frames with botocore, which Lanekeeper needs only to sign requests, so it is not
always installed.)
"""

import base64
import json
import struct
import zlib
from collections.abc import Mapping
from typing import Final

from consumers.failures import AnswerTooLargeError, TransientError
from topology.codec import bounds

_PRELUDE: Final = struct.Struct(">III")
_CRC: Final = struct.Struct(">I")
_SIZES: Final = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}
"""The length in bytes of the value of a frame's header, by the number of the value's type. Values of the types 6
(bytes) and 7 (text), which are not listed, begin with their length."""
_FIELDS: Final = 100
"""How many JSON keys and values the payload of a frame may have at most. A valid payload has two or three."""
_TYPES: Final[Mapping[str, str]] = {
    "throttlingException": "rate_limit_error",
    "validationException": "invalid_request_error",
    "serviceUnavailableException": "overloaded_error",
    "modelTimeoutException": "timeout_error",
}
"""Translates the exceptions that Bedrock sends in the middle of a stream into Anthropic's error types. All other
exceptions become `api_error`."""


class FrameSplitter:
    """Splits Bedrock's event stream into events: takes its bytes in pieces of any size and returns the data of each
    event, as `EventSplitter` does for Server-Sent Events."""

    def __init__(self, max_event_bytes: int) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes of the stream, and return the data of the events that are complete now. Raises
        `TransientError` if the stream is damaged or of another format, and `AnswerTooLargeError` if an event is too
        large."""
        self._rest += chunk
        found = []
        while len(self._rest) >= _PRELUDE.size:
            size, headers_size, crc = _PRELUDE.unpack_from(self._rest)
            if zlib.crc32(self._rest[:8]) != crc or size < headers_size + 16:
                raise _broken("a frame's beginning is damaged")
            if size > self._max_event_bytes:
                raise AnswerTooLargeError(f"an event of more than {self._max_event_bytes} bytes")
            if len(self._rest) < size:
                break
            frame = bytes(self._rest[:size])
            del self._rest[:size]
            if zlib.crc32(frame[:-4]) != _CRC.unpack(frame[-4:])[0]:
                raise _broken("a frame is damaged")
            body = _PRELUDE.size + headers_size
            if (data := _data(_headers(frame[_PRELUDE.size : body]), frame[body:-4])) is not None:
                found.append(data)
        return found


def _data(headers: Mapping[str, str], payload: bytes) -> bytes | None:
    """Anthropic's event in a frame of Bedrock's event stream, as JSON; None if the frame has none."""
    kind = headers.get(":message-type")
    if kind in ("exception", "error"):
        code = headers.get(":exception-type") or headers.get(":error-code") or ""
        message = headers.get(":error-message") or _field(payload, "message") or code
        return json.dumps(
            {"type": "error", "error": {"type": _TYPES.get(code, "api_error"), "message": message}}
        ).encode()
    if (encoded := _field(payload, "bytes")) is None:
        return None
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError as error:  # binascii.Error, or characters beyond ASCII
        raise _broken("the data of an event is not base64") from error


def _field(payload: bytes, name: str) -> str | None:
    """A text field in the payload of a frame of Bedrock's event stream; None if the payload does not have it."""
    if bounds.excess(payload, max_values=_FIELDS) is not None:
        return None
    try:
        fields = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if isinstance(value, str) else None


def _headers(raw: bytes) -> dict[str, str]:
    """The headers of a frame of Bedrock's event stream, except those whose values are not text."""
    found: dict[str, str] = {}
    at = 0
    try:
        while at < len(raw):
            end = at + 1 + raw[at]
            name, kind, at = raw[at + 1 : end].decode(), raw[end], end + 1
            if kind in (6, 7):
                size = int.from_bytes(raw[at : at + 2], "big")
                if kind == 7:
                    found[name] = raw[at + 2 : at + 2 + size].decode()
                at += 2 + size
            else:
                at += _SIZES[kind]
    except (IndexError, KeyError, UnicodeDecodeError) as error:
        raise _broken("the headers of a frame cannot be read") from error
    return found


def _broken(what: str) -> TransientError:
    return TransientError(f"the stream is broken: {what}", type="broken_stream")
