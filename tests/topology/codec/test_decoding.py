"""From a delivered message to a request: what is accepted, what is refused and with which code, and no other errors."""

import gzip
import json
from dataclasses import replace
from typing import Any

import pytest

from lanekeeper.contract.messages import UNREADABLE, Message
from lanekeeper.contract.problems import RequestProblem
from tests.support.pictures import picture, png
from topology.codec import decoding
from topology.codec.decoding import Request
from topology.codec.headers import FlowHop, HopHeaders
from topology.lanes import CRITICAL, LaneSpec

NOW_MS = 1_790_000_000_000
WHOLE = b'{"model": "claude-x", "max_tokens": 64,\n "messages": [{"role": "user", "content": "hi"}]}'
TALK = '"messages":[{"role":"user","content":"hi"}]'


def message(body: bytes | str = WHOLE, **properties: Any) -> Message:
    raw = body.encode() if isinstance(body, str) else body
    return Message(**{"body": raw, "exchange": "lane.requests", "routing_key": "critical.shop.chat", **properties})


def decode(found: Message, *, hop: HopHeaders | None = None, lane: Any = CRITICAL) -> Request:
    return decoding.decode(found, lane=lane, request_id="r-1", hop=hop, now_ms=NOW_MS)


def refused(found: Message, **how: Any) -> RequestProblem:
    with pytest.raises(RequestProblem) as problem:
        decode(found, **how)
    return problem.value


# accepted requests


def test_the_short_form_may_have_a_system_prompt() -> None:
    asked = json.loads(decode(message('{"prompt":"hi","system":"be brief ✓"}')).body)
    assert asked["system"] == "be brief ✓"


def test_an_empty_property_counts_as_absent() -> None:
    """Some clients cannot leave one out."""
    assert decode(message(message_id="", type="", content_type="", content_encoding="")).body == WHOLE


# refused requests

