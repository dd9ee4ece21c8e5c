"""The options of a request, and the message made from its body and options."""

import json
import time
import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypedDict

from lanekeeper.contract import names as n
from lanekeeper.contract.messages import PRIORITY_AT_MOST, Message
from lanekeeper.replies import Problem

PRIORITY = 4
"""Always set: without it, RabbitMQ assumes 4 on quorum queues and 0 on classic ones (docs/facts.md, section 1)."""
ANSWER_LATE_S = 5.0
"""The problem document should arrive this soon after the deadline; waiting longer is useless."""


class Options(TypedDict, total=False):
    """The options of a request. If one is left out, the lane's setting applies."""

    message_id: str
    """The request's id; generated if left out."""
    tenant: str
    """The tenant that the request belongs to: the connection's user, which the broker checks. Another tenant is
    accepted only if the service lets this user speak for others (`LANEKEEPER_SPEAKERS`)."""
    priority: int
    """The priority inside the lane: 0 to 9, higher first."""
    deadline_s: float
    delay_s: float
    at: datetime
    """Earliest start; with a time zone."""
    beta: str
    headers: Mapping[str, Any]
    """Further headers, such as `traceparent`; they override the options above."""
    cancel_abandoned: bool
    """False: this request continues even if its caller leaves (see `Client`)."""
    full_within_s: float
    """How long to wait for a place in a full lane before PublishRefused is raised: 2 s if left out, 0 raises at
    once."""


def message_of(body: Mapping[str, Any] | bytes, options: Options, *, stream: bool, user: str) -> Message:
    """The message to publish; `user` is the connection's user. Raises Problem if the priority is not 0 to 9."""
    priority = options.get("priority", PRIORITY)
    if not 0 <= priority <= PRIORITY_AT_MOST:
        detail = f"priority: found {priority}, allowed are 0 to {PRIORITY_AT_MOST}"
        raise Problem({"code": "invalid_request", "status": 400, "detail": detail})
    headers: dict[str, Any] = {n.SENT_MS: int(time.time() * 1000)}
    if stream:
        headers[n.STREAM] = True
    if (deadline_s := options.get("deadline_s")) is not None:
        headers[n.DEADLINE_MS] = round(deadline_s * 1000)
    if delay_s := options.get("delay_s"):
        headers[n.DELAY_MS] = round(delay_s * 1000)
    if (at := options.get("at")) is not None:
        headers[n.AT] = at.isoformat()
    if (beta := options.get("beta")) is not None:
        headers[n.ANTHROPIC_BETA] = beta
    if (tenant := options.get("tenant")) is not None and tenant != user:
        headers[n.TENANT] = tenant
    return Message(
        body=body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode(),
        headers={**headers, **options.get("headers", {})},
        content_type="application/json",
        message_id=options.get("message_id") or uuid.uuid4().hex,
        priority=priority,
        user_id=None if tenant is None else user,
    )


def bound_s(message: Message) -> float | None:
    """How long to wait for the answer to a request with a deadline; None: no bound.

    Workers answer requests past their deadline, but if no worker runs, only this bound ends the wait.
    """
    deadline_ms, at = message.headers.get(n.DEADLINE_MS), message.headers.get(n.AT)
    if not isinstance(deadline_ms, int) or at is not None:
        return None
    return (deadline_ms + int(message.headers.get(n.DELAY_MS, 0))) / 1000 + ANSWER_LATE_S
