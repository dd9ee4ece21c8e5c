"""A request as a client sends it: its options, the message made of them, and the wait for its end."""

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, BinaryIO, TypedDict

from lanekeeper.contract import names as n
from lanekeeper.contract.identity import REQUEST_ID, TENANT, encodable, is_request_id, is_tenant
from lanekeeper.contract.messages import PRIORITY_AT_MOST, BodyAddress, Message
from lanekeeper.contract.problems import AccessRefused, BrokerError, InvalidArgument, TopologyMismatch
from lanekeeper.replies import ControlRefused, Final, NoReply, NotEnded, Problem

PRIORITY = 4
"""Always sent: without one, quorum queues take 4 and classic queues 0 (docs/facts.md, section 1)."""
ANSWER_LATE_S = 5.0
"""For so long after the deadline a client waits for the worker's error that says so."""
FIRST_PAUSE_S = 0.1
PAUSE_CAP_S = 5.0
HEADER_NAME_BYTES = 255
LARGEST_NUMBER = 1e12
"""Of an argument, such as seconds: what is made of it fits into every clock and header."""


Json = Mapping[str, Any] | Sequence[Any] | str | bytes
"""A body. Bytes are JSON already. A list and a str: for a handler or a pipeline alone."""


class Options(TypedDict, total=False):
    """The options of a request; each may be left out."""

    message_id: str
    tenant: str
    """Normally the connection's user, which the broker checks; another one only where `LANEKEEPER_SPEAKERS` allows it.
    """
    priority: int
    deadline_s: float
    """For the final answer, counted from publishing or from the end of the delay. Without it, the lane's."""
    delay_s: float
    at: datetime
    """The earliest start: a time with a time zone."""
    beta: str
    """The value of the header `anthropic-beta`."""
    dialect: str
    """The API whose body it is: `anthropic.messages` (the default), `openai.chat`, `openai.responses` or
    `openai.embeddings`. The answer is of the same API."""
    handler: str
    """The handler that answers in place of the model (`[handlers.NAME]` of the service); the body is then any JSON."""
    pipeline: str
    """The pipeline that is run (`[pipelines.NAME]` of the service); the body, any JSON, is its input."""
    webhook: str
    """The URL to which the outcome is posted."""
    debounce: str
    """Of several requests with this key only the last one runs, `delay_s` after it; the others end as `superseded`."""
    headers: Mapping[str, Any]
    """Further AMQP headers, such as `traceparent`; they override those of other options."""
    cancel_abandoned: bool
    """Whether the request is cancelled if its caller stops waiting (see `Client`)."""
    full_within_s: float
    """How many seconds to wait for room in a full lane: 2 if left out, 0 for none."""


_KINDS: Mapping[str, tuple[type, ...]] = {
    "message_id": (str,), "tenant": (str,), "priority": (int,), "deadline_s": (int, float), "delay_s": (int, float),
    "at": (datetime,), "beta": (str,), "dialect": (str,), "handler": (str,), "pipeline": (str,),
    "webhook": (str,), "debounce": (str,), "headers": (Mapping,), "cancel_abandoned": (bool,),
    "full_within_s": (int, float),
}  # fmt: skip


