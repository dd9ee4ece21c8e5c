"""A job is one delivery that is being worked on; its result is an outcome (`outcomes.py`)."""

import os
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b

from opentelemetry.trace import INVALID_SPAN, Span

from consumers.chain import Chain, Route
from consumers.interruptible import Interruptible
from consumers.limits.amounts import Amounts
from consumers.limits.base import Reservation
from consumers.rank import restored
from consumers.state.base import Completion, Copy, Held, Identity, Stop
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
ATTEMPT_WITHIN_S = 1200.0
STORE_WITHIN_S = 180.0
"""How long a delivery may wait for its claim, run its attempt, and wait until the store has its outcome. Together with
two publishes after that (up to 100 s each) this is less than the broker's consumer timeout of 1800 s. The broker takes
back a delivery that is held longer, does not count it, and delivers it again and again (docs/facts.md, section 7)."""
NowMs = Callable[[], int]
"""The clock: ms since 1970."""


def now_ms() -> int:
    """The wall clock."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class Asked:
    """What a delivery asks for: known once it is decoded."""

    request: Request
    lane: LaneSpec
    chain: Chain
    """The providers that may be called for it."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """The route that a job's call will take, and what is reserved there for it."""

    route: Route
    reservation: Reservation


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempted:
    """The attempt of a delivery, from its first call on."""

    started_ms: int
    run_ms: int = 0
    usage: Amounts | None = None
    """What the provider counted; None: unknown."""
    cost_usd: float | None = None
    """What the answer cost; None: no answer, or its model has no price."""
    lost: tuple[tuple[str, Amounts], ...] = ()
    """Calls before the last one that may have been paid: each one's model, and what was reserved for it."""
    counts: bool = True
    """False if the attempt does not count, because the provider was down."""


