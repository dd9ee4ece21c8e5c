"""Makes one attempt to answer a request: calls a provider and, if that call fails, perhaps another one.

An attempt makes at most two calls until one is answered, because each retry is a further attempt: more calls in one
attempt would multiply with the number of retries. A second provider is called only if its circuit breaker allows it
(`providers/breakers.py`) and its rate limits allow the call at once, because an attempt waits for its rate limits only
before the first call.

A refusal (`stop_reason: refusal`) is an answer. If the setting `fallback_on_refusal` says so, the model's fallback is
asked once, and the refusal stays the answer if that fails. Of a stream, nothing may have been sent by then.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, NamedTuple, assert_never

import structlog

from consumers.budget_gate import BudgetGate
from consumers.claiming import DEATHS_AT_MOST
from consumers.clock import NowMs, now_ms
from consumers.dialects.answers import Answer
from consumers.failures import (
    TIMEOUT,
    AccountError,
    BreakerOpen,
    Failover,
    HandlerDied,
    Paid,
    ProviderError,
    Retry,
    RetryPolicy,
    TransientError,
    Trips,
    decide,
)
from consumers.flows.handlers import PROVIDER as HANDLER
from consumers.flows.handlers import Caller, Handlers
from consumers.job import ATTEMPT_WITHIN_S, Attempted, Decoded, Interruptible, Job, LostCall, Route
from consumers.lifecycle import Lifecycle
from consumers.limits.base import NOTHING, Amounts, CallInProgress
from consumers.outcomes import (
    LATER_MS,
    Answered,
    Deferred,
    Outcome,
    Refused,
    Retried,
    end_with,
    end_with_problem,
    stopped_by,
)
from consumers.providers.breakers import Breakers, Permit, ProviderChange
from consumers.providers.registry import Registry
from consumers.refusals import exceeded, later
from consumers.replies import Parts, Replies
from consumers.slots.pausing import Pausing
from lanekeeper.contract.identity import shown
from lanekeeper.contract.problems import RequestProblem
from lanekeeper.telemetry import signals
from topology.codec.decoding import Request

SLACK_S = 1.0
"""By how many seconds the timeout of a call to a provider may be later than the request's deadline. It is later so that
the deadline, and not the timeout, ends the call, because a timeout would count as a failure of the provider."""
LONG_RETRY_AFTER_S = 5.0
"""If a provider answers 429 with a `retry-after` longer than this many seconds, the attempt may call another model.
After any other 429 it may call another account (another provider, for example) only with the same model."""
LEAST_LEFT_S = 1.0
"""An attempt calls a second provider only if at least this many seconds are left until the request's deadline."""
DEADLINE_TOLERANCE_S = 0.1
DEADLINE_PASSED = TransientError("no answer before the request's deadline", type=TIMEOUT)
"""The error that is reported to the provider's circuit breaker if the request's deadline ended the call."""
log = structlog.get_logger()


class _FailedCall(NamedTuple):
    route: Route
    error: ProviderError