BAD: list[tuple[str, Message, str, str]] = [
    ("nothing", message(b""), "invalid_request", "empty"),
    ("not json", message(b"{"), "invalid_request", "not JSON"),
    ("not utf-8", message(b'{"prompt":"\xff"}'), "invalid_request", "not JSON in UTF-8"),
    ("utf-16", message('{"prompt":"x"}'.encode("utf-16")), "invalid_request", "not JSON in UTF-8"),
    ("bom", message(b'\xef\xbb\xbf{"prompt":"x"}'), "invalid_request", "not JSON in UTF-8"),
    ("nan", message(f'{{{TALK},"t":NaN}}'), "invalid_request", "not JSON"),
    ("infinity", message(f'{{{TALK},"t":-Infinity}}'), "invalid_request", "not JSON"),
    ("twice", message(f'{{{TALK},"model":"a","model":"b"}}'), "invalid_request", 'duplicate key "model"'),
    ("half a surrogate", message('{"prompt":"\\ud800"}'), "invalid_request", "not JSON"),
    ("5000 digits", message(f'{{{TALK},"x":1{"0" * 5000}}}'), "invalid_request", "out of range"),
    ("4000 digits", message(f'{{{TALK},"max_tokens":1{"0" * 4000}}}'), "invalid_request", "max_tokens"),
    ("something after", message(WHOLE + b"{}"), "invalid_request", "not JSON"),
    ("an array", message(b"[]"), "invalid_request", "found an array, allowed is a JSON object"),
    ("null", message(b"null"), "invalid_request", "found null"),
    ("a string", message(b'"secret"'), "invalid_request", "found a string"),
    ("neither form", message(b'{"model":"m"}'), "invalid_request", "`messages` is missing"),
    ("both forms", message(f'{{"prompt":"x",{TALK}}}'), "invalid_request", "not both"),
    ("no messages", message(b'{"messages":[]}'), "invalid_request", "messages: List should have at least 1 item"),
    ("messages no list", message(b'{"messages":"hi"}'), "invalid_request", "messages: "),
    ("a message no object", message(b'{"messages":["secret"]}'), "invalid_request", "messages.0: "),
    ("no content", message(b'{"messages":[{"role":"user"}]}'), "invalid_request", "messages.0.content: Field required"),
    (
        "content 5",
        message(b'{"messages":[{"role":"u","content":5}]}'),
        "invalid_request",
        "string or an array (found 5)",
    ),
    ("role 5", message(b'{"messages":[{"role":5,"content":""}]}'), "invalid_request", "messages.0.role"),
    ("role []", message(b'{"messages":[{"role":[],"content":""}]}'), "invalid_request", "messages.0.role"),
    ("model 5", message(f'{{"model":5,{TALK}}}'), "invalid_request", "model: "),
    ("model empty", message(f'{{"model":"",{TALK}}}'), "invalid_request", "model: "),
    ("max_tokens -1", message(f'{{"max_tokens":-1,{TALK}}}'), "invalid_request", "max_tokens: "),
    ("max_tokens true", message(f'{{"max_tokens":true,{TALK}}}'), "invalid_request", "max_tokens: "),
    ("max_tokens '1'", message(f'{{"max_tokens":"1",{TALK}}}'), "invalid_request", "max_tokens: "),
    ("system 5", message(f'{{"system":5,{TALK}}}'), "invalid_request", "system: "),
    ("stream 1", message(f'{{"stream":1,{TALK}}}'), "invalid_request", "stream: "),
    ("stream by body alone", message(f'{{"stream":true,{TALK}}}'), "invalid_request", "x-lane-stream says false"),
    (
        "stream by header alone",
        message(f'{{"stream":false,{TALK}}}', headers={"x-lane-stream": True}),
        "invalid_request",
        "stream is false",
    ),
    ("prompt empty", message(b'{"prompt":""}'), "invalid_request", "prompt: "),
    ("prompt with more", message(b'{"prompt":"x","tools":[]}'), "invalid_request", "found also tools"),
    ("a value", message(b"\x00\x53\x77\xa1\x02{}"), "invalid_request", "as a data section"),
    ("a value's type", message(b"\x00\x53\x77\xa1\x02{}", type="amqp-1.0"), "invalid_request", "as a data section"),
    ("no gzip", message(content_encoding="gzip"), "invalid_request", "content_encoding is gzip, but it is not"),
    ("half a gzip", message(gzip.compress(WHOLE)[:-5], content_encoding="gzip"), "invalid_request", "cut short"),
    ("gzip and more", message(gzip.compress(WHOLE) + b"x", content_encoding="gzip"), "invalid_request", "follows it"),
    ("brotli", message(content_encoding="br"), "unsupported_media", "'br'"),
    ("text", message(content_type="text/plain"), "unsupported_media", "'text/plain'"),
    ("latin", message(content_type="application/json; charset=latin-1"), "unsupported_media", "latin-1"),
    ("another lane's key", message(routing_key="batch.shop.chat"), "invalid_request", "'batch.shop.chat'"),
    ("a lane's name prefixed", message(routing_key="criticality.a.b"), "invalid_request", "routing key"),
    ("x-death", message(headers={"x-death": [{"reason": "expired"}]}), "invalid_request", "x-death"),
    ("unknown header", message(headers={"x-lane-modell": "m"}), "invalid_request", "x-lane-modell"),
    ("message_id spaced", message(message_id="a b"), "invalid_request", "message_id"),
    ("message_id newline", message(message_id="a\n"), "invalid_request", "message_id"),
    (
        "a handler",
        message(type="resize"),
        "invalid_request",
        "type 'resize': no handler has this name",
    ),
    (
        "unreadable",
        message(headers={UNREADABLE: "timestamp (ValueError)"}),
        "invalid_request",
        "timestamp (ValueError)",
    ),
    ("deadline too long", message(headers={"x-lane-deadline-ms": 3_600_001}), "invalid_request", "at most 3600000"),
    ("years ahead", message(headers={"x-lane-at": "2199-01-01T00:00:00Z"}), "invalid_request", "more than a year"),
]


@pytest.mark.parametrize(("found", "code", "named"), [each[1:] for each in BAD], ids=[each[0] for each in BAD])
def test_an_invalid_message_is_refused_with_its_code_and_detail(found: Message, code: str, named: str) -> None:
    problem = refused(found)
    assert problem.code == code
    assert named in problem.detail
    assert "secret" not in problem.detail


def test_json_that_is_nested_too_deeply_is_refused() -> None:
    def nested(depth: int) -> Message:
        return message(f'{{{TALK},"x":{"[" * (depth - 1)}0{"]" * (depth - 1)}}}')

    assert decode(nested(decoding.NESTED))
    problem = refused(nested(decoding.NESTED + 1))
    assert (problem.code, problem.detail) == (
        "invalid_request",
        "body: nested too deeply: allowed are 200 arrays and objects inside of each other",
    )


