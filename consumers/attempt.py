"""An attempt: a provider is called, and where that call fails another provider, within the same attempt.

At most two calls an attempt: retries (`retry.py`) come on top, and two layers that repeat multiply. Who is asked next
must not be known to fail (`providers/breaker.py`) and must have budget at once: an attempt stands in line once.
What a failure means for all this stands in the table of `failures.py`.
"""

import asyncio
import random
from typing import assert_never

from consumers import retry
from consumers.capacity.pausing import Pausing
from consumers.chain import Route
from consumers.failures import TIMEOUT, BreakerOpen, Failover, ProviderError, Retry, TransientError
from consumers.gates.budget import BudgetGate
from consumers.gates.deadline import exceeded
from consumers.gates.route import RouteGate
from consumers.job import ATTEMPT_WITHIN_S, Answered, Deferred, Dropped, Job, NowMs, Outcome, Refused, ended_by
from consumers.lifecycle import Lifecycle
from consumers.providers.base import Answer
from consumers.providers.breaker import Breakers, Change, Pass
from consumers.providers.counting import counted, spent
from consumers.providers.registry import Registry
from consumers.replies.reply import Parts, Replies
from consumers.state.base import Stop
from lanekeeper.contract.problems import RequestProblem
from lanekeeper.telemetry import logs, signals
from topology.codec.request import Request
from topology.lanes import LaneSpec

LATER_MS = 1000
SLACK_S = 1.0
"""A call that its deadline ends is ended by the deadline, not by its own timeout in the same instant: that would be a
failure of the provider's."""
LONG_S = 5.0
"""After a 429 that tells a longer wait a fallback model is asked, too."""
LEAST_LEFT_S = 1.0
"""With less left until its deadline nobody else is asked."""
DEADLINE_ABOUT_S = 0.1
LATE = TransientError("no answer before the request's deadline", type=TIMEOUT)
"""What a deadline ended may be a provider that hangs, though nobody waited until its call had timed out."""
log = logs.logger()