def check_argument(name: str, value: object, *kinds: type) -> None:
    """Raises InvalidArgument for another type, for NaN and too large numbers, and for text that is no UTF-8."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        allowed = " or ".join(kind.__name__ for kind in kinds)
        raise InvalidArgument(f"{name}: found {type(value).__name__}, allowed is {allowed}")
    if isinstance(value, (int, float)) and not abs(value) <= LARGEST_NUMBER:  # nor NaN
        raise InvalidArgument(f"{name}: allowed is a number of at most {LARGEST_NUMBER:g}")
    if isinstance(value, str) and encodable(value) != value:
        raise InvalidArgument(f"{name}: has half a character (a lone surrogate), which UTF-8 cannot express")


def request_message(body: Json, options: Options, *, stream: bool, user: str) -> Message:
    """The message of a request. `user`: the connection's. Raises Problem for a wrong priority, and InvalidArgument."""
    if not options.keys() <= _KINDS.keys():
        unknown = ", ".join(sorted(options.keys() - _KINDS.keys()))
        raise InvalidArgument(f"unknown option: {unknown}; known: {', '.join(sorted(_KINDS))}")
    for name, value in options.items():
        if value is not None:
            check_argument(name, value, *_KINDS[name])
    if (id := options.get("message_id")) is not None and not is_request_id(id):
        raise InvalidArgument(f"message_id: {REQUEST_ID}")
    if (tenant := options.get("tenant")) is not None and not is_tenant(tenant):
        raise InvalidArgument(f"tenant: {TENANT}")
    for name in options.get("headers") or {}:
        check_argument("the name of a header", name, str)
        if len(name.encode()) > HEADER_NAME_BYTES:
            raise InvalidArgument(f"header {name[:40]}…: a name has at most {HEADER_NAME_BYTES} bytes")
    if (dialect := options.get("dialect")) is not None and dialect not in n.DIALECTS:
        raise InvalidArgument(f"dialect: found {dialect[:40]!r}, allowed are {', '.join(n.DIALECTS)}")
    priority = options.get("priority", PRIORITY)
    if priority is None or not 0 <= priority <= PRIORITY_AT_MOST:
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
    for header, text in (
        (n.ANTHROPIC_BETA, options.get("beta")),
        (n.DIALECT, options.get("dialect")),
        (n.PIPELINE, options.get("pipeline")),
        (n.WEBHOOK, options.get("webhook")),
        (n.DEBOUNCE, options.get("debounce")),
    ):
        if text is not None:
            headers[header] = text
    if tenant is not None and tenant != user:
        headers[n.TENANT] = tenant
    return Message(
        body=body if isinstance(body, bytes) else _json(body),
        headers={**headers, **(options.get("headers") or {})},
        content_type="application/json",
        message_id=uuid.uuid4().hex if id is None else id,
        priority=priority,
        type=options.get("handler"),
        user_id=None if tenant is None else user,
    )


def _json(body: object) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"body: cannot be written as JSON: {error}") from error


def bound_s(message: Message) -> float | None:
    """For how long a client waits for an answer: deadline, delay and `ANSWER_LATE_S`. None: no limit. A worker answers
    a late request with an error; if none runs, only this limit ends the wait."""
    deadline_ms, at = ms_in(message, n.DEADLINE_MS), message.headers.get(n.AT)
    if deadline_ms is None or at is not None:
        return None
    return (deadline_ms + (ms_in(message, n.DELAY_MS) or 0)) / 1000 + ANSWER_LATE_S


def ms_in(message: Message, header: str) -> int | None:
    """None if there is no such header, or if a worker refuses what the caller gave."""
    found = message.headers.get(header)
    if isinstance(found, str) and found.isascii() and found.isdigit() and len(found) < 16:
        found = int(found)
    return found if isinstance(found, int) and 0 <= found < 2**53 else None


@dataclass(slots=True, kw_only=True)
class OutgoingRequest:
    """A request that is being published."""

    message: Message
    content: BinaryIO | None = None
    """The body, if it was given as a file; that of `message` is then empty."""
    key: str
    tenant: str | None
    chose_id: bool
    publish_within_s: float
    absent_within_s: float | None
    full_within_s: float
    timeout_s: float | None
    """How long the caller waits for the answer or, streamed, for its next part."""
    end: float | None

    may_be_published: bool = False
    kept: BodyAddress | None = None

    @property
    def id(self) -> str:
        assert self.message.message_id is not None
        return self.message.message_id


def time_in(timeout_s: float | None) -> float | None:
    """A time of the event loop's clock."""
    return None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s


async def until_ended(ask: Callable[[float | None], Awaitable[Final]], *, end: float | None) -> Final:
    """Call `ask` (with the seconds left until `end`) until the request has ended, the last time at `end`. Without an
    end, the first BrokerError ends the wait. Raises the last error of `ask`."""
    loop = asyncio.get_running_loop()
    pause_s = FIRST_PAUSE_S
    while True:
        asked_at = loop.time()
        try:
            return await ask(None if end is None else max(0.0, end - asked_at))
        except (AccessRefused, TopologyMismatch):
            raise
        except (NotEnded, NoReply, BrokerError, ControlRefused) as error:
            if isinstance(error, ControlRefused) and not error.is_passing:
                raise
            over = isinstance(error, BrokerError) if end is None else loop.time() >= end
            if over:
                raise
        again_at = asked_at + pause_s
        await asyncio.sleep(max(0.0, (again_at if end is None else min(again_at, end)) - loop.time()))
        pause_s = min(PAUSE_CAP_S, pause_s * 1.5)
