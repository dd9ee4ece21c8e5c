"""The checks before a call, in order: deadline, schedule, brake, claim, body, route, caps, budget."""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import NamedTuple, assert_never

from consumers.brake import Brake
from consumers.claiming import Claiming
from consumers.clock import NowMs, now_ms
from consumers.decoding import Decoding
from consumers.job import Attempted, Decoded, Interruptible, Job, Reserved, Route
from consumers.large_bodies import Fetching
from consumers.limits.base import Amounts, BudgetSpec, Wait, WaitTooLong
from consumers.limits.budgets import Budgets, Estimates, UsageClass, task_of
from consumers.outcomes import (
    LATER_MS,
    Answered,
    Batched,
    DeadLettered,
    Deferred,
    Outcome,
    PipelineAdvanced,
    Refused,
    Replayed,
    Retried,
    Superseded,
    ended,
    ended_by,
    stopped_by,
)
from consumers.prices import Prices, Usage
from consumers.providers.breakers import Breakers
from consumers.providers.registry import asking_for
from consumers.spending import Bound, Hold, Over, Spending, Spent
from consumers.state.base import (
    DAY_S,
    IN_BATCH,
    UNIT_BYTES,
    WHICH_LIMIT,
    Conflict,
    Ended,
    Granted,
    Pause,
    Running,
    StoreUnavailable,
    WaitingLimit,
    period_of,
)
from lanekeeper.bodies import BodiesUnavailable, BodyError, BodyTooLarge
from lanekeeper.contract.names import BODY
from lanekeeper.contract.problems import ProviderFailure, RequestProblem
from lanekeeper.telemetry import logs, signals
from topology.codec.decoding import Request
from topology.codec.headers import BatchHop, provider_headers_json

LEAST_WAIT_MS = 200
"""The shortest deferral of a request that runs elsewhere, or for which no provider may be called."""
SPREAD = 0.5
"""A delay is lengthened at random by up to this share, so that requests do not come back together."""
log = logs.logger()


Enter = Callable[[Job, Decoded], Awaitable[Outcome | None]]
Leave = Callable[[Job, Decoded, Outcome | None], Awaitable[None]]


class Gate(NamedTuple):
    """A check before a call to a provider."""

    enter: Enter
    """Returns None if the job may pass to the next gate; otherwise the outcome with which its delivery ends here."""
    leave: Leave | None = None
    """Gives back what `enter` took. It is called for every gate that let the request pass, in reverse order, whatever
    the outcome; that is None if the job was cancelled, because its delivery was lost or the worker stops."""
    is_for_models: bool = False
    """A request for a handler does not pass this gate."""


UNCOUNTED_MS = 60_000
"""A request that waits for at most this time does not count towards the limits of how many requests may wait, because
no tenant can publish very many requests in that time."""
DEBOUNCED_KEPT_MS = 3_600_000


async def refuse_if_late(job: Job, decoded: Decoded, *, breakers: Breakers, now_ms: NowMs) -> Outcome | None:
    """The deadline gate."""
    if now_ms() < decoded.request.deadline_ms:
        return None
    return Refused(exceeded(job, decoded, breakers, now_ms=now_ms()))


def exceeded(job: Job, decoded: Decoded, breakers: Breakers, *, now_ms: int) -> RequestProblem:
    """The error for a request past its deadline. Its text says how long the request waited and ran, and what hindered
    it."""
    bound_ms = decoded.request.deadline_ms - decoded.request.start_ms
    spent = f"{max(0, job.waited_ms(now_ms) - job.ran_ms)} ms in the queue"
    if job.redelivered:
        spent += " or with a worker that was lost"
    if job.attempts > 1:
        spent += " and in pauses between attempts"
    if job.ran_ms:
        spent += f", {job.ran_ms} ms in " + (f"{job.attempts} attempts" if job.attempts > 1 else "attempt 1")
    detail = f"not answered within {bound_ms} ms: {spent}"
    pause = breakers.brake.during(
        lane=job.lane_name,
        tenant=job.identity.tenant,
        app=job.app,
        routes=decoded.chain.routes,
        from_ms=decoded.request.start_ms,
        to_ms=decoded.request.deadline_ms,
    )
    if pause is not None:
        return RequestProblem(
            "deadline_exceeded",
            f"{detail}; {pause.told}{job.last_failure}",
            brief=detail,
            provider=job.provider_failure,
        )
    if decoded.chain.routes and (why := breakers.hindrance(decoded.chain.routes)) is not None:
        return unavailable(job, why, detail, breakers.last_failure(decoded.chain.routes))
    return RequestProblem("deadline_exceeded", detail + job.last_failure, provider=job.provider_failure)


