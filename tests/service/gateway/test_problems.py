"""What a caller of Anthropic's API is told when its request has failed: the provider's own error, in words of HTTP."""

import json
import random

import pytest
from aiohttp.test_utils import make_mocked_request

from consumers.failures import (
    OverloadedError,
    ProviderError,
    RateLimitedError,
    RejectedError,
    RetryPolicy,
    TransientError,
    decide,
)
from consumers.outcomes import DeadLettered, Refused
from consumers.state.base import StoreUnavailable
from lanekeeper.contract.problems import (
    PROBLEMS,
    AccessRefused,
    BrokerBlocked,
    BrokerUnreachable,
    ConfirmUnknown,
    LanekeeperError,
    MessageTooLarge,
    ProviderFailure,
    PublishRefused,
    ReplyLost,
    RequestProblem,
    TopologyMismatch,
    Unroutable,
)
from lanekeeper.replies import Problem
from service.gateway.problems import ABOUT_REQUEST, ApiError, api_error_of, detail_of, refusal

AMQP = ("message_id", "queue", "exchange", "reply_to", "routing", "publish", "amqp", "lane.")


def received(problem: RequestProblem) -> Problem:
    """A problem as the gateway gets it from a worker."""
    return Problem(json.loads(problem.document(request="r", attempts=1)))


def ended(error: ProviderError, *, attempts: int = 4, left_ms: int = 60_000, chose_id: bool = False) -> ApiError:
    """The answer to a call whose attempt failed with `error`, and is not retried."""
    outcome = decide(
        error, attempts=attempts, max_attempts=4, left_ms=left_ms, policy=RetryPolicy(), rng=random.Random(1)
    )
    assert isinstance(outcome, Refused | DeadLettered)
    return api_error_of(received(outcome.problem), chose_id=chose_id)


LIMITED = RateLimitedError("429 rate_limit_error: slow down", status=429, type="rate_limit_error", retry_after_s=7)
OVERLOADED = OverloadedError("529 overloaded_error: Overloaded", status=529, type="overloaded_error")


@pytest.mark.parametrize(
    ("error", "attempts", "left_ms", "expected", "again_after"),
    [
        (LIMITED, 4, 60_000, (429, "rate_limit_error", "slow down"), ["7"]),
        (LIMITED, 1, 10, (429, "rate_limit_error", "slow down"), ["8"]),
        (OVERLOADED, 4, 60_000, (529, "overloaded_error", "Overloaded"), ["2"]),
        (OVERLOADED, 1, 10, (529, "overloaded_error", "Overloaded"), ["1", "2"]),
    ],
)
def test_a_rate_limit_or_overload_to_the_end_is_answered_as_itself(
    error: ProviderError, attempts: int, left_ms: int, expected: tuple[int, str, str], again_after: list[str]
) -> None:
    found = ended(error, attempts=attempts, left_ms=left_ms)

    assert (found.status, found.type) == expected[:2]
    assert expected[2] in found.message
    assert found.headers["retry-after"] in again_after
    assert "x-should-retry" not in found.headers


@pytest.mark.parametrize(("code", "status"), [("deadline_exceeded", 504), ("provider_unavailable", 503)])
@pytest.mark.parametrize("failed", [529, 500, None])
def test_after_the_deadline_only_an_overload_of_the_last_call_is_passed_on(
    code: str, status: int, failed: int | None
) -> None:
    failure = None if failed is None else ProviderFailure(status=failed, type="overloaded_error")
    problem = RequestProblem(code, "not answered within 9 ms: 9 ms in the queue", provider=failure)

    found = api_error_of(received(problem))

    assert found.status == (529 if failed == 529 else status)
    assert ("x-should-retry" in found.headers) == (failed != 529)


BODY = (
    b'{"type":"error","error":{"type":"invalid_request_error","message":"line one\\nline two",'
    b'"details":{"error_code":"x_y","error_visibility":"user_facing"}},\n "request_id":"req_odd"}'
)


def test_the_providers_error_is_answered_byte_for_byte() -> None:
    error = RejectedError("400 invalid_request_error: cut", status=400, type="invalid_request_error", request_id="r_1")
    error.body = BODY.decode()

    found = ended(error)

    assert (found.status, found.body("its own")) == (400, BODY)
    assert found.headers["x-lane-provider-request-id"] == "r_1"


@pytest.mark.parametrize("body", ["", "<html>", "[1]", '{"message":"of Amazon"}', BODY.decode()[:-1]])
def test_any_other_body_is_put_into_anthropics_format(body: str) -> None:
    error = RejectedError("400 : no", status=400)
    error.body = body

    found = json.loads(ended(error).body("r"))

    assert (found["type"], found["error"]["type"], found["request_id"]) == ("error", "invalid_request_error", "r")


