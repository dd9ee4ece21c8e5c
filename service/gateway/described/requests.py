"""The OpenAPI of `/v1/requests` and `/v1/ws`."""

from collections.abc import Iterable
from typing import Any, get_args

from lanekeeper.errors import Cancelled
from service.gateway.described import schemas
from service.gateway.described.schemas import SECURITY, TEXT, WHOLE, Schema, record, ref
from service.gateway.documents import JSON, PROBLEM, path_of
from service.gateway.events import LARGEST_NUMBER, LAST_EVENT_ID

WORDS = ("queued", "delayed", "running", "retrying", "completed", "failed", "cancelled")
_TIME: Schema = {"type": "string", "format": "date-time"}
_NUMBER: Schema = {"type": "integer", "minimum": 0, "maximum": LARGEST_NUMBER}
_ACCESS = (400, 401, 403, 500, 503, 529)
_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def paths(*, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    """The paths. `parameters`: the headers of a call that goes through a lane."""
    body = {"required": True, "content": {JSON: {"schema": ref("Request")}}}
    submitted = _answer("The broker has it.", record({"id": TEXT, "status_url": TEXT, "events_url": TEXT}))
    submitted["headers"] = {"Location": {"required": True, "schema": TEXT}}
    cancelled = record({"id": TEXT, "outcome": {"enum": list(get_args(Cancelled))}})
    wait = {"name": "wait", "in": "query", "schema": TEXT, "description": "How long to wait for its end, as in `20s`."}
    return {
        path_of("").rstrip("/"): {
            "post": {
                "operationId": "submitRequest",
                "summary": "Submit a request, and ask for it later.",
                "security": SECURITY,
                "parameters": parameters,
                "requestBody": body,
                "responses": {"202": submitted, **_problems((*_ACCESS, 408, 409, 413, 415, 429, 502))},
            }
        },
        path_of("{id}"): {
            "get": {
                "operationId": "getRequest",
                "summary": "The status of a request; its result or problem once it has ended.",
                "security": SECURITY,
                "parameters": [_ID, wait],
                "responses": {"200": _answer("Its status.", ref("Status")), **_problems((*_ACCESS, 404))},
            },
            "delete": {
                "operationId": "cancelRequest",
                "summary": "Cancel a request.",
                "security": SECURITY,
                "parameters": [_ID],
                "responses": {
                    "200": _answer("It had ended.", cancelled),
                    "202": _answer("It will end as cancelled.", cancelled),
                    **_problems((*_ACCESS, 404, 429)),
                },
            },
        },
        path_of("{id}/events"): {
            "get": {
                "operationId": "followRequest",
                "summary": "The steps of a request and the parts of its answer, as Server-Sent Events.",
                "security": SECURITY,
                "parameters": [_ID, {"name": LAST_EVENT_ID, "in": "header", "schema": _NUMBER}],
                "responses": {
                    "200": {"description": "The events.", "content": {"text/event-stream": {"schema": TEXT}}},
                    "204": {"description": "The reader has had the last one."},
                    **_problems((*_ACCESS, 404)),
                },
            }
        },
        "/v1/ws": {
            "get": {
                "operationId": "openSocket",
                "summary": "A WebSocket: submit, follow and cancel many requests. docs/contract.md has its messages.",
                "security": SECURITY,
                "responses": {"101": {"description": "The WebSocket."}, **_problems((*_ACCESS, 426))},
            }
        },
    }


def status() -> Schema:
    """The status of a request."""
    always: dict[str, Schema] = {
        "id": TEXT,
        "status": {"enum": list(WORDS)},
        "lane": {"type": ["string", "null"]},
        "attempts": WHOLE,
    }
    more: dict[str, Schema] = {
        "submitted_at": _TIME,
        "deadline_at": _TIME,
        "due_at": _TIME,
        "ended_at": _TIME,
        "position": WHOLE,
        "model": TEXT,
        "provider": TEXT,
        "wait_ms": WHOLE,
        "run_ms": WHOLE,
        "result": ref("Message"),
        "problem": schemas.problem(),
    }
    return record({**always, **more}, optional=more)


def problem() -> Schema:
    """A problem document: of a request, or of the call alone."""
    of_the_call = {"type": {"const": "about:blank"}, "title": TEXT, "status": WHOLE, "detail": TEXT, "request": TEXT}
    return {"anyOf": [record(of_the_call, optional=["request"]), schemas.problem()]}


def _problems(statuses: Iterable[int]) -> dict[str, Any]:
    content = {PROBLEM: {"schema": ref("Problem")}}
    return {str(status): {"description": "A problem document.", "content": content} for status in sorted(statuses)}


def _answer(description: str, schema: Schema) -> dict[str, Any]:
    return {"description": description, "content": {JSON: {"schema": schema}}}