class Job:
    """One delivery on its way through the pipeline.

    `trusted`: a worker sent it, through the delay cascade or into a side queue: its internal headers are believed.
    """

    __slots__ = (
        "_copy", "asked", "attempted", "claim", "completion", "delivery", "hop", "id", "identity", "lane", "reserved",
        "span", "stopped", "taken_ms", "trail", "trusted", "waiting",
    )  # fmt: skip

    def __init__(
        self,
        delivery: Delivery,
        *,
        lane: LaneSpec | None,
        trusted: bool,
        taken_ms: int,
        speakers: Collection[str] = (),
    ) -> None:
        self.delivery = delivery
        self.lane = lane
        """None for a message without a lane (an unknown routing key)."""
        self.trusted = trusted
        self.id = delivery.message.message_id or uuid.uuid4().hex
        self.hop = read_hop(delivery.message.headers) if trusted else HopHeaders()
        if trusted:
            delivery.message.priority = restored(delivery.message.priority)
        headers = delivery.message.headers
        # a republished dead letter names its tenant, which is believed if its sender may speak for others
        stated = headers.get(n.TENANT) or (headers.get(n.USER_ID) if n.DEAD_AT in headers else None)
        self.identity = Identity(tenant_of(self.user_id, stated, speakers), self.id)
        self.taken_ms = taken_ms
        self.asked: Asked | None = None
        """None until it is decoded."""
        self.claim: Held | None = None
        self.trail: Trail | None = None
        """What is written for those who follow the request; None: nothing."""
        self.reserved: Reserved | None = None
        """None while nothing is reserved for it."""
        self.attempted: Attempted | None = None
        """None until its call has begun."""
        self.completion: Completion | None = None
        """How it ended, as it is stored and sent."""
        self._copy: Copy | None = None
        self.span: Span = INVALID_SPAN
        """The span of this delivery."""
        self.stopped: Stop | None = None
        """Why it must stop; None: it may go on."""
        self.waiting: Interruptible | None = None
        """The current wait, which `stop` can end; None if the job is not waiting."""

    def stop(self, why: Stop) -> None:
        """Tell the job to stop: end its current wait now, and each later one as soon as it begins."""
        self.stopped = why
        if self.waiting is not None:
            self.waiting.end()

    def interruptible(self, seconds: float | None) -> Interruptible:
        """Bounds a wait, which `stop` can then end: `async with job.interruptible(30): …`."""
        return Interruptible(self, seconds)

    def log_fields(self) -> dict[str, str | int]:
        """The fields of each of its log lines; `trace_id` only if there is a trace."""
        fields: dict[str, str | int] = {"request": self.id, "lane": self.lane_name, "attempt": self.attempts}
        if (trace_id := propagation.trace_id(self.span, self.message.headers)) is not None:
            fields["trace_id"] = trace_id
        return fields

    @property
    def user_id(self) -> str | None:
        """The user who published the request, as checked by the broker. A worker that delays the request keeps the name
        in a header."""
        return self.hop.user_id if self.trusted else self.message.user_id

    @property
    def dead_at(self) -> str | None:
        """When it had ended, by its header, if it is a dead letter that was published again; else None."""
        told = self.hop.dead_at if self.trusted else self.message.headers.get(n.DEAD_AT)
        return told if isinstance(told, str) else None

    @property
    def redelivered(self) -> bool:
        """An earlier delivery of this message was never settled."""
        return self.delivery.redelivered or self.hop.redelivered

    @property
    def is_fresh(self) -> bool:
        """True if the message comes from its publisher, not from a delay. It may have been set aside."""
        return not self.trusted or self.hop.is_fresh

    @property
    def came_before(self) -> bool:
        """True if the request was worked on before. Its outcome may be stored already, but not yet published."""
        return self.redelivered or not self.is_fresh

    def copy(self) -> Copy:
        """The properties of this message that the store compares."""
        if self._copy is not None:
            return self._copy
        message = self.message
        told = (
            message.reply_to, message.correlation_id, message.routing_key, message.timestamp_s, message.priority,
            message.app_id, message.headers.get(n.SENT_MS), message.headers.get(n.TRACEPARENT),
        )  # fmt: skip
        self._copy = Copy(
            body_hash=_body_hash(message),
            mark=blake2b(repr(told).encode(errors="replace"), digest_size=16).digest(),
            redelivered=self.redelivered,
            nonce=os.urandom(8),
            dead_at_ms=dead_at_ms(self.dead_at),
        )
        return self._copy

    @property
    def message(self) -> Message:
        return self.delivery.message

    @property
    def lane_name(self) -> str:
        return self.lane.name if self.lane else "none"

    @property
    def routing_key(self) -> str:
        """The key that it was published with; delays keep it."""
        return self.message.routing_key

    @property
    def attempts(self) -> int:
        """Attempts made so far, the one of this delivery included."""
        return self.hop.attempts + (1 if self.attempted is not None and self.attempted.counts else 0)

    @property
    def wait_ms(self) -> int:
        """The time from publishing (or the due time) to the start of this delivery's attempt; without an attempt, to
        the delivery."""
        return self.waited_ms(self.taken_ms if self.attempted is None else self.attempted.started_ms)

    @property
    def run_ms(self) -> int:
        """How long the attempt of this delivery ran."""
        return 0 if self.attempted is None else self.attempted.run_ms

    def waited_ms(self, until_ms: int) -> int:
        """The time from publishing (or the due time) to `until_ms`."""
        if self.asked is not None:
            return max(0, until_ms - self.asked.request.start_ms)
        return max(0, until_ms - max(self.published.ms, self.hop.due_ms or 0))

    @property
    def published(self) -> Published:
        """When it was published, if known. Works for invalid requests too."""
        if self.asked is not None:
            return Published(self.asked.request.sent_ms, self.asked.request.sent_by)
        return published(self.message, self.hop, now_ms=self.taken_ms)


def content_hash(content: bytes | str) -> bytes:
    """The hash by which bodies are compared. `content`: the body, or, if it lies elsewhere, its SHA-256 in hex."""
    known = content if isinstance(content, bytes) else content.lower().encode()
    return blake2b(known, digest_size=16).digest()


def _body_hash(message: Message) -> bytes:
    sha256 = message.headers.get(n.BODY_SHA256)
    return content_hash(sha256 if isinstance(sha256, str) else message.body)


def tenant_of(user_id: str | None, stated: object, speakers: Collection[str]) -> str:
    """The tenant of a request: its user, or the stated tenant if that user may speak for others. "" if unknown."""
    if user_id in speakers and isinstance(stated, str):
        return stated
    return user_id or ""


def moment_text(ms: int) -> str:
    """A time as text (RFC 3339, UTC)."""
    when = datetime.fromtimestamp(ms / 1000, tz=UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def dead_at_ms(text: object) -> int | None:
    """The time in a dead letter's header, ms since 1970; None if it is missing or malformed."""
    if not isinstance(text, str):
        return None
    try:
        return round(1000 * datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError):
        return None


def is_trusted(message: Message, names: Names) -> bool:
    """Whether a worker sent it: through `lane.due` (internal), or a delay or side exchange, to which only workers may
    publish."""
    return message.exchange == names.due_exchange or message.exchange.startswith(
        (names.delay_prefix, names.side_prefix)
    )
