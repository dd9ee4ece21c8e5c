"""A request as it is posted: its headers and its body."""

import json
from typing import Any

from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.options import PRIORITY
from lanekeeper.replies import Problem
from lanekeeper.transport import Asked

IDEMPOTENCY_KEY = "idempotency-key"
PREFIX = "x-lane-"
CARRIED = n.TRACE_CONTEXT | {n.ANTHROPIC_BETA}


def headers_of(asked: Asked) -> dict[str, str]:
    """The lane is the key's first word. Raises Problem for what a gateway does not take."""
    message = asked.message
    if message.priority != PRIORITY:
        raise _refused(f"priority: found {message.priority}; over HTTP only {PRIORITY} is available")
    if asked.tenant is not None or n.TENANT in message.headers:
        raise _refused("tenant: over HTTP it follows from the key, and cannot be named")
    found = {
        "content-type": "application/json",
        IDEMPOTENCY_KEY: asked.id,
        n.LANE_NAME: asked.key.partition(".")[0],
    }
    for name, value in message.headers.items():
        if name == n.STREAM:
            continue  # the body says it
        if not name.startswith(PREFIX) and name not in CARRIED:
            raise _refused(f"header {name}: not passed on over HTTP")
        found[name] = _text(value)
    return found


def body_of(message: Message) -> bytes:
    """The body, with `stream` where the parts are wanted. Raises Problem if it says otherwise."""
    if not message.headers.get(n.STREAM):
        return message.body
    try:
        found = json.loads(message.body)
    except ValueError:
        return message.body  # the gateway tells what is wrong with it
    if not isinstance(found, dict) or found.get("stream") is True:
        return message.body
    if "stream" in found:
        raise _refused(f"stream: found {found['stream']!r}, and the parts are asked for")
    begin, _, rest = message.body.partition(b"{")  # otherwise byte for byte as it was given
    return b'%b{"stream":true%b%b' % (begin, b"," if found else b"", rest)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return value.decode("ascii") if isinstance(value, bytes) else str(value)


def _refused(detail: str) -> Problem:
    return Problem({"code": "invalid_request", "status": 400, "detail": detail})
