"""What logs and events say of a failed attempt: a provider's words only if they have the expected form."""

import pytest

from consumers.failures import (
    BROKEN_OFF,
    FORBIDDEN,
    KEY_REFUSED,
    REJECTED,
    SERVER_ERROR,
    TIMED_OUT,
    TOO_LARGE,
    UNSENT,
    AnswerTooLargeError,
    Meaning,
    OverloadedError,
    Paid,
    ProviderError,
    RejectedError,
    TransientError,
)


@pytest.mark.parametrize(
    ("error", "brief"),
    [
        (
            OverloadedError("a prompt", status=529, type="overloaded_error", request_id="req_01/a@b:c.d-e"),
            "overloaded_error 529 (req_01/a@b:c.d-e)",
        ),
        (TransientError("a prompt", status=500, type="a prompt", request_id="a prompt"), "TransientError 500 (?)"),
        (TransientError("a prompt", type="cut", request_id="a" * 101), "cut (?)"),
        (TransientError("a prompt", type="a\n", request_id="a\n"), "TransientError (?)"),
        (TransientError("a prompt", type="cut"), "cut"),
    ],
)
def test_the_brief_of_a_failure_has_names_and_ids_and_no_text(error: ProviderError, brief: str) -> None:
    assert error.brief == brief


@pytest.mark.parametrize(
    ("error", "means"),
    [
        (TransientError("x", type="unreachable"), UNSENT),
        (TransientError("x", type="credentials"), UNSENT),
        (TransientError("x", type="timeout"), TIMED_OUT),
        (TransientError("x", type="timeout", status=500), SERVER_ERROR),
        (TransientError("x", type="api_error", status=400), SERVER_ERROR),
        (TransientError("x", type="cut"), BROKEN_OFF),
        (RejectedError("x", status=400), REJECTED),
        (RejectedError("x", status=401), KEY_REFUSED),
        (RejectedError("x", status=403), FORBIDDEN),
        (AnswerTooLargeError("x"), TOO_LARGE),
    ],
)
def test_retry_failover_and_breaker_follow_from_the_failures_class_type_and_status(
    error: ProviderError, means: Meaning
) -> None:
    assert error.means is means


def test_a_failure_in_the_middle_of_an_answer_may_have_been_paid() -> None:
    error = OverloadedError("x")
    assert (error.paid, error.is_outage) == (Paid.REQUEST, True)
    error.had_begun = True
    assert (error.paid, error.is_outage) == (Paid.UNKNOWN, False)
