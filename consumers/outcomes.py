"""The possible outcomes of a delivery, as a closed set of classes. `settle.py` carries them out."""

from dataclasses import dataclass
from typing import assert_never

from consumers.state.base import Completion, Stop
from lanekeeper.contract.messages import BodyAddress
from lanekeeper.contract.problems import RequestProblem

LATER_MS = 1000
"""If another worker has the claim of a request, or this worker's work is paused, the request is deferred by this many
ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The provider answered. Its answer goes to the requester."""

    body: bytes
    """The provider's answer: Anthropic's Message object as JSON."""
    model: str
    provider: str
    kept: BodyAddress | None = None
    """The address and digest of an answer that is stored outside the broker, because it is too large for an AMQP
    message; `body` is then a JSON object with that address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferred:
    """The request waits in the broker's delay queues and is delivered again later. It does not count as an attempt."""

    delay_ms: int
    reason: str
    due_ms: int | None = None
    """The due time of the request, ms since 1970; None: it does not change."""
    redelivered: bool = False
    """True if the deferred message was redelivered from a queue for which the broker counts no deliveries: the next
    worker must know it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried:
    """The attempt failed and is counted. The request is delivered again after `delay_ms`, ahead of new requests."""

    delay_ms: int
    error: str
    """The error of the failed attempt in one line, for the requester."""
    brief: str = ""
    """The error of the failed attempt without content of the request, for logs and events."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The request ended with an error, and its message is not kept as a dead letter."""

    problem: RequestProblem


@dataclass(frozen=True, slots=True)
class Buried:
    """The request ended with an error, and its message is kept in the queue `lane.dead`."""

    problem: RequestProblem


@dataclass(frozen=True, slots=True)
class Dropped:
    """The request was cancelled. The requester gets an error, and the message is not kept as a dead letter."""

    problem: RequestProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The request had ended before this delivery. Its stored result is sent again."""

    completion: Completion
    buries: bool = False
    """True if the message may be missing in `lane.dead`: it is published there, perhaps a second time."""
    is_reply_only: bool = False
    """True if only the reply of the request was left to send, because the reply queue had been full."""


Outcome = Answered | Deferred | Retried | Refused | Buried | Dropped | Replayed


def ended_by(problem: RequestProblem) -> Refused | Buried:
    """The outcome of a request that ends with this error: `Buried` (kept in `lane.dead`) if docs/contract.md says so
    for the error, else `Refused`."""
    return Buried(problem) if problem.type.parked else Refused(problem)


def ended(code: str, detail: str, *, status: int | None = None, brief: str | None = None) -> Refused | Buried:
    """The outcome of a request that ends with the error of this code (see `RequestProblem`)."""
    return ended_by(RequestProblem(code, detail, status=status, brief=brief))


def stopped_by(why: Stop, *, doing: str) -> Dropped | Deferred:
    """The outcome of a stopped job: its request was cancelled, or another delivery has taken over its claim (`FENCED`).
    `doing`: a verb in the past tense for the error's text, which says what the job did when it was stopped."""
    match why:
        case Stop.CANCELLED:
            return Dropped(RequestProblem("cancelled", f"cancelled by its owner while it {doing}"))
        case Stop.FENCED:
            return Deferred(delay_ms=LATER_MS, reason="running elsewhere")
        case never:
            assert_never(never)
