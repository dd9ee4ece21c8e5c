"""Messages on the control exchange, and how their answers are read."""

import json
from collections.abc import Callable

import pytest

from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import RequestProblem
from lanekeeper.over_amqp import cancellation, outcome_of, question, result_of
from lanekeeper.replies import ControlRefused, Problem, final_of


def answered(document: object, **headers: str) -> Message:
    named = {f"x-lane-{name}": value for name, value in headers.items()}
    return Message(body=json.dumps(document).encode(), headers=named, content_type="application/json")


@pytest.mark.parametrize("make", [cancellation, question])
def test_a_tenant_is_sent_together_with_the_user_that_the_broker_checks(make: Callable[..., Message]) -> None:
    told, untold = make("id-1", tenant="acme", user="crm"), make("id-1", tenant=None, user="crm")

    assert (json.loads(told.body)["tenant"], told.user_id) == ("acme", "crm")
    assert ("tenant" in json.loads(untold.body), untold.user_id) == (False, None)


@pytest.mark.parametrize("read", [outcome_of, result_of])
def test_a_refused_control_message_raises_its_own_error(read: Callable[[Message], object]) -> None:
    document = json.loads(RequestProblem("invalid_request", "tenant: another's").document(request="", attempts=0))

    with pytest.raises(ControlRefused, match="tenant: another's") as caught:
        read(answered(document, control="error"))

    assert caught.value.fields["code"] == "invalid_request"


def test_a_problem_with_an_unknown_code_is_raised_with_that_code() -> None:
    body = b'{"code": "out_of_budget", "detail": "none left", "status": 402}'

    with pytest.raises(Problem, match="out_of_budget: none left") as caught:
        final_of(Message(body=body, headers={"x-lane-status": "error"}))

    assert (caught.value.code, caught.value.status) == ("internal", 402)


def test_a_problem_has_what_its_document_says_and_nothing_made_up() -> None:
    said = Problem({"code": "internal", "detail": "x", "request": "id-1", "attempts": 3, "trace": "4bf9"})
    bare = Problem({"attempts": None, "trace": 5})
    assert (str(said), said.request, said.attempts, said.trace) == ("internal: x", "id-1", 3, "4bf9")
    assert (str(bare), bare.request, bare.attempts, bare.trace) == ("internal: None: no detail", "", 0, None)
