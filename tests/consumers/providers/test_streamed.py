import json
from typing import Any

import httpx2
import pytest
from anthropic import AsyncAnthropic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from consumers.failures import AnswerTooLargeError, TransientError
from consumers.providers.streamed import StreamedMessage, parse_event, to_json
from tests.support.examples import examples

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


def test_text_thinking_tools_and_citations_are_assembled() -> None:
    message = assemble(
        START,
        *block(
            0,
            {"type": "thinking", "thinking": "", "signature": ""},
            {"type": "thinking_delta", "thinking": "I "},
            {"type": "thinking_delta", "thinking": "see"},
            {"type": "signature_delta", "signature": "c2ln"},
        ),
        *block(
            1,
            {"type": "text", "text": "", "citations": None},
            {"type": "text_delta", "text": "The "},
            {"type": "citations_delta", "citation": {"type": "page_location", "cited_text": "a"}},
            {"type": "text_delta", "text": "end"},
            {"type": "citations_delta", "citation": {"type": "page_location", "cited_text": "b"}},
        ),
        {"type": "ping"},
        *block(
            2,
            {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}},
            {"type": "input_json_delta", "partial_json": ""},
            {"type": "input_json_delta", "partial_json": '{"a": [1, '},
            {"type": "input_json_delta", "partial_json": "2.50]}"},
        ),
        end("tool_use"),
        STOP,
    )

    assert message["content"] == [
        {"type": "thinking", "thinking": "I see", "signature": "c2ln"},
        {
            "type": "text",
            "text": "The end",
            "citations": [{"type": "page_location", "cited_text": "a"}, {"type": "page_location", "cited_text": "b"}],
        },
        {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": [1, 2.5]}},
    ]
    assert message["stop_reason"] == "tool_use"


def test_usage_at_the_end_replaces_that_of_the_start_field_by_field() -> None:
    more: dict[str, Any] = {
        "usage": {"input_tokens": None, "output_tokens": 9, "server_tool_use": {"web_search_requests": 2}}
    }

    assert assemble(START, end(**more), STOP)["usage"] == {
        "input_tokens": 10,
        "cache_read_input_tokens": 3,
        "output_tokens": 9,
        "service_tier": "standard",
        "server_tool_use": {"web_search_requests": 2},
    }


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


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"3", b"\xff", b'{"a": NaN}', b'{"a": "\\ud800"}', b"[" * 10_000])
def test_an_event_that_is_no_json_object_is_a_broken_stream(data: bytes) -> None:
    with pytest.raises(TransientError) as caught:
        parse_event(data)

    assert caught.value.type == "broken_stream"


def test_every_character_in_json_is_kept() -> None:
    text = 'ünïcödé  \u2028 \U0001f600 " \\ \x00'

    assert json.loads(to_json({"text": text})) == {"text": text}


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


def assembled(*events: dict[str, Any], most_bytes: int) -> StreamedMessage:
    streamed = StreamedMessage(max_bytes=most_bytes)
    for event in events:
        streamed.add(event, json.dumps(event).encode())
    return streamed


def test_a_piece_of_text_counts_with_its_bytes_alone_and_a_citation_with_its_event() -> None:
    text, citation = {"type": "text_delta", "text": "xy"}, {"type": "citations_delta", "citation": {"cited_text": "a"}}
    start = {"type": "text", "text": "", "citations": None}
    first = assembled(START, *block(0, start, text), most_bytes=10_000).size

    assert assembled(START, *block(0, start, *[text] * 501), most_bytes=10_000).size == first + 1000
    assert assembled(START, *block(0, start, text, *[citation] * 10), most_bytes=10_000).size > first + 500
    with pytest.raises(AnswerTooLargeError):
        assembled(START, *block(0, start, text, *[citation] * 10), most_bytes=first + 500)
