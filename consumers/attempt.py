"""An attempt: one provider is called and, if that call fails, another one within the same attempt.

An attempt makes at most two calls: retries (`retry.py`) come on top, and two layers of repetition multiply. The second
provider must not be known to fail (`providers/breakers.py`) and must have budget at once: an attempt waits in line only
once. The table in `failures.py` says what each failure means for this.
"""

import asyncio
import random
from dataclasses import replace
from typing import Any, assert_never

from consumers import retry
from consumers.capacity.pausing import Pausing
from consumers.chain import Route
from consumers.failures import TIMEOUT, BreakerOpen, Failover, ProviderError, Retry, TransientError
from consumers.gates.budget import BudgetGate
from consumers.gates.deadline import exceeded
from consumers.gates.route import RouteGate
from consumers.job import ATTEMPT_WITHIN_S, Asked, Attempted, Job, NowMs
from consumers.lifecycle import Lifecycle
from consumers.limits.amounts import Amounts
from consumers.outcomes import LATER_MS, Answered, Deferred, Outcome, Refused, ended_by, stopped_by
from consumers.providers.base import Answer
from consumers.providers.breakers import Breakers, Change, Pass
from consumers.providers.counting import counted, spent
from consumers.providers.registry import Registry
from consumers.replies.reply import Parts, Replies
from lanekeeper.contract.problems import RequestProblem
from lanekeeper.telemetry import logs, signals
from topology.codec.request import Request

SLACK_S = 1.0
"""A call's timeout ends this much after the request's deadline, so that the deadline ends the call and not the timeout:
a timeout would count as a failure of the provider."""
LONG_S = 5.0
"""After a 429 with a longer `retry-after`, a fallback model may be asked as well."""
LEAST_LEFT_S = 1.0
"""With less time left until the deadline, no second provider is asked."""
DEADLINE_ABOUT_S = 0.1
LATE = TransientError("no answer before the request's deadline", type=TIMEOUT)
"""Reported to the breaker if the deadline ended the call: the provider may hang although the call did not time out."""
log = logs.logger()


