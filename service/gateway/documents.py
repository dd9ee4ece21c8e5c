"""The JSON of `/v1/requests`: the status of a request, and problem documents (RFC 9457)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from aiohttp import web

from consumers.job import moment_text
from consumers.state.base import Completion, Found
from consumers.state.following import Submission
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import BodyAddress, body_address_in
from lanekeeper.contract.problems import LanekeeperError, RequestProblem
from service.gateway.positions import Place
from service.gateway.problems import ApiError, of_error

JSON = "application/json"
PROBLEM = "application/problem+json"
_HEADER_FIELDS = {n.MODEL: "model", n.PROVIDER: "provider", n.WAIT_MS: "wait_ms", n.RUN_MS: "run_ms"}
"""Headers of the final reply, each with its field in the status of a request that has ended."""


def path_of(id: str) -> str:
    """The URL path of the request with this id, on the gateway."""
    return f"/v1/requests/{id}"


@dataclass(frozen=True, slots=True)
class Status:
    """The answer to `GET /v1/requests/{id}`: the JSON of a request's status."""

    text: bytes
    """The complete JSON of the status. If `result` is set: only the part before the result."""
    result: BodyAddress | None = None
    """The address of a large result, which lies in the store for large bodies and is inserted between `text` and
    `end`."""
    end: bytes = b""
    """The rest of the JSON of the status, after the inserted large result."""


def status_of(
    id: str, found: Found, submission: Submission | None, *, now_ms: int, place: Place | None = None
) -> Status:
    """The status of a request. Once the request has ended, it contains the result or problem that a worker stored."""
    ended = found.completion
    due_ms = found.due_ms or (None if submission is None else submission.due_ms)
    fields: dict[str, Any] = {"id": id, "status": word_of(found, due_ms, now_ms=now_ms)}
    lane = None if ended is None else ended.headers.get(n.LANE_NAME)
    fields["lane"] = lane if submission is None else submission.lane
    fields["attempts"] = found.attempts if ended is None else ended.headers.get(n.ATTEMPT, found.attempts)
    if submission is not None:
        fields["submitted_at"] = moment_text(submission.submitted_ms)
        fields["deadline_at"] = moment_text(submission.deadline_ms)
    if ended is None:
        if due_ms is not None and due_ms > now_ms:
            fields["due_at"] = moment_text(due_ms)
        if place is not None:
            fields["position"] = place.position
            if place.starts_in_s is not None:
                fields["predicted_start_at"] = moment_text(now_ms + round(place.starts_in_s * 1000))
        return Status(json.dumps(fields).encode())
    fields["ended_at"] = moment_text(ended.ended_ms)
    fields |= {name: ended.headers[header] for header, name in _HEADER_FIELDS.items() if header in ended.headers}
    begin = json.dumps(fields, ensure_ascii=False).encode()[:-1]
    name = b"result" if ended.status == "ok" else b"problem"
    if (kept := body_address_in(ended.headers)) is not None:
        return Status(b'%b, "%b": ' % (begin, name), kept, b"}")
    return Status(b'%b, "%b": %b}' % (begin, name, ended.body))


def word_of(found: Found, due_ms: int | None, *, now_ms: int) -> str:
    """The status of a request, in the contract's words: `queued`, `delayed`, `running`, `retrying`, or how it ended."""
    if found.completion is not None:
        return end_of(found.completion)
    if found.running:
        return "running"
    if found.attempts:
        return "retrying"
    return "delayed" if due_ms is not None and due_ms > now_ms else "queued"


def end_of(completion: Completion) -> str:
    """The word of the contract for how a request ended: `completed`, `failed` or `cancelled`."""
    if completion.status == "ok":
        return "completed"
    return "cancelled" if completion.code == "cancelled" else "failed"


def problem_of(
    error: ApiError | LanekeeperError, id: str | None = None
) -> tuple[int, dict[str, Any], Mapping[str, str]]:
    """The HTTP status, the problem document and the headers for any error that a call can raise."""
    if isinstance(error, RequestProblem):
        headers = of_error(error, chose_id=False).headers
        document = json.loads(error.document(request=id or "", attempts=0))
        return error.status, document, headers
    known = error if isinstance(error, ApiError) else of_error(error, chose_id=False)
    try:
        title = HTTPStatus(known.status).phrase
    except ValueError:  # 529 is not a standard status
        title = "Overloaded"
    document = {"type": "about:blank", "title": title, "status": known.status, "detail": known.message}
    if id is not None:
        document["request"] = id
    return known.status, document, known.headers


def refusal(error: ApiError | LanekeeperError, id: str | None = None) -> web.Response:
    """The HTTP answer for a call that failed: a problem document (RFC 9457). `id`: the request that the call was
    about."""
    status, document, headers = problem_of(error, id)
    body = json.dumps(document, ensure_ascii=False).encode()
    return answer(body, status=status, **{**headers, "content-type": PROBLEM, "cache-control": "no-store"})


def answer(body: bytes, *, status: int = 200, **headers: str) -> web.Response:
    """Make an HTTP response with a JSON body, and a header that forbids caches to store it. `headers`: further
    headers."""
    return web.Response(
        body=body, status=status, headers={"content-type": JSON, "cache-control": "no-store", **headers}
    )