def test_an_error_that_is_kept_under_the_callers_key_is_not_tried_again() -> None:
    assert ended(OVERLOADED, chose_id=True).headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    "error",
    [
        TransientError("500 api_error: oops", status=500, type="api_error"),
        TransientError("the connection to the provider was lost", type="connection"),
    ],
)
def test_after_other_failures_of_all_attempts_another_call_brings_nothing(error: ProviderError) -> None:
    found = ended(error)

    assert (found.status, found.headers["x-should-retry"]) == (error.status or 502, "false")


@pytest.mark.parametrize(
    ("status", "type"),
    [(400, "invalid_request_error"), (404, "not_found_error"), (403, "permission_error"), (413, "request_too_large")],
)
def test_what_the_provider_refuses_has_its_status_type_and_message(status: int, type: str) -> None:
    found = ended(RejectedError(f"{status} {type}: not that: please", status=status, type=type))

    assert (found.status, found.type, found.message) == (status, type, "not that: please")


DETAILS = [
    RequestProblem("deadline_exceeded", "not answered within 9 ms: 8 ms in the queue, 1 ms in attempt 1"),
    RequestProblem("provider_unavailable", "api: its last calls failed (not answered within 9 ms: 9 ms in the queue)"),
    RequestProblem("idempotency_conflict", "message_id: it was used with another body; give every request its own"),
    RequestProblem("poison", "delivered from lane.critical again and again, and never settled"),
    RequestProblem("internal", "fell out of exchange 'lane.due', queue None, reason None"),
    RequestProblem("invalid_request", "header x-lane-body: there is none at this address"),
    *(RequestProblem(code, "why") for code in PROBLEMS),
]


@pytest.mark.parametrize("problem", DETAILS, ids=lambda problem: problem.code)
@pytest.mark.parametrize("chose_id", [False, True])
def test_errors_of_requests_speak_of_http(problem: RequestProblem, chose_id: bool) -> None:
    for text in (api_error_of(received(problem), chose_id=chose_id).message, detail_of(received(problem))):
        assert not [word for word in AMQP if word in text.lower()]
        assert "x-lane-body" not in text
    assert ("Idempotency-Key" in detail_of(received(problem))) == bool(
        problem.type.advice or "idempotency" in problem.code
    )


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (PublishRefused("the lane is full: lane.batch holds 3 requests"), 529),
        (MessageTooLarge(20, 10), 413),
        (AccessRefused("ACCESS_REFUSED - write access to exchange 'lane.requests' in vhost '/' refused"), 403),
        (BrokerBlocked("the broker at amqp://host takes nothing"), 503),
        (BrokerUnreachable("no connection to amqp://host:5672/"), 503),
        (ConfirmUnknown("no confirm for 'normal.app.messages' within 30 s"), 503),
        (TopologyMismatch("NOT_FOUND - no exchange 'lane.requests' in vhost '/'"), 503),
        (ReplyLost("the reply queue is gone"), 503),
        (Unroutable("no queue takes 'x' from exchange 'y'"), 503),
        (StoreUnavailable("Redis at redis:6379 refuses writes: OOM, script: 99b2adf4, on @user_script:28"), 503),
        (StoreUnavailable("/var/lib/lane.sqlite: the disk is full"), 503),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_of_the_broker_speak_of_the_service(error: LanekeeperError, status: int) -> None:
    found = api_error_of(error)

    assert found.status == status
    assert not [word for word in (*AMQP, "redis", "script", "sqlite") if word in found.message.lower()]
    assert ("retry-after" in found.headers) == (status in (503, 529))


def test_a_problem_names_the_trace_that_its_caller_began() -> None:
    for given, trace in ((f"00-{'a' * 32}-{'b' * 16}-01", "a" * 32), ("00-odd", None)):
        call = make_mocked_request("GET", "/v1/requests/x", headers={"traceparent": given})
        assert json.loads(refusal(call, ApiError(404, "unknown")).body).get("trace") == trace  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses/resp_%00", "/v1/requests/%00"])
def test_what_cannot_be_an_id_is_not_sent_back_in_a_header(path: str) -> None:
    call = make_mocked_request("GET", path)
    call[ABOUT_REQUEST] = "\0\r\nset-cookie: a=b"

    answered = refusal(call, ApiError(404, "unknown"))
    assert not any("\0" in value or "cookie" in value for value in answered.headers.values())
