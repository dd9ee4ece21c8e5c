"""The formats of OpenAI's paths. What a call of theirs meets is in `tests/journeys/test_openai.py`."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from typing import Any

import aiohttp
import pytest
from multidict import CIMultiDict

from consumers.dialects.openai_chat import ChatStream
from consumers.state.base import Found
from lanekeeper import Part
from lanekeeper.contract import names as n
from service.config.settings import GatewayKey
from service.gateway.access import hash_of
from service.gateway.calls import CallReader, CheckedCall
from service.gateway.messages import Format, Forwarding
from service.gateway.openai import CHAT, RESPONSES, ResponsePaths, _continuing, _StoredResponse
from service.gateway.problems import ApiError
from service.gateway.requests import Known
from service.simulated import openai as simulated
from service.simulated.messages import echo
from tests.support.gate import SETTINGS, Alone

LANES = {lane.name: lane for lane in SETTINGS.lane_specs()}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"required": ["at"]}}}
TOOL_OF_RESPONSE = {"type": "function", "name": "look", "parameters": {"required": ["at"]}}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "gpt-5.5", "messages": [{"role": "user", "content": "words 🦊"}], "stream": True, **fields}


def checked(fields: dict[str, Any], dialect: str = n.OPENAI_CHAT, **headers: str) -> CheckedCall:
    return read(json.dumps(fields).encode(), dialect, **headers)


def read(given: bytes, dialect: str, **headers: str) -> CheckedCall:
    reader = CallReader(lanes=LANES, app="x", max_values=10_000, cancel_abandoned=True)
    named = CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()})
    return reader.read(named, given, GatewayKey(tenant=None), request_id="r", task="chat", dialect=dialect)


def chunks(**fields: Any) -> list[bytes]:
    asked = simulated.read_chat(json.dumps(body(**fields)).encode())
    events = simulated.chat_events(asked, echo(asked, output_tokens=None), id="1", deltas=3)
    return [event.removeprefix(b"data: ").strip() for event in events[:-1]]


def data_in(events: bytes) -> Iterator[Any]:
    for line in events.splitlines():
        if line.startswith(b"data: ") and b"[DONE]" not in line:
            yield json.loads(line.removeprefix(b"data: "))


def parts(found: list[bytes]) -> list[Part]:
    return [Part(kind="event", seq=seq, body=each) for seq, each in enumerate(found)]


def test_the_first_chunk_waits_for_content_and_the_last_one_for_the_outcome() -> None:
    it, found = Forwarding(CHAT), parts(chunks(stream_options={"include_usage": True}))

    assert it.part(found[0]) == b""
    assert [len(list(data_in(it.part(part)))) for part in found[1:-2]] == [2, 1, 1]
    assert it.part(found[-2]) + it.part(found[-1]) == b""
    last, usage = data_in(it.end() or b"")
    assert (last["choices"][0]["finish_reason"], usage["choices"]) == ("stop", [])


def test_an_empty_finish_reason_ends_nothing() -> None:
    """Servers such as LocalAI write it into each chunk: the events are passed on as they come."""
    found = [each.replace(b'"finish_reason": null', b'"finish_reason": ""') for each in chunks()]
    it = Forwarding(CHAT)

    assert [len(list(data_in(it.part(part)))) for part in parts(found)] == [0, 2, 1, 1, 0]
    assert len(list(data_in(it.end() or b""))) == 1


def test_a_stream_of_several_choices_ends_with_the_last_of_them() -> None:
    it, found = Forwarding(CHAT, choices=2), parts(chunks(n=2))
    written = b"".join(map(it.part, found))

    whole = written + (it.end(2) or b"")
    assert [each["choices"][0]["index"] for each in data_in(whole)] == [0] * 5 + [1] * 5
    fewer = Forwarding(CHAT, choices=2)
    assert len(list(data_in(b"".join(map(fewer.part, parts(chunks()))) + (fewer.end(1) or b"")))) == 5


def test_two_choices_may_end_in_one_chunk_and_one_in_two() -> None:
    def chunk(*ended: int) -> bytes:
        choices = [{"index": index, "delta": {"content": "x"}, "finish_reason": "stop"} for index in ended]
        return json.dumps({"choices": choices}).encode()

    at_once, twice = Forwarding(CHAT, choices=2), Forwarding(CHAT, choices=2)
    assert at_once.part(parts([chunk(0, 1)])[0]) == b""
    assert len(list(data_in(at_once.end(2) or b""))) == 1
    for part in parts([chunk(0), chunk(0)]):
        twice.part(part)
    with pytest.raises(ApiError):
        twice.end(2)


@pytest.mark.parametrize("lost", [-1, -2])
def test_a_lost_end_is_never_passed_over(lost: int) -> None:
    it, found = Forwarding(CHAT, choices=2), parts(chunks(n=2))
    del found[lost]

    def forward() -> None:
        for part in found:
            it.part(part)
        it.end(2)

    with pytest.raises(ApiError):
        forward()


CHAT_ERROR = {"error": {"message": "it broke", "type": "server_error", "param": None, "code": None, "own": 1}}
RESPONSE_ERROR = {"type": "error", "sequence_number": 8, "code": "server_error", "message": "it broke", "param": None}


@pytest.mark.parametrize(
    ("format", "told", "sent"),
    [
        (CHAT, CHAT_ERROR, CHAT_ERROR),
        (RESPONSES, RESPONSE_ERROR, RESPONSE_ERROR),
        (CHAT, {"detail": "of another server"}, None),
        (CHAT, None, None),
    ],
)
def test_a_stream_that_has_begun_ends_with_the_providers_own_error(format: Format, told: Any, sent: Any) -> None:
    failed = {} if told is None else {"provider_status": 500, "provider_error": json.dumps(told)}
    it = Forwarding(CHAT)
    for part in parts(chunks())[:2]:
        it.part(part)

    with pytest.raises(ApiError) as raised:
        it.part(Part(kind="restart", seq=0, body=json.dumps(failed).encode()))

    (event,) = data_in(format.error_event(raised.value, "r"))
    if sent is None:
        assert "send the request again" in event["error"]["message"]
    else:
        assert event == sent


def test_a_stream_that_has_not_begun_starts_over_unnoticed() -> None:
    it, found = Forwarding(CHAT), parts(chunks())
    it.part(found[0])
    for failed in ({"provider_status": 500, "provider_error": json.dumps(CHAT_ERROR)}, {}):
        assert it.part(Part(kind="restart", seq=0, body=json.dumps(failed).encode())) == b""
    again = [replace(part, seq=part.seq + 1) for part in found]

    assert len(list(data_in(b"".join(map(it.part, again)) + (it.end() or b"")))) == 5


@pytest.mark.parametrize("fields", [{}, {"n": 2, "stream_options": {"include_usage": True}}, {"tools": [TOOL]}])
def test_a_stream_can_be_made_of_a_whole_chat_completion(fields: dict[str, Any]) -> None:
    asked = simulated.read_chat(json.dumps(body(**fields)).encode())
    whole = simulated.chat(asked, echo(asked, output_tokens=None), id="1")
    events = b"".join(CHAT.events_of(whole, checked(body(**fields))))

    stream = ChatStream(asks_usage=True)
    for each in data_in(events):
        stream.take(each, b"")
    again = stream.message()
    assert events.endswith(b"data: [DONE]\n\n")
    assert [choice["message"] for choice in again["choices"]] == [choice["message"] for choice in whole["choices"]]
    assert again.get("usage") == (whole["usage"] if "stream_options" in fields else None)


@pytest.mark.parametrize("message", [1, None, "x", [], {"tool_calls": 1}])
def test_a_choice_whose_message_is_none_is_streamed_all_the_same(message: Any) -> None:
    whole = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    assert b"".join(CHAT.events_of(whole, checked(body()))).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("tools", [[], [TOOL_OF_RESPONSE]])
def test_a_stream_can_be_made_of_a_whole_response(tools: list[Any]) -> None:
    given = {"model": "gpt-5.5", "input": "words", "stream": True, "tools": tools}
    asked = simulated.read_response(json.dumps(given).encode())
    output = echo(asked, output_tokens=None)
    whole = simulated.response(asked, output, id="1")
    made = list(data_in(b"".join(RESPONSES.events_of(whole, checked(given, n.OPENAI_RESPONSES)))))

    assert made[-1]["response"] == whole
    assert [event["sequence_number"] for event in made] == list(range(len(made)))
    streamed = list(data_in(b"".join(simulated.response_events(asked, output, id="1", deltas=1))))
    assert [event["type"] for event in made] == [event["type"] for event in streamed]


def test_an_event_of_a_response_has_its_name() -> None:
    given = {"model": "gpt-5.5", "input": "words", "stream": True}
    asked = simulated.read_response(json.dumps(given).encode())
    whole = simulated.response(asked, echo(asked, output_tokens=None), id="1")
    of_whole = b"".join(RESPONSES.events_of(whole, checked(given, n.OPENAI_RESPONSES)))
    passed_on = [RESPONSES.read(json.dumps(event).encode())[1] for event in data_in(of_whole)]

    for event in (*of_whole.strip().split(b"\n\n"), *passed_on):
        (data,) = data_in(event)
        assert event.startswith(b"event: %b\n" % data["type"].encode())


def test_a_response_in_the_background_is_submitted_without_the_field_that_says_so() -> None:
    given = b'{"model": "gpt-5.5",  "background": %b,\n"input": "\xc3\xa9", "own": 1e400}'
    call = read(given % b"true", n.OPENAI_RESPONSES)

    assert call.is_background
    assert (call.body, call.key) == (given.replace(b',  "background": %b', b""), "normal.x.requests")
    other = read(given % b"false", n.OPENAI_RESPONSES)
    assert (other.is_background, other.body) == (False, given % b"false")


@pytest.mark.parametrize("is_filed", [False, True])
def test_a_response_that_continues_another_keeps_all_other_bytes(is_filed: bool) -> None:
    given = b'{"model":"gpt-5.5", "previous_response_id":"resp_ours-and-long", "input": "\xc3\xa9", "own": 1e400}'
    call = read(given, n.OPENAI_RESPONSES)
    if is_filed:
        call = replace(call, body=BytesIO(given), sha256="of the body")

    found = _continuing(call, "resp_1")

    body = found.body if isinstance(found.body, bytes) else found.body.read()
    assert body == given.replace(b"resp_ours-and-long", b"resp_1")
    assert found.sha256 == (hashlib.sha256(body).hexdigest() if is_filed else None)


async def test_half_a_character_is_told_as_it_came() -> None:
    """A model writes one where it is cut off: in the answer of a response in the background, and in an error."""
    paths = ResponsePaths(*[Any] * 4, ping_every_s=1)  # type: ignore[arg-type]
    found = _StoredResponse(Known("r", Found(completion=None, running=False, attempts=0), None), "m")

    answered = paths._json(found, found.answered(rb'{"output": "\ud83d"}'))
    assert json.loads(answered.body)["output"] == "\ud83d"  # type: ignore[attr-defined]
    event = ApiError(400, "", whole=rb'{"type": "error", "message": "\ud83d"}')
    assert json.loads(event.openai_body()) == {"error": {"message": "\ud83d"}}


async def test_errors_are_in_openais_format_on_its_paths_and_where_its_client_calls() -> None:
    async def error(method: str, path: str, **headers: str) -> tuple[int, dict[str, Any]]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with session.request(method, made.url + path, headers=named, data=b"{}") as got:
            found = await got.json()
            assert found.keys() == {"error"}
            assert got.headers["x-request-id"]
            return got.status, found["error"]

    async with Alone(keys={hash_of("k"): {"tenant": "crm"}}) as made, aiohttp.ClientSession() as session:
        assert (await error("POST", "/v1/chat/completions"))[1]["code"] == "invalid_api_key"
        status, found = await error("POST", "/v1/moderations", authorization="Bearer k")
        assert (status, found["type"]) == (404, "invalid_request_error")
        assert "/v1/chat/completions, /v1/responses" in found["message"]
        assert (await error("GET", "/v1/files", authorization="Bearer k"))[0] == 404
        async with session.get(f"{made.url}/v1/moderations", headers={"x-api-key": "k"}) as got:
            assert (await got.json())["type"] == "error"
        async with session.get(f"{made.url}/v1/requests/x", headers={"authorization": "Bearer no"}) as got:
            assert got.content_type == "application/problem+json"


@pytest.mark.parametrize(("status", "told"), [(529, 503), (402, 429), (503, 503), (400, 400)])
def test_a_status_that_openai_does_not_have_is_the_nearest_one_that_it_has(status: int, told: int) -> None:
    answered = ApiError(status, "why").openai_response("r")

    assert (answered.status, json.loads(answered.body)["error"]["message"]) == (told, "why")  # type: ignore[arg-type]
