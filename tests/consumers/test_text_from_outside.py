"""Whatever text a provider sends, the request ends, and what is stored, sent and logged about it can be encoded."""

import asyncio
import json
import random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from consumers.dialects.answers import Answer
from consumers.dialects.anthropic import MESSAGES, classify
from consumers.dialects.anthropic_answers import read_answer
from consumers.dialects.anthropic_stream import StreamedMessage
from consumers.dialects.base import Failure
from consumers.failures import RetryPolicy, decide
from consumers.lifecycle import waits
from consumers.limits.base import Amounts
from consumers.outcomes import Answered
from consumers.providers.calling import parse_message
from consumers.providers.errors import from_event
from consumers.providers.streams import parse_event, to_json
from lanekeeper.amqp.tolerant import encoded
from lanekeeper.contract.identity import encodable
from lanekeeper.contract.problems import RequestProblem
from service.telemetry import redaction
from tests.support.jobs import NOW_MS, Bench, read

LONE = "\ud83d"
TEXT = st.text(st.characters(), max_size=20)
"""With surrogates, which `st.text()` leaves out."""


def settled(answer: Answer | None, error: Any = None) -> bytes:
    """Settle a request that ends so, and return its reply."""

    async def story() -> bytes:
        bench = Bench()
        job = read(bench.job())
        outcome: Any = (
            Answered(body=answer.body, model=answer.model, provider=answer.provider)
            if answer is not None
            else decide(error, attempts=9, max_attempts=1, left_ms=9, policy=RetryPolicy(), rng=random.Random(1))
        )
        assert await bench.settler.settle(job, outcome) is not None
        for sent in bench.publisher.sent:
            encoded(sent.message)
        return bench.to("").body

    return asyncio.run(story())


@given(TEXT)
@example(LONE)
@example("\ude00\ud83d")
def test_any_text_can_be_encoded_and_what_has_no_surrogate_is_unchanged(text: str) -> None:
    encodable(text).encode()
    if not any("\ud800" <= each <= "\udfff" for each in text):
        assert encodable(text) == text
    RequestProblem("internal", text, brief=text).document(request="r", attempts=1)
    json.dumps(redaction.fields({"said": text, "more": [text]}, with_content=True), ensure_ascii=False).encode()


@pytest.mark.slow
@given(st.sampled_from([400, 401, 404, 500, 529]), TEXT, TEXT, TEXT)
@example(400, LONE, LONE, LONE)
def test_a_request_ends_whatever_the_text_of_its_error(status: int, type: str, code: str, message: str) -> None:
    event = {"error": {"type": type, "message": message, "details": {"error_code": code}}}
    for error in (
        classify(Failure(status=status, type="", code=code, message=message, retry_after_s=None)),
        from_event(MESSAGES.error(event), MESSAGES, secret="k"),
    ):
        json.loads(settled(None, error))
        error.brief.encode()
        assert error.spent(Amounts(1)) is not None


@pytest.mark.slow
@given(TEXT, TEXT, TEXT)
@example(LONE, LONE, LONE)
@example("\ud83d", "\ude00", "m")
def test_an_answer_is_sent_whatever_its_text(one: str, two: str, name: str) -> None:
    start: dict[str, Any] = {
        "type": "message",
        "role": "assistant",
        "model": name,
        "content": [],
        "usage": {},
        f"new {name}": one,
    }
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": start},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": one}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": two}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
        {"type": "message_stop"},
    ]
    collected = StreamedMessage()
    for event in events:
        data = json.dumps(event).encode()
        collected.add(parse_event(data), data)
    whole = {**start, "content": [{"type": "text", "text": one + two}], "stop_reason": "end_turn"}
    for body in (to_json(collected.message()), json.dumps(whole).encode()):
        reply = settled(read_answer(parse_message(body, ""), body, provider="p", request_id=None))
        assert json.loads(reply) == json.loads(json.dumps(whole))


@pytest.mark.parametrize("at", ["1900-01-01T00:00:00Z", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_no_span_begins_before_1970_whatever_time_a_requester_states(at: str) -> None:
    job = read(Bench().job(headers={"x-lane-dead-at": at}))
    assert [span for span in waits(job, NOW_MS * 1_000_000) if span.start_ns < 0] == []