def unavailable(job: Job, why: str, detail: str, failure: ProviderFailure | None) -> RequestProblem:
    """The error for a request whose time is over while nothing could be called for it, because of `why`. `failure`:
    what the provider answered to others, if it has answered nothing to this request."""
    detail = f"{why} ({detail}){job.last_failure}"
    return RequestProblem(
        "provider_unavailable", detail, brief="no provider may be called", provider=job.provider_failure or failure
    )


async def defer_until_due(
    job: Job, decoded: Decoded, *, claiming: Claiming, bodies: Fetching, now_ms: NowMs
) -> Outcome | None:
    """The schedule gate: defers a request until its due time (`x-lane-delay-ms`, `x-lane-at`). A request that has ended
    already, or was cancelled before it arrived, does not wait: the claim gate answers it.

    The wait is noted in the store before the request is published to the broker's delay queues, because once it is
    published, another worker may take it at any time. Raises StoreUnavailable.
    """
    due_ms = decoded.request.due_ms
    if due_ms is None:
        return None
    if (left_ms := due_ms - now_ms()) <= 0:
        # a repeated message of a request that has ended must not supersede others
        if decoded.request.debounce is None or (job.hop.due_ms is None and await claiming.has_ended(job)):
            return None
        return await _superseded(job, decoded, due_ms, claiming=claiming)
    # a request that a worker has deferred before was counted then, and is not refused now
    is_counted = job.hop.due_ms is None and left_ms > UNCOUNTED_MS
    if is_counted:
        weight = 1 + await bodies.size_of(job.message) // UNIT_BYTES
        limit = await claiming.reserve(job, weight=weight, until_ms=due_ms)
        if limit is not WaitingLimit.WITHIN:
            return None if await claiming.has_ended(job) else _too_many(limit)
    defer = claiming.defer_for_long if is_counted else claiming.defer
    if not await defer(job, due_ms=due_ms, deadline_ms=decoded.request.deadline_ms):
        return None
    if (superseded := await _superseded(job, decoded, due_ms, claiming=claiming)) is not None:
        return superseded
    # the clock is read again, because the store may have needed some time
    return Deferred(delay_ms=max(0, due_ms - now_ms()), reason="scheduled", due_ms=due_ms)


async def _superseded(job: Job, decoded: Decoded, due_ms: int, *, claiming: Claiming) -> Outcome | None:
    key = decoded.request.debounce
    # what has begun goes on: in a provider's batch, or in a pipeline's next step
    if key is None or job.attempts or job.batch is not None or job.hop.flow is not None:
        return None
    if await claiming.debounce(job, key, until_ms=due_ms + DEBOUNCED_KEPT_MS):
        return None
    return Superseded(RequestProblem("superseded", "a newer request has the same x-lane-debounce"))


def _too_many(limit: WaitingLimit) -> Refused:
    """The refusal of one message, which is not stored as the outcome of its request: an earlier message of the request
    may wait."""
    detail = (
        f"x-lane-delay-ms or x-lane-at is {UNCOUNTED_MS // 1000} s ahead or more, and {WHICH_LIMIT[limit]}: "
        "wait until some are due, or ask for a shorter delay"
    )
    return Refused(RequestProblem("too_many_waiting", detail), is_repeat=limit is WaitingLimit.REPEATED)


SHARE_OF_PAUSE = 0.25
LEAST_MS = 1000
MOST_MS = 15_000
BACK_PER_S = 200
LONGEST_MS = 300_000


@dataclass(slots=True, eq=False)
class BrakeGate:
    """The gate of the brake: a request of a paused tenant or application, or whose routes are all paused, waits on the
    broker. It comes back every 15 to 22 s, but at most `BACK_PER_S` of these requests in a second. `publish`:
    `Lifecycle.publish`."""

    brake: Brake
    claiming: Claiming
    _: KW_ONLY
    now_ms: NowMs = now_ms
    rng: random.Random = field(default_factory=random.Random)
    publish: Callable[..., None]
    _next_ms: dict[Pause, float] = field(default_factory=dict, init=False)

    async def enter(self, job: Job, decoded: Decoded) -> Outcome | None:
        if not self.brake.pauses or job.batch_result is not None:
            return None
        pause = self.brake.of_request(tenant=job.identity.tenant, app=job.app, routes=decoded.chain.routes)
        if pause is None:
            return None
        now_ms, deadline_ms = self.now_ms(), decoded.request.deadline_ms
        delay_ms = max(1, min(self._delay_ms(pause, now_ms), deadline_ms - now_ms))
        if not await self.claiming.defer(job, due_ms=now_ms + delay_ms, deadline_ms=deadline_ms):
            return None  # it has ended, or was cancelled: the claim gate answers it
        if job.hop.is_fresh:
            self.publish(job, "paused", kind=pause.kind, name=pause.name, why=pause.why)
        return Deferred(delay_ms=delay_ms, reason="paused")

    def _delay_ms(self, pause: Pause, now_ms: int) -> int:
        delay_ms = min(max(LEAST_MS, SHARE_OF_PAUSE * (now_ms - pause.since_ms)), MOST_MS)
        delay_ms *= 1 + self.rng.uniform(0, SPREAD)
        if pause.until_ms is not None:
            delay_ms = min(delay_ms, pause.until_ms - now_ms + self.rng.uniform(0, LEAST_MS))
        if pause not in self._next_ms:
            self._next_ms = {each: next for each, next in self._next_ms.items() if each in self.brake.pauses.values()}
        self._next_ms[pause] = max(self._next_ms.get(pause, now_ms), now_ms) + 1000 / BACK_PER_S
        return round(min(max(delay_ms, self._next_ms[pause] - now_ms), LONGEST_MS))


