"""START HERE: the pipeline of one request, read from top to bottom."""

import asyncio
import random
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from consumers import retry
from consumers.capacity.pausing import Pausing
from consumers.failpoints import Failpoints
from consumers.failures import TIMEOUT, BreakerOpen, ProviderError, TransientError
from consumers.gates.base import Gate
from consumers.gates.deadline import exceeded
from consumers.job import ATTEMPT_WITHIN_S, Answered, Deferred, Dropped, Job, NowMs, Outcome, Refused, ended_by
from consumers.lifecycle import Lifecycle
from consumers.providers.base import Answer
from consumers.providers.counting import counted, spent
from consumers.providers.registry import Registry
from consumers.providers.routes import Route
from consumers.reading import Reading
from consumers.replies.reply import Parts, Replies
from consumers.state.base import Stop
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import RequestProblem
from topology.codec import bounds, decoding
from topology.codec.request import Request
from topology.lanes import LaneSpec, urgency

LATER_MS = 1000
SLACK_S = 1.0
"""A call that its deadline ends is ended by the deadline, not by its own timeout in the same instant: that would be a
failure of the provider's."""


class Elsewhere(Protocol):
    """Who may be asked beside the one that the request's budget was reserved at (`RouteGate`)."""

    def after(self, job: Job) -> Sequence[Route]: ...

    def has_other(self, job: Job) -> bool:
        """Whether another account may be asked next time."""
        ...

    def closed_s(self, job: Job) -> float:
        """How long nobody may be asked for it; 0: somebody may."""
        ...

    def later(self, job: Job, wait_s: float) -> Outcome:
        """What becomes of it then."""
        ...


class Purse(Protocol):
    """Whose budget is used (`BudgetGate`)."""

    async def move(self, job: Job, route: Route, error: ProviderError | None) -> bool: ...


