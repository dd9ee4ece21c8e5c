"""Which of an answer's usage figures are believed."""

import base64
import json
import struct
import zlib
from typing import Any

import httpx2
import pytest
from anthropic import AsyncAnthropic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from consumers.dialects.anthropic_answers import read_answer
from consumers.dialects.anthropic_stream import StreamedMessage
from consumers.dialects.fields import MOST_TOKENS
from consumers.failures import AnswerTooLargeError, TransientError
from consumers.prices import Usage
from consumers.providers.calling import parse_message
from consumers.providers.cloud import FrameSplitter
from consumers.providers.streams import (
    EventSplitter,
    parse_event,
    to_json,
)
from tests.support.examples import examples


def usage(**said: Any) -> Usage:
    message = {"type": "message", "content": [], "stop_reason": "end_turn", "usage": said}
    body = json.dumps(message).encode()
    return read_answer(parse_message(body, "application/json"), body, provider="anthropic", request_id=None).usage


@pytest.mark.parametrize("absurd", [10**30, 1e30, -1, -(10**30), MOST_TOKENS + 1, True, "9", None, [9]])
@pytest.mark.parametrize(
    "name", ["input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"]
)
def test_an_impossible_usage_figure_is_ignored(name: str, absurd: object) -> None:
    said = {"input_tokens": 3, "output_tokens": 4, name: absurd}
    without = {key: value for key, value in said.items() if key != name}

    assert usage(**said) == usage(**without)


def split(stream: bytes, cuts: list[int] | None = None) -> list[bytes]:
    splitter = EventSplitter(max_event_bytes=10_000)
    found: list[bytes] = []
    at = 0
    for cut in [*sorted(cuts or []), len(stream)]:
        found += splitter.feed(stream[at:cut])
        at = cut
    return found


@pytest.mark.parametrize(
    ("stream", "data"),
    [
        (b"data: 1\ndata: 2\n\n", [b"1\n2"]),
        (b"data:1\n\n", [b"1"]),
        (b"data:  1\n\n", [b" 1"]),
        (b"data: 1\ndata\ndata: 2\n\n", [b"1\n\n2"]),
        (b": a comment\n\ndata: 1\n\n", [b"1"]),
        (b": data: 0\nid: 3\nretry: 5\ndata: 1\nnonsense\n\n", [b"1"]),
        (b"database: 1\n\n", []),
        (b"event: ping\n\n", []),
        (b"data\n\n", []),
        (b"\n\n\n\ndata: 1\n\n\n\n\ndata: 2\n\n", [b"1", b"2"]),
        (b"\xef\xbb\xbfdata: 1\n\n", [b"1"]),
        (b"data: 1\n", []),
        (b"data: 1", []),
        (b"", []),
    ],
)
def test_event_fields_are_read_as_the_standard_says(stream: bytes, data: list[bytes]) -> None:
    assert split(stream) == data


LINES = st.one_of(
    st.sampled_from([b"", b"", b":", b": ping", b"event: a", b"data", b"data:", b"id: 1"]),
    st.binary(max_size=12).map(lambda text: b"data: " + text.replace(b"\r", b"").replace(b"\n", b"")),
)
STREAMS = st.lists(st.tuples(LINES, st.sampled_from([b"\n", b"\r\n", b"\r"])), max_size=20).map(
    lambda lines: b"".join(line + end for line, end in lines)
)


def by_lines(stream: bytes) -> list[bytes]:
    """The standard's algorithm, line by line, for a complete stream."""
    lines = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    found: list[bytes] = []
    data: list[bytes] = []
    for line in lines[:-1]:
        field, _, value = line.partition(b":")
        if not line:
            if (joined := b"\n".join(data)) != b"":
                found.append(joined)
            data = []
        elif field == b"data":
            data.append(value.removeprefix(b" "))
    return found


