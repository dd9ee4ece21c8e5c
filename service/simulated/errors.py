"""Anthropic's error answers: a status and `{"type": "error", "error": {…}, "request_id"}`."""

import json
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}


@dataclass(slots=True)
class Refusal(Exception):
    """Raised when the simulated API answers a call with an error. `outcome`: the error's name in the API's
    statistics."""

    status: int
    message: str
    _: KW_ONLY
    outcome: str
    details: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self, request_id: str) -> bytes:
        return error_body(TYPES[self.status], self.message, details=self.details, request_id=request_id)


def error_body(type: str, message: str, *, request_id: str, details: Mapping[str, Any] | None = None) -> bytes:
    """The JSON of an error in Anthropic's format, for a response's body or for an `error` event of a stream."""
    error: dict[str, Any] = {"type": type, "message": message}
    if details is not None:
        error["details"] = details
    return json.dumps({"type": "error", "error": error, "request_id": request_id}).encode()


def invalid(message: str) -> Refusal:
    """The error 400 for an invalid request."""
    return Refusal(400, message, outcome="invalid")
