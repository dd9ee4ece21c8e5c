"""The fuzz targets: each passes any bytes to code that reads untrusted bytes, and checks the result.

What may come out is written in each target: the typed error of the border, or a value that holds what it promises. All
else (an internal exception, an AssertionError) is a finding. A target keeps nothing between two inputs.
"""

import gzip
import json
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import pamqp.frame
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from consumers.control import _id_of, read_command
from consumers.dialects.anthropic import MESSAGES, classify, read_rate
from consumers.dialects.anthropic_answers import read_answer
from consumers.dialects.anthropic_stream import StreamedMessage
from consumers.dialects.base import Dialect, Failure
from consumers.dialects.bodies import set_stream
from consumers.dialects.openai_chat import CHAT
from consumers.dialects.openai_embeddings import EMBEDDINGS, EmbeddingInputs, separate
from consumers.dialects.openai_responses import RESPONSES
from consumers.failures import ProviderError, read_retry_after_s
from consumers.providers.calling import parse_message
from consumers.providers.cloud import FrameSplitter
from consumers.providers.errors import from_event, from_fields
from consumers.providers.streams import (
    EventSplitter,
    parse_event,
    to_json,
)
from lanekeeper.amqp.tolerant import NESTED_LEVELS, encoded, message_of, read_table, readable_header, write_table
from lanekeeper.contract.messages import UNREADABLE, Message
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import DETAIL_CHARACTERS, RequestProblem
from lanekeeper.telemetry import tracing
from topology.codec import headers as header_rules
from topology.codec.bounds import VALUES
from topology.codec.decoding import Request, decode, unpublished
from topology.codec.fields import with_field, without_field
from topology.lanes import CRITICAL, LaneSpec

NOW_MS: Final = 1_790_000_000_000
EVENT_BYTES: Final = 1024 * 1024
OPEN: Final = CRITICAL
NARROW: Final = replace(CRITICAL, models=frozenset({CRITICAL.model}))
_NO_TABLE: Final = (ValueError, ArithmeticError, OSError, RecursionError, LookupError, TypeError, struct.error)


def body(data: bytes) -> None:
    """A request's body. The first byte chooses the lane (whether it allows only some models), and whether the body is
    compressed."""
    how, raw = data[:1], data[1:]
    packed = how in (b"g", b"h")
    try:
        request = decoded(
            Message(
                body=gzip.compress(raw, 1) if packed else raw,
                routing_key="critical.fuzz.body",
                content_encoding="gzip" if packed else None,
            ),
            lane=NARROW if how in (b"n", b"h") else OPEN,
        )
    except RequestProblem as problem:
        _is_fit_to_send(problem)
        return
    said = strict(request.body)
    assert (said["model"], said["max_tokens"]) == (request.model, request.max_tokens)
    assert said["messages"]
    assert decoded(Message(body=request.body, routing_key="critical.fuzz.body")).body == request.body
    assert strict(set_stream(request.body, True))["stream"] is True
    assert strict(with_field(request.body, "model", "other")) == {**said, "model": "other"}
    assert strict(without_field(request.body, "model")) == {k: v for k, v in said.items() if k != "model"}


def packed(data: bytes) -> None:
    """A body with the content encoding gzip."""
    message = Message(body=data, routing_key="critical.fuzz.packed", content_encoding="gzip")
    try:
        strict(decoded(message).body)
    except RequestProblem as problem:
        _is_fit_to_send(problem)


def properties(data: bytes) -> None:
    """A message's properties as on the wire: flags, then values. They pass through the code that reads the socket."""
    message = _delivered(data)
    for lane in ("critical", "nowhere"):
        try:
            decoded(message, lane=OPEN if lane == "critical" else NARROW)
        except RequestProblem as problem:
            _is_fit_to_send(problem)
    header_rules.read_hop(message.headers)
    header_rules.ms_or_none(message.headers, "x-lane-sent-ms")
    span = tracing.context_in(message.headers)
    tracing.received_context(message.headers, span)
    carried = header_rules.carried(message.headers, of=Names())
    carried.pop(UNREADABLE, None)  # such a message is never published
    again = _published(Message(body=b"{}", headers=carried, correlation_id=message.correlation_id))
    kept = {name: value for name, value in message.headers.items() if name in carried}
    assert repr(dict(again.headers)) == repr(kept)
    assert (again.correlation_id or None) == (message.correlation_id or None)


