"""The table of problems equals the contract's."""

import json

import pytest

from lanekeeper.contract.problems import PROBLEMS, RequestProblem

CONTRACT = {  # code: (status, also in lane.dead)
    "invalid_request": (400, True),
    "unsupported_media": (415, True),
    "too_large": (413, True),
    "forbidden_reply_to": (403, True),
    "forbidden_webhook": (403, True),
    "webhook_undelivered": (502, True),
    "forbidden_model": (403, True),
    "unroutable": (404, True),
    "superseded": (409, False),
    "idempotency_conflict": (409, False),
    "cancelled": (499, False),
    "too_many_waiting": (429, False),
    "deadline_exceeded": (504, False),
    "provider_rejected": (400, True),
    "provider_unavailable": (503, False),
    "answer_too_large": (502, True),
    "attempts_exhausted": (502, True),
    "poison": (500, True),
    "internal": (500, True),
    "forbidden_control": (403, False),
    "too_many_control_messages": (429, False),
}


def test_the_table_of_problems_is_the_contracts() -> None:
    assert {code: (row.status, row.parked) for code, row in PROBLEMS.items()} == CONTRACT


def test_a_problem_is_retryable_unless_the_request_itself_is_at_fault() -> None:
    assert {code for code, row in PROBLEMS.items() if row.retryable} == {
        "too_many_waiting",
        "deadline_exceeded",
        "provider_unavailable",
        "attempts_exhausted",
        "internal",
        "too_many_control_messages",
    }


def test_an_error_is_the_outcome_of_the_request_unless_it_concerns_one_message() -> None:
    assert {code for code, row in PROBLEMS.items() if row.kept} == {
        "superseded",
        "cancelled",
        "deadline_exceeded",
        "provider_rejected",
        "provider_unavailable",
        "answer_too_large",
        "attempts_exhausted",
        "poison",
        "internal",
    }
    assert {code for code, row in PROBLEMS.items() if not row.answered} == {"forbidden_reply_to", "webhook_undelivered"}


def test_a_document_is_as_the_contract_shows_it() -> None:
    detail = "not answered within 30000 ms: 29120 ms in the queue, 880 ms in attempt 1"
    document = RequestProblem("deadline_exceeded", detail).document(request="5b0c", attempts=1, trace="4bf9")
    again = "; to try again, publish it with a new message_id: under this one this error is kept"
    assert json.loads(document) == {
        "type": "urn:lanekeeper:problem:deadline-exceeded",
        "title": "Deadline exceeded",
        "status": 504,
        "detail": detail + again,
        "code": "deadline_exceeded",
        "request": "5b0c",
        "attempts": 1,
        "retryable": True,
        "trace": "4bf9",
    }


@pytest.mark.parametrize("code", PROBLEMS)
def test_a_retryable_problem_says_how_to_retry(code: str) -> None:
    """A new id is needed, except for errors about a control message: the same id would get the same stored error."""
    kind = PROBLEMS[code]
    document = json.loads(RequestProblem(code, "…").document(request="r", attempts=0))
    assert ("a new message_id" in document["detail"]) == (kind.retryable and kind.kept)
    assert ("its dead letter as it is" in document["detail"]) == (kind.retryable and kind.parked)


def test_provider_rejected_has_the_providers_status() -> None:
    problem = RequestProblem("provider_rejected", "402 billing_error: …", status=402)
    assert json.loads(problem.document(request="r", attempts=1))["status"] == 402
