"""The JSON of `/v1/requests`: the status of a request, and problem documents (RFC 9457)."""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web

from consumers.job import moment_text
from consumers.state.base import Completion, Found
from consumers.state.following import Submission
from lanekeeper.contract import names as n
from lanekeeper.contract.problems import LanekeeperError, RequestProblem
from service.gateway.problems import ApiError, of_error

JSON = "application/json"
PROBLEM = "application/problem+json"
_TOLD = {n.MODEL: "model", n.PROVIDER: "provider", n.WAIT_MS: "wait_ms", n.RUN_MS: "run_ms"}
"""Headers of the final reply, and their names in the status of a request that has ended."""


def path_of(id: str) -> str:
    """Where a request is."""
    return f"/v1/requests/{id}"


def status_of(
    id: str, found: Found, submission: Submission | None, *, now_ms: int, position: int | None = None
) -> bytes:
    """The status of a request; with its result or problem, as its worker stored them, once it has ended."""
    ended = found.completion
    due_ms = found.due_ms or (None if submission is None else submission.due_ms)
    told: dict[str, Any] = {"id": id, "status": word_of(found, due_ms, now_ms=now_ms)}
    lane = None if ended is None else ended.headers.get(n.LANE_NAME)
    told["lane"] = lane if submission is None else submission.lane
    told["attempts"] = found.attempts if ended is None else ended.headers.get(n.ATTEMPT, found.attempts)
    if submission is not None:
        told["submitted_at"] = moment_text(submission.submitted_ms)
        told["deadline_at"] = moment_text(submission.deadline_ms)
    if ended is None:
        if due_ms is not None and due_ms > now_ms:
            told["due_at"] = moment_text(due_ms)
        if position is not None:
            told["position"] = position
        return json.dumps(told).encode()
    told["ended_at"] = moment_text(ended.ended_ms)
    told |= {name: ended.headers[header] for header, name in _TOLD.items() if header in ended.headers}
    return b'%b, "%b": %b}' % (
        json.dumps(told, ensure_ascii=False).encode()[:-1],
        b"result" if ended.status == "ok" else b"problem",
        ended.body,
    )


def word_of(found: Found, due_ms: int | None, *, now_ms: int) -> str:
    """What a request is doing, in one word."""
    if found.completion is not None:
        return end_of(found.completion)
    if found.running:
        return "running"
    if found.attempts:
        return "retrying"
    return "delayed" if due_ms is not None and due_ms > now_ms else "queued"


def end_of(completion: Completion) -> str:
    """How a request ended, in one word."""
    if completion.status == "ok":
        return "completed"
    return "cancelled" if completion.code == "cancelled" else "failed"


def problem_of(
    error: ApiError | LanekeeperError, id: str | None = None
) -> tuple[int, dict[str, Any], Mapping[str, str]]:
    """Status, problem document and headers for whatever a call can raise."""
    if isinstance(error, RequestProblem):
        told = of_error(error, chose_id=False)
        document = json.loads(error.document(request=id or "", attempts=0))
        return error.status, document, told.headers
    known = error if isinstance(error, ApiError) else of_error(error, chose_id=False)
    try:
        title = HTTPStatus(known.status).phrase
    except ValueError:  # 529
        title = "Overloaded"
    document = {"type": "about:blank", "title": title, "status": known.status, "detail": known.message}
    if id is not None:
        document["request"] = id
    return known.status, document, known.headers


def refusal(error: ApiError | LanekeeperError, id: str | None = None) -> web.Response:
    """The answer to a call that failed."""
    status, document, headers = problem_of(error, id)
    return web.Response(
        body=json.dumps(document, ensure_ascii=False).encode(),
        status=status,
        headers={**headers, "content-type": PROBLEM, "cache-control": "no-store"},
    )


def answer(body: bytes, *, status: int = 200, **headers: str) -> web.Response:
    """A JSON answer that nobody may cache."""
    return web.Response(
        body=body, status=status, headers={"content-type": JSON, "cache-control": "no-store", **headers}
    )