def table(data: bytes) -> None:
    """A field table: if it can be read, it can be written and read again."""
    try:
        _, found = read_table(data, levels=NESTED_LEVELS)
    except _NO_TABLE:
        return
    written = write_table(found)
    size, again = read_table(written, levels=NESTED_LEVELS)
    assert size == len(written)
    assert again.keys() == found.keys()
    assert len(write_table(again)) == len(written)


def stream(data: bytes) -> None:
    """The events of a streamed answer, as the provider's bytes; the first byte says where they are cut into pieces."""
    size, rest = (data[0] + 1 if data else 1), data[1:]
    whole = _events(EventSplitter(max_event_bytes=EVENT_BYTES), rest, size=len(rest) + 1)
    assert _events(EventSplitter(max_event_bytes=EVENT_BYTES), rest, size=size) == whole
    streamed = StreamedMessage()
    try:
        for event in map(parse_event, whole):
            if event.get("type") == "error":
                raise from_event(MESSAGES.error(event), MESSAGES, secret="sk-ant-secret")
            if streamed.add(event):
                break
        _answered(to_json(streamed.message()))
    except ProviderError as error:
        _is_one_line(error)


def openai(data: bytes) -> None:
    """An answer in one of OpenAI's dialects, streamed or whole; the first byte says which, and where the stream is cut
    into pieces."""
    how, rest = (data[0] if data else 0), data[1:]
    dialect = (CHAT, RESPONSES, EMBEDDINGS)[how % 3]
    try:
        if dialect is EMBEDDINGS:
            message = parse_message(rest, "application/json")
            if (wrong := dialect.error_within(message)) is not None:
                raise from_fields(wrong, dialect, secret="sk-secret", data=rest)
        else:
            message = _openai_stream(dialect, rest, size=how + 1)
        body = to_json(message)
        strict(body)
        found = dialect.read_answer(message, body, provider="fuzz", request_id=None, rate=None)
        assert min(found.counted) >= 0
        if dialect is EMBEDDINGS:
            two = [EmbeddingInputs("", ["one", "two"], 2), EmbeddingInputs("", ["three"], 1)]
            assert [len(strict(each.body)["data"]) for each in separate(found, two)] == [2, 1]
    except ProviderError as error:
        _is_one_line(error)


def _openai_stream(dialect: Dialect, data: bytes, *, size: int) -> dict[str, Any]:
    asked = unpublished("1", model="fuzz", max_tokens=1, dialect=dialect.name)
    streamed = dialect.new_stream(asked, max_bytes=EVENT_BYTES, max_values=VALUES)
    for raw in _events(EventSplitter(EVENT_BYTES, keeps=dialect.is_event), data, size=size):
        event = parse_event(raw)
        if (wrong := dialect.error_within(event)) is not None:
            raise from_event(wrong, dialect, secret="sk-secret", data=raw)
        if (told := streamed.take(event, raw)) is not None:
            strict(told)
        streamed.used()
        if streamed.is_complete:
            break
    else:
        streamed.end()
    return streamed.message()


def bedrock(data: bytes) -> None:
    """Amazon's frames: `data` as it is, and once more as headers and payload of a valid frame."""
    size = data[0] if data else 0
    headers, payload = data[1 : 1 + size], data[1 + size :]
    for raw in (data, framed(headers, payload)):
        try:
            for event in FrameSplitter(max_event_bytes=EVENT_BYTES).feed(raw):
                parse_event(event)
        except ProviderError as error:
            _is_one_line(error)


def answer(data: bytes) -> None:
    try:
        _answered(data)
    except ProviderError as error:
        _is_one_line(error)