DEATHS_AT_MOST = 4
"""After this many workers have died while they worked on a request (had its claim in the store), the request goes to
the queue `lane.dead` at its next delivery. The broker's delivery count is not used, because it also counts deliveries
that ended because the connection was lost while the worker lived on."""
SUSPECT_FROM = 2
"""A request is a suspect if at least this many workers have died while they worked on it. A worker runs only one
suspect at a time, so that the request which kills workers is identified."""
SUSPECT_WAIT_MS = 1000
LONGEST_WAIT_MS = 5_000


class ClaimGate:
    """Takes the claim of a request, so that no other delivery of the same request runs at the same time. It releases
    the claim of a request that has not ended; `settle.py` completes the others."""

    def __init__(self, claiming: Claiming, *, now_ms: NowMs = now_ms) -> None:
        self._claiming = claiming
        self._now_ms = now_ms
        self._suspect: Job | None = None

    async def enter(self, job: Job, decoded: Decoded) -> Outcome | None:
        """Raises StoreUnavailable if the store does not answer: no provider is called without a claim."""
        match await self._claiming.claim(job):
            case Granted(deaths=deaths) if deaths >= DEATHS_AT_MOST:
                return ended(
                    "poison", f"delivered {deaths + 1} times and never settled: its worker died or hung under it"
                )
            case Granted(deaths=deaths) if deaths >= SUSPECT_FROM:
                if self._suspect is not None:
                    await self._claiming.release(job)
                    return Deferred(delay_ms=SUSPECT_WAIT_MS, reason="suspect")
                self._suspect = job
                return None
            case Granted():
                return None
            case Running(for_ms=for_ms):
                # wait as long as the other delivery has run already, which doubles the time between two checks
                wait_ms = min(LONGEST_WAIT_MS, max(LEAST_WAIT_MS, for_ms))
                return Deferred(delay_ms=wait_ms, reason="running elsewhere")
            case Ended(completion=completion, is_same_message=is_same_message):
                return Replayed(completion=completion, buries=is_same_message and job.came_before)
            case Conflict():
                return ended(
                    "idempotency_conflict",
                    "message_id: it was used with another body; give every request an id of its own",
                )

    async def leave(self, job: Job, decoded: Decoded, outcome: Outcome | None) -> None:
        if self._suspect is job:
            self._suspect = None
        if job.progress is not None and isinstance(outcome, Retried):
            job.progress.tell("retrying", attempt=job.attempts, delay_ms=outcome.delay_ms, error=outcome.brief)
        match outcome:
            case Answered() | Refused() | DeadLettered() | Superseded() | Replayed():
                return
            case PipelineAdvanced(answer=answer, delay_ms=delay_ms):
                if job.progress is not None:
                    job.progress.tell("step", step=outcome.flow.step, done=outcome.done, of=outcome.of)
                if answer is None:  # else its step's outcome must be stored first
                    await self._claiming.release(job, due_ms=self._now_ms() + delay_ms, step=outcome.told)
            case Batched():
                await self._claiming.release(job, step=f"{job.step}, {IN_BATCH}" if job.step else IN_BATCH)
            case Retried(delay_ms=delay_ms) | Deferred(delay_ms=delay_ms):
                await self._claiming.release(job, due_ms=self._now_ms() + delay_ms)
            case None:
                await self._claiming.release(job)
            case _:
                assert_never(outcome)


FETCH_WITHIN_S = 60.0
AGAIN_MS = 2000


