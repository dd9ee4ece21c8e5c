"""What a client gets of a stream's parts."""

import json
from typing import Any

import pytest

from lanekeeper import Part
from service.gateway.messages import FORMAT, Forwarding, _since_restart, events_of, named
from service.gateway.problems import ApiError
from tests.support.requester import put_together

START: dict[str, Any] = {"type": "message_start", "message": {"id": "m", "content": [], "usage": {}}}
BLOCK: dict[str, Any] = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
DELTA: dict[str, Any] = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}}
STOP: dict[str, Any] = {"type": "message_stop"}
MESSAGE = {
    "id": "m",
    "type": "message",
    "role": "assistant",
    "model": "claude-x",
    "content": [
        {"type": "thinking", "thinking": "well", "signature": "c2ln"},
        {"type": "text", "text": "hi", "citations": [{"type": "char_location"}]},
        {"type": "tool_use", "id": "t", "name": "look", "input": {"at": "🦊"}},
        {"type": "unheard_of", "field": [1]},
    ],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": {"input_tokens": 3, "output_tokens": 4},
}


def part(seq: int, event: dict[str, Any]) -> Part:
    return Part(kind="event", seq=seq, body=json.dumps(event).encode())


def restart() -> Part:
    return Part(kind="restart", seq=0, body=b"{}")


def read(data: bytes) -> list[dict[str, Any]]:
    found = []
    for each in data.decode().split("\n\n")[:-1]:
        name, line = each.split("\n")
        found.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_what_comes_before_the_first_piece_waits_for_it() -> None:
    it = Forwarding(FORMAT)

    assert it.part(part(0, START)) + it.part(part(1, BLOCK)) == b""
    assert read(it.part(part(2, DELTA))) == [START, BLOCK, DELTA]
    assert read(it.part(part(3, DELTA))) == [DELTA]


def test_the_end_waits_until_the_outcome_is_stored() -> None:
    it = Forwarding(FORMAT)
    for seq, event in enumerate((START, BLOCK, DELTA)):
        it.part(part(seq, event))

    assert it.part(part(3, STOP)) == b""
    assert it.end() == b"event: message_stop\ndata: " + json.dumps(STOP).encode() + b"\n\n"


def test_a_missing_part_at_the_beginning_is_made_good_by_the_whole_answer() -> None:
    it = Forwarding(FORMAT)

    assert it.part(part(0, START)) + it.part(part(2, DELTA)) + it.part(part(3, STOP)) == b""
    assert it.end() is None
    assert put_together(read(b"".join(events_of(MESSAGE)))) == MESSAGE


@pytest.mark.parametrize("lost", [2, 3])
def test_a_missing_part_later_is_never_passed_over(lost: int) -> None:
    def forward(it: Forwarding) -> None:
        for seq, event in enumerate([START, DELTA, DELTA, STOP]):
            if seq != lost:
                it.part(part(seq, event))
        it.end()

    with pytest.raises(ApiError):
        forward(Forwarding(FORMAT))


def test_a_start_that_is_large_is_not_held() -> None:
    large = {**BLOCK, "content_block": {"type": "web_search_tool_result", "content": "x" * 100_000}}
    it = Forwarding(FORMAT)
    it.part(part(0, START))

    assert read(it.part(part(1, large))) == [START, large]


@pytest.mark.parametrize(
    "event", [b'{"type":"ping"}', b'{"type": "ping"}', b'{"index":0,"type":"ping"}', b'{"type":"\\u0070ing"}']
)
def test_the_type_is_read_wherever_it_stands(event: bytes) -> None:
    assert named(event)[0] == "ping"


def test_an_event_with_line_breaks_stays_one_field() -> None:
    it = Forwarding(FORMAT)
    data = b'{"type":"content_block_delta",\n"index":0,\r\n"delta":{"type":"text_delta","text":"hi"}}'

    assert read(it.part(Part(kind="event", seq=0, body=data))) == [DELTA]


def test_an_attempt_that_failed_before_anything_of_it_was_written_is_not_noticed() -> None:
    came = [part(0, START), part(1, DELTA), restart(), part(1, START)]

    assert _since_restart(came) == came[2:]
    assert _since_restart(came[:2]) == came[:2]


@pytest.mark.parametrize(
    "block", [1, None, "x", [], {}, {"type": []}, {"type": "text", "text": None}, {"type": "text", "citations": 1}]
)
def test_a_block_that_no_stream_can_have_is_passed_on_in_one_all_the_same(block: Any) -> None:
    events = b"".join(events_of({"type": "message", "content": [block], "stop_reason": "end_turn"}))
    assert events.count(b"event: content_block_start") == events.count(b"event: message_stop") == 1
