"""The gateway's error answers in Anthropic's format: a status, and `{"type": "error", "error": {…}, "request_id"}`.

Anthropic's SDKs repeat a call after 408, 409, 429 and 5xx. Repeating it helps if the request was not accepted. If a
worker has ended the request with an error, repeating the call brings nothing new, and `x-should-retry: false` tells the
SDK so.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from aiohttp import web

from consumers.state.base import StoreUnavailable
from lanekeeper.contract.names import CODE
from lanekeeper.contract.problems import AccessRefused, LanekeeperError, MessageTooLarge, PublishRefused, RequestProblem
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
"""The value of the header `retry-after`, in seconds, in answers to calls that the client may repeat. A full lane, or a
broker that restarts, seldom accepts requests sooner."""
_TRIED_ALREADY = frozenset({"attempts_exhausted", "deadline_exceeded"})
"""The codes of errors after which a client should not repeat the call, because workers have retried it already."""
_BY_PROVIDER = re.compile(r"\d{3} (?P<type>[a-z_]{1,60}): (?P<message>.*)", re.DOTALL)


@dataclass(slots=True)
class ApiError(Exception):
    """An error with which the gateway answers an HTTP call, in Anthropic's format or as a problem document."""

    status: int
    message: str
    type: str = ""
    """Anthropic's type of error. If it is empty, the type that `TYPES` has for the status is used."""
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self, request_id: str) -> bytes:
        """The error in Anthropic's JSON format, for a response or for an `error` event of a stream."""
        kind = self.type or TYPES.get(self.status, "api_error")
        error = {"type": kind, "message": self.message}
        return json.dumps({"type": "error", "error": error, "request_id": request_id}, ensure_ascii=False).encode()

    def response(self, request_id: str) -> web.Response:
        return web.Response(
            status=self.status,
            body=self.body(request_id),
            headers={
                **self.headers,
                "content-type": "application/json",
                "cache-control": "no-store",  # it may depend on the key, or on the moment
                "request-id": request_id,
            },
        )


def refused(message: str, *, status: int = 503) -> ApiError:
    """The error for an HTTP call that cannot be accepted at present. Its header `retry-after` tells the client when to
    repeat the call."""
    return ApiError(status, message, headers={"retry-after": str(AGAIN_AFTER_S)})


def stopping() -> ApiError:
    """The error for an HTTP call to a process that is stopping."""
    return refused("this process stops; the next try reaches another, or the one that follows")


def _of_problem(problem: RequestProblem, *, chose_id: bool) -> ApiError:
    headers = {CODE: problem.code}
    is_kept = chose_id and problem.type.kept
    if not problem.type.retryable or is_kept or problem.code in _TRIED_ALREADY:
        headers["x-should-retry"] = "false"
    elif problem.status in (429, 503, 529):
        headers["retry-after"] = str(AGAIN_AFTER_S)
    by_provider = _BY_PROVIDER.fullmatch(problem.detail) if problem.code == "provider_rejected" else None
    if by_provider is not None:
        return ApiError(problem.status, by_provider["message"], by_provider["type"], headers)
    return ApiError(problem.status, problem.detail, headers=headers)


def api_error_of(error: ApiError | LanekeeperError, *, chose_id: bool = False) -> ApiError:
    """Convert any error that a handler can raise to the error of an HTTP call. `chose_id`: whether the caller chose the
    request's id. If so, the error may be stored under that id, and repeating the call would return the stored error."""
    match error:
        case ApiError():
            return error
        case RequestProblem():
            return _of_problem(error, chose_id=chose_id)
        case StoreUnavailable():
            return refused(f"the store: {error}")
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
