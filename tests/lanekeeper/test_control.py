"""Messages on the control exchange, and how their answers are read."""

import json
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import RequestProblem
from lanekeeper.control import cancellation, outcome_of, question, result_of
from lanekeeper.errors import ControlRefused, NotEnded
from lanekeeper.replies import Problem


def answered(document: object, **headers: str) -> Message:
    named = {f"x-lane-{name}": value for name, value in headers.items()}
    return Message(body=json.dumps(document).encode(), headers=named, content_type="application/json")


def test_a_cancellation_is_persistent_and_a_question_is_not() -> None:
    asked, kept = question("id-1", tenant=None, user="crm"), cancellation("id-1", tenant=None, user="crm")

    assert (json.loads(kept.body), kept.type, kept.persistent, kept.expiration) == (
        {"cancel": "id-1"},
        "cancel",
        True,
        None,
    )
    assert (json.loads(asked.body), asked.type, asked.persistent) == ({"result": "id-1"}, "result", False)
    assert asked.expiration == "5000"
    assert asked.message_id != kept.message_id


@pytest.mark.parametrize("make", [cancellation, question])
def test_a_tenant_is_sent_together_with_the_user_that_the_broker_checks(make: Callable[..., Message]) -> None:
    told, untold = make("id-1", tenant="acme", user="crm"), make("id-1", tenant=None, user="crm")

    assert (json.loads(told.body)["tenant"], told.user_id) == ("acme", "crm")
    assert ("tenant" in json.loads(untold.body), untold.user_id) == (False, None)


@pytest.mark.parametrize("outcome", ["recorded", "told", "ended", "unseen"])
def test_the_answer_to_a_cancellation_says_what_became_of_the_request(outcome: str) -> None:
    assert outcome_of(answered({"id": "id-1", "outcome": outcome}, control="accepted")) == outcome


def test_a_stored_result_is_read_like_the_final_reply() -> None:
    reply = answered({"content": [{"type": "text", "text": "a"}]}, status="ok")
    reply.headers = {**reply.headers, "x-lane-replayed": True}

    assert (result_of(reply).text, result_of(reply).replayed) == ("a", True)


def test_a_stored_problem_is_raised_as_that_problem() -> None:
    body = RequestProblem("cancelled", "by its owner").document(request="id-1", attempts=1)

    with pytest.raises(Problem, match="cancelled: by its owner"):
        result_of(Message(body=body, headers={"x-lane-status": "error"}, content_type="application/problem+json"))


@pytest.mark.parametrize("status", ["running", "waiting", "unknown"])
def test_a_pending_result_says_why_and_what_to_do(status: str) -> None:
    with pytest.raises(NotEnded, match="lanekeeper result --wait 20s id-1") as caught:
        result_of(answered({"id": "id-1", "status": status, "attempts": 2}, control="pending"))

    assert (caught.value.id, caught.value.status, caught.value.attempts) == ("id-1", status, 2)


@pytest.mark.parametrize(
    ("attempts", "hint"),
    [(0, "not begun yet, due at 2026-11-21T18:00:00"), (2, "attempt 2 was made, it waits for the next, due at 2026")],
)
def test_a_pending_result_of_a_delayed_request_has_its_due_time(attempts: int, hint: str) -> None:
    document = {"id": "id-1", "status": "waiting", "attempts": attempts, "due_at": "2026-11-21T18:00:00.500Z"}

    with pytest.raises(NotEnded, match=hint) as caught:
        result_of(answered(document, control="pending"))

    assert caught.value.due_at == datetime(2026, 11, 21, 18, 0, 0, 500_000, tzinfo=UTC)


@pytest.mark.parametrize("read", [outcome_of, result_of])
def test_a_refused_control_message_raises_its_own_error(read: Callable[[Message], object]) -> None:
    document = json.loads(RequestProblem("invalid_request", "tenant: another's").document(request="", attempts=0))

    with pytest.raises(ControlRefused, match="tenant: another's") as caught:
        read(answered(document, control="error"))

    assert caught.value.fields["code"] == "invalid_request"