class Attempts:
    """Makes one attempt at a job that has passed the gates. It settles nothing (`settle.py`)."""

    def __init__(
        self,
        registry: Registry,
        *,
        breakers: Breakers,
        route_gate: RouteGate,
        budget_gate: BudgetGate,
        replies: Replies,
        lifecycle: Lifecycle,
        pausing: Pausing,
        policy: retry.RetryPolicy,
        now_ms: NowMs,
        rng: random.Random,
    ) -> None:
        self._registry = registry
        self._breakers = breakers
        self._route_gate = route_gate
        self._budget_gate = budget_gate
        self._replies = replies
        self._lifecycle = lifecycle
        self._pausing = pausing
        self._policy = policy
        self._now_ms = now_ms
        self._rng = rng

    async def make(self, job: Job) -> Outcome:
        """Ask for an answer, within what is left of the deadline, and say what that comes to."""
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
                answer = await self._ask(job, request, lane, parts)
        except TimeoutError:
            if not limit.expired():
                raise
            job.run_ms = _run_ms(job, began_s)
            return self._ended_early(job, request, lane, is_over=left_s <= ATTEMPT_WITHIN_S)
        except RequestProblem as forbidden:  # nothing may be sent to its reply address: found out while streaming to it
            job.run_ms = _run_ms(job, began_s)
            return ended_by(forbidden)
        except BreakerOpen as closed:
            return self._route_gate.later(job, closed.retry_in_s)
        except ProviderError as error:
            job.run_ms = _run_ms(job, began_s)
            if job.reservation is not None:
                job.usage = spent(error, job.reservation.amounts)
            has_sent = parts is not None and parts.has_sent
            if error.is_outage and not has_sent and (wait_s := self._breakers.least_wait_s(job.chain.routes)) > 0:
                job.attempt_started_ms = None  # by its breaker the provider is down: that is no failure of the request
                return self._route_gate.later(job, wait_s)
            return self._decide(error, job, request, lane)
        finally:
            job.limit = None  # what has ended cannot be made to end
        job.run_ms = _run_ms(job, began_s)
        job.usage, job.cost_usd = counted(answer.usage), answer.cost_usd
        return Answered(body=answer.body, model=answer.model, provider=answer.provider)

    async def _ask(self, job: Job, request: Request, lane: LaneSpec, parts: Parts | None) -> Answer:
        """Call the route that is reserved for, then, where that fails, one of those after it.

        Raises the ProviderError that counts, and BreakerOpen where no call was made.
        """
        clock = asyncio.get_running_loop().time
        left_s = (request.deadline_ms - self._now_ms()) / 1000
        until_s, timeout_s = clock() + left_s, min(lane.call_timeout_s, left_s + SLACK_S)
        failed: tuple[Route, ProviderError] | None = None
        for route in job.chain.routes if job.route is None else job.chain.since(job.route):
            if failed is not None and not _may_help(failed[1], failed[0], route):
                continue
            entered = await self._enter(job, route, None if failed is None else failed[1])
            if entered is None:
                continue
            if failed is None:
                job.attempt_started_ms = self._now_ms()
                self._lifecycle.tell(job, "started", wait_ms=job.wait_ms)
            else:
                _restart(failed, route, parts)
            try:
                return await self._call(job, entered, request, timeout_s=timeout_s, parts=parts, until_s=until_s)
            except ProviderError as error:
                if failed is not None:
                    if error.means.retry is Retry.REJECTED and failed[1].means.retry is not Retry.REJECTED:
                        raise failed[1] from error  # what the second refuses, the first may answer yet
                    raise
                left_s = until_s - clock()
                if left_s < LEAST_LEFT_S:
                    raise
                failed, timeout_s = (route, error), min(timeout_s, left_s)
        if failed is None:
            raise BreakerOpen(self._breakers.least_wait_s(job.chain.routes))
        raise failed[1]

    async def _enter(self, job: Job, route: Route, error: ProviderError | None) -> Pass | None:
        """Have the breaker's leave, and budget of the route's account; None where one of them is not to be had now."""
        clock = asyncio.get_running_loop().time
        entered = await self._breakers.enter(route, clock(), request=job.id)
        if entered is None:
            return None
        self._tell(job, entered.change)
        if job.route is None or route == job.route:
            return entered
        is_reserved = False
        try:
            is_reserved = await self._budget_gate.move(job, route, error)
        finally:
            if not is_reserved:
                await self._breakers.unknown(entered, clock())
        return entered if is_reserved else None

    async def _call(
        self, job: Job, entered: Pass, request: Request, *, timeout_s: float, parts: Parts | None, until_s: float
    ) -> Answer:
        """Make one call, and tell the breaker what became of it."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            answer = await self._registry.call(entered.route, request, timeout_s=timeout_s, parts=parts)
        except ProviderError as error:
            self._tell(job, await self._breakers.failed(entered, error, clock(), timeout_s=timeout_s))
            raise
        except BaseException:  # cancelled, or a fault of ours
            if parts is None and clock() >= until_s - DEADLINE_ABOUT_S:
                self._tell(job, await self._breakers.failed(entered, LATE, clock(), timeout_s=clock() - began_s))
            else:
                await self._breakers.unknown(entered, clock())
            raise
        self._tell(job, await self._breakers.answered(entered, clock()))
        return answer

    def _tell(self, job: Job, change: Change | None) -> None:
        if change is not None:
            self._lifecycle.tell(job, "breaker", **change.figures())

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
        others = self._breakers.callable(job.chain.routes)
        has_other = job.route is not None and any(each.account != job.route.account for each in others)
        return retry.decide(
            error,
            attempts=job.attempts,
            max_attempts=lane.max_attempts,
            left_ms=request.deadline_ms - self._now_ms(),
            policy=self._policy,
            rng=self._rng,
            has_other=has_other,
        )


def _restart(failed: tuple[Route, ProviderError], route: Route, parts: Parts | None) -> None:
    """The answer comes from somewhere else: the requester forgets what it has of the call that failed."""
    before, error = failed
    log.info(
        signals.FAILED_OVER,
        provider=before.provider,
        model=before.model,
        to_provider=route.provider,
        to_model=route.model,
        error=error.brief,
    )
    if parts is not None and parts.restart():
        log.info(signals.STREAM_RESTARTED, error=error.brief)


def _may_help(error: ProviderError, failed: Route, other: Route) -> bool:
    """Whether another may answer where one failed so."""
    is_elsewhere, is_paid_by_another = other.provider != failed.provider, other.account != failed.account
    is_same = other.model == failed.model
    match error.means.failover:
        case Failover.NOBODY:
            return False
        case Failover.PROVIDER:
            return is_elsewhere
        case Failover.SAME_MODEL:
            return is_elsewhere and is_same
        case Failover.ACCOUNT:
            return is_paid_by_another
        case Failover.SAME_MODEL_FIRST:
            return is_paid_by_another and (is_same or (error.retry_after_s or 0) > LONG_S)
        case never:
            assert_never(never)


def _run_ms(job: Job, began_s: float) -> int:
    """How long the call took; nothing where it was not made."""
    return 0 if job.attempt_started_ms is None else round(1000 * (asyncio.get_running_loop().time() - began_s))