@pytest.mark.slow
def test_a_body_that_compresses_extremely_well_is_accepted() -> None:
    rows = "2026-11-22,0,0,shop\n" * 150_000
    for prompt in (rows, "0" * 3_000_000):
        packed = gzip.compress(json.dumps({"prompt": prompt}).encode())
        assert len(packed) < len(prompt) / 200
        found = decode(message(packed, content_encoding="gzip"))
        assert json.loads(found.body)["messages"][0]["content"] == prompt


# handlers and pipelines

PIPED = {"x-lane-pipeline": "digest"}


def decode_named(found: Message) -> Request:
    return decoding.decode(
        found, lane=CRITICAL, request_id="r-1", hop=None, now_ms=NOW_MS, handlers={"resize"}, pipelines={"digest"}
    )


@pytest.mark.parametrize(
    ("properties", "named"),
    [
        ({"type": "crop"}, "type 'crop': no handler has this name (registered: resize)"),
        ({"type": "resize", "headers": {"x-lane-stream": True}}, "a handler's answer is not streamed"),
        ({"headers": {"x-lane-pipeline": "other"}}, "'other' is no pipeline (declared: digest)"),
        ({"headers": PIPED, "type": "resize"}, "type 'resize' and header x-lane-pipeline: give one of them"),
        ({"headers": {**PIPED, "x-lane-stream": True}}, "a pipeline's answer is not streamed"),
        (
            {"headers": {**PIPED, "x-lane-body": "s3://a/b", "x-lane-body-sha256": "0" * 64}},
            "a pipeline's input is the message's body",
        ),
    ],
)
def test_a_handler_or_pipeline_is_refused_if_it_is_unknown_or_cannot_do_what_is_asked(
    properties: dict[str, Any], named: str
) -> None:
    with pytest.raises(RequestProblem) as refused:
        decode_named(message(**properties))
    assert (refused.value.code, named in refused.value.detail) == ("invalid_request", True)


# bodies that lie elsewhere

AWAY = {"x-lane-body": "s3://a/b", "x-lane-body-sha256": "0" * 64}


@pytest.mark.parametrize(
    ("body", "encoding", "code", "named"),
    [(b"{}", None, "invalid_request", "2 bytes"), (b"", "GZIP", "unsupported_media", "'GZIP'")],
)
def test_a_body_that_lies_elsewhere_is_neither_here_too_nor_packed(
    body: bytes, encoding: str | None, code: str, named: str
) -> None:
    problem = refused(message(body, headers=AWAY, content_encoding=encoding))
    assert (problem.code, named in problem.detail) == (code, True)


def test_a_long_call_may_take_the_time_to_its_deadline() -> None:
    assert decode(message()).call_s == 60
    assert decode(message(headers={"x-lane-long-call": True})).call_s == 120
    assert decode(message(headers={"x-lane-long-call": True, "x-lane-deadline-ms": 500_000})).call_s == 500
    flow = HopHeaders(flow=FlowHop(step="sum", deadline_ms=NOW_MS + 77))
    assert decode(message(headers={"x-lane-long-call": True}), hop=flow).call_s == 3600
    assert decode(message(), hop=flow).deadline_ms == NOW_MS + 77


# times


@pytest.mark.parametrize(
    ("properties", "sent_ms", "by"),
    [
        ({}, NOW_MS, "delivery"),
        ({"headers": {"x-lane-sent-ms": NOW_MS - 700}}, NOW_MS - 700, "sender"),
        ({"headers": {"x-lane-sent-ms": NOW_MS - 700, "timestamp_in_ms": NOW_MS - 900}}, NOW_MS - 900, "broker"),
        ({"headers": {"x-lane-sent-ms": NOW_MS + 700}}, NOW_MS, "sender"),  # a time in the future is not believed
        ({"headers": {"x-lane-sent-ms": NOW_MS + 10**10}}, NOW_MS, "sender"),
        ({"headers": {"timestamp_in_ms": True}}, NOW_MS, "delivery"),
        ({"headers": {"timestamp_in_ms": 1}, "timestamp_s": 9.0}, 1, "broker"),
        ({"headers": {"timestamp_in_ms": 0}, "timestamp_s": 1.0}, 1999, "timestamp"),
        ({"headers": {"timestamp_in_ms": "x"}, "timestamp_s": 0.0}, NOW_MS, "delivery"),
        ({"timestamp_s": NOW_MS / 1000 - 60}, NOW_MS - 60_000 + 999, "timestamp"),
    ],
)
def test_the_sending_time_and_its_source_are_read(properties: dict[str, Any], sent_ms: int, by: str) -> None:
    request = decode(message(**properties))
    assert request.published == (sent_ms, by)


