"""Every error answer of the gateway: what a handler may raise, what the client is told, and in which format.

Calls of paths below `/v1/messages`, `/v1/models` and `/v1/files`, and of unknown ones below `/v1/`, get errors in
Anthropic's format (`{"type": "error", "error": {…}, "request_id"}`) or in OpenAI's (`{"error": {…}}`), whosever client
calls; all others get problem documents (RFC 9457).

Both vendors' SDKs repeat a call after 408, 409, 429 and 5xx. Repeating it helps if the request was not accepted. If a
worker has ended the request with an error, repeating the call brings nothing new, and `x-should-retry: false` tells the
SDK so.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler
from multidict import istr
from opentelemetry.trace import INVALID_SPAN

from consumers.rate_limit import LogThrottle
from consumers.state.base import StoreUnavailable
from lanekeeper.bodies import BodiesFull
from lanekeeper.contract import problems
from lanekeeper.contract.identity import is_request_id
from lanekeeper.contract.names import BODY, CODE, PROVIDER_REQUEST_ID
from lanekeeper.contract.problems import LanekeeperError, ProviderFailure, RequestProblem
from lanekeeper.replies import NoReply, Problem
from lanekeeper.telemetry import signals
from lanekeeper.telemetry.tracing import trace_id_of

TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
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
_TRIED_ALREADY = frozenset({"attempts_exhausted", "deadline_exceeded", "provider_unavailable"})
_BY_PROVIDER = frozenset({"attempts_exhausted", "provider_rejected"})
_PASSING = frozenset({429, 529})
_TEXTS: Mapping[str, str] = {
    "idempotency_conflict": "Idempotency-Key: it was used with another body",
    "poison": "its worker died or hung under it, again and again",
    "internal": "a fault of Lanekeeper; its log tells of this request",
}
"""The text over HTTP where the one over AMQP names properties and queues."""
_BODY = f"header {BODY}: "
JSON = "application/json"
PROBLEM = "application/problem+json"
ABOUT_REQUEST = web.RequestKey("request_id", str)
NO_SNIFFING = istr("X-Content-Type-Options")
_API = "/v1/"
_ANTHROPICS = ("/v1/messages", "/v1/models", "/v1/files")
_OPENAIS = ("/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/models")
_OF_BOTH = ("/v1/models", "/v1/files")
_OPENAI_STATUS = {402: 429, 529: 503}
"""Of the statuses that OpenAI's API does not have."""
_OPENAI_CODES = {401: "invalid_api_key", 402: "insufficient_quota", 429: "rate_limit_exceeded"}
_HAS_BEGUN = web.RequestKey("has_begun", bool)
_away = LogThrottle()
log = structlog.get_logger()


@dataclass(slots=True)
class ApiError(Exception):
    """An error with which a call is answered. `type`: Anthropic's; empty: that of the status in `TYPES`. `whole`: the
    provider's own body, byte for byte."""

    status: int
    message: str
    type: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    whole: bytes | None = None
    code: str | None = None
    """OpenAI's."""

    def body(self, request_id: str) -> bytes:
        if self.whole is not None:
            return self.whole
        kind = self.type or TYPES.get(self.status, "api_error")
        error = {"type": kind, "message": self.message}
        return json.dumps({"type": "error", "error": error, "request_id": request_id}, ensure_ascii=False).encode()

    def response(self, request_id: str) -> web.Response:
        headers = {**self.headers, "request-id": request_id}
        return answer(self.body(request_id), status=self.status, **headers)

    @property
    def openai_status(self) -> int:
        return _OPENAI_STATUS.get(self.status, self.status)

    def openai_error(self) -> dict[str, Any]:
        """The fields of the error in OpenAI's format."""
        if self.whole is not None and (error := _error_in(self.whole)) is not None:
            return error
        kind = "server_error" if self.openai_status >= 500 else "invalid_request_error"
        if self.openai_status == 429:
            kind = "insufficient_quota" if self.status == 402 else "requests"
        code = self.code or self.headers.get(CODE) or _OPENAI_CODES.get(self.status)
        return {"message": self.message, "type": kind, "param": None, "code": code}

    def openai_body(self) -> bytes:
        if self.whole is not None and not _is_event(json.loads(self.whole)):
            return self.whole
        return encoded({"error": self.openai_error()})

    def openai_response(self, request_id: str) -> web.Response:
        headers = {**self.headers, "x-request-id": request_id}
        return answer(self.openai_body(), status=self.openai_status, **headers)


def refused(message: str, *, status: int = 503) -> ApiError:
    """The error for a call that cannot be accepted at present, with `retry-after`."""
    return ApiError(status, message, headers={"retry-after": str(AGAIN_AFTER_S)})


def stopping() -> ApiError:
    """The error for a call to a process that is stopping."""
    return refused("this process stops; the next try reaches another, or the one that follows")