@dataclass(slots=True, eq=False)
class Attempts:
    """Makes one attempt to get an answer for a job (a delivery that is worked on): calls a provider, and another one if
    that call fails. `call_begins`: awaited before the first call of one that has waited for it. `keep_files`:
    `Claiming.keep_files`."""

    registry: Registry
    _: KW_ONLY
    breakers: Breakers
    budget_gate: BudgetGate
    replies: Replies
    lifecycle: Lifecycle
    pausing: Pausing
    policy: RetryPolicy
    now_ms: NowMs = now_ms
    rng: random.Random = field(default_factory=random.Random)
    handlers: Handlers = field(default_factory=Handlers)
    call_begins: Callable[[Job], Awaitable[None]]
    hold_again: Callable[[Job, Decoded], Awaitable[bool]]
    keep_files: Callable[..., Awaitable[None]]
    fallback_on_refusal: bool = False

    async def make(self, job: Job, decoded: Decoded) -> Outcome:
        """Make one attempt within the time left until the request's deadline, and return its outcome. When this method
        returns, the broker has confirmed each part of a streamed answer, or the part counts as lost."""
        parts = Parts(self.replies, job, keeps=self.fallback_on_refusal) if decoded.request.stream else None
        outcome = await self._attempt(job, decoded, parts)
        if parts is not None:
            await parts.confirmed()
        return outcome

    async def _attempt(self, job: Job, decoded: Decoded, parts: Parts | None) -> Outcome:
        left_s = (decoded.request.deadline_ms - self.now_ms()) / 1000
        if left_s <= 0:  # waiting for the store took too long
            return Refused(exceeded(job, decoded, self.breakers, now_ms=self.now_ms()))
        clock = asyncio.get_running_loop().time
        began_s = clock()
        longest_s = began_s + ATTEMPT_WITHIN_S
        try:
            async with job.interruptible(min(left_s, ATTEMPT_WITHIN_S)) as limit:
                if parts is not None:  # the deadline bounds only the time until a stream flows
                    parts.on_flow = partial(limit.reschedule, longest_s)
                await self.pausing.opened()  # make no call whose answer could not be sent
                began_s = clock()
                if job.batch_result is not None:
                    answer = await self._read_result(job, job.batch_result)
                elif decoded.request.handler:
                    answer = await self._call_handler(job, decoded)
                else:
                    answer = await self._call_routes(job, decoded, parts, limit)
                _record_run(
                    job,
                    clock() - began_s,
                    usage=answer.counted if answer.is_counted else None,
                    cost_usd=answer.cost_usd,
                    saved_usd=answer.saved_usd,
                )
                if answer.files:
                    await self.keep_files(job, answer.files, provider=answer.provider)
                return Answered(
                    body=answer.body,
                    model=answer.model,
                    provider=answer.provider,
                    request_id=answer.request_id,
                    stop_reason=answer.stop_reason,
                )
        except RequestProblem as forbidden:  # raised while streaming, for a part that may not be sent
            _record_run(job, clock() - began_s)
            return end_with_problem(forbidden)
        except BreakerOpen as breaker:
            return self._later(job, decoded, breaker.retry_in_s)
        except ProviderError as error:
            _forget_frames(error)
            is_outage = error.is_outage and not (parts is not None and parts.has_sent)
            wait_s = self.breakers.least_wait_s(decoded.chain.routes) if is_outage else 0.0
            # while no provider may be called, or the account is what is wrong, the attempt does not count
            is_free = wait_s > 0 or (is_outage and error.means.trips is Trips.ACCOUNT)
            _record_run(job, clock() - began_s, usage=self._spent(job, error), error=error, counts=not is_free)
            if is_free:
                return self._later(job, decoded, wait_s)
            outcome = self._decide(error, job, decoded)
            if parts is not None and isinstance(outcome, Retried):
                await parts.restart(error.failure)
            return outcome
        _record_run(job, clock() - began_s)
        if parts is not None and parts.flow and job.stopped is None:
            return end_with(
                "deadline_exceeded", f"its stream was cut after {ATTEMPT_WITHIN_S:g} s, the most that one lasts"
            )
        return self._ended_early(job, decoded, is_past_deadline=left_s <= ATTEMPT_WITHIN_S)

    async def _read_result(self, job: Job, line: bytes) -> Answer:
        """The answer that a provider's batch gave to the request: nothing is called."""
        assert job.batch is not None
        await self._begin(job)
        batch = job.batch
        route = Route(provider=batch.provider, model=batch.model, name=batch.model, account=batch.account)
        answer = await self.registry.from_batch(route, line, dialect=batch.dialect)
        self._note_stop(job, route, answer)
        return answer

    async def _call_handler(self, job: Job, decoded: Decoded) -> Answer:
        request, name = decoded.request, decoded.request.handler
        caller = Caller(job.lane_name, decoded.lane.rank, job.identity.tenant)
        # after an attempt that failed, which may have been its neighbours' fault or have been theirs, once alone
        alone = job.hop.attempts % 2 == 1
        async with self.handlers.turn(name, caller, alone=alone) as call:
            await self._begin(job)
            try:
                body = await call(request.body, request.call_s)
            except HandlerDied as died:
                job.died = True
                if job.deaths >= DEATHS_AT_MOST:
                    raise RequestProblem("poison", f"{died} in {job.deaths} attempts") from died
                raise
            return Answer(body=body, model=name, provider=HANDLER)

    async def _begin(self, job: Job) -> None:
        if job.noting is not None:  # it has waited
            await self.call_begins(job)
        job.attempted = Attempted(started_ms=self.now_ms())
        self.lifecycle.publish(job, "started", wait_ms=job.wait_ms)
        if job.progress is not None:
            job.progress.publish_event("started", attempt=job.attempts, wait_ms=job.wait_ms)

    async def _call_routes(self, job: Job, decoded: Decoded, parts: Parts | None, limit: Interruptible) -> Answer:
        request, chain, clock = decoded.request, decoded.chain, asyncio.get_running_loop().time
        left_s = (request.deadline_ms - self.now_ms()) / 1000
        until_s, timeout_s = clock() + left_s, min(request.call_s, left_s + SLACK_S)
        ends_s = limit.until_s
        failed: _FailedCall | None = None
        is_held = False
        first = 0 if job.reserved is None else chain.routes.index(job.reserved.route)
        for route in chain.routes[first:]:
            if failed is not None and not _may_help(failed, route):
                continue
            used = None if failed is None else self._spent(job, failed.error)
            if failed is not None and _is_paid(used) and not is_held:
                if not await self.hold_again(job, decoded):
                    raise failed.error
                is_held = True
            permit = await self._enter(job, decoded, route, used)
            if permit is None:
                continue
            if failed is None:
                await self._begin(job)
            else:
                _lose(job, failed.route, used)
                await _restart(failed, route, parts)
                limit.reschedule(ends_s)
            try:
                answer = await self._call(job, permit, request, timeout_s=timeout_s, parts=parts, until_s=until_s)
            except ProviderError as error:
                if failed is not None:
                    if error.means.retry is Retry.REJECTED and failed.error.means.retry is not Retry.REJECTED:
                        raise failed.error from error  # the second provider rejects it; the first may answer a retry
                    raise
                left_s = until_s - clock()
                if left_s < LEAST_LEFT_S:
                    raise
                failed, timeout_s = _FailedCall(route, error), min(timeout_s, left_s)
                continue
            if answer.refusal is not None and self.fallback_on_refusal:
                answer = await self._of_fallback(job, decoded, route, answer, parts=parts, until_s=until_s)
            if parts is not None and not parts.is_open:
                await parts.release(parts.taken())
            return answer
        if failed is None:  # no call was made; a route with a wait of 0 had no budget: its breaker is not the reason
            waits_s = (self.breakers.wait_s(route, clock()) for route in chain.routes)
            raise BreakerOpen(min((wait_s for wait_s in waits_s if wait_s > 0), default=0.0))
        raise failed.error

    async def _of_fallback(
        self, job: Job, decoded: Decoded, refused: Route, refusal: Answer, *, parts: Parts | None, until_s: float
    ) -> Answer:
        """What the fallback of the model that has refused answers; the refusal, if it cannot be asked or fails."""
        clock, routes = asyncio.get_running_loop().time, decoded.chain.routes
        left_s = until_s - clock() - LEAST_LEFT_S  # so that the refusal can be answered in time
        if left_s < LEAST_LEFT_S or job.attempted is None or (parts is not None and parts.is_open):
            return refusal
        others = [route for route in routes[routes.index(refused) + 1 :] if route.model != refused.model]
        if not others or not await self.hold_again(job, decoded):
            return refusal
        for route in others:
            permit = await self._enter(job, decoded, route, refusal.counted)
            if permit is None:
                continue
            paid = job.attempted.lost
            job.attempted.lost = (*paid, LostCall(refused.model, refusal.counted, refusal.cost_usd))
            log.info(signals.FALLBACK_ASKED, model=refused.model, to_provider=route.provider, to_model=route.model)
            kept: Sequence[bytes] = ()
            if parts is not None:
                kept = parts.taken()
                await parts.restart()
            timeout_s = min(decoded.request.call_s, left_s)
            try:
                return await self._call(job, permit, decoded.request, timeout_s=timeout_s, parts=parts, until_s=until_s)
            except ProviderError as error:
                used = self._spent(job, error)
                self.budget_gate.give_up(job, used)
                job.attempted.lost = paid
                _lose(job, route, used)
                if parts is not None:
                    await parts.restart(error.failure)
                    await parts.release(kept)
                break
        return refusal

    def _note_stop(self, job: Job, route: Route, answer: Answer) -> None:
        self.registry.count_stop(job.lane_name, route.model, answer)
        if answer.refusal is None:
            return
        told = {"provider": route.provider, "model": shown(route.model), "category": shown(answer.refusal)}
        log.info(signals.ANSWER_REFUSAL, **told)
        self.lifecycle.publish(job, "refusal", **told)

    async def _enter(self, job: Job, decoded: Decoded, route: Route, used: Amounts | None) -> Permit | None:
        """`used`: what the call before used; None: no call was made."""
        clock = asyncio.get_running_loop().time
        permit = self.breakers.enter(route, clock(), request=job.id)
        if permit is None:
            return None
        self._publish_change(job, permit.change)
        if job.reserved is None or route == job.reserved.route:
            return permit
        is_reserved = False
        try:
            is_reserved = await self.budget_gate.move(job, decoded, route, used)
        finally:
            if not is_reserved:
                self.breakers.unknown(permit, clock())
        return permit if is_reserved else None

    async def _call(
        self, job: Job, permit: Permit, request: Request, *, timeout_s: float, parts: Parts | None, until_s: float
    ) -> Answer:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        job.in_progress = CallInProgress(began_s)
        try:
            answer = await self._answer(job, permit.route, request, timeout_s=timeout_s, parts=parts)
        except ProviderError as error:
            self._publish_change(job, self.breakers.failed(permit, error, clock(), timeout_s=timeout_s))
            raise
        except BaseException:  # cancelled, or an internal error
            if (parts is None or not parts.flow) and clock() >= until_s - DEADLINE_TOLERANCE_S:
                change = self.breakers.failed(permit, DEADLINE_PASSED, clock(), timeout_s=clock() - began_s)
                self._publish_change(job, change)
            else:
                self.breakers.unknown(permit, clock())
            raise
        self._publish_change(job, self.breakers.answered(permit, clock()))
        self._note_stop(job, permit.route, answer)
        return answer

    async def _answer(
        self, job: Job, route: Route, request: Request, *, timeout_s: float, parts: Parts | None
    ) -> Answer:
        """Call the provider. If the request would end because of an error that could be the account's, call it again
        first: an operator may have mended the account between the call and the check that found it well."""
        in_progress = job.in_progress
        try:
            return await self.registry.call(route, request, timeout_s=timeout_s, parts=parts, in_progress=in_progress)
        except ProviderError as error:
            judged = await self.breakers.pauses.judge(route, error)
            try:
                if judged is error:
                    raise
                if judged.means.retry is not Retry.REJECTED:
                    raise judged from error
            finally:
                del judged  # its traceback holds this frame: a circle that would keep the request's body
        try:
            return await self.registry.call(route, request, timeout_s=timeout_s, parts=parts, in_progress=in_progress)
        except AccountError as again:
            if (otherwise := again.take_otherwise()) is None:
                raise
            try:
                raise otherwise from again
            finally:
                del otherwise  # as above

    def _publish_change(self, job: Job, change: ProviderChange | None) -> None:
        if change is not None:
            self.lifecycle.publish(job, change.event, **change.fields)

    def _spent(self, job: Job, error: ProviderError | None) -> Amounts | None:
        if job.batch_result is not None and error is not None and error.paid is not Paid.UNKNOWN:
            return NOTHING
        return (
            None if job.reserved is None or error is None else error.spent(self.budget_gate.likely(job, job.reserved))
        )

    def _ended_early(self, job: Job, decoded: Decoded, *, is_past_deadline: bool) -> Outcome:
        if job.stopped is not None:
            return stopped_by(job.stopped, doing="ran")
        if is_past_deadline:
            return Refused(exceeded(job, decoded, self.breakers, now_ms=self.now_ms()))
        if job.attempted is None:
            return Deferred(delay_ms=LATER_MS, reason="paused")
        late = TransientError(f"the answer was not whole after {ATTEMPT_WITHIN_S:g} s", type=TIMEOUT)
        return self._decide(late, job, decoded)

    def _later(self, job: Job, decoded: Decoded, wait_s: float) -> Outcome:
        return later(job, decoded, wait_s, breakers=self.breakers, now_ms=self.now_ms, rng=self.rng)

    def _decide(self, error: ProviderError, job: Job, decoded: Decoded) -> Outcome:
        usable, reserved = self.breakers.usable(decoded.chain.routes), job.reserved
        has_other = reserved is not None and any(route.account != reserved.route.account for route in usable)
        return decide(
            error,
            attempts=job.attempts,
            max_attempts=decoded.lane.max_attempts,
            left_ms=decoded.request.deadline_ms - self.now_ms(),
            policy=self.policy,
            rng=self.rng,
            has_other=has_other,
        )