def test_a_sending_time_in_the_future_extends_neither_deadline_nor_delay() -> None:
    ahead = {"x-lane-sent-ms": NOW_MS + 10**10}
    assert decode(message(headers=ahead)).deadline_ms == NOW_MS + 120_000
    delayed = decode(message(headers={**ahead, "x-lane-delay-ms": 5000}))
    assert (delayed.due_ms, delayed.deadline_ms) == (NOW_MS + 5000, NOW_MS + 125_000)


@pytest.mark.parametrize("lane", [CRITICAL, replace(CRITICAL, models=frozenset({"claude-x"}))])
@pytest.mark.parametrize("escapes", [False, True])
def test_the_text_of_a_body_is_what_is_left_without_its_images(escapes: bool, lane: LaneSpec) -> None:
    talk = [
        {
            "role": "user",
            "content": [picture(png(1000, 700, size=60_000) + b"\xff" * 30_000), {"type": "text", "text": "hi"}],
        }
    ]
    body = json.dumps({"model": "claude-x", "max_tokens": 64, "messages": talk})
    request = decode(message(body.replace("/", "\\/") if escapes else body), lane=lane)

    assert request.media.tokens("claude-x") == 900
    assert 100 < request.text_bytes < 300
    assert decode(message(WHOLE)).text_bytes == len(WHOLE)


def asking(field: str, value: object) -> bytes:
    return json.dumps({"prompt": "x", field: value}).encode()


def padded(size: int) -> bytes:
    return b'{"prompt": "x"}'.ljust(size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("allowed", "above", "code", "text"),
    [
        ({"body": padded(1_048_576)}, {"body": padded(1_048_577)}, "too_large", "allowed are 1048576"),
        (
            {"body": gzip.compress(padded(8_388_608)), "content_encoding": "gzip"},
            {"body": gzip.compress(padded(8_388_609)), "content_encoding": "gzip"},
            "too_large",
            "when unpacked",
        ),
        ({"message_id": "a" * 128}, {"message_id": "a" * 129}, "invalid_request", "message_id"),
        ({"priority": 9}, {"priority": 10}, "invalid_request", "priority"),
        ({"body": asking("model", "m" * 256)}, {"body": asking("model", "m" * 257)}, "invalid_request", "model"),
        ({"body": asking("model", "m")}, {"body": asking("model", "")}, "invalid_request", "model"),
        ({"body": asking("max_tokens", 10**7)}, {"body": asking("max_tokens", 10**7 + 1)}, "invalid_request", "max_t"),
        ({"body": asking("max_tokens", 0)}, {"body": asking("max_tokens", -1)}, "invalid_request", "max_tokens"),
    ],
    ids=["as sent", "unpacked", "id", "priority", "long model", "short model", "most tokens", "fewest tokens"],
)
def test_a_request_may_have_what_the_contract_states_and_no_more(
    allowed: dict[str, Any], above: dict[str, Any], code: str, text: str
) -> None:
    decode(message(**{"body": padded(0), **allowed}))
    problem = refused(message(**{"body": padded(0), **above}))
    assert (problem.code, text in problem.detail) == (code, True)


def test_a_charset_as_the_encoding_and_no_tokens_at_all_are_accepted() -> None:
    body = json.dumps({"max_tokens": 0, "messages": [{"role": "system", "content": "x"}]}).encode()

    found = decode(message(body, content_encoding="UTF-8"))

    assert (found.max_tokens, json.loads(found.body)["max_tokens"]) == (0, 0)


@pytest.mark.parametrize(
    "more",
    [{"fallbacks": [{"model": "dear"}]}, {"tools": [{"type": "advisor_20260301", "name": "advisor", "model": "dear"}]}],
    ids=["fallback", "advisor"],
)
def test_a_lanes_models_are_also_those_that_the_provider_may_ask(more: dict[str, Any]) -> None:
    body = json.dumps({"model": "cheap", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}], **more})
    found = message(body.encode())

    assert decode(found).other_models == ("dear",)
    assert decode(found, lane=replace(CRITICAL, models=frozenset({"cheap", "dear"}))).model == "cheap"
    assert refused(found, lane=replace(CRITICAL, models=frozenset({"cheap"}))).code == "forbidden_model"