@given(stream=STREAMS, cuts=st.lists(st.integers(0, 300), max_size=12))
def test_bytes_in_any_pieces_give_the_events_of_the_standard(stream: bytes, cuts: list[int]) -> None:
    assert split(stream, [min(cut, len(stream)) for cut in cuts]) == by_lines(stream)


def test_an_endless_event_is_refused() -> None:
    splitter = EventSplitter(max_event_bytes=1000)
    splitter.feed(b"data: " + b"x" * 900)

    with pytest.raises(AnswerTooLargeError, match="more than 1000 bytes"):
        splitter.feed(b"x" * 200)


EVENTS = [b'{"type":"message_start","message":{}}', b'{"type":"ping"}', b'{"type":"message_stop"}']


def frame(payload: bytes, **headers: str) -> bytes:
    said = b"".join(
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


@given(st.integers(0, 200), st.integers(1, 255))
def test_a_damaged_byte_is_detected(at: int, flip: int) -> None:
    damaged = bytearray(event(EVENTS[0]))
    damaged[at % len(damaged)] ^= flip

    with pytest.raises(TransientError):
        FrameSplitter(max_event_bytes=1000).feed(bytes(damaged))


def test_an_event_that_is_too_large_is_refused_before_it_is_complete() -> None:
    with pytest.raises(AnswerTooLargeError, match="more than 1000 bytes"):
        FrameSplitter(max_event_bytes=1000).feed(event(b"x" * 2000)[:1001])


START: dict[str, Any] = {
    "type": "message_start",
    "message": {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-sonnet-5-5",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 10, "cache_read_input_tokens": 3, "output_tokens": 1, "service_tier": "standard"},
    },
}
STOP = {"type": "message_stop"}


def end(reason: str = "end_turn", **more: Any) -> dict[str, Any]:
    return {
        "type": "message_delta",
        "delta": {"stop_reason": reason, "stop_sequence": None},
        "usage": {"output_tokens": 7},
        **more,
    }


def block(index: int, start: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "content_block_start", "index": index, "content_block": start},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


def assemble(*events: dict[str, Any]) -> dict[str, Any]:
    streamed = StreamedMessage()
    for event in events:
        streamed.add(event)
    return streamed.message()


def test_unknown_fields_are_kept() -> None:
    start = {**START, "message": {**START["message"], "new_field": {"a": 1}}}
    message = assemble(
        start,
        {"type": "new_event", "index": 5},
        *block(0, {"type": "redacted_thinking", "data": "xyz"}),
        *block(
            1,
            {"type": "new_block", "note": "a", "items": [1]},
            {"type": "new_delta", "note": "b", "items": [2], "level": 3},
        ),
        {
            **end(context_management={"applied_edits": []}),
            "delta": {"stop_reason": "end_turn", "stop_sequence": None, "container": {"id": "c"}, "stop_details": None},
        },
        STOP,
    )

    assert message["new_field"] == {"a": 1}
    assert message["content"][0] == {"type": "redacted_thinking", "data": "xyz"}
    assert message["content"][1] == {"type": "new_block", "note": "ab", "items": [1, 2], "level": 3}
    assert (message["container"], message["stop_details"]) == ({"id": "c"}, None)
    assert message["context_management"] == {"applied_edits": []}


def test_what_a_delta_says_of_itself_is_no_part_of_the_block_and_a_fallback_names_the_model() -> None:
    it = StreamedMessage()
    for event in (
        {"type": "message_start", "message": {"type": "message", "model": "asked", "content": [], "usage": {}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "thinking_delta", "thinking": "hm", "estimated_tokens": 7},
        },
        {
            "type": "content_block_start",
            "index": 1,
            "content_block": {"type": "fallback", "from": {"model": "asked"}, "to": {"model": "other"}},
        },
        {"type": "content_block_start", "index": 2, "content_block": {"type": "fallback", "to": None}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {}},
    ):
        it.add(event)
    message = it.message()
    assert message["content"][0] == {"type": "thinking", "thinking": "hm"}
    assert message["model"] == "other"


def test_content_that_the_start_of_the_message_has_comes_before_the_blocks() -> None:
    first, second = {"type": "text", "text": "a"}, {"type": "text", "text": "b"}
    start = {**START, "message": {**START["message"], "content": [first]}}

    assert assemble(start, *block(0, second), end(), STOP)["content"] == [first, second]


def test_output_that_is_not_counted_yet_is_a_token_for_four_characters() -> None:
    streamed = StreamedMessage()
    for each in (START, *block(0, {"type": "text", "text": ""}, {"type": "text_delta", "text": "x" * 400})):
        streamed.add(each)

    used = streamed.used()

    assert used is not None
    assert used.output_tokens == 100


def test_a_tools_input_that_was_cut_off_is_kept_as_received() -> None:
    tool = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}

    def of(text: str) -> Any:
        delta = {"type": "input_json_delta", "partial_json": text}
        return assemble(START, *block(0, tool, delta), end("max_tokens"))["content"][0]["input"]

    assert of('{"a": 1, "b": [2') == {"a": 1, "b": [2]}
    assert of("not json") == {"INVALID_JSON": "not json"}
    assert assemble(START, *block(0, tool), end())["content"][0]["input"] == {}