async def fetch_body(
    job: Job, decoded: Decoded, *, fetching: Fetching, decoding: Decoding, now_ms: NowMs
) -> Outcome | None:
    """The body gate: if the message has only the body's address, fetches the body and decodes it into `job.decoded`."""
    kept = decoded.request.kept
    if kept is None:
        return None
    raw: bytes | None = None
    left_s = max(0.0, (decoded.request.deadline_ms - now_ms()) / 1000)
    try:
        async with job.interruptible(min(FETCH_WITHIN_S, left_s)):
            raw = await fetching.fetch(kept)
        if raw is not None:
            job.decoded = await decoding.decode_body(raw, job, decoded.lane)
            return None
    except BodyTooLarge as error:
        return ended("too_large", f"header {BODY}: {error}")
    except BodyError as error:
        return ended("invalid_request", f"header {BODY}: {error}")
    except RequestProblem as problem:
        return ended_by(problem)
    except BodiesUnavailable as error:
        log.warning(signals.BODY_UNAVAILABLE, error=error.cause)
    if job.stopped is not None:
        return stopped_by(job.stopped, doing="was fetched")
    return Deferred(delay_ms=AGAIN_MS, reason="body unavailable")


HOLD_S = 3.0
STAGGER_S = 0.2
"""Each request waits up to this many seconds longer, at random. So one of them makes the probe (the first call after an
outage), and the others come after its result."""
SHARE_OF_OUTAGE = 0.25
"""A request is deferred by this share of the time for which the provider has been down."""
MOST_TARGETS = 5
"""A request is deferred by at most this many times its lane's target wait (the setting `target_wait_s`)."""


async def await_route(
    job: Job, decoded: Decoded, *, breakers: Breakers, now_ms: NowMs, rng: random.Random
) -> Outcome | None:
    """The route gate: whether the lane and the tenant may use the model, and a provider may be called for it. While all
    are paused or their circuit breakers are open, a request waits here for at most `HOLD_S`."""
    if job.batch_result is not None:
        return None
    if decoded.chain.forbidden:
        return ended("forbidden_model", decoded.chain.forbidden)
    clock = asyncio.get_running_loop().time
    left_s = (decoded.request.deadline_ms - now_ms()) / 1000
    until_s = clock() + min(HOLD_S, left_s)
    while (wait_s := breakers.least_wait_s(decoded.chain.routes)) > 0:
        if job.stopped is not None:
            return stopped_by(job.stopped, doing="waited for a provider")
        ends_first = clock() + wait_s >= until_s
        may_end = any(breakers.pauses.since_s(route) is not None for route in decoded.chain.routes)
        if ends_first and not (may_end and left_s <= HOLD_S and clock() < until_s):
            return later(job, decoded, wait_s, breakers=breakers, now_ms=now_ms, rng=rng)
        async with job.interruptible(until_s - clock() if ends_first else None):
            await asyncio.sleep(wait_s + rng.uniform(0, STAGGER_S))
    return None


