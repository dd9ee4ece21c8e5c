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
"""The default priority of a request. A client always sets a priority, because RabbitMQ treats a message without one as
priority 4 in quorum queues, but as 0 in classic queues (docs/facts.md, section 1)."""
ANSWER_LATE_S = 5.0
"""A client waits for a request's reply until this many seconds after the request's deadline. If a worker runs, its
error reply, which says that the deadline has passed, comes sooner."""


class Options(TypedDict, total=False):
    """The options of a request; each may be left out. Without `deadline_s`, the lane's deadline applies."""

    message_id: str
    """The request's id; generated if left out."""
    tenant: str
    """The tenant that the request belongs to, normally the connection's user, whose name the broker checks. Another
    tenant is accepted only if `LANEKEEPER_SPEAKERS` allows this user to send requests of other tenants."""
    priority: int
    """The priority inside the lane: 0 to 9, higher first."""
    deadline_s: float
    """The time limit for the final answer in seconds, counted from publishing, or from the end of the request's delay.
    """
    delay_s: float
    """How many seconds after publishing the request may start at the earliest."""
    at: datetime
    """The earliest start of the request: a time with a time zone."""
    beta: str
    """The value of the header `anthropic-beta`, which names features of Anthropic's API that are in beta."""
    headers: Mapping[str, Any]
    """Further AMQP headers, such as `traceparent`; they override the headers that other options set."""
    cancel_abandoned: bool
    """If this is false, the request continues even if its caller stops waiting (see `Client`)."""
    full_within_s: float
    """How many seconds to wait for room in a full lane before PublishRefused is raised: 2 if left out, and 0 to raise
    it at once."""


KNOWN = frozenset(Options.__annotations__)


def message_of(body: Mapping[str, Any] | bytes, options: Options, *, stream: bool, user: str) -> Message:
    """Build the AMQP message of a request. `user`: the connection's AMQP user. Raises Problem for a priority outside 0
    to 9, and TypeError for an unknown option."""
    if not options.keys() <= KNOWN:
        unknown = ", ".join(sorted(options.keys() - KNOWN))
        raise TypeError(f"unknown option: {unknown}; known: {', '.join(sorted(KNOWN))}")
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
    """How many seconds a client should wait for the answer to a request: the sum of its deadline, its delay and
    `ANSWER_LATE_S`. Returns None (no limit) if the message sets no deadline, or if it sets an absolute start (`at`).

    A worker answers a request whose deadline has passed with an error. If no worker runs, only this limit ends the
    wait.
    """
    deadline_ms, at = message.headers.get(n.DEADLINE_MS), message.headers.get(n.AT)
    if not isinstance(deadline_ms, int) or at is not None:
        return None
    return (deadline_ms + int(message.headers.get(n.DELAY_MS, 0))) / 1000 + ANSWER_LATE_S
