"""Builds the headers and the body of a client's `POST` to a gateway."""

import json
from typing import Any

from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.options import PRIORITY
from lanekeeper.replies import Problem
from lanekeeper.transport import OutgoingRequest

IDEMPOTENCY_KEY = "idempotency-key"
PREFIX = "x-lane-"
CARRIED = n.TRACE_CONTEXT | {n.ANTHROPIC_BETA}


def headers_of(outgoing: OutgoingRequest) -> dict[str, str]:
    """The HTTP headers of a posted request. The lane is the first word of the routing key. Raises Problem for options
    that a gateway does not accept."""
    message = outgoing.message
    if message.priority != PRIORITY:
        raise _refused(f"priority: found {message.priority}; over HTTP only {PRIORITY} is available")
    if outgoing.tenant is not None or n.TENANT in message.headers:
        raise _refused("tenant: over HTTP it follows from the key, and cannot be named")
    found = {
        "content-type": "application/json",
        IDEMPOTENCY_KEY: outgoing.id,
        n.LANE_NAME: outgoing.key.partition(".")[0],
    }
    for name, value in message.headers.items():
        if name == n.STREAM:
            continue  # over HTTP, the body has the field `stream`
        if not name.startswith(PREFIX) and name not in CARRIED:
            raise _refused(f"header {name}: not passed on over HTTP")
        found[name] = _text(value)
    return found


def body_of(message: Message) -> bytes:
    """The HTTP body of a posted request; `"stream": true` is added if the caller wants the parts of the answer. Raises
    Problem if the caller wants them, but the body says `"stream": false`."""
    if not message.headers.get(n.STREAM):
        return message.body
    try:
        found = json.loads(message.body)
    except ValueError:
        return message.body  # the gateway's error says what is wrong with it
    if not isinstance(found, dict) or found.get("stream") is True:
        return message.body
    if "stream" in found:
        raise _refused(f"stream: found {found['stream']!r}, and the parts are asked for")
    begin, _, rest = message.body.partition(b"{")  # all other bytes stay as the caller gave them
    return b'%b{"stream":true%b%b' % (begin, b"," if found else b"", rest)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return value.decode("ascii") if isinstance(value, bytes) else str(value)


def _refused(detail: str) -> Problem:
    return Problem({"code": "invalid_request", "status": 400, "detail": detail})
