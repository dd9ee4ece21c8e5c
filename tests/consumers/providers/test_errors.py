import email.utils
import re
import typing
from collections.abc import Iterator

import anthropic
import httpx2
import pytest
from anthropic.resources.messages import AsyncMessages

from consumers.dialects.anthropic import (
    ACCOUNT_CODES,
    LIMIT_CODES,
    MESSAGES,
    REQUEST_CODES,
    TEMPORARY_CODES,
    classify,
    read_rate,
)
from consumers.dialects.base import Failure
from consumers.failures import (
    AccountError,
    OverloadedError,
    ProviderError,
    RateLimitedError,
    RejectedError,
    TransientError,
    read_retry_after_s,
)
from consumers.limits.base import BucketHeaders, RateHeaders
from consumers.providers.errors import from_event, from_response
from lanekeeper.contract.problems import PROVIDER_ERROR_BYTES

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
        (402, "billing_error", "linked_organization_spend_limit_reached", RejectedError),
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
    error = classify(Failure(status=status, type=type, code=code, message="no", retry_after_s=None, request_id="req_1"))

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
        (400, "You have reached your specified API usage limits. You will regain access on …", False, RejectedError),
    ],
)
def test_an_error_of_the_account_knows_what_it_is_if_the_account_proves_to_be_well(
    status: int, message: str, is_html: bool, otherwise: type[ProviderError] | None
) -> None:
    error = classify(Failure(status=status, type="", code="", message=message, retry_after_s=None, is_html=is_html))

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
    error = classify(Failure(status=status, type="", code="", message=message, retry_after_s=None))

    assert type(error) is RejectedError


def declared_codes() -> dict[str, int]:
    """The error codes that the installed SDK declares for `messages.create`, with their statuses."""
    found: dict[str, int] = {}
    kinds = {kind.__name__: kind for kind in _subclasses(anthropic.APIStatusError)}
    for overload in typing.get_overloads(AsyncMessages.create):
        for name in re.findall(r"^\s+(\w+Error):", (overload.__doc__ or "").partition("Raises:")[2], re.MULTILINE):
            (code,) = typing.get_args(kinds[name].__annotations__["error_code"])
            statuses = (str(each.__annotations__.get("status_code")) for each in kinds[name].__mro__[1:-3])
            found[code] = int(next(re.findall(r"\d+", each)[0] for each in statuses if "Literal" in each))
    return found


def _subclasses(kind: type[Exception]) -> Iterator[type[Exception]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


CODES = declared_codes()


def test_each_error_code_that_the_installed_sdk_declares_has_a_class() -> None:
    assert len(CODES) >= 36
    classes = [*ACCOUNT_CODES, *TEMPORARY_CODES, *REQUEST_CODES, *LIMIT_CODES]
    assert len(classes) == len(set(classes))
    assert not CODES.keys() - set(classes), "say in consumers/dialects/anthropic.py what each means"


@pytest.mark.parametrize("code", sorted(ACCOUNT_CODES.keys() & CODES.keys()))
def test_an_error_code_of_the_account_pauses_it_whatever_the_status(code: str) -> None:
    for status in (400, CODES[code]):
        error = classify(Failure(status=status, type="", code=code, message="", retry_after_s=None))
        assert isinstance(error, AccountError)
        assert error.reason == ACCOUNT_CODES[code]


@pytest.mark.parametrize("code", sorted(REQUEST_CODES))
def test_an_error_code_of_one_request_or_customer_is_that_requests_alone(code: str) -> None:
    for status in (402, 404, CODES.get(code, 400)):
        error = classify(Failure(status=status, type="", code=code, message="", retry_after_s=None))
        assert type(error) is RejectedError
        assert error.status == status


@pytest.mark.parametrize("status", [400, 409, 413, 429, 500, 503, 529])
def test_every_error_keeps_its_retry_after(status: int) -> None:
    error = classify(Failure(status=status, type="", code="", message="", retry_after_s=3.0))

    assert error.retry_after_s == 3.0
    assert error.failure is not None
    assert error.failure.retry_after_ms == 3000


def test_a_503_that_says_when_to_come_back_is_an_overload() -> None:
    error = classify(Failure(status=503, type="api_error", code="", message="", retry_after_s=3.0))

    assert (type(error), error.status) == (OverloadedError, 503)


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
    error = from_event(MESSAGES.error(event), MESSAGES, secret="")

    assert error.__class__ is expected
    assert error.status == status
    assert "in the middle of the stream" in error.detail


def test_a_detail_is_one_short_line_without_the_key() -> None:
    message = "key sk-secret is bad\r\n\x1b[31m" + "x" * 1000
    error = from_event(
        MESSAGES.error({"error": {"type": "api_error", "message": message}}), MESSAGES, secret="sk-secret"
    )

    assert len(error.detail) < 350
    assert "sk-secret" not in error.detail
    assert error.detail.isprintable()


def test_no_part_of_the_key_is_left_where_a_long_message_is_cut() -> None:
    secret = "sk-" + "s" * 30
    message = " " * (10_000 - 20) + secret
    detail = from_event(
        MESSAGES.error({"error": {"type": "api_error", "message": message}}), MESSAGES, secret=secret
    ).detail

    assert "sk-" not in detail


def test_no_part_of_the_key_is_left_where_a_long_body_is_cut() -> None:
    secret = "sk-" + "s" * 30
    for left in range(1, len(secret) + 1):
        body = f"{' ' * (PROVIDER_ERROR_BYTES + 1 - left)}{secret} and more"
        error = from_response(httpx2.Response(500, content=body.encode()), MESSAGES, secret=secret)

        assert "s" not in error.body, left


def limits(kind: str = "requests", **said: str) -> RateHeaders | None:
    return read_rate({f"anthropic-ratelimit-{kind}-{name}": value for name, value in said.items()}, now_s=NOW_S)


@pytest.mark.parametrize(
    ("kind", "limit", "remaining", "expected"),
    [
        ("requests", "50", "50", (50, 50)),
        ("requests", "50", "51", (50, None)),
        ("requests", "1", "0", (1, 0)),
        ("input-tokens", "1000", "1500", (1000, 1000)),  # Anthropic rounds what remains, up to half a thousand
        ("input-tokens", "1000", "1501", (1000, None)),
        ("output-tokens", "4000", "4500", (4000, 4000)),
        ("output-tokens", "999999999999", "0", (999_999_999_999, 0)),
        ("output-tokens", "1000000000000", "7", (None, 7)),
        ("output-tokens", "4e3", " 5 ", (4000, 5)),
        ("output-tokens", "4" + " " * 19, "5", (None, None)),  # less than any account has
        ("output-tokens", "4000" + " " * 16, "5", (4000, 5)),
        ("output-tokens", "4000" + " " * 17, "5", (None, 5)),
        ("output-tokens", "nan", "-1", None),
        ("output-tokens", "inf", "٣", None),
        ("output-tokens", "", "many", None),
        ("requests", "0.9", "5", None),
        ("input-tokens", "999", "5", None),
    ],
)
def test_a_limit_is_read_and_impossible_figures_are_ignored(
    kind: str, limit: str, remaining: str, expected: tuple[float | None, float | None] | None
) -> None:
    rate = limits(kind, limit=limit, remaining=remaining)
    found = None if rate is None else getattr(rate, kind.replace("-", "_"))

    wanted = None if expected in (None, (None, None)) else BucketHeaders(limit=expected[0], remaining=expected[1])
    assert found == wanted
