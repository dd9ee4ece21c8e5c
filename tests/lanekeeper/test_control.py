"""Messages on the control exchange, and how their answers are read."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import RequestProblem
from lanekeeper.over_amqp import cancellation, outcome_of, question, result_of
from lanekeeper.replies import ControlRefused, NotEnded, Part, Problem, final_of, part_of


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


def test_a_final_reply_has_what_its_headers_say_and_nothing_made_up() -> None:
    told = {
        "x-lane-status": "ok", "x-lane-attempt": 2, "x-lane-wait-ms": 3, "x-lane-run-ms": 4, "x-lane-replayed": True
    }  # fmt: skip

    full, bare = (final_of(Message(body=b"{}", headers=headers)) for headers in (told, {"x-lane-status": "ok"}))

    assert (full.body, full.attempt, full.wait_ms, full.run_ms) == (b"{}", 2, 3, 4)
    assert (bare.lane, bare.model, bare.provider, bare.attempt, bare.wait_ms, bare.run_ms) == ("", "", "", 0, 0, 0)
    assert (full.replayed, bare.replayed, bare.webhook) == (True, False, None)


@pytest.mark.parametrize(
    ("headers", "part"),
    [
        ({"x-lane-part": "event", "x-lane-seq": 3}, Part(kind="event", seq=3, body=b'{"delta": {}}')),
        ({"x-lane-part": "restart", "x-lane-seq": 0}, Part(kind="restart", seq=0, body=b"{}")),
        ({}, Part(kind="event", seq=0, body=b'{"delta": {}}')),
    ],
)
def test_a_part_has_its_number_and_that_of_a_restart_no_event(headers: dict[str, Any], part: Part) -> None:
    assert part_of(Message(body=b'{"delta": {}}', headers=headers)) == part


@pytest.mark.parametrize(
    ("event", "text"), [(b'{"delta": {"text": "a"}}', "a"), (b'{"delta": {}}', ""), (b'{"delta": 5}', ""), (b"{}", "")]
)
def test_a_part_that_has_no_text_has_an_empty_one(event: bytes, text: str) -> None:
    assert Part(kind="event", seq=0, body=event).text == text


def test_a_problem_has_what_its_document_says_and_nothing_made_up() -> None:
    said = Problem({"code": "internal", "detail": "x", "request": "id-1", "attempts": 3, "trace": "4bf9"})
    bare = Problem({"attempts": None, "trace": 5})
    assert (str(said), said.request, said.attempts, said.trace) == ("internal: x", "id-1", 3, "4bf9")
    assert (str(bare), bare.request, bare.attempts, bare.trace) == ("internal: None: no detail", "", 0, None)


@pytest.mark.parametrize(
    ("status", "more", "says"),
    [
        ("running", {}, "running, a worker is at it"),
        ("running", {"step": "summaries, 37 of 100"}, "step: summaries, 37 of 100"),
        ("waiting", {}, "waiting, not begun yet; "),
        ("waiting", {"attempts": 2}, "attempt 2 was made, it waits for the next; "),
        ("waiting", {"due_at": "2026-05-01T00:00:00+00:00"}, "not begun yet, due at 2026-05-01T00:00:00"),
        ("unknown", {}, "no worker has seen it"),
        ("new", {}, "new, ask again later"),
    ],
)
def test_a_result_that_is_not_there_says_where_the_request_is(status: str, more: Any, says: str) -> None:
    assert says in str(NotEnded("id-1", status, **more))
