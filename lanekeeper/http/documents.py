"""Turns a gateway's HTTP answers into the same values and errors that a client gets over AMQP."""

import json
import re
from collections.abc import Mapping
from typing import Any

from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import PROBLEMS, AccessRefused, TopologyMismatch
from lanekeeper.errors import ControlRefused, NotEnded
from lanekeeper.replies import Final, Problem, final_of

_SPACE = re.compile(r"[ \t\r\n]*")
_STATUS = {"queued": "waiting", "delayed": "waiting", "retrying": "waiting", "running": "running"}
"""Translates the status of a request that has not ended from the gateway's word to the word that is used over AMQP."""
_FIELDS = {
    "lane": n.LANE_NAME, "model": n.MODEL, "provider": n.PROVIDER, "attempts": n.ATTEMPT, "wait_ms": n.WAIT_MS,
    "run_ms": n.RUN_MS, "replayed": n.REPLAYED,
}  # fmt: skip


def document_of(body: bytes) -> Mapping[str, Any]:
    """Parse a response's body as a JSON object. Returns an empty object if the body is something else."""
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def check_accepted(status: int, body: bytes) -> None:
    """Check that a gateway has accepted a posted request, by its answer's status and body. Raises Problem if the
    gateway refuses the request, AccessRefused if it refuses the API key, and TopologyMismatch if there is no gateway at
    this address."""
    if status < 300:
        return
    document = document_of(body)
    check_access(status, document)
    if status < 400 or (status in (404, 405) and document.get("code") not in PROBLEMS):
        raise TopologyMismatch(
            f"answered {status}: no requests are taken at this address; is it a gateway's, of a version that has "
            "/v1/requests? " + str(document.get("detail", ""))
        )
    code = "too_large" if status == 413 else "invalid_request"
    raise Problem({"code": code, "status": status, **document})


def check_access(status: int, document: Mapping[str, Any]) -> None:
    """Raise AccessRefused if the answer says that the API key does not allow the call. An error whose code is in
    `PROBLEMS` concerns a single request and not the key, so it is ignored here."""
    if status == 401 or (status == 403 and document.get("code") not in PROBLEMS):
        raise AccessRefused(f"the gateway answered {status}: {document.get('detail', 'no detail')}")


def final_of_status(id: str, status: int, body: bytes) -> Final:
    """The final reply in a gateway's answer to `GET /v1/requests/{id}`.

    Raises Problem if the request ended in an error, NotEnded, AccessRefused, ControlRefused.
    """
    document = document_of(body)
    check_access(status, document)
    if status == 404:
        raise NotEnded(id, "unknown")
    if status != 200:
        raise ControlRefused(document or {"status": status, "detail": f"the gateway answered {status}"})
    headers = {name: document[field] for field, name in _FIELDS.items() if field in document}
    headers[n.REQUEST_ID] = document.get("id", id)
    if "result" in document:
        return final_of(Message(body=_member_bytes(body, "result"), headers={**headers, n.STATUS: "ok"}))
    if isinstance(problem := document.get("problem"), dict):
        raise Problem(problem)
    named = str(document.get("status"))
    attempts = int(document.get("attempts", 0))
    raise NotEnded(id, _STATUS.get(named, named), attempts=attempts, due_at=document.get("due_at"))


def _member_bytes(body: bytes, name: str) -> bytes:
    """The bytes of the value of member `name` in a JSON object. They are cut out of the text of the object, because
    parsing the value and encoding it again could change its bytes."""
    text = body.decode()
    decode = json.JSONDecoder().raw_decode
    at = _skip_space(text, 0) + 1
    while True:
        key, at = decode(text, _skip_space(text, at))
        start = _skip_space(text, _skip_space(text, at) + 1)
        _, end = decode(text, start)
        if key == name:
            return text[start:end].encode()
        at = _skip_space(text, end) + 1


def _skip_space(text: str, at: int) -> int:
    """The position of the first character, from position `at` on, that is not white space."""
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()