@pytest.mark.parametrize(
    "events",
    [
        [STOP, {}],
        [end()],
        [START, *block(0, {"type": "text", "text": ""})[1:1], {"type": "content_block_delta", "index": 0, "delta": {}}],
        [START, {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}],
        [START, {"type": "content_block_start", "index": 0, "content_block": "text"}],
        [START, {"type": "content_block_start", "index": 0, "content_block": {}}, end(delta=3)],
        [{"type": "message_start", "message": 3}],
        [START, *block(0, {"type": "text", "text": ""}, {"type": "text_delta", "text": "a"}, {"text": "b"})],
        [START, *block(0, {"type": "tool_use"}, {"type": "input_json_delta", "partial_json": 3})],
        [START, *block(0, {"type": "text", "text": 3}, {"type": "text_delta", "text": "a"})],
        [START, *block("x", {"type": "text"}), *block(0, {"type": "text"})],  # type: ignore[arg-type]
    ],
)
def test_events_in_an_impossible_order_are_a_broken_stream(events: list[dict[str, Any]]) -> None:
    with pytest.raises(TransientError) as caught:
        assemble(*events)

    assert caught.value.type == "broken_stream"


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"3", b"\xff", b'{"a": NaN}', b"[" * 10_000])
def test_an_event_that_is_no_json_object_is_a_broken_stream(data: bytes) -> None:
    with pytest.raises(TransientError) as caught:
        parse_event(data)

    assert caught.value.type == "broken_stream"


@pytest.mark.parametrize("changed", [{"type": "error"}, {"content": "text"}, {"content": None}, {"stop_reason": None}])
def test_an_answer_that_is_no_whole_message_is_a_failure(changed: dict[str, Any]) -> None:
    message = {"type": "message", "model": "m", "content": [], "stop_reason": "end_turn", **changed}
    with pytest.raises(TransientError) as caught:
        read_answer(message, b"{}", provider="p", request_id=None)

    assert caught.value.type == ("unfinished" if "stop_reason" in changed else "broken_answer")