def detail_of(problem: RequestProblem, *, chose_id: bool = True) -> str:
    """The detail of a request's error in the words of HTTP."""
    advice = problem.type.advice
    detail = _TEXTS.get(problem.code, problem.detail.removesuffix(advice))
    if problem.code in ("deadline_exceeded", "provider_unavailable"):
        detail = detail.replace(" ms in the queue", " ms waiting", 1)
    if isinstance(problem, Problem) and detail.startswith(_BODY):  # the caller sent no such header
        detail = f"body: {detail.removeprefix(_BODY)}"
    if advice and chose_id:
        detail += "; to try again, send it with another Idempotency-Key: under this one this error is kept"
    return detail


def _of_problem(problem: RequestProblem, *, chose_id: bool) -> ApiError:
    """The provider's error is answered as it came, if the request ended by it. An overload or a rate limit may be over
    when the caller tries again; after other errors Lanekeeper has tried often enough."""
    headers, failure = {CODE: problem.code}, problem.provider
    if failure is not None and failure.request_id:
        headers[PROVIDER_REQUEST_ID] = failure.request_id
    is_passing = failure is not None and failure.status in _PASSING
    is_passed_on = failure is not None and (problem.code in _BY_PROVIDER or is_passing)
    is_kept = chose_id and problem.type.kept
    if is_kept or not problem.type.retryable or (problem.code in _TRIED_ALREADY and not is_passing):
        headers["x-should-retry"] = "false"
    if is_passing or (problem.status in (429, 503, 529) and "x-should-retry" not in headers):
        headers["retry-after"] = str(AGAIN_AFTER_S)
    if problem.retry_after_ms is not None:
        headers["retry-after"] = str(math.ceil(problem.retry_after_ms / 1000))
    if failure is None or not is_passed_on:
        return ApiError(problem.status, detail_of(problem, chose_id=chose_id), headers=headers)
    whole = failure.error.encode() if _error_in(failure.error) is not None else None
    message = problem.detail.removesuffix(problem.type.advice).removeprefix(f"{failure.status} {failure.type}: ")
    return ApiError(failure.status, message, failure.type, headers, whole)


def passed_on(failure: ProviderFailure | None) -> ApiError | None:
    """The provider's error in the middle of a stream, as it came; None: an SDK could not read it."""
    if failure is None or _error_in(failure.error) is None:
        return None
    return ApiError(failure.status, "", failure.type, whole=failure.error.encode())


def _error_in(text: str | bytes) -> dict[str, Any] | None:
    """The error in a body that the SDKs read. Any other body, or one that was cut, is put into the vendor's format."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if _is_event(found):
        return {name: value for name, value in found.items() if name != "type"}
    error = found.get("error") if isinstance(found, dict) else None
    return error if isinstance(error, dict) else None


def _is_event(found: object) -> bool:
    """Whether it is an event `error` of OpenAI's responses, which has the error's fields itself."""
    return isinstance(found, dict) and found.get("type") == "error" and isinstance(found.get("message"), str)


def api_error_of(error: ApiError | LanekeeperError, *, chose_id: bool = False) -> ApiError:
    """`chose_id`: the caller chose the request's id, under which the error may be kept."""
    match error:
        case ApiError():
            return error
        case RequestProblem():
            return _of_problem(error, chose_id=chose_id)
        case StoreUnavailable():
            return refused("the service's store cannot be used at present; try again later")
        case BodiesFull():
            return refused(str(error), status=429)
        case NoReply():
            return ApiError(504, str(error), headers={"x-should-retry": "false"})
        case problems.PublishRefused():
            return refused("the lane is full and takes no more requests; try again later", status=529)
        case problems.MessageTooLarge():
            return ApiError(413, f"body: {error.size} bytes, the service takes {error.limit}")
        case problems.AccessRefused():
            return ApiError(403, "the gateway itself has no right to submit this: its operator must grant it")
        case problems.BrokerBlocked():
            return refused("the service accepts no requests at present: its broker is low on memory or disk")
        case problems.TopologyMismatch():
            return refused("the service is not set up: its operator must run lanekeeper topology verify")
        case problems.BrokerError() | problems.ClientMisused():
            return refused("no connection to the service's broker at present; try again later")
        case _:
            return refused(str(error))


def problem_of(error: ApiError | LanekeeperError, id: str | None) -> dict[str, Any]:
    """The problem document (RFC 9457) for an error. `id`: of the request that the call was about, if there is one."""
    if isinstance(error, RequestProblem):
        document: dict[str, Any] = json.loads(error.document(request=id or "", attempts=0))
        return {**document, "detail": detail_of(error)}
    known = api_error_of(error)
    try:
        title = HTTPStatus(known.status).phrase
    except ValueError:  # 529 is not a standard status
        title = "Overloaded"
    document = {"type": "about:blank", "title": title, "status": known.status, "detail": known.message}
    return document if id is None else {**document, "request": id}


