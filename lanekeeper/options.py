"""What a request may say beside its body, and the message that is made of both."""

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
"""Said, because a message without one is 4 on quorum queues and 0 on classic ones (docs/facts.md, section 1)."""
ANSWER_LATE_S = 5.0
"""After a deadline its problem document should be here; waiting longer is in vain."""


class Options(TypedDict, total=False):
    """What a request may say beside its body; what is left out is left to the lane."""

    message_id: str
    """The request's id; one is made where it is left out."""
    tenant: str
    """Whose request it is: the broker sees to it that this is the connection's user, or, where the service lets that
    user speak for others, one of these."""
    priority: int
    """0 to 9, higher first."""
    deadline_s: float
    delay_s: float
    at: datetime
    """Do not start before; with a time zone."""
    beta: str
    headers: Mapping[str, Any]
    """Further headers, `traceparent` among them; they win over the ones above."""


def message_of(body: Mapping[str, Any] | bytes, options: Options, *, stream: bool, user: str) -> Message:
    """The message to publish; `user` is the connection's. Raises Problem for what every worker would refuse."""
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
    """How long an answer can take that says until when it must be there: where no worker runs, none says so."""
    deadline_ms, at = message.headers.get(n.DEADLINE_MS), message.headers.get(n.AT)
    if not isinstance(deadline_ms, int) or at is not None:
        return None
    return (deadline_ms + int(message.headers.get(n.DELAY_MS, 0))) / 1000 + ANSWER_LATE_S