def later(
    job: Job, decoded: Decoded, wait_s: float, *, breakers: Breakers, now_ms: NowMs, rng: random.Random
) -> Outcome:
    """The outcome of a job for which no provider may be called in the next `wait_s` seconds: it is deferred, or refused
    if its deadline is before the end of that time."""
    left_ms = decoded.request.deadline_ms - now_ms()
    wait_ms = max(LEAST_WAIT_MS, round(1000 * wait_s))
    routes = decoded.chain.routes
    if wait_ms >= left_ms:
        why = breakers.hindrance(routes) or "its last calls failed"
        detail = f"no provider may be called for {wait_ms} ms, and {max(0, left_ms)} ms are left"
        return ended_by(unavailable(job, why, detail, breakers.last_failure(routes)))
    now_s = asyncio.get_running_loop().time()
    down_s = min(breakers.down_s(route, now_s) for route in routes)
    stay_s = min(SHARE_OF_OUTAGE * down_s, MOST_TARGETS * decoded.lane.target_wait_s)
    delay_ms = round(max(wait_ms, 1000 * stay_s) * (1 + rng.uniform(0, SPREAD)))
    is_paused = any(breakers.pauses.since_s(route) is not None or breakers.brake.of_route(route) for route in routes)
    return Deferred(delay_ms=min(delay_ms, max(wait_ms, left_ms // 2)), reason="paused" if is_paused else "breaker")


SPREAD_MS = 60_000
"""If a cap is used up, requests are deferred to the next day, week or month, and come back at random times within this
time after its beginning."""
TAKE_WITHIN_S = 10.0
STORE_AWAY_MS = 1000
SOON_MS = 2000
SOON_AT_MOST_MS = 60_000
"""If calls that run hold what is left of a cap, requests try again after a quarter of the time that they have waited,
within these bounds."""
Estimate = Callable[[Job, Request, Route], Amounts]


class _Held(NamedTuple):
    """`likely`: what the call is expected to use. It is counted if the call fails and may have to be paid for."""

    hold: Hold
    likely: Spent


@dataclass(slots=True, eq=False)
class CapsGate:
    """Lets a request pass if its lane, tenant, key and user have enough left of their caps for all that it can use:
    its `max_tokens` of output. `estimate`: `BudgetGate.amounts`. `publish`: `Lifecycle.publish`."""

    spending: Spending
    breakers: Breakers
    _: KW_ONLY
    prices: Prices
    estimate: Estimate
    now_ms: NowMs = now_ms
    rng: random.Random = field(default_factory=random.Random)
    publish: Callable[..., None]
    _held: dict[Job, "_Held"] = field(default_factory=dict, init=False)

    async def enter(self, job: Job, decoded: Decoded) -> Outcome | None:
        request = decoded.request
        bounds = self._bounds(job, request)
        if not bounds or job.stopped is not None:
            return None
        if job.batch is not None and job.batch.held:  # it was counted when it was gathered
            hold = self._counted(job, job.batch, bounds)
            self._held[job] = _Held(hold, hold.spent)
            job.batch = replace(job.batch, held=(), held_until_ms=0)
            return None
        if job.batch_result is not None:  # it is paid for already
            self._held[job] = _Held(Hold(bounds, Spent(), self.now_ms()), Spent())
            return None
        route = self.breakers.usable(decoded.chain.routes)[0]
        if not self.prices.has(route.model, route.name) and any(bound.what == "usd" for bound in bounds):
            return ended(
                "forbidden_model",
                f"model {route.model[:80]!r} has no price, and what is spent here is capped in dollars; "
                "the operator can set its price (LANEKEEPER_PRICES__MODELS)",
            )
        likely = self.estimate(job, request, route)
        most = likely._replace(output_tokens=max(likely.output_tokens, request.max_tokens))
        try:
            wanted = self._spent(most, route.model, route.name)
            async with asyncio.timeout(TAKE_WITHIN_S):
                found = await self.spending.take(bounds, wanted, publish=partial(self.publish, job))
        except (StoreUnavailable, TimeoutError):  # while a cap cannot be checked, no provider is called
            return Deferred(delay_ms=STORE_AWAY_MS, reason="store")
        if isinstance(found, Over):
            return self._over(job, request, found)
        self._held[job] = _Held(found, self._spent(likely, route.model, route.name))
        return None

    async def leave(self, job: Job, decoded: Decoded, outcome: Outcome | None) -> None:
        """Correct what `enter` counted against the caps. After a failure nothing is counted, unless the failed call may
        have to be paid for: then the estimate stays counted."""
        held, attempted = self._held.pop(job, None), job.attempted
        hold, likely = (None, Spent()) if held is None else held
        answer = outcome.answer if isinstance(outcome, PipelineAdvanced) else outcome
        if hold is not None and job.batch is not None:
            is_in_message = job.hop.batch is not None and job.hop.batch.held != ()
            if outcome is None and attempted is None and is_in_message:
                return  # and is delivered again with it
            if hold.spent != Spent() and (
                isinstance(outcome, Batched) or (attempted is None and isinstance(outcome, Deferred))
            ):
                until_ms = period_of(DAY_S, hold.at_ms).ends_ms
                job.batch = replace(job.batch, held=tuple(hold.spent), held_until_ms=until_ms)
                if not is_in_message:
                    job.unsettled = partial(self.spending.correct, hold, Spent())
                return
        used = Spent()
        if isinstance(answer, Answered):
            usage = None if attempted is None else attempted.usage
            tokens = 0.0 if usage is None else usage.input_tokens + usage.output_tokens
            used = Spent(1, tokens, (attempted and attempted.cost_usd) or 0.0)
            saved_usd = 0.0 if attempted is None else attempted.saved_usd
            self.spending.count(job.lane_name, job.identity.tenant, used, saved_usd=saved_usd)
        elif hold is not None and attempted is not None and _may_be_paid(attempted):
            used = likely
        for model, amounts in () if attempted is None else attempted.lost:
            _, tokens, usd = self._spent(amounts, model)
            used = Spent(used.requests, used.tokens + tokens, used.usd + usd)
        if hold is not None:
            self.spending.correct(hold, used, publish=partial(self.publish, job))

    async def come_back(self, job: Job, decoded: Decoded) -> Outcome | None:
        """A gate before all that can end a request, so that `end` is called."""
        return None

    async def end(self, job: Job, decoded: Decoded, outcome: Outcome | None) -> None:
        """Give back what is counted for a request that was in a batch, and ended before `enter`: too late, or
        cancelled."""
        if job.batch is None or not job.batch.held:
            return
        match outcome:
            case Replayed(completion=completion) if completion.code != "cancelled":
                return  # it was delivered twice, and the first one has counted it
            case Refused() | DeadLettered() | Superseded() | Replayed():
                bounds = self._bounds(job, decoded.request)
                self.spending.correct(self._counted(job, job.batch, bounds), Spent())

    def _bounds(self, job: Job, request: Request) -> tuple[Bound, ...]:
        return self.spending.bounds(job.lane_name, job.identity.tenant, key=request.key, user=request.user)

    def _counted(self, job: Job, batch: BatchHop, bounds: tuple[Bound, ...]) -> Hold:
        """What was counted on the day that ended, or will end, at `held_until_ms`."""
        return Hold(bounds, Spent(*batch.held), batch.held_until_ms - 1)

    def _spent(self, amounts: Amounts, model: str, name: str = "") -> Spent:
        usage = Usage(input_tokens=round(amounts.input_tokens), output_tokens=round(amounts.output_tokens))
        return Spent(
            1, amounts.input_tokens + amounts.output_tokens, self.prices.cost_usd(model, usage, name=name) or 0.0
        )

    def _over(self, job: Job, request: Request, over: Over) -> Outcome:
        now_ms = self.now_ms()
        left_ms = request.deadline_ms - now_ms
        if over.ends_soon:
            waited_ms = max(0, now_ms - request.start_ms)
            delay_ms = round(min(max(SOON_MS, waited_ms / 4), SOON_AT_MOST_MS) * self.rng.uniform(0.5, 1))
            if delay_ms < left_ms:
                return Deferred(delay_ms=delay_ms, reason=over.bound.reason)
        wait_ms = round(1000 * over.resets_in_s)
        if wait_ms >= left_ms or over.wanted > over.bound.limit:
            text = f"{over}; the next {over.bound.per} begins in {wait_ms} ms, and {left_ms} ms are left"
            return ended("deadline_exceeded", text)
        delay_ms = min(wait_ms + round(self.rng.uniform(0, SPREAD_MS)), left_ms)
        return Deferred(delay_ms=delay_ms, reason=over.bound.reason)


def _may_be_paid(attempted: Attempted) -> bool:
    return attempted.usage is None or attempted.usage.output_tokens > 0


LARGEST_PART = 32
"""A request that is larger than this part of a batch's bytes runs live: others would not fit beside it."""


@dataclass(slots=True, eq=False)
class BatchGate:
    """Sends requests that can wait to be gathered for a provider's batch (`batches/gather.py`). `estimate`:
    `BudgetGate.amounts`."""

    breakers: Breakers
    _: KW_ONLY
    estimate: Estimate
    has_batches: Callable[[str], bool]
    now_ms: NowMs = now_ms

    async def enter(self, job: Job, decoded: Decoded) -> Outcome | None:
        spec, request, before = decoded.lane.batches, decoded.request, job.batch
        if not spec.enabled or request.stream or request.no_batch or job.stopped is not None:
            return None
        if job.batch_result is not None or (before is not None and before.live):
            return None
        if request.deadline_ms - self.now_ms() < 1000 * spec.least_s:
            return None
        route = self.breakers.usable(decoded.chain.routes)[0]
        if not self.has_batches(route.provider):
            return None
        params = asking_for(request, route.name).body
        if len(job.message.body) + len(params) > spec.bytes // LARGEST_PART:
            return None
        amounts = self.estimate(job, request, route)
        job.batch = BatchHop(
            account=route.account,
            provider=route.provider,
            model=route.model,
            headers=provider_headers_json(request.provider_headers),
            tokens=round(amounts.input_tokens + amounts.output_tokens),
            deadline_ms=request.deadline_ms,
            tenant=job.identity.tenant,
            ticket="" if before is None else before.ticket,
            tries=0 if before is None else before.tries,
        )
        return Batched(params=params)


REPORTED_FROM_S = 1.0
BACK_WITHIN_MS = 15_000
AT_ONCE_S = 0.25
"""A call that could begin within this time is always tried, even if it may not end before the request's deadline."""
SHORTEST_S = 0.25
LONGEST_S = 15.0
"""The shortest and the longest patience of a request whose slot others need."""


class WaitingRoom:
    """Counts the requests of this process that wait for budget, by lane and account, and decides how long each may
    wait.

    A waiting request keeps its slot (the right to be worked on), because requests behind it for the same account would
    wait too. But if requests that wait for one account hold all slots of a lane but one, the next request for that
    account may wait for a short time only (its patience). Then it is deferred, which frees its slot for a request for
    another account; when it comes back, it has its old place among those that wait. As long as only requests for that
    account follow, the patience doubles with each of them, because deferring them helps no other request.
    """

    def __init__(self) -> None:
        self._waiting: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._patience_s: dict[str, float] = {}

    def enter(self, lane: str, account: str, *, slots: int) -> float | None:
        """Count a request that begins to wait. Return its patience; None: it need not let others pass."""
        waiting = self._waiting[lane]
        waiting[account] += 1
        if len(waiting) > 1:
            self._patience_s[lane] = SHORTEST_S  # requests for other accounts follow too: deferring helps them
        if waiting[account] <= max(1, slots - 1):
            return None
        patience_s = self._patience_s.get(lane, SHORTEST_S)
        self._patience_s[lane] = min(LONGEST_S, 2 * patience_s)
        return patience_s

    def leave(self, lane: str, account: str) -> None:
        self._waiting[lane][account] -= 1
        if not self._waiting[lane][account]:
            del self._waiting[lane][account]

    def passed(self, lane: str, account: str) -> None:
        """Note that a request got its budget without a wait. If others of its lane wait for another account, deferring
        those lets requests like this one pass, so the patience becomes short again."""
        if self._waiting[lane].keys() - {account}:
            self._patience_s[lane] = SHORTEST_S


@dataclass(slots=True, eq=False)
class BudgetGate:
    """Reserves budget (requests and tokens per minute) for the call of a job. Of the providers that may be called for
    the job, it chooses the first that will have enough budget soon; if there is none, the provider with the shortest
    predicted wait."""

    budgets: Budgets
    breakers: Breakers
    estimates: Estimates
    _: KW_ONLY
    spec: BudgetSpec
    now_ms: NowMs = now_ms
    on_wait: Callable[[Job, Wait], None]
    _waiting_room: WaitingRoom = field(default_factory=WaitingRoom, init=False)
    waits: Counter[tuple[str, str, str]] = field(default_factory=Counter, init=False)

    async def enter(self, job: Job, decoded: Decoded) -> Outcome | None:
        if job.batch_result is not None:  # nothing is called
            return None
        routes = self.breakers.usable(decoded.chain.routes)
        route = routes[0]
        began_s = _loop_s()
        try:
            async with job.interruptible(None) as limit:  # `_reserve` limits it, if the request has to wait
                if len(routes) > 1:
                    if (found := await self._overflowing(job, decoded, routes, limit)) is not None:
                        job.reserved = found
                        return None
                    waits = [await self._wait(job, decoded.request, each) for each in routes]
                    route = routes[min(range(len(routes)), key=lambda index: waits[index].seconds)]
                until = self._start_by(job, decoded.request, route)
                job.reserved = await self._reserve(job, decoded, route, until, limit)
                return None
        except WaitTooLong as too_long:
            return self._too_long(job, decoded.request, route, too_long.wait)
        return await self._interrupted(job, decoded.request, route, _loop_s() - began_s)

    async def leave(self, job: Job, decoded: Decoded, outcome: Outcome | None) -> None:
        """Replace what was reserved for the job by what the call used or, if that is unknown, by what it has probably
        used."""
        reserved, job.reserved = job.reserved, None
        if reserved is None:
            return
        attempted = job.attempted
        if attempted is None:
            self.budgets.settle(reserved.reservation, None)
            return
        usage, kind = attempted.usage, _usage_class(job, reserved.route)
        self.budgets.settle(reserved.reservation, self.likely(job, reserved) if usage is None else usage)
        job.in_progress = None  # it keeps the events of a stream in memory
        if isinstance(outcome, (Answered, Refused)):
            self.estimates.learn_run(kind, attempted.run_ms / 1000, was_cut=isinstance(outcome, Refused))
        if isinstance(outcome, Answered) and usage is not None:
            self.estimates.learn(
                kind,
                text_bytes=decoded.request.text_bytes,
                media_tokens=decoded.request.media.tokens(reserved.route.model),
                input_tokens=usage.input_tokens,
                output_tokens=usage.output_tokens,
            )

    def likely(self, job: Job, reserved: Reserved) -> Amounts:
        """What a job's call has probably used of the provider's limits, if it ended without the provider's count: what
        a stream has shown of it. Without a stream: the input that was sent, and as much of the expected output as the
        model could write in the time."""
        expected, in_progress = reserved.reservation.amounts, job.in_progress
        if in_progress is None:
            return expected
        if (used := in_progress.used()) is not None:
            return used
        run_s = _loop_s() - in_progress.began_s
        usual_s = self.estimates.run_s(_usage_class(job, reserved.route))
        part = run_s / usual_s if run_s < usual_s else 1.0
        return expected._replace(output_tokens=part * expected.output_tokens)

    async def move(self, job: Job, decoded: Decoded, route: Route, used: Amounts | None) -> bool:
        """Move a job's reservation to another provider: reserve budget for `route` without waiting, and settle the
        earlier reservation. Return False, and change nothing, if the account of `route` has too little budget. `used`:
        what the call on the earlier route used; None: no call was made."""
        amounts = self.amounts(job, decoded.request, route)
        found = await self.budgets.try_reserve(route.account, lane=job.lane_name, amounts=amounts, request=job.id)
        if found is None:
            return False
        before, job.reserved = job.reserved, Reserved(route, found)
        if before is not None:
            self.budgets.settle(before.reservation, used)
        return True

    def amounts(self, job: Job, request: Request, route: Route) -> Amounts:
        return Amounts(
            1.0,
            self.estimates.input_tokens(route.model, request.text_bytes, request.media.tokens(route.model)),
            self.estimates.output_tokens(_usage_class(job, route), max_tokens=request.max_tokens),
        )

    async def _overflowing(
        self, job: Job, decoded: Decoded, routes: Sequence[Route], limit: Interruptible
    ) -> Reserved | None:
        patience_s = decoded.lane.target_wait_s if self.spec.overflow_s is None else self.spec.overflow_s
        for route in routes:
            soon = min(self._start_by(job, decoded.request, route), _loop_s() + patience_s)
            if (await self._wait(job, decoded.request, route)).seconds > soon - _loop_s():
                continue
            try:
                return await self._reserve(job, decoded, route, soon, limit)
            except WaitTooLong:
                continue
        return None

    async def _reserve(self, job: Job, decoded: Decoded, route: Route, until: float, limit: Interruptible) -> Reserved:
        lane, account, room, has_to_wait, ends_s = decoded.lane, route.account, self._waiting_room, False, limit.until_s

        def on_wait(wait: Wait) -> None:
            nonlocal has_to_wait
            has_to_wait = True
            self.waits[account, lane.name, wait.reason] += 1
            patience_s = room.enter(lane.name, account, slots=lane.slots)
            hold_s = self.spec.hold_s
            limit.reschedule(_loop_s() + (hold_s if patience_s is None else min(patience_s, hold_s)))
            if wait.seconds >= REPORTED_FROM_S:
                self.on_wait(job, wait)

        # A request that comes back after a deferral or redelivery keeps its place among those that wait. A new one goes
        # to the end, even if its headers say that it was published long ago.
        try:
            reservation = await self.budgets.reserve(
                account,
                lane=job.lane_name,
                amounts=self.amounts(job, decoded.request, route),
                until=until,
                request=job.id,
                arrived=_loop_s() - job.waited_ms(self.now_ms()) / 1000 if job.came_before else None,
                on_wait=on_wait,
            )
        except WaitTooLong:
            limit.reschedule(ends_s)  # undo the shorter limit of `on_wait`: another route may be tried
            raise
        finally:
            if has_to_wait:
                room.leave(job.lane_name, account)
        if not has_to_wait:
            room.passed(job.lane_name, account)
        return Reserved(route, reservation)

    def _start_by(self, job: Job, request: Request, route: Route) -> float:
        """The latest time at which the call may begin, by the event loop's clock: the request's deadline minus the
        usual run time of such a call, but at least `AT_ONCE_S` from now, unless the deadline itself is earlier."""
        left_s = (request.deadline_ms - self.now_ms()) / 1000
        return _loop_s() + max(left_s - self._run_s(job, request, route), min(left_s, AT_ONCE_S))

    def _run_s(self, job: Job, request: Request, route: Route) -> float:
        return 0.0 if request.stream else self.estimates.run_s(_usage_class(job, route))

    async def _wait(self, job: Job, request: Request, route: Route) -> Wait:
        amounts = self.amounts(job, request, route)
        return await self.budgets.predicted_wait(route.account, lane=job.lane_name, amounts=amounts)

    def _too_long(self, job: Job, request: Request, route: Route, wait: Wait) -> Outcome:
        left_ms = request.deadline_ms - self.now_ms()
        bound_ms = request.deadline_ms - request.start_ms
        return ended(
            "deadline_exceeded",
            f"not answered within {bound_ms} ms: it could start in {round(1000 * wait.least_s)} ms at the earliest "
            f"(waiting for {wait.reason} of {route.account}), its call may take "
            f"{round(1000 * self._run_s(job, request, route))} ms, and {max(0, left_ms)} ms are left{job.last_failure}",
        )

    async def _interrupted(self, job: Job, request: Request, route: Route, waited_s: float) -> Outcome:
        if job.stopped is not None:
            return stopped_by(job.stopped, doing="waited for the budget")
        wait = await self._wait(job, request, route)
        lets_others_pass = waited_s < self.spec.hold_s
        delay_ms = max(LATER_MS, min(BACK_WITHIN_MS, round(1000 * wait.seconds))) if lets_others_pass else LATER_MS
        return Deferred(delay_ms=delay_ms, reason=wait.reason)


def _usage_class(job: Job, route: Route) -> UsageClass:
    return UsageClass(job.lane_name, task_of(job.routing_key), route.model)


def _loop_s() -> float:
    return asyncio.get_running_loop().time()
