"""Errors as Anthropic's API answers them: a status, and `{"type": "error", "error": {…}, "request_id"}`.

The vendor's clients try again after 408, 409, 429 and 5xx. That helps where the request was not accepted. Where a
worker has ended the request, trying again is over, and `x-should-retry: false` tells the client.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from aiohttp import web

from lanekeeper.contract.names import CODE
from lanekeeper.contract.problems import (
    AccessRefused,
    LanekeeperError,
    MessageTooLarge,
    PublishRefused,
    RequestProblem,
)
from lanekeeper.errors import NoReply

TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "request_too_large",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
AGAIN_AFTER_S = 2
"""`retry-after` of a refusal: a lane that is full or a broker that restarts seldom takes requests sooner."""
_TRIED_ALREADY = frozenset({"attempts_exhausted", "deadline_exceeded"})
_BY_PROVIDER = re.compile(r"\d{3} (?P<type>[a-z_]{1,60}): (?P<message>.*)", re.DOTALL)


@dataclass(slots=True)
class ApiError(Exception):
    """A call that is answered with an error."""

    status: int
    message: str
    type: str = ""
    """Anthropic's name of the error; empty: the one of the status."""
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self, request_id: str) -> bytes:
        """The JSON of a response, or of an `error` event."""
        kind = self.type or TYPES.get(self.status, "api_error")
        error = {"type": kind, "message": self.message}
        return json.dumps({"type": "error", "error": error, "request_id": request_id}, ensure_ascii=False).encode()

    def response(self, request_id: str) -> web.Response:
        return web.Response(
            status=self.status,
            body=self.body(request_id),
            headers={**self.headers, "content-type": "application/json", "request-id": request_id},
        )


def refused(message: str, *, status: int = 503) -> ApiError:
    """A call that was not accepted; the same one may be accepted a little later."""
    return ApiError(status, message, headers={"retry-after": str(AGAIN_AFTER_S)})


def stopping() -> ApiError:
    """The refusal of a process that stops."""
    return refused("this process stops; the next try reaches another, or the one that follows")


def of_problem(problem: RequestProblem, *, chose_id: bool) -> ApiError:
    """The error for a problem document. `chose_id`: the caller chose the request's id, under which a final error is
    kept, so that trying again would bring the same error."""
    headers = {CODE: problem.code}
    is_kept = chose_id and problem.type.kept
    if not problem.type.retryable or is_kept or problem.code in _TRIED_ALREADY:
        headers["x-should-retry"] = "false"
    elif problem.status in (429, 503, 529):
        headers["retry-after"] = str(AGAIN_AFTER_S)
    said = _BY_PROVIDER.fullmatch(problem.detail) if problem.code == "provider_rejected" else None
    if said is not None:
        return ApiError(problem.status, said["message"], said["type"], headers)
    return ApiError(problem.status, problem.detail, headers=headers)


def of_error(error: LanekeeperError, *, chose_id: bool) -> ApiError:
    """The error for whatever a request through the lanes can raise."""
    match error:
        case RequestProblem():
            return of_problem(error, chose_id=chose_id)
        case NoReply():
            return ApiError(504, str(error), headers={"x-should-retry": "false"})
        case PublishRefused():
            return refused(str(error), status=529)
        case MessageTooLarge():
            return ApiError(413, str(error))
        case AccessRefused():
            return ApiError(403, f"the gateway's user on the broker may not publish this: {error}")
        case _:
            return refused(str(error))
