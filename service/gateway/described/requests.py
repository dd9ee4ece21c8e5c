"""Describes the gateway's paths `/v1/requests` and `/v1/ws` for its OpenAPI document."""

from collections.abc import Iterable
from typing import Any, get_args

from lanekeeper.errors import Cancelled
from service.gateway.described import schemas
from service.gateway.described.schemas import PATH_ID, TEXT, TIME, WHOLE, Schema, content, operation, record, ref
from service.gateway.documents import PROBLEM, path_of
from service.gateway.polling import LARGEST_NUMBER
from service.gateway.request_paths import LAST_EVENT_ID

WORDS = ("queued", "delayed", "running", "retrying", "completed", "failed", "cancelled")
_NUMBER: Schema = {"type": "integer", "minimum": 0, "maximum": LARGEST_NUMBER}
_ACCESS = (401, 403, 500, 503)


def paths(*, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    """The OpenAPI paths below `/v1/requests`. `parameters`: the OpenAPI parameters for the headers of a call that
    submits a request."""
    submitted = _answer(
        "The broker has confirmed the request.", record({"id": TEXT, "status_url": TEXT, "events_url": TEXT})
    )
    submitted["headers"] = {"Location": {"required": True, "schema": TEXT}}
    cancelled = record({"id": TEXT, "outcome": {"enum": list(get_args(Cancelled))}})
    wait = {
        "name": "wait",
        "in": "query",
        "schema": TEXT,
        "description": "How long to wait for the request's end, such as `20s`.",
    }
    submit = operation(
        "submitRequest",
        "Submit a request without waiting for its answer.",
        {"202": submitted, **_problems((*_ACCESS, 400, 408, 409, 413, 529))},
        parameters=parameters,
        body=ref("Request"),
    )
    get = operation(
        "getRequest",
        "The status of a request; its result or problem once it has ended.",
        {"200": _answer("The request's status.", ref("Status")), **_problems((*_ACCESS, 400, 404, 410, 529))},
        parameters=[PATH_ID, wait],
    )
    cancel = operation(
        "cancelRequest",
        "Cancel a request.",
        {
            "200": _answer("The request had already ended.", cancelled),
            "202": _answer("The request will end as cancelled.", cancelled),
            **_problems((*_ACCESS, 404, 429, 529)),
        },
        parameters=[PATH_ID],
    )
    follow = operation(
        "followRequest",
        "The steps of a request and the parts of its answer, as Server-Sent Events.",
        {
            "200": {"description": "The events.", "content": {"text/event-stream": {"schema": TEXT}}},
            "204": {"description": "The client already has the last event."},
            **_problems((*_ACCESS, 400, 404, 410, 529)),
        },
        parameters=[PATH_ID, {"name": LAST_EVENT_ID, "in": "header", "schema": _NUMBER}],
    )
    open_socket = operation(
        "openSocket",
        "A WebSocket: submit, follow and cancel many requests. `/asyncapi.json` has its messages.",
        {"101": {"description": "The WebSocket."}, **_problems((*_ACCESS, 426, 529))},
    )
    return {
        path_of("").rstrip("/"): {"post": submit},
        path_of("{id}"): {"get": get, "delete": cancel},
        path_of("{id}/events"): {"get": follow},
        "/v1/ws": {"get": open_socket},
    }


def status() -> Schema:
    """The JSON Schema of the answer to `GET /v1/requests/{id}`: a request's status."""
    always: dict[str, Schema] = {
        "id": TEXT,
        "status": {"enum": list(WORDS)},
        "lane": {"type": ["string", "null"]},
        "attempts": {**WHOLE, "description": "Attempts that have ended; one that is running is not counted."},
    }
    more: dict[str, Schema] = {
        "submitted_at": TIME,
        "deadline_at": TIME,
        "due_at": TIME,
        "ended_at": TIME,
        "position": WHOLE,
        "predicted_start_at": TIME,
        "model": TEXT,
        "provider": TEXT,
        "wait_ms": WHOLE,
        "run_ms": WHOLE,
        "result": ref("Message"),
        "problem": schemas.problem(),
    }
    return record({**always, **more}, optional=more)


def problem() -> Schema:
    """The JSON Schema of a problem document, for either a request that failed, or a call that was refused."""
    of_the_call = {"type": {"const": "about:blank"}, "title": TEXT, "status": WHOLE, "detail": TEXT, "request": TEXT}
    return {"anyOf": [record(of_the_call, optional=["request"]), schemas.problem()]}


def _problems(statuses: Iterable[int]) -> dict[str, Any]:
    answer = {"description": "A problem document.", "content": {PROBLEM: {"schema": ref("Problem")}}}
    return {str(status): answer for status in sorted(statuses)}


def _answer(description: str, schema: Schema) -> dict[str, Any]:
    return {"description": description, **content(schema)}