def test_the_error_of_a_block_that_is_too_rich_names_the_limit() -> None:
    streamed = StreamedMessage(max_values=100)
    piece = {"type": "input_json_delta", "partial_json": "," * 101}
    start, begin, delta, *_ = [START, *block(0, {"type": "tool_use", "id": "toolu_1", "name": "x", "input": {}}, piece)]
    for each in (start, begin):
        streamed.add(each, json.dumps(each).encode())

    with pytest.raises(AnswerTooLargeError, match="more than 100 keys and values"):
        streamed.add(delta, json.dumps(delta).encode())


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_a_number_that_json_cannot_hold_is_a_broken_stream(number: float) -> None:
    with pytest.raises(TransientError) as caught:
        to_json({"usage": {"input_tokens": number}})

    assert caught.value.type == "broken_stream"


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def streams(draw: st.DrawFn) -> list[dict[str, Any]]:
    events = [START]
    for index in range(draw(st.integers(0, 4))):
        match draw(st.sampled_from(["text", "thinking", "tool_use", "redacted_thinking"])):
            case "text":
                deltas: list[dict[str, Any]] = [{"type": "text_delta", "text": t} for t in draw(st.lists(TEXT))]
                if draw(st.booleans()):
                    citation = {
                        "type": "char_location",
                        "cited_text": draw(TEXT),
                        "document_index": 0,
                        "document_title": None,
                        "start_char_index": 0,
                        "end_char_index": 2,
                    }
                    deltas.append({"type": "citations_delta", "citation": citation})
                events += block(index, {"type": "text", "text": draw(TEXT)}, *deltas)
            case "thinking":
                thoughts = [{"type": "thinking_delta", "thinking": t} for t in draw(st.lists(TEXT))]
                signature = {"type": "signature_delta", "signature": draw(TEXT)}
                events += block(index, {"type": "thinking", "thinking": "", "signature": ""}, *thoughts, signature)
            case "tool_use":
                written = json.dumps(draw(st.dictionaries(TEXT, JSON, max_size=3)), ensure_ascii=draw(st.booleans()))
                cuts = sorted(draw(st.lists(st.integers(0, len(written)), max_size=3)))
                pieces = [written[a:b] for a, b in zip([0, *cuts], [*cuts, len(written)], strict=True)]
                inputs = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]
                events += block(index, {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}, *inputs)
            case _:
                events += block(index, {"type": "redacted_thinking", "data": draw(TEXT)})
        if draw(st.booleans()):
            events.append({"type": "ping"})
    usage = {"output_tokens": draw(st.integers(0, 999))}
    if draw(st.booleans()):
        usage["input_tokens"] = draw(st.integers(0, 999))
    reason = draw(st.sampled_from(["end_turn", "max_tokens", "tool_use", "stop_sequence"]))
    return [*events, end(reason, usage=usage), STOP]


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(events=streams())
async def test_the_assembled_message_equals_that_of_the_vendors_client(events: list[dict[str, Any]]) -> None:
    wire = b"".join(b"event: %b\ndata: %b\n\n" % (e["type"].encode(), json.dumps(e).encode()) for e in events)

    def answer(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=wire)

    http_client = httpx2.AsyncClient(transport=httpx2.MockTransport(answer))
    async with (
        AsyncAnthropic(api_key="k", base_url="http://x", http_client=http_client) as sdk,
        sdk.messages.stream(model="claude-sonnet-5-5", max_tokens=10, messages=[]) as stream,
    ):
        theirs = (await stream.get_final_message()).to_dict()

    ours = assemble(*(parse_event(json.dumps(event).encode()) for event in events))

    assert without_nulls(json.loads(to_json(ours))) == without_nulls(theirs)


def without_nulls(value: Any) -> Any:
    """The client's models add fields that are null."""
    if isinstance(value, dict) and "input" not in value:
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_an_answer_that_is_not_valid_json_is_a_failure(number: float) -> None:
    with pytest.raises(TransientError, match="is not JSON"):
        usage(input_tokens=number)


@pytest.mark.parametrize(("fields", "is_read"), [(45, True), (55, False)])
def test_a_payload_with_more_than_a_hundred_keys_and_values_is_not_read(fields: int, is_read: bool) -> None:
    payload = json.dumps({"message": "Too many"} | {str(each): each for each in range(fields)}).encode()

    (data,) = FrameSplitter(max_event_bytes=10_000).feed(
        frame(payload, message_type="exception", exception_type="throttlingException")
    )

    assert json.loads(data)["error"]["message"] == ("Too many" if is_read else "throttlingException")
