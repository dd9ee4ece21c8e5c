"""The possible outcomes of a delivery: a closed set. `settle.py` carries them out."""

from dataclasses import dataclass
from typing import assert_never

from consumers.state.base import Completion, Stop
from lanekeeper.contract.problems import RequestProblem

LATER_MS = 1000
"""How long a request is deferred that runs elsewhere, or that a pause holds back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The provider answered: the Message goes to the requester."""

    body: bytes
    model: str
    provider: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferred:
    """The request waits, and no attempt is counted."""

    delay_ms: int
    reason: str
    due_ms: int | None = None
    """The due time of the request, if it has one; ms since 1970."""
    redelivered: bool = False
    """True if the message's last delivery was never settled, in a queue that does not count deliveries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried:
    """The attempt failed and counts; it comes back after `delay_ms`, ahead of its peers."""

    delay_ms: int
    error: str
    """The error in one line, for the requester."""
    brief: str = ""
    """The error without content, for logs and events."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A final error; the message is not kept."""

    problem: RequestProblem


@dataclass(frozen=True, slots=True)
class Buried:
    """A final error; the message is kept in `lane.dead`."""

    problem: RequestProblem


@dataclass(frozen=True, slots=True)
class Dropped:
    """The request was cancelled, or replaced by a newer one: the requester gets an error, and the message is not
    kept."""

    problem: RequestProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The request had ended before: the stored outcome is sent again."""

    completion: Completion
    buries: bool = False
    """This message may not have been parked when it ended, so it is parked (again)."""
    retold: bool = False
    """True if only the reply was left to send, because its queue had refused it."""


Outcome = Answered | Deferred | Retried | Refused | Buried | Dropped | Replayed


def ended_by(problem: RequestProblem) -> Refused | Buried:
    """The outcome of a problem: parked if the table of errors in docs/contract.md says so."""
    return Buried(problem) if problem.type.parked else Refused(problem)


def stopped_by(why: Stop, *, doing: str, due_ms: int | None) -> Dropped | Deferred:
    """The outcome of a job that was told to stop. `doing`: what it was doing, for the error's detail."""
    match why:
        case Stop.CANCELLED:
            return Dropped(RequestProblem("cancelled", f"cancelled by its owner while it {doing}"))
        case Stop.FENCED:
            return Deferred(delay_ms=LATER_MS, reason="running elsewhere", due_ms=due_ms)
        case never:
            assert_never(never)
