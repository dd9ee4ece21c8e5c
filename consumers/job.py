"""A job is one delivery being worked; an outcome is what that came to. The outcomes are a closed set."""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from topology.broker.deliveries import Delivery
from topology.contract.headers import HopHeaders, read_hop
from topology.contract.messages import Message, Request
from topology.contract.problems import RequestProblem
from topology.lanes import LaneSpec
from topology.names import Names

NowMs = Callable[[], int]
"""The clock: ms since 1970."""


def now_ms() -> int:
    """The wall clock."""
    return time.time_ns() // 1_000_000


class Job:
    """One delivery on its way through the pipeline.

    `trusted`: it came through the delay cascade, so that its internal headers are a worker's (design.md, section 3).
    """

    __slots__ = ("attempt_started_ms", "delivery", "hop", "id", "lane", "request", "run_ms", "taken_ms", "trusted")

    def __init__(self, delivery: Delivery, *, lane: LaneSpec | None, trusted: bool, taken_ms: int) -> None:
        self.delivery = delivery
        self.lane = lane
        """None for what fell out of no lane at all (an unknown routing key)."""
        self.trusted = trusted
        self.id = delivery.message.message_id or uuid.uuid4().hex
        self.hop = read_hop(delivery.message.headers) if trusted else HopHeaders()
        self.taken_ms = taken_ms
        self.request: Request | None = None
        """Set once the codec has read it."""
        self.attempt_started_ms: int | None = None
        self.run_ms = 0
        """How long the attempt of this delivery ran."""

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
        if self.request is None:
            return 0
        return max(0, (self.attempt_started_ms or self.taken_ms) - self.request.start_ms)


def is_trusted(message: Message, names: Names) -> bool:
    """Whether a worker sent it: through `lane.due` (internal) or a delay exchange, which only workers may write."""
    return message.exchange == names.due_exchange or message.exchange.startswith(names.delay_prefix)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried:
    """The attempt failed and counts; it comes back after `delay_ms`, ahead of its peers."""

    delay_ms: int
    error: str
    """One line, without content."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A final error with nothing to keep."""

    problem: RequestProblem


@dataclass(frozen=True, slots=True)
class Buried:
    """A final error; the message is kept in `lane.dead`."""

    problem: RequestProblem


Outcome = Answered | Deferred | Retried | Refused | Buried


def ended_by(problem: RequestProblem) -> Refused | Buried:
    """The outcome of a problem: parked where the contract's table says so (section 2)."""
    return Buried(problem) if problem.type.parked else Refused(problem)
