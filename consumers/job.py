"""A job is one delivery being worked; an outcome is what that came to. The outcomes are a closed set."""

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b

from opentelemetry.trace import INVALID_SPAN, Span

from consumers.chain import Chain, Route
from consumers.limits.amounts import Amounts
from consumers.limits.base import Reservation
from consumers.rank import restored
from consumers.state.base import Completion, Copy, Held, Identity, Stop
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import RequestProblem
from lanekeeper.telemetry import propagation
from topology.broker.session import Delivery
from topology.codec.headers import HopHeaders, read_hop
from topology.codec.published import Published, published
from topology.codec.request import Request
from topology.lanes import LaneSpec

CLAIM_WITHIN_S = 60.0
ATTEMPT_WITHIN_S = 1200.0
STORE_WITHIN_S = 180.0
"""How long a delivery may wait for its claim, be worked on, and wait for the store to take how it ended. With the time
that two publishes may take after that (100 s each) it is less than the broker's consumer timeout, 1800 s: what is held
longer the broker takes back, counts for nothing, and hands out again and again (docs/facts.md, section 7)."""
NowMs = Callable[[], int]
"""The clock: ms since 1970."""


def now_ms() -> int:
    """The wall clock."""
    return time.time_ns() // 1_000_000


class Job:
    """One delivery on its way through the pipeline.

    `trusted`: a worker sent it, through the delay cascade or into a side queue: its internal headers are believed.
    """

    __slots__ = (
        "_copy", "attempt_started_ms", "chain", "claim", "completion", "cost_usd", "deaths", "delivery", "hop", "id",
        "identity", "lane", "limit", "lost", "request", "reservation", "route", "run_ms", "span", "stopped",
        "taken_ms", "trusted", "usage",
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
        """None for what fell out of no lane at all (an unknown routing key)."""
        self.trusted = trusted
        self.id = delivery.message.message_id or uuid.uuid4().hex
        self.hop = read_hop(delivery.message.headers) if trusted else HopHeaders()
        if trusted:
            delivery.message.priority = restored(delivery.message.priority)
        headers = delivery.message.headers
        # a dead letter that is published again tells whose it was; whoever may speak for others is believed
        stated = headers.get(n.TENANT) or (headers.get(n.USER_ID) if n.DEAD_AT in headers else None)
        self.identity = Identity(tenant_of(self.user_id, stated, speakers), self.id)
        self.taken_ms = taken_ms
        self.request: Request | None = None
        """Set once the codec has read it."""
        self.chain = Chain()
        """Who may be asked for it; found when it has been read."""
        self.attempt_started_ms: int | None = None
        self.run_ms = 0
        """How long the attempt of this delivery ran."""
        self.claim: Held | None = None
        self.deaths = 0
        """Holders of its claim before this one that never let go."""
        self.limit: asyncio.Timeout | None = None
        """Ends the attempt, or the wait for its budget; there while it runs."""
        self.route: Route | None = None
        """Where it is called, and whose budget it uses."""
        self.reservation: Reservation | None = None
        self.usage: Amounts | None = None
        """What the provider counted of the attempt; None: that is not known."""
        self.lost: list[tuple[str, Amounts]] = []
        """Calls within the attempt before the last one that may have been paid: their models, and what was expected."""
        self.cost_usd: float | None = None
        """What the answer cost; None: no answer, or its model has no price."""
        self.completion: Completion | None = None
        """How it ended, as it is stored and told."""
        self._copy: Copy | None = None
        self.span: Span = INVALID_SPAN
        """What is traced of this delivery."""
        self.stopped: Stop | None = None
        """Why it must not go on, where that is so."""

    def stop(self, why: Stop) -> None:
        """Have the attempt end now: the provider's socket is closed with it."""
        self.stopped = why
        if self.limit is not None and not self.limit.expired():
            self.limit.reschedule(asyncio.get_running_loop().time())

    def log_fields(self) -> dict[str, str | int]:
        """What each of its log lines carries; `trace_id` only where there is a trace."""
        fields: dict[str, str | int] = {"request": self.id, "lane": self.lane_name, "attempt": self.attempts}
        if (trace_id := propagation.trace_id(self.span, self.message.headers)) is not None:
            fields["trace_id"] = trace_id
        return fields

    @property
    def user_id(self) -> str | None:
        """Who published it, as the broker has checked; kept by the worker that sent it through a delay."""
        return self.hop.user_id if self.trusted else self.message.user_id

    @property
    def dead_at(self) -> str | None:
        """Of a dead letter that was published again: when it had ended, as it tells."""
        told = self.hop.dead_at if self.trusted else self.message.headers.get(n.DEAD_AT)
        return told if isinstance(told, str) else None

    @property
    def redelivered(self) -> bool:
        """An earlier delivery of this message was never settled."""
        return self.delivery.redelivered or self.hop.redelivered

    @property
    def is_fresh(self) -> bool:
        """It comes from its publisher, and was at most set aside since: not from a delay."""
        return not self.trusted or self.hop.is_fresh

    @property
    def came_before(self) -> bool:
        """It was worked on before, and perhaps ended by whoever had it then: what follows the store may not be done."""
        return self.redelivered or not self.is_fresh

    def copy(self) -> Copy:
        """What the store compares of this message."""
        if self._copy is not None:
            return self._copy
        message = self.message
        told = (
            message.reply_to, message.correlation_id, message.routing_key, message.timestamp_s, message.priority,
            message.app_id, message.headers.get(n.SENT_MS), message.headers.get(n.TRACEPARENT),
        )  # fmt: skip
        self._copy = Copy(
            body_hash=blake2b(message.body, digest_size=16).digest(),
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
        return self.hop.attempts + (0 if self.attempt_started_ms is None else 1)

    @property
    def wait_ms(self) -> int:
        """From publishing (or the due time) to the start of this delivery's attempt, or until it was taken."""
        return self.waited_ms(self.attempt_started_ms or self.taken_ms)

    def waited_ms(self, until_ms: int) -> int:
        """From publishing (or the due time) to `until_ms`."""
        if self.request is not None:
            return max(0, until_ms - self.request.start_ms)
        return max(0, until_ms - max(self.published.ms, self.hop.due_ms or 0))

    @property
    def published(self) -> Published:
        """When it was published, as far as is known; of what is no request, too."""
        if self.request is not None:
            return Published(self.request.sent_ms, self.request.sent_by)
        return published(self.message, self.hop, now_ms=self.taken_ms)


def tenant_of(user_id: str | None, stated: object, speakers: Collection[str]) -> str:
    """Whose request it is: its user's, or whose that user says, where it may speak for others. "" for nobody's."""
    if user_id in speakers and isinstance(stated, str):
        return stated
    return user_id or ""


def moment_text(ms: int) -> str:
    """A time as it is told to people and programs (RFC 3339, UTC)."""
    when = datetime.fromtimestamp(ms / 1000, tz=UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def dead_at_ms(text: object) -> int | None:
    """The time that a dead letter tells, ms since 1970; None where there is none that can be read."""
    if not isinstance(text, str):
        return None
    try:
        return round(1000 * datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError):
        return None


def is_trusted(message: Message, names: Names) -> bool:
    """Whether a worker sent it: through `lane.due` (internal), or a delay or side exchange, which only workers may
    write."""
    return message.exchange == names.due_exchange or message.exchange.startswith(
        (names.delay_prefix, names.side_prefix)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The provider answered: the Message goes to the requester."""

    body: bytes
    model: str
    provider: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferred:
    """It waits, and no attempt is counted."""

    delay_ms: int
    reason: str
    due_ms: int | None = None
    """When it is due, where that is what it waits for; ms since 1970."""
    redelivered: bool = False
    """It leaves a queue that counts nothing, where its last delivery was never settled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried:
    """The attempt failed and counts; it comes back after `delay_ms`, ahead of its peers."""

    delay_ms: int
    error: str
    """One line, for the requester."""
    brief: str = ""
    """The same without content, for logs and events."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A final error with nothing to keep."""

    problem: RequestProblem


@dataclass(frozen=True, slots=True)
class Buried:
    """A final error; the message is kept in `lane.dead`."""

    problem: RequestProblem


@dataclass(frozen=True, slots=True)
class Dropped:
    """It was cancelled, or a newer one took its place: told so, and nothing is kept of it."""

    problem: RequestProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """It had ended before: what the store keeps is told again."""

    completion: Completion
    buries: bool = False
    """This very message was never settled: whether it was parked is not known, so it is parked (again)."""
    retold: bool = False
    """All else was done: its reply queue refused it before."""


Outcome = Answered | Deferred | Retried | Refused | Buried | Dropped | Replayed


def ended_by(problem: RequestProblem) -> Refused | Buried:
    """The outcome of a problem: parked where the table of errors in docs/contract.md says so."""
    return Buried(problem) if problem.type.parked else Refused(problem)
