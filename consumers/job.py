"""Defines `Job`: one delivery while a worker works on it. The result of a job is an outcome (`outcomes.py`)."""

import os
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, auto
from functools import cached_property
from hashlib import blake2b

from opentelemetry.trace import INVALID_SPAN, Span

from consumers.chain import Chain, Route
from consumers.interruptible import Interruptible
from consumers.limits.base import Amounts, Reservation
from consumers.rank import original_priority
from consumers.state.base import Completion, Fingerprint, Held, Identity, Stop
from consumers.trail import Trail
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import Names
from lanekeeper.telemetry import propagation
from topology.broker.session import Delivery
from topology.codec.headers import HopHeaders, read_hop
from topology.codec.published import Published, published
from topology.codec.request import Request
from topology.lanes import LaneSpec

CLAIM_WITHIN_S = 60.0
"""For how many seconds a delivery may wait for its claim (the store's record that this worker works on its request)
while the store is unavailable."""
ATTEMPT_WITHIN_S = 1200.0
"""The longest time, in seconds, that one attempt of a request may take."""
STORE_WITHIN_S = 180.0
"""For how many seconds a worker tries to store the outcome of a request while the store is unavailable. Together with
`CLAIM_WITHIN_S`, `ATTEMPT_WITHIN_S` and two publishes (up to 100 s each), this is less than the broker's consumer
timeout of 1800 s, after which the broker would deliver the request again, without end (docs/facts.md, section 7)."""
NowMs = Callable[[], int]
"""A function that returns the time in ms since 1970."""


def now_ms() -> int:
    """The time of the system clock, in ms since 1970."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class Decoded:
    """A decoded request, its lane, and the providers that may be called for it (`chain`). A message is decoded once
    for each delivery, and a second time only if its body is not in the message and had to be fetched."""

    request: Request
    lane: LaneSpec
    chain: Chain


@dataclass(frozen=True, slots=True)
class Reserved:
    """The provider and model that will be called for a job (`route`), and the budget, that is, the part of the
    account's rate limits, that is reserved for the call (`reservation`)."""

    route: Route
    reservation: Reservation


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempted:
    """What is known about the attempt that is made for a delivery, that is, about its one or two calls to providers.
    It exists only once the first of these calls has begun."""

    started_ms: int
    run_ms: int = 0
    """How many ms the attempt ran; 0 while it runs."""
    usage: Amounts | None = None
    """What the provider counted (requests, tokens) for the call that decided the attempt's outcome; None: unknown."""
    cost_usd: float | None = None
    """What the answer cost; None if there is no answer, or its model has no price."""
    lost: tuple[tuple[str, Amounts], ...] = ()
    """The attempt's failed calls that may have to be paid for, without its last call: for each, the model, and the
    requests and tokens that it used."""
    counts: bool = True
    """Whether the attempt counts against the request's limit of attempts. False if the provider was down."""


class Source(Enum):
    """Where a message was published. This tells whether a worker published the message: only then are its internal
    headers trusted."""

    REQUESTER = auto()
    """The message was published to the exchange for requests, or to another one that is not for workers only. Its
    internal headers are ignored, because anyone may have set them."""
    DELAY = auto()
    """A worker published the message to a delay exchange or a due queue, so its internal headers are trusted."""
    SIDE = auto()
    """A worker published the message to a side queue, so its internal headers are trusted."""


