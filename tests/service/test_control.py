"""What is said over the control exchange, and how its answers are read."""

import json

import pytest

from service.control import ControlRefused, NotEnded, cancellation, outcome_of, question, result_of
from service.replies import Problem
from topology.contract.messages import Message
from topology.contract.problems import RequestProblem


def answered(document: object, status: str | None = None, content_type: str = "application/json") -> Message:
    headers = {} if status is None else {"x-lane-status": status}
    return Message(body=json.dumps(document).encode(), headers=headers, content_type=content_type)


def test_a_cancellation_is_kept_and_a_question_is_not() -> None:
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
def test_a_tenant_is_said_with_the_user_that_the_broker_checks(make) -> None:
    told, untold = make("id-1", tenant="acme", user="crm"), make("id-1", tenant=None, user="crm")

    assert (json.loads(told.body)["tenant"], told.user_id) == ("acme", "crm")
    assert ("tenant" in json.loads(untold.body), untold.user_id) == (False, None)


@pytest.mark.parametrize("outcome", ["recorded", "told", "ended"])
def test_a_cancellation_tells_what_it_came_to(outcome: str) -> None:
    assert outcome_of(answered({"id": "id-1", "outcome": outcome})) == outcome


def test_a_result_is_the_final_reply_again() -> None:
    reply = answered({"content": [{"type": "text", "text": "a"}]}, "ok")
    reply.headers = {**reply.headers, "x-lane-replayed": True}

    assert (result_of(reply).text, result_of(reply).replayed) == ("a", True)


def test_a_result_that_is_an_error_is_raised_as_its_problem() -> None:
    body = RequestProblem("cancelled", "by its owner").document(request="id-1", attempts=1)

    with pytest.raises(Problem, match="cancelled: by its owner"):
        result_of(Message(body=body, headers={"x-lane-status": "error"}, content_type="application/problem+json"))


@pytest.mark.parametrize("status", ["running", "waiting", "unknown"])
def test_what_has_not_ended_says_why_and_what_to_do(status: str) -> None:
    with pytest.raises(NotEnded, match="lanekeeper result --wait 20s id-1") as caught:
        result_of(answered({"id": "id-1", "status": status, "attempts": 2}, "pending"))

    assert (caught.value.id, caught.value.status, caught.value.attempts) == ("id-1", status, 2)


@pytest.mark.parametrize("read", [outcome_of, result_of])
def test_a_refusal_is_an_error_of_its_own(read) -> None:
    with pytest.raises(ControlRefused, match="tenant: another's"):
        read(answered({"id": "id-1", "error": "tenant: another's"}, "error"))