class Attempts:
    """Makes one attempt at a job that has passed the gates. It does not settle the job (`settle.py` does)."""

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

    async def make(self, job: Job, asked: Asked) -> Outcome:
        """Call the providers within the time left until the deadline, and return the outcome."""
        left_s = (asked.request.deadline_ms - self._now_ms()) / 1000
        if left_s <= 0:  # waiting for the store took too long
            return Refused(exceeded(job, asked))
        clock = asyncio.get_running_loop().time
        began_s = clock()
        parts = self._replies.parts(job) if asked.request.stream else None
        try:
            async with job.interruptible(min(left_s, ATTEMPT_WITHIN_S)):
                await self._pausing.opened()  # make no call whose answer could not be sent
                began_s = clock()
                answer = await self._ask(job, asked, parts)
                _ran(job, clock() - began_s, usage=counted(answer.usage), cost_usd=answer.cost_usd)
                return Answered(body=answer.body, model=answer.model, provider=answer.provider)
        except RequestProblem as forbidden:  # found while streaming: a part may not be sent
            _ran(job, clock() - began_s)
            return ended_by(forbidden)
        except BreakerOpen as closed:
            return self._route_gate.later(job, asked, closed.retry_in_s)
        except ProviderError as error:
            has_sent = parts is not None and parts.has_sent
            wait_s = self._breakers.least_wait_s(asked.chain.routes) if error.is_outage and not has_sent else 0.0
            _ran(job, clock() - began_s, usage=self._spent(job, error), counts=wait_s <= 0)
            # an open breaker means that the provider is down: the attempt does not count
            return self._route_gate.later(job, asked, wait_s) if wait_s > 0 else self._decide(error, job, asked)
        _ran(job, clock() - began_s)
        return self._ended_early(job, asked, is_over=left_s <= ATTEMPT_WITHIN_S)

    async def _ask(self, job: Job, asked: Asked, parts: Parts | None) -> Answer:
        """Call the reserved route; if that call fails, call one of the routes after it.

        Raises the ProviderError that decides the outcome; BreakerOpen if no call was made.
        """
        request, chain, clock = asked.request, asked.chain, asyncio.get_running_loop().time
        left_s = (request.deadline_ms - self._now_ms()) / 1000
        until_s, timeout_s = clock() + left_s, min(asked.lane.call_timeout_s, left_s + SLACK_S)
        failed: tuple[Route, ProviderError] | None = None
        for route in chain.routes if job.reserved is None else chain.since(job.reserved.route):
            if failed is not None and not _may_help(failed[1], failed[0], route):
                continue
            entered = await self._enter(job, asked, route, None if failed is None else failed[1])
            if entered is None:
                continue
            if failed is None:
                job.attempted = Attempted(started_ms=self._now_ms())
                self._lifecycle.tell(job, "started", wait_ms=job.wait_ms)
                if job.trail is not None:
                    job.trail.tell("started", attempt=job.attempts, wait_ms=job.wait_ms)
            else:
                _restart(failed, route, parts)
            try:
                return await self._call(job, entered, request, timeout_s=timeout_s, parts=parts, until_s=until_s)
            except ProviderError as error:
                if failed is not None:
                    if error.means.retry is Retry.REJECTED and failed[1].means.retry is not Retry.REJECTED:
                        raise failed[1] from error  # the second refuses it, but the first may still answer it
                    raise
                left_s = until_s - clock()
                if left_s < LEAST_LEFT_S:
                    raise
                failed, timeout_s = (route, error), min(timeout_s, left_s)
        if failed is None:  # a route whose breaker is closed was left out for lack of budget
            waits_s = (self._breakers.wait_s(route, clock()) for route in chain.routes)
            raise BreakerOpen(min((wait_s for wait_s in waits_s if wait_s > 0), default=0.0))
        raise failed[1]

    async def _enter(self, job: Job, asked: Asked, route: Route, error: ProviderError | None) -> Pass | None:
        """Ask the breaker for permission and reserve budget of the route's account; None if either is refused now."""
        clock = asyncio.get_running_loop().time
        entered = await self._breakers.enter(route, clock(), request=job.id)
        if entered is None:
            return None
        self._tell(job, entered.change)
        if job.reserved is None or route == job.reserved.route:
            return entered
        before, used, is_reserved = job.reserved.route, self._spent(job, error), False
        try:
            is_reserved = await self._budget_gate.move(job, asked, route, used)
        finally:
            if not is_reserved:
                await self._breakers.unknown(entered, clock())
        if is_reserved and used is not None and used.output_tokens > 0 and job.attempted is not None:
            job.attempted = replace(job.attempted, lost=(*job.attempted.lost, (before.model, used)))
        return entered if is_reserved else None

    async def _call(
        self, job: Job, entered: Pass, request: Request, *, timeout_s: float, parts: Parts | None, until_s: float
    ) -> Answer:
        """Make one call, and report its result to the breaker."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            answer = await self._registry.call(entered.route, request, timeout_s=timeout_s, parts=parts)
        except ProviderError as error:
            self._tell(job, await self._breakers.failed(entered, error, clock(), timeout_s=timeout_s))
            raise
        except BaseException:  # cancelled, or an internal error
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

    @staticmethod
    def _spent(job: Job, error: ProviderError | None) -> Amounts | None:
        """How much of its reservation a failed call used; None: nothing was reserved, or no call was made."""
        return None if job.reserved is None or error is None else spent(error, job.reserved.reservation.amounts)

    def _ended_early(self, job: Job, asked: Asked, *, is_over: bool) -> Outcome:
        """The outcome if the job was stopped, its deadline passed, or its delivery may not be held any longer."""
        if job.stopped is not None:
            return stopped_by(job.stopped, doing="ran", due_ms=job.hop.due_ms)
        if is_over:
            return Refused(exceeded(job, asked))
        if job.attempted is None:
            return Deferred(delay_ms=LATER_MS, reason="paused", due_ms=job.hop.due_ms)
        late = TransientError(f"the answer was not whole after {ATTEMPT_WITHIN_S:g} s", type=TIMEOUT)
        return self._decide(late, job, asked)

    def _decide(self, error: ProviderError, job: Job, asked: Asked) -> Outcome:
        others, here = self._breakers.callable(asked.chain.routes), job.reserved
        has_other = here is not None and any(each.account != here.route.account for each in others)
        return retry.decide(
            error,
            attempts=job.attempts,
            max_attempts=asked.lane.max_attempts,
            left_ms=asked.request.deadline_ms - self._now_ms(),
            policy=self._policy,
            rng=self._rng,
            has_other=has_other,
        )


def _restart(failed: tuple[Route, ProviderError], route: Route, parts: Parts | None) -> None:
    """Log the failover, and tell the requester to forget what it received from the failed call."""
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
    """Whether another route may answer after this failure of the first."""
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


def _ran(job: Job, seconds: float, **came_to: Any) -> None:
    """Record the result of the attempt, if a call was made."""
    if job.attempted is not None:
        job.attempted = replace(job.attempted, run_ms=round(1000 * seconds), **came_to)