class Job:
    """A delivery while a worker works on it: its message, and what is known about its request so far. `speakers`: the
    users that may publish for other tenants."""

    def __init__(
        self,
        delivery: Delivery,
        *,
        lane: LaneSpec | None,
        source: Source,
        taken_ms: int,
        speakers: Collection[str] = (),
    ) -> None:
        self.delivery = delivery
        self.lane = lane
        """The lane of the request; None if the message's routing key names no lane."""
        self.source = source
        self.id = delivery.message.message_id or uuid.uuid4().hex
        message, headers = delivery.message, delivery.message.headers
        if self.trusted:
            self.hop = read_hop(headers)
            message.priority = original_priority(message.priority)
        else:
            dead_at = headers.get(n.DEAD_AT)
            self.hop = HopHeaders(
                user_id=message.user_id,
                expiration=message.expiration,
                dead_at=dead_at if isinstance(dead_at, str) else None,
                is_fresh=True,
            )
        """What is known about the request's past (attempts, errors, due time, user). If a worker published the message,
        this is read from the headers that the worker wrote; otherwise from the message's properties."""
        # a republished dead letter names its tenant in a header, which counts if its sender may speak for others
        stated = headers.get(n.TENANT) or (headers.get(n.USER_ID) if n.DEAD_AT in headers else None)
        self.identity = Identity(tenant_of(self.hop.user_id, stated, speakers), self.id)
        self.taken_ms = taken_ms
        self.decoded: Decoded | None = None
        """The request, decoded from the message; None until the message is decoded."""
        self.claim: Held | None = None
        """The claim that this process holds for the request, that is, the store's record that no other worker may work
        on it; None if the process holds none."""
        self.trail: Trail | None = None
        """Writes the progress of the request to the store, for clients that follow it; None if the progress is not
        written."""
        self.reserved: Reserved | None = None
        """The budget (a part of a provider's rate limits) that is reserved for the call to the provider; None while no
        budget is reserved."""
        self.attempted: Attempted | None = None
        """What is known about this delivery's attempt; None until its first call to a provider has begun."""
        self.completion: Completion | None = None
        """How the request ended, as it is stored and sent; None until it has ended."""
        self.span: Span = INVALID_SPAN
        """The trace span of this delivery; an invalid span until the work on it begins."""
        self.stopped: Stop | None = None
        """Why the job must stop; None: it may continue."""
        self.waiting: Interruptible | None = None
        """The wait that the job is in now (in an `interruptible` block) and that `stop` can end; None if there is
        none."""

    def stop(self, why: Stop) -> None:
        """Stop the job: end its current wait now, and each later wait as soon as it begins."""
        self.stopped = why
        if self.waiting is not None:
            self.waiting.end()

    def interruptible(self, seconds: float | None) -> Interruptible:
        """A context manager that ends the wait in its block when `stop` is called, or after `seconds` (None: no time
        limit). Execution then continues after the block, without an exception."""
        return Interruptible(self, seconds)

    def log_fields(self) -> dict[str, str | int]:
        """The fields of each log line about this job, among them `trace_id` if there is a trace."""
        fields: dict[str, str | int] = {"request": self.id, "lane": self.lane_name, "attempt": self.attempts}
        if (trace_id := propagation.trace_id(self.span, self.message.headers)) is not None:
            fields["trace_id"] = trace_id
        return fields

    @property
    def trusted(self) -> bool:
        """Whether a worker published the message, so that its internal headers are genuine."""
        return self.source is not Source.REQUESTER

    @property
    def redelivered(self) -> bool:
        """True if this message was delivered before and not acknowledged. This is known from AMQP's `redelivered` flag
        or from a header that a worker wrote."""
        return self.delivery.redelivered or self.hop.redelivered

    @property
    def came_before(self) -> bool:
        """True if a worker had this request before. The request's outcome may then be stored already, although its
        reply was not published yet."""
        return self.redelivered or not self.hop.is_fresh

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The properties of this message (such as the hash of its body) by which the store recognises that another
        message with the same id is a different request."""
        message = self.message
        compared = (
            message.reply_to, message.correlation_id, message.routing_key, message.timestamp_s, message.priority,
            message.app_id, message.headers.get(n.SENT_MS), message.headers.get(n.TRACEPARENT),
        )  # fmt: skip
        return Fingerprint(
            body_hash=_body_hash(message),
            mark=blake2b(repr(compared).encode(errors="replace"), digest_size=16).digest(),
            # a message in a side queue that was not delivered before has no claim; only its original may have one
            redelivered=self.delivery.redelivered if self.source is Source.SIDE else self.redelivered,
            nonce=(b"s" if self.source is Source.SIDE else b"q") + os.urandom(7),
            dead_at_ms=dead_at_ms(self.hop.dead_at),
        )

    @property
    def message(self) -> Message:
        return self.delivery.message

    @property
    def lane_name(self) -> str:
        return self.lane.name if self.lane else "none"

    @property
    def routing_key(self) -> str:
        """The routing key with which the requester published the request. It stays the same when the request is delayed
        or moved to a side queue."""
        return self.message.routing_key

    @property
    def attempts(self) -> int:
        """How many attempts were made for the request, including the attempt of this delivery, if that counts."""
        return self.hop.attempts + (1 if self.attempted is not None and self.attempted.counts else 0)

    @property
    def wait_ms(self) -> int:
        """How many ms the request waited: from when it was published (or was due) to the start of this delivery's
        attempt or, if there is no attempt, to the delivery."""
        return self.waited_ms(self.taken_ms if self.attempted is None else self.attempted.started_ms)

    @property
    def run_ms(self) -> int:
        """How many ms the attempt of this delivery ran; 0 if there is no attempt or while it runs."""
        return 0 if self.attempted is None else self.attempted.run_ms

    def waited_ms(self, until_ms: int) -> int:
        """How many ms the request had waited at the time `until_ms`, since it was published or since its due time."""
        if self.decoded is not None:
            return max(0, until_ms - self.decoded.request.start_ms)
        return max(0, until_ms - max(self.published.ms, self.hop.due_ms or 0))

    @property
    def published(self) -> Published:
        """When the request was published, and where that time comes from: a header, the time stamp of the message, or
        only the time of the delivery. It is known for invalid requests too."""
        if self.decoded is not None:
            return self.decoded.request.published
        return published(self.message, self.hop, now_ms=self.taken_ms)


def content_hash(content: bytes | str) -> bytes:
    """The hash by which the bodies of two messages are compared. `content`: the body, or its SHA-256 in hex if the body
    is not in the message."""
    known = content if isinstance(content, bytes) else content.lower().encode()
    return blake2b(known, digest_size=16).digest()


def _body_hash(message: Message) -> bytes:
    sha256 = message.headers.get(n.BODY_SHA256)
    return content_hash(sha256 if isinstance(sha256, str) else message.body)


def tenant_of(user_id: str | None, stated: object, speakers: Collection[str]) -> str:
    """The tenant of a request: its user, or the tenant that its header names (`stated`), if the user is one of
    `speakers` (users that may publish for other tenants). The result is "" if the tenant is unknown."""
    if user_id in speakers and isinstance(stated, str):
        return stated
    return user_id or ""


def moment_text(ms: int) -> str:
    """A time as text (RFC 3339, UTC)."""
    when = datetime.fromtimestamp(ms / 1000, tz=UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def dead_at_ms(text: object) -> int | None:
    """When the request of a dead letter ended, in ms since 1970. `text`: the value of the letter's header with that
    time. None is returned if the header is missing or malformed."""
    if not isinstance(text, str):
        return None
    try:
        return round(1000 * datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError):
        return None


def source_of(message: Message, names: Names) -> Source:
    """Where a message was published, according to its exchange."""
    if message.exchange.startswith(names.side_prefix):
        return Source.SIDE
    if message.exchange == names.due_exchange or message.exchange.startswith(names.delay_prefix):
        return Source.DELAY
    return Source.REQUESTER