def response(data: bytes) -> None:
    """Headers of a response and an error's fields: lines of text."""
    lines = [*data.decode("utf-8", "replace").split("\n"), "", "", "", "", ""]
    told = {
        "retry-after": lines[0],
        "retry-after-ms": lines[1],
        "anthropic-ratelimit-requests-limit": lines[2],
        "anthropic-ratelimit-requests-remaining": lines[3],
        "anthropic-ratelimit-requests-reset": lines[4],
    }
    wait_s = read_retry_after_s(told, now_s=NOW_MS / 1000)
    assert wait_s is None or 0 <= wait_s <= 86_400
    read_rate(told, now_s=NOW_MS / 1000)
    classify(
        Failure(
            status=400 + len(data) % 200,
            type=lines[0],
            code=lines[1],
            message=lines[2],
            retry_after_s=wait_s,
            request_id=None,
        )
    )


def control(data: bytes) -> None:
    """A control message: its type on the first line, its body after it."""
    kind, _, said = data.partition(b"\n")
    text = kind.decode("utf-8", "replace")
    message = Message(body=said, routing_key=text, type=text, user_id="crm")
    try:
        _id_of(message)
        read_command(message, speakers=(), needs_user_id=False)
    except RequestProblem as problem:
        _is_fit_to_send(problem)


TARGETS: Final[Mapping[str, Callable[[bytes], None]]] = {
    each.__name__: each
    for each in (body, packed, properties, table, stream, openai, bedrock, answer, response, control)
}


def decoded(message: Message, *, lane: LaneSpec = OPEN) -> Request:
    return decode(message, lane=lane, request_id="fuzz", hop=None, now_ms=NOW_MS)


def strict(raw: bytes) -> Any:
    """Parse JSON as strictly as RFC 8259: no NaN, no Infinity."""
    return json.loads(raw.decode(), parse_constant=_no_constant)


def framed(headers: bytes, payload: bytes) -> bytes:
    """One frame of Amazon's event stream, with correct checksums."""
    prelude = struct.pack(">II", len(headers) + len(payload) + 16, len(headers))
    whole = prelude + struct.pack(">I", zlib.crc32(prelude)) + headers + payload
    return whole + struct.pack(">I", zlib.crc32(whole))


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def _is_fit_to_send(problem: RequestProblem) -> None:
    assert len(problem.detail) <= DETAIL_CHARACTERS
    json.loads(problem.document(request="fuzz", attempts=0))


def _is_one_line(error: ProviderError) -> None:
    assert "\n" not in str(error)
    str(error).encode()


def _answered(raw: bytes) -> None:
    """Check that what would be delivered as `ok` is a Message in valid JSON."""
    found = read_answer(parse_message(raw, "application/json"), raw, provider="fuzz", request_id=None)
    assert strict(found.body)["type"] == "message"
    assert found.usage.output_tokens >= 0


def _events(splitter: EventSplitter, data: bytes, *, size: int) -> list[bytes]:
    return [event for at in range(0, len(data), size) for event in splitter.feed(data[at : at + size])]


def _delivered(data: bytes) -> Message:
    # Without the bit that announces more flags: the broker closes the connection of a client that sends it
    # (journeys/test_bad_input.py).
    flags = int.from_bytes(data[:2].ljust(2, b"\0"), "big") & ~1
    return _received(struct.pack(">H", flags) + data[2:])


def _published(message: Message) -> Message:
    return _received(encoded(message))


def _received(properties: bytes) -> Message:
    payload = readable_header(struct.pack(">HHQ", 60, 0, 2) + properties, of_return=True)
    _, _, header = pamqp.frame.unmarshal(struct.pack(">BHI", 2, 1, len(payload)) + payload + b"\xce")
    assert isinstance(header, ContentHeader)
    deliver = Basic.Deliver(consumer_tag="c", delivery_tag=1, exchange="lane.requests", routing_key="critical.fuzz.x")
    body = b'{"prompt": "fuzz"}'
    return message_of(DeliveredMessage(delivery=deliver, header=header, body=body, channel=None))  # type: ignore[arg-type]
