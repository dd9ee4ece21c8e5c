import email.utils

import pytest

from consumers.failures import (
    AccountError,
    OverloadedError,
    ProviderError,
    RateLimitedError,
    RejectedError,
    TransientError,
)
from consumers.providers.errors import classify, from_event, read_retry_after_s

NOW_S = 1_790_000_000.0


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({}, None),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": "12"}, 12.0),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after-ms": "250"}, 0.25),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9.0),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "1e9"}, None),
        ({"retry-after": "86401"}, None),
        ({"retry-after": ""}, None),
        ({"retry-after": "tomorrow"}, None),
        ({"retry-after": email.utils.formatdate(NOW_S + 30, usegmt=True)}, 30.0),
        ({"retry-after": email.utils.formatdate(NOW_S - 5, usegmt=True)}, 0.0),
        ({"retry-after": email.utils.formatdate(NOW_S + 10**7, usegmt=True)}, None),
        ({"retry-after": email.utils.formatdate(NOW_S - 10**7, usegmt=True)}, None),
        ({"retry-after": "Mon, 99 Foo 2026 99:99:99 GMT"}, None),
    ],
)
def test_retry_after_is_read_in_every_form_and_ignored_when_absurd(
    headers: dict[str, str], wait_s: float | None
) -> None:
    assert read_retry_after_s(headers, now_s=NOW_S) == wait_s


@pytest.mark.parametrize(
    ("status", "type", "code", "expected"),
    [
        (400, "invalid_request_error", "", RejectedError),
        (401, "authentication_error", "", AccountError),
        (402, "billing_error", "", AccountError),
        (402, "billing_error", "linked_organization_spend_limit_reached", AccountError),
        (403, "permission_error", "", AccountError),
        (404, "not_found_error", "", AccountError),
        (408, "", "", TransientError),
        (409, "conflict_error", "", TransientError),
        (413, "request_too_large", "", RejectedError),
        (418, "", "", RejectedError),
        (422, "", "", RejectedError),
        (429, "rate_limit_error", "", RateLimitedError),
        (429, "rate_limit_error", "ramp_limit_exceeded", RateLimitedError),
        (429, "rate_limit_error", "enforced_spend_limit_reached", AccountError),
        (429, "rate_limit_error", "contract_spend_limit_reached", AccountError),
        (429, "", "", RateLimitedError),
        (429, "something_new_error", "", RateLimitedError),
        (500, "api_error", "", TransientError),
        (502, "", "", TransientError),
        (503, "", "", TransientError),
        (504, "timeout_error", "", TransientError),
        (520, "", "", TransientError),
        (529, "overloaded_error", "", OverloadedError),
        (529, "", "", OverloadedError),
        (529, "something_new_error", "", OverloadedError),
        (500, "overloaded_error", "", OverloadedError),
        (500, "rate_limit_error", "", RateLimitedError),
        (307, "", "", RejectedError),
    ],
)
def test_an_error_is_classified_by_code_then_type_then_status(
    status: int, type: str, code: str, expected: type[ProviderError]
) -> None:
    error = classify(status=status, type=type, code=code, message="no", retry_after_s=None, request_id="req_1")

    assert error.__class__ is expected
    assert (error.status, error.request_id) == (status, "req_1")
    assert error.type == (type or f"http_{status}")


@pytest.mark.parametrize(
    ("status", "message", "is_html", "otherwise"),
    [
        (401, "model x", False, None),
        (402, "model x", False, None),
        (403, "no", False, RejectedError),
        (404, "Not Found", False, RejectedError),
        (405, "no", False, RejectedError),
        (400, "a firewall's page", True, RejectedError),
        (413, "a proxy's page", True, RejectedError),
        (502, "a proxy's page", True, TransientError),
        (400, "Your credit balance is too low to access the API", False, RejectedError),
    ],
)
def test_an_error_of_the_account_knows_what_it_is_if_the_account_proves_to_be_well(
    status: int, message: str, is_html: bool, otherwise: type[ProviderError] | None
) -> None:
    error = classify(status=status, type="", code="", message=message, retry_after_s=None, is_html=is_html)

    assert isinstance(error, AccountError)
    assert (None if error.otherwise is None else type(error.otherwise)) == otherwise


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (403, "You don't have access to the model with the specified model ID."),
        (404, "model: claude-nope"),
        (400, "tools.0: 'Your credit balance is too low' is no name"),
    ],
)
def test_an_error_about_the_requests_model_or_content_is_the_requests(status: int, message: str) -> None:
    error = classify(status=status, type="", code="", message=message, retry_after_s=None)

    assert type(error) is RejectedError


def test_retry_after_is_kept_by_failures_that_have_such_a_field() -> None:
    def of(status: int, type: str) -> ProviderError:
        return classify(status=status, type=type, code="", message="", retry_after_s=3.0, request_id=None)

    limited, overloaded, unavailable = of(429, "rate_limit_error"), of(529, "overloaded_error"), of(503, "api_error")

    assert isinstance(limited, RateLimitedError)
    assert isinstance(overloaded, OverloadedError)
    assert isinstance(unavailable, OverloadedError)
    assert (limited.retry_after_s, overloaded.retry_after_s, unavailable.retry_after_s) == (3.0, 3.0, 3.0)
    assert unavailable.status == 503


@pytest.mark.parametrize(
    "message",
    [
        "You have reached your specified API usage limits. You will regain access on 2026-12-01.",
        "Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing to upgrade or "
        "purchase credits.",
    ],
)
def test_a_spend_limit_is_recognised_by_its_text(message: str) -> None:
    error = classify(
        status=400,
        type="invalid_request_error",
        code="",
        message=message,
        retry_after_s=None,
        request_id=None,
    )

    assert isinstance(error, AccountError)


@pytest.mark.parametrize(
    ("event", "expected", "status"),
    [
        ({"error": {"type": "overloaded_error", "message": "Overloaded"}}, OverloadedError, 529),
        ({"error": {"type": "rate_limit_error"}}, RateLimitedError, 429),
        ({"error": {"type": "api_error"}}, TransientError, 500),
        ({"error": {"type": "invalid_request_error", "message": "bad"}}, RejectedError, 400),
        (
            {"error": {"type": "rate_limit_error", "details": {"error_code": "enforced_spend_limit_reached"}}},
            AccountError,
            429,
        ),
        ({"error": {"type": "brand_new_error"}}, TransientError, 500),
        ({"error": None}, TransientError, 500),
        ({"error": {"details": 3, "message": None}}, TransientError, 500),
        ({}, TransientError, 500),
    ],
)
def test_an_error_event_is_classified_by_its_type(
    event: dict[str, object], expected: type[ProviderError], status: int
) -> None:
    error = from_event(event, secret="")

    assert error.__class__ is expected
    assert error.status == status
    assert "in the middle of the stream" in error.detail


def test_a_detail_is_one_short_line_without_the_key() -> None:
    message = "key sk-secret is bad\r\n\x1b[31m" + "x" * 1000
    error = from_event({"error": {"type": "api_error", "message": message}}, secret="sk-secret")

    assert len(error.detail) < 350
    assert "sk-secret" not in error.detail
    assert error.detail.isprintable()


def test_no_part_of_the_key_is_left_where_a_long_message_is_cut() -> None:
    secret = "sk-" + "s" * 30
    message = " " * (10_000 - 20) + secret
    detail = from_event({"error": {"type": "api_error", "message": message}}, secret=secret).detail

    assert "sk-" not in detail