def _lose(job: Job, route: Route, used: Amounts | None) -> None:
    if used is not None and _is_paid(used) and job.attempted is not None:
        job.attempted.lost = (*job.attempted.lost, LostCall(route.model, used))


def _is_paid(used: Amounts | None) -> bool:
    return used is not None and used.output_tokens > 0


def _forget_frames(error: BaseException | None) -> None:
    """The job keeps the error, and the error's frames the job: a circle that would keep the request's body. Causes may
    form a circle too, so those without frames end it."""
    while error is not None and error.__traceback__ is not None:
        error.__traceback__, error = None, error.__cause__ or error.__context__


async def _restart(failed: _FailedCall, route: Route, parts: Parts | None) -> None:
    log.info(
        signals.FAILED_OVER,
        provider=failed.route.provider,
        model=failed.route.model,
        to_provider=route.provider,
        to_model=route.model,
        error=failed.error.brief,
    )
    if parts is not None and await parts.restart(failed.error.failure):
        log.info(signals.STREAM_RESTARTED, error=failed.error.brief)


def _may_help(failed: _FailedCall, other: Route) -> bool:
    has_other_provider = other.provider != failed.route.provider
    has_other_account = other.account != failed.route.account
    has_same_model = other.model == failed.route.model
    match failed.error.means.failover:
        case Failover.NOBODY:
            return False
        case Failover.PROVIDER:
            return has_other_provider
        case Failover.SAME_MODEL:
            return has_other_provider and has_same_model
        case Failover.ACCOUNT:
            return has_other_account
        case Failover.SAME_MODEL_FIRST:
            return has_other_account and (has_same_model or (failed.error.retry_after_s or 0) > LONG_RETRY_AFTER_S)
        case never:
            assert_never(never)


def _record_run(job: Job, seconds: float, **result: Any) -> None:
    if job.attempted is not None:
        job.attempted.run_ms = round(1000 * seconds)
        for name, value in result.items():
            setattr(job.attempted, name, value)
