"""The JSON of `/v1/requests`: the status of a request, and problem documents (RFC 9457)."""

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple

from aiohttp import web

from consumers.job import moment_text
from consumers.state.base import Completion, Found
from consumers.state.following import Submission
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import BodyAddress, body_address_in
from lanekeeper.contract.problems import LanekeeperError, RequestProblem
from service.gateway.positions import Place
from service.gateway.problems import ApiError, api_error_of

JSON = "application/json"
PROBLEM = "application/problem+json"
_HEADER_FIELDS = {n.MODEL: "model", n.PROVIDER: "provider", n.WAIT_MS: "wait_ms", n.RUN_MS: "run_ms"}
"""For some headers of a worker's final reply: the name of the field that contains the header's value in the status of a
request that has ended."""


def path_of(id: str) -> str:
    """The URL path of the request with this id, on the gateway."""
    return f"/v1/requests/{id}"


@dataclass(frozen=True, slots=True)
class Known:
    """What the workers' store knows about a request: its state (`found`), and how it was submitted."""

    id: str
    found: Found
    submission: Submission | None
    """How the request was submitted. None: it was not submitted through a gateway."""

    @property
    def due_ms(self) -> int | None:
        return self.found.due_ms or (None if self.submission is None else self.submission.due_ms)


class LargeStatus(NamedTuple):
    """The status of a request whose result is in the store for large bodies, in three parts: the JSON before the
    result, the result's address in the store, and the JSON after the result."""

    begin: bytes
    result: BodyAddress
    end: bytes


class End(NamedTuple):
    """The last of the entries (steps and events) that a client gets when it follows a request. It says that the request
    has ended, and its `body` is the request's status."""

    number: int
    kind: str
    body: bytes | LargeStatus


def status_of(known: Known, *, now_ms: int, place: Place | None = None) -> bytes | LargeStatus:
    """The status of a request as JSON. Once the request has ended, it contains the result or problem that a worker
    stored."""
    found, submission, due_ms = known.found, known.submission, known.due_ms
    ended = found.completion
    fields: dict[str, Any] = {"id": known.id, "status": word_of(known, now_ms)}
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
        return json.dumps(fields).encode()
    fields["ended_at"] = moment_text(ended.ended_ms)
    fields |= {name: ended.headers[header] for header, name in _HEADER_FIELDS.items() if header in ended.headers}
    begin = json.dumps(fields, ensure_ascii=False).encode()[:-1]
    name = b"result" if ended.status == "ok" else b"problem"
    if (kept := body_address_in(ended.headers)) is not None:
        return LargeStatus(b'%b, "%b": ' % (begin, name), kept, b"}")
    return b'%b, "%b": %b}' % (begin, name, ended.body)


def word_of(known: Known, now_ms: int) -> str:
    """The status of a request as the word that clients get: `queued`, `delayed`, `running`, `retrying`, or one of
    `end_of` if the request has ended."""
    found = known.found
    if found.completion is not None:
        return end_of(found.completion)
    if found.running:
        return "running"
    if found.attempts:
        return "retrying"
    return "delayed" if (known.due_ms or 0) > now_ms else "queued"


def end_of(completion: Completion) -> str:
    """How a request ended, as the word that clients get: `completed`, `failed` or `cancelled`."""
    if completion.status == "ok":
        return "completed"
    return "cancelled" if completion.code == "cancelled" else "failed"


def problem_of(error: ApiError | LanekeeperError, id: str | None) -> dict[str, Any]:
    """The problem document (RFC 9457) for an error. `id`: the id of the request that the HTTP call was about, if there
    is one."""
    if isinstance(error, RequestProblem):
        document: dict[str, Any] = json.loads(error.document(request=id or "", attempts=0))
        return document
    known = api_error_of(error)
    try:
        title = HTTPStatus(known.status).phrase
    except ValueError:  # 529 is not a standard status
        title = "Overloaded"
    document = {"type": "about:blank", "title": title, "status": known.status, "detail": known.message}
    return document if id is None else {**document, "request": id}


def answer(body: bytes | dict[str, Any], *, status: int = 200, **headers: str) -> web.Response:
    """Make an HTTP response with a JSON body. A header forbids caches to store it; `headers` are further ones."""
    if not isinstance(body, bytes):
        body = json.dumps(body, ensure_ascii=False).encode()
    return web.Response(
        body=body, status=status, headers={"content-type": JSON, "cache-control": "no-store", **headers}
    )