class Handler:
    """From a delivery to its outcome. It settles nothing (`settle.py`) and decides no retry (`retry.py`)."""

    def __init__(
        self,
        *,
        gates: Sequence[Gate],
        providers: Registry,
        elsewhere: Elsewhere,
        purse: Purse,
        replies: Replies,
        lifecycle: Lifecycle,
        pausing: Pausing,
        policy: retry.RetryPolicy,
        names: Names,
        now_ms: NowMs,
        rng: random.Random,
        failpoints: Failpoints,
        reading: Reading,
        values: int = bounds.VALUES,
        needs_user_id: bool = False,
    ) -> None:
        """`needs_user_id`: a request that the broker has not seen a user of is refused, for it would be anybody's."""
        self._gates = gates
        self._reading = reading
        self._values = values
        self._providers = providers
        self._elsewhere = elsewhere
        self._purse = purse
        self._replies = replies
        self._lifecycle = lifecycle
        self._pausing = pausing
        self._failpoints = failpoints
        self._policy = policy
        self._names = names
        self._now_ms = now_ms
        self._rng = rng
        self._needs_user_id = needs_user_id

    async def handle(self, job: Job) -> Outcome:
        """Fit to be worked → decoded → through the gates → one attempt."""
        if (unfit := self._unfit(job)) is not None:
            return unfit
        try:
            job.request = await self._decode(job)
        except RequestProblem as problem:
            return ended_by(problem)
        if job.delivery.times_delivered is None:
            # a classic intake (3.x) counts nothing: the due queue does
            return Deferred(delay_ms=0, reason="redelivered", redelivered=True)
        self._failpoints.reach("before_claim")
        outcome: Outcome | None = None
        passed: list[Gate] = []
        try:
            for gate in self._gates:
                outcome = await gate.enter(job)
                if outcome is not None:
                    return outcome
                passed.append(gate)
            self._failpoints.reach("after_claim")
            outcome = await self._attempt(job)
            self._failpoints.reach("after_call")
            return outcome
        finally:
            await _leave(passed, job, outcome)

    def _unfit(self, job: Job) -> Outcome | None:
        """What ends a delivery before it is even read."""
        if not job.trusted and job.message.exchange != self._names.requests:
            return ended_by(
                RequestProblem(
                    "invalid_request",
                    f"published to exchange {job.message.exchange[:80]!r}: allowed is {self._names.requests!r}",
                )
            )
        if self._needs_user_id and not job.user_id:
            return ended_by(
                RequestProblem(
                    "invalid_request",
                    "user_id: missing; publish with the property user_id, the name of the user that is connected: "
                    "without it nobody can tell whose the request is",
                )
            )
        if (forbidden := self._replies.refusal(job)) is not None:
            return ended_by(forbidden)
        return None

    async def _decode(self, job: Job) -> Request:
        """In one step, or, where its body may take a while, in several: the event loop goes on between them."""
        assert job.lane is not None
        message = job.message
        rank = (urgency(job.lane.name), decoding.weight(message))
        decode = partial(
            decoding.decode,
            message,
            lane=job.lane,
            request_id=job.id,
            hop=job.hop if job.trusted else None,
            now_ms=job.taken_ms,
            values=self._values,
        )
        if decoding.weight(message) <= bounds.SMALL_BYTES:
            return await self._reading.turn(decode, rank=rank)
        raw = await self._reading.turn(partial(decoding.unpacked, message), rank=rank)
        if (excess := await self._reading.excess(raw, values=self._values, rank=rank)) is not None:
            raise decoding.too_large(excess)
        return await self._reading.turn(partial(decode, raw=raw), rank=rank)

    async def _attempt(self, job: Job) -> Outcome:
        """Call the provider once, within what is left of the deadline."""
        request, lane = job.request, job.lane
        assert request is not None
        assert lane is not None
        left_s = (request.deadline_ms - self._now_ms()) / 1000
        if left_s <= 0:  # the store was waited for
            return Refused(exceeded(job))
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        parts = self._replies.parts(job) if request.stream else None
        job.limit = limit = asyncio.timeout(min(left_s, ATTEMPT_WITHIN_S))
        try:
            async with limit:
                if job.stopped is not None:
                    job.stop(job.stopped)
                await self._pausing.opened()  # an answer that could not be sent is not asked for
                began_s = loop.time()
                answer = await self._call(job, request, lane, parts)
        except TimeoutError:
            if not limit.expired():
                raise
            job.run_ms = self._run_ms(job, began_s)
            return self._ended_early(job, request, lane, is_over=left_s <= ATTEMPT_WITHIN_S)
        except RequestProblem as forbidden:  # nothing may be sent to its reply address: found out while streaming to it
            job.run_ms = self._run_ms(job, began_s)
            return ended_by(forbidden)
        except BreakerOpen as closed:
            return self._elsewhere.later(job, closed.retry_in_s)
        except ProviderError as error:
            job.run_ms = self._run_ms(job, began_s)
            if job.reservation is not None:
                job.usage = spent(error, job.reservation.amounts)
            has_sent = parts is not None and parts.has_sent
            if error.is_outage and not has_sent and (wait_s := self._elsewhere.closed_s(job)) > 0:
                job.attempt_started_ms = None  # by its breaker the provider is down: that is no failure of the request
                return self._elsewhere.later(job, wait_s)
            return self._decide(error, job, request, lane)
        finally:
            job.limit = None  # what has ended cannot be made to end
        job.run_ms = self._run_ms(job, began_s)
        job.usage, job.cost_usd = counted(answer.usage), answer.cost_usd
        return Answered(body=answer.body, model=answer.model, provider=answer.provider)

    async def _call(self, job: Job, request: Request, lane: LaneSpec, parts: Parts | None) -> Answer:
        def begin() -> None:
            job.attempt_started_ms = self._now_ms()
            self._lifecycle.tell(job, "started", wait_ms=job.wait_ms)

        left_s = (request.deadline_ms - self._now_ms()) / 1000
        return await self._providers.stream(
            request,
            timeout_s=min(lane.call_timeout_s, left_s + SLACK_S),
            parts=parts,
            routes=self._elsewhere.after(job),
            until_s=asyncio.get_running_loop().time() + left_s,
            move=partial(self._purse.move, job),
            begin=begin,
            tell=partial(self._lifecycle.tell, job),
        )

    def _run_ms(self, job: Job, began_s: float) -> int:
        """How long the call took; nothing where it was not made."""
        return 0 if job.attempt_started_ms is None else round(1000 * (asyncio.get_running_loop().time() - began_s))

    def _ended_early(self, job: Job, request: Request, lane: LaneSpec, *, is_over: bool) -> Outcome:
        """It was told to stop, its time was over, or it was held as long as a delivery may be."""
        match job.stopped:
            case Stop.CANCELLED:
                return Dropped(RequestProblem("cancelled", "cancelled by its owner while it ran"))
            case Stop.FENCED:
                return Deferred(delay_ms=LATER_MS, reason="running elsewhere", due_ms=job.hop.due_ms)
            case None if is_over:
                return Refused(exceeded(job))
            case None if job.attempt_started_ms is None:
                return Deferred(delay_ms=LATER_MS, reason="paused", due_ms=job.hop.due_ms)
            case None:
                late = TransientError(f"the answer was not whole after {ATTEMPT_WITHIN_S:g} s", type=TIMEOUT)
                return self._decide(late, job, request, lane)

    def _decide(self, error: ProviderError, job: Job, request: Request, lane: LaneSpec) -> Outcome:
        return retry.decide(
            error,
            attempts=job.attempts,
            max_attempts=lane.max_attempts,
            left_ms=request.deadline_ms - self._now_ms(),
            policy=self._policy,
            rng=self._rng,
            has_other=self._elsewhere.has_other(job),
        )


async def _leave(passed: list[Gate], job: Job, outcome: Outcome | None) -> None:
    """Leave all gates, the last one first, though one of them raises, or is cancelled."""
    try:
        while passed:
            await passed.pop().leave(job, outcome)
    finally:
        if passed:
            await _leave(passed, job, outcome)