def encoded(value: object) -> bytes:
    """As JSON. Half a character (a lone surrogate), which providers write where they cut a text, stays an escape."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value).encode()


def answer(body: bytes | dict[str, Any], *, status: int = 200, **headers: str) -> web.Response:
    """A response with a JSON body. No cache may keep it: it may depend on the key, or on the moment."""
    if not isinstance(body, bytes):
        body = encoded(body)
    return web.Response(
        body=body, status=status, headers={"content-type": JSON, "cache-control": "no-store", **headers}
    )


def is_openai(call: web.BaseRequest) -> bool:
    """Whether OpenAI's client calls. Both vendors have the paths of models and files, and an unknown path may be either
    one's; but only Anthropic's clients send these headers."""
    if call.path.startswith(_OPENAIS) and not call.path.startswith(_OF_BOTH):
        return True
    headers = call.headers
    return (
        call.path.startswith(_API)
        and not call.path.startswith("/v1/messages")
        and headers.get("authorization", "").lower().startswith("bearer ")
        and "anthropic-version" not in headers
        and "x-api-key" not in headers
    )


def refusal(call: web.BaseRequest, error: ApiError | LanekeeperError, *, sdk_id: str | None = None) -> web.Response:
    """In the format of the path. `sdk_id`: the id that an SDK reads; default: the request's, or a random one."""
    about, api_error = call.get(ABOUT_REQUEST, ""), api_error_of(error)
    request_id = about if is_request_id(about) else None  # it becomes a header, and a path may hold anything
    if isinstance(error, StoreUnavailable) and (count := _away.count("store")):
        log.error(signals.STORE_AWAY, reason=str(error), count=count)
    path, id = call.path, sdk_id or request_id or uuid.uuid4().hex
    if path.startswith((*_ANTHROPICS, *_OPENAIS)):
        return api_error.openai_response(id) if is_openai(call) else api_error.response(id)
    document = problem_of(error, request_id)
    if (trace := trace_id_of(INVALID_SPAN, call.headers)) is not None:  # the caller's
        document.setdefault("trace", trace)
    return answer(document, status=api_error.status, **{**api_error.headers, "content-type": PROBLEM})


def _without_handler(request: web.Request, error: web.HTTPException) -> ApiError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        names = ", ".join(sorted(error.allowed_methods))
        return ApiError(405, f"{request.method} {request.path}: allowed is {names}", headers={"Allow": names})
    if error.status != 404 or not request.path:  # CONNECT has no path
        return ApiError(error.status, error.text or error.reason)
    return path_unknown(request)


def path_unknown(request: web.BaseRequest) -> ApiError:
    """The error 404, with what there is."""
    why = "is not a path of Lanekeeper's"
    if request.path == "/v1/messages":
        why = "is served by `lanekeeper gateway` and `lanekeeper serve`, not by this process"
    elif is_openai(request):
        served = ", ".join(_OPENAIS)
        why += f"; of OpenAI's API it serves {served}: for others, call the API itself"
    elif request.path.startswith(_API):
        served = ", ".join(_ANTHROPICS)
        why += f"; of Anthropic's API it serves {served} and paths below them: for others, call the API itself"
    return ApiError(404, f"{request.path[:200]} {why}")


async def note_beginning(request: web.Request, response: web.StreamResponse) -> None:
    """The status is sent, and cannot change. No browser shall guess a type, nobody learn the server's version."""
    request[_HAS_BEGUN] = True
    headers = response.headers
    headers[NO_SNIFFING] = "nosniff"
    headers.popall("Server", None)


def _break_off(request: web.Request) -> None:
    """If its answer has begun: else the client would take the part that it has, or the error in it, for the answer."""
    if request.get(_HAS_BEGUN) and request.transport is not None:
        request.transport.abort()


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers what handlers raise. An unexpected error is answered with 500, and logged without the call's content."""
    try:
        return await handler(request)
    except (ApiError, LanekeeperError) as error:
        _break_off(request)
        return refusal(request, error)
    except ConnectionError:  # the client has disconnected
        raise
    except web.HTTPException as error:
        api_error = _without_handler(request, error)
        if api_error.status == 404 and request.path.startswith(_API):  # an SDK may have called it
            id = uuid.uuid4().hex
            return api_error.openai_response(id) if is_openai(request) else api_error.response(id)
        return refusal(request, api_error)
    except Exception:
        id, resource = uuid.uuid4().hex, request.match_info.route.resource
        path = "" if resource is None else resource.canonical
        log.exception(signals.HANDLER_FAILED, where=f"gateway {path}", request=id)
        _break_off(request)
        return refusal(request, ApiError(500, f"a fault of Lanekeeper; its log tells of {id}"), sdk_id=id)
