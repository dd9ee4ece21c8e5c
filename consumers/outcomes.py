"""Defines the possible outcomes of a delivery, as a closed set of classes. `settle.py` carries out an outcome: it
publishes, for example, the reply."""

from dataclasses import dataclass
from typing import assert_never

from consumers.state.base import Completion, Stop
from lanekeeper.contract.messages import BodyAddress
from lanekeeper.contract.problems import ProviderFailure, RequestProblem
from topology.codec.headers import FlowHop

LATER_MS = 1000
"""If a request cannot be worked on now, because another worker works on it or this worker is paused, it is deferred by
this many ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The provider answered, and its answer is sent to the requester."""

    body: bytes
    model: str
    provider: str
    request_id: str | None = None
    """The provider's id of the call."""
    stop_reason: str | None = None
    """Of the Message; None: it is none."""
    kept: BodyAddress | None = None
    """The address and digest of an answer that is stored outside the broker because of its size; `body` is then a JSON
    object with that address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferred:
    """The request waits in the broker's delay queues and is delivered again later. It does not count as an attempt."""

    delay_ms: int
    reason: str
    due_ms: int | None = None
    redelivered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried:
    """The attempt failed, and counts against the request's limit of attempts. The request is delivered again after
    `delay_ms`, ahead of new requests."""

    delay_ms: int
    error: str
    brief: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """The request ended with an error, and its message is not kept as a dead letter."""

    problem: RequestProblem
    is_silent: bool = False
    """True if only this message ends, and nothing is stored or answered: the same message was published twice and the
    reply to the first one is the reply to both; or it keeps a pipeline's state; or its group was never whole."""


@dataclass(frozen=True, slots=True)
class DeadLettered:
    """The request ended with an error, and its message is kept in the queue `lane.dead`."""

    problem: RequestProblem


@dataclass(frozen=True, slots=True)
class Superseded:
    """The request was cancelled. The requester gets an error, and the message is not kept as a dead letter."""

    problem: RequestProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The request had ended already, so its stored result is sent again."""

    completion: Completion
    buries: bool = False
    """True if the request's dead letter may be missing in `lane.dead`."""
    is_reply_only: bool = False
    """True if only the reply remains to be sent, because the reply queue was full when the request ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineAdvanced:
    """A step of a pipeline has ended, or waits for its items: the pipeline's message goes on (`flows/pipelines.py`)."""

    flow: FlowHop
    state: bytes
    lane: str
    step: str
    answer: Answered | None = None
    """Of the attempt that was made for the step; None if none was made."""
    delay_ms: int = 0
    done: int = 0
    of: int = 0
    """So many of the step's items have ended, of so many; 0 of 0 if it has none."""
    keeper_ms: int = 0
    """Above 0: the state is in the store now. A message with it (`KEEPS`) goes round, for so long at first, and a
    message without it (`LOOKS`)."""

    @property
    def description(self) -> str:
        return f"{self.flow.step}, {self.done} of {self.of}" if self.of else self.flow.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Batched:
    """The request goes to the queue `lane.batches`, where it is gathered for a provider's batch (`Job.batch`)."""

    params: bytes


Outcome = Answered | Deferred | Retried | Refused | DeadLettered | Superseded | Replayed | PipelineAdvanced | Batched


def bytes_of(outcome: Outcome) -> int:
    """How many bytes it adds to those of its message."""
    match outcome:
        case Answered(body=body) | Batched(params=body):
            return len(body)
        case Replayed(completion=completion):
            return len(completion.body)
        case PipelineAdvanced(state=state, answer=answer):
            return len(state) + (0 if answer is None else len(answer.body))
        case Deferred() | Retried() | Refused() | DeadLettered() | Superseded():
            return 0
        case _:
            assert_never(outcome)


def end_with_problem(problem: RequestProblem) -> Refused | DeadLettered:
    """The outcome of a request that ends with this error: `DeadLettered` if it is kept in `lane.dead` after such an
    error (docs/contract.md lists them), else `Refused`."""
    return DeadLettered(problem) if problem.type.parked else Refused(problem)


def end_with(
    code: str,
    detail: str,
    *,
    status: int | None = None,
    brief: str | None = None,
    provider: ProviderFailure | None = None,
    retry_after_ms: int | None = None,
) -> Refused | DeadLettered:
    """The outcome of a request that ends with the error `code`."""
    return end_with_problem(
        RequestProblem(code, detail, status=status, brief=brief, provider=provider, retry_after_ms=retry_after_ms)
    )


def stopped_by(why: Stop, *, doing: str) -> Superseded | Deferred:
    """The outcome of a job that was stopped: an error if its request was cancelled; a short delay if another delivery
    has taken over the request's claim (`FENCED`)."""
    match why:
        case Stop.CANCELLED:
            return Superseded(RequestProblem("cancelled", f"cancelled by its owner while it {doing}"))
        case Stop.FENCED:
            return Deferred(delay_ms=LATER_MS, reason="running elsewhere")
        case never:
            assert_never(never)
