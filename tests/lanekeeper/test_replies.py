"""Replies as our client reads them."""

import json

import pytest

from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import RequestProblem
from lanekeeper.replies import Problem, final_of, part_of

ANSWER = {"content": [{"type": "text", "text": "a"}, {"type": "tool_use"}, {"type": "text", "text": "b"}]}


def test_a_final_reply_is_read_with_all_its_fields() -> None:
    headers = {
        "x-lane-status": "ok",
        "x-lane-request-id": "id-1",
        "x-lane-name": "batch",
        "x-lane-attempt": 2,
        "x-lane-wait-ms": 30,
    }

    final = final_of(Message(body=json.dumps(ANSWER).encode(), headers=headers))

    assert (final.text, final.request_id, final.lane, final.attempt, final.wait_ms) == ("ab", "id-1", "batch", 2, 30)
    assert not final.replayed


def test_a_problem_document_is_raised_with_its_fields() -> None:
    body = RequestProblem("poison", "too often").document(request="id-1", attempts=2)

    with pytest.raises(Problem) as caught:
        final_of(Message(body=body, headers={"x-lane-status": "error"}))

    problem = caught.value
    assert (problem.code, problem.status, problem.detail) == ("poison", 500, "too often")
    assert (problem.request, problem.attempts, problem.fields["retryable"]) == ("id-1", 2, False)


def test_a_problem_with_an_unknown_code_is_raised_with_that_code() -> None:
    body = b'{"code": "out_of_budget", "detail": "none left", "status": 402}'

    with pytest.raises(Problem, match="out_of_budget: none left") as caught:
        final_of(Message(body=body, headers={"x-lane-status": "error"}))

    assert (caught.value.code, caught.value.status) == ("internal", 402)


def test_parts_of_a_stream_are_text_events_or_restarts() -> None:
    delta = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "hi"}}
    event = part_of(Message(body=json.dumps(delta).encode(), headers={"x-lane-part": "event", "x-lane-seq": 3}))
    restart = part_of(Message(body=b"{}", headers={"x-lane-part": "restart", "x-lane-seq": 0}))

    assert (event.kind, event.seq, event.text) == ("event", 3, "hi")
    assert (restart.kind, restart.text) == ("restart", "")
