"""Most of the checks before a call. `_handler` in `service/worker/assembly.py` has the order of all gates."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from secrets import token_hex
from typing import NamedTuple, assert_never

import structlog

from consumers.brake import Brake
from consumers.claiming import DEATHS_AT_MOST, Claiming
from consumers.clock import NowMs, now_ms
from consumers.decoding import Decoding
from consumers.job import Attempted, Decoded, Job, Route
from consumers.large_bodies import Fetching
from consumers.limits.base import Amounts
from consumers.outcomes import (
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
    end_with,
    end_with_problem,
    stopped_by,
)
from consumers.prices import Prices, Usage
from consumers.providers.breakers import Breakers
from consumers.providers.registry import asking_for
from consumers.refusals import LEAST_WAIT_MS, SPREAD, exceeded, later
from consumers.spending import Bound, Hold, Over, Spending, Spent
from consumers.state.base import (
    IN_BATCH,
    UNIT_BYTES,
    WHICH_LIMIT,
    AllowanceReservation,
    Conflict,
    Ended,
    Granted,
    Pause,
    Running,
    StoreUnavailable,
    WaitingLimit,
)
from lanekeeper.bodies import BodiesUnavailable, BodyError, BodyTooLarge
from lanekeeper.contract.names import BODY
from lanekeeper.contract.problems import ProviderFailure, RequestProblem
from lanekeeper.telemetry import signals
from topology.codec.decoding import Request
from topology.codec.headers import BatchHop, provider_headers_json

log = structlog.get_logger()


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
            return None if await claiming.has_ended(job) else _too_many(limit, is_silent=await claiming.is_known(job))
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


def _too_many(limit: WaitingLimit, *, is_silent: bool) -> Refused:
    """The refusal of one message, which is not stored as the outcome of its request: an earlier message of the request
    may wait."""
    detail = (
        f"x-lane-delay-ms or x-lane-at is {UNCOUNTED_MS // 1000} s ahead or more, and {WHICH_LIMIT[limit]}: "
        "wait until some are due, or ask for a shorter delay"
    )
    return Refused(RequestProblem("too_many_waiting", detail), is_silent=is_silent)


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
                return end_with(
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
                return end_with(
                    "idempotency_conflict",
                    "message_id: it was used with another body; give every request an id of its own",
                )

    async def leave(self, job: Job, decoded: Decoded, outcome: Outcome | None) -> None:
        if self._suspect is job:
            self._suspect = None
        if job.progress is not None and isinstance(outcome, Retried):
            job.progress.publish_event("retrying", attempt=job.attempts, delay_ms=outcome.delay_ms, error=outcome.brief)
        match outcome:
            case Answered() | Refused() | DeadLettered() | Superseded() | Replayed():
                return
            case PipelineAdvanced(answer=answer, delay_ms=delay_ms):
                if job.progress is not None:
                    job.progress.publish_event("step", step=outcome.flow.step, done=outcome.done, of=outcome.of)
                if answer is None:  # else its step's outcome must be stored first
                    await self._claiming.release(job, due_ms=self._now_ms() + delay_ms, step=outcome.description)
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
            raw = await fetching.fetch(kept, room=job.delivery.room)
        if raw is not None:
            job.decoded = await decoding.decode_body(raw, job, decoded.lane)
            return None
    except BodyTooLarge as error:
        return end_with("too_large", f"header {BODY}: {error}")
    except BodyError as error:
        return end_with("invalid_request", f"header {BODY}: {error}")
    except RequestProblem as problem:
        return end_with_problem(problem)
    except BodiesUnavailable as error:
        log.warning(signals.BODY_UNAVAILABLE, error=error.cause)
    if job.stopped is not None:
        return stopped_by(job.stopped, doing="was fetched")
    return Deferred(delay_ms=AGAIN_MS, reason="body unavailable")


async def bind_files(job: Job, decoded: Decoded, *, claiming: Claiming) -> Outcome | None:
    """The files gate: a request that names files of a provider is called only where they lie. Files that nobody has
    uploaded through a gateway count as lying at the request's first provider, whose API says if they do not. Raises
    StoreUnavailable."""
    ids, routes = decoded.request.files, decoded.chain.routes
    if not ids or not routes or job.batch_result is not None:
        return None
    known = await claiming.find_files(ids)
    for id, file in known.items():
        if file.tenant != job.identity.tenant:  # as the API answers about a file that it does not have
            return _no_such_file(id, request=job.identity.id)
    providers = {file.provider: file.id for file in known.values()} or {routes[0].provider: ""}
    if len(providers) > 1:
        where = ", ".join(f"{id} at {provider}" for provider, id in providers.items())
        return end_with("invalid_request", f"body: its files lie at different providers: {where}; upload them again")
    ((provider, id),) = providers.items()
    there = tuple(route for route in routes if route.provider == provider)
    if not there:
        text = f"body: file {id} lies at provider {provider}, which lane {job.lane_name} does not call for this model"
        return end_with("invalid_request", text)
    job.decoded = replace(decoded, chain=replace(decoded.chain, routes=there))
    return None


def _no_such_file(id: str, *, request: str) -> Outcome:
    type_, message = "not_found_error", f"File not found: {id}"
    body = json.dumps({"type": "error", "error": {"type": type_, "message": message}, "request_id": request})
    failure = ProviderFailure(status=404, type=type_, error=body)
    brief = f"{type_} 404"
    return end_with("provider_rejected", f"404 {type_}: {message}", status=404, brief=brief, provider=failure)


HOLD_S = 3.0
STAGGER_S = 0.2
"""Each request waits up to this many seconds longer, at random. So one of them makes the probe (the first call after an
outage), and the others come after its result."""


async def await_route(
    job: Job, decoded: Decoded, *, breakers: Breakers, now_ms: NowMs, rng: random.Random
) -> Outcome | None:
    """The route gate: whether the lane and the tenant may use the model, and a provider may be called for it. While all
    are paused or their circuit breakers are open, a request waits here for at most `HOLD_S`."""
    if job.batch_result is not None:
        return None
    if decoded.chain.forbidden:
        return end_with("forbidden_model", decoded.chain.forbidden)
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


SPREAD_MS = 60_000
"""If a cap is used up, requests are deferred to the next day, week or month, and come back at random times within this
time after its beginning."""
TAKE_WITHIN_S = 10.0
HELD_AFTER_MS = 60_000
"""What is held for a request against caps ends so long after its deadline if its worker has died: clocks differ."""
STORE_AWAY_MS = 1000
SOON_MS = 2000
SOON_AT_MOST_MS = 60_000
"""If calls that run hold what is left of a cap, requests try again after a quarter of the time that they have waited,
within these bounds."""
Estimate = Callable[[Job, Request, Route], Amounts]


class _Held(NamedTuple):
    """`likely`: what the call is expected to use. It is counted if the call fails and may have to be paid for. `again`:
    what is held for each further call."""

    hold: Hold
    likely: Spent
    again: tuple[Hold, ...] = ()


@dataclass(slots=True, eq=False)
class CapsGate:
    """Lets a request pass if its lane, tenant, key and user have enough left of their caps for all that one call of it
    can use: its `max_tokens` of output, at the dearest of its routes. A further call, after one that has to be paid, is
    made only if there is enough left for it, too (`hold_again`). `estimate`: `BudgetGate.amounts`. `publish`:
    `Lifecycle.publish`."""

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
        routes, model = decoded.chain.routes, request.model
        if job.batch_result is not None:  # it is paid for: what it costs takes the place of what was held for it
            self._held[job] = _Held(self._kept(job, bounds, request), self._estimated(job, request, routes)[0])
            return None
        if any(bound.what == "usd" for bound in bounds):
            routes = tuple(route for route in routes if self.prices.has(route.model, route.name))
            job.decoded = replace(decoded, chain=replace(decoded.chain, routes=routes))
        if not routes:
            return end_with(
                "forbidden_model",
                f"model {model[:80]!r} has no price, and what is spent here is capped in dollars; "
                "the operator can set its price (LANEKEEPER_PRICES__MODELS)",
            )
        likely, most = self._estimated(job, request, routes)
        try:
            found = await self._take(job, decoded, bounds, most)
        except (StoreUnavailable, TimeoutError):  # while a cap cannot be checked, no provider is called
            return Deferred(delay_ms=STORE_AWAY_MS, reason="store")
        if isinstance(found, Over):
            return self._over(job, request, found)
        self._held[job] = _Held(found, likely)
        return None

    async def hold_again(self, job: Job, decoded: Decoded) -> bool:
        """Hold as much as before for a further call, whose cost comes to that of those before. Returns False if there
        is not enough left, or the store does not answer."""
        held = self._held.get(job)
        if held is None:
            return True
        nth = " again" * (len(held.again) + 1)
        try:
            found = await self._take(job, decoded, held.hold.bounds, held.hold.spent._replace(requests=0), nth=nth)
        except (StoreUnavailable, TimeoutError):
            return False
        if isinstance(found, Over):
            return False
        self._held[job] = held._replace(again=(*held.again, found))
        return True

    async def leave(self, job: Job, decoded: Decoded, outcome: Outcome | None) -> None:
        """Correct what `enter` counted against the caps. After a failure nothing is counted, unless the failed call may
        have to be paid for: then the estimate stays counted."""
        held, attempted = self._held.pop(job, None), job.attempted
        hold, likely, more = (None, Spent(), ()) if held is None else held
        for again in more:
            self.spending.correct(again, Spent())
        answer = outcome.answer if isinstance(outcome, PipelineAdvanced) else outcome
        goes_on = outcome is None or isinstance(outcome, (Batched, Deferred))
        if job.batch is not None and attempted is None and goes_on:
            return  # it stays held: the request comes back from its batch, and takes the same place
        used = Spent()
        if isinstance(answer, Answered):
            usage = None if attempted is None else attempted.usage
            tokens = 0.0 if usage is None else usage.input_tokens + usage.output_tokens
            used = Spent(1, tokens, (attempted and attempted.cost_usd) or 0.0)
            if usage is None and hold is not None:  # the provider has not said what the call used
                used = likely
        elif hold is not None and attempted is not None and _may_be_paid(attempted):
            used = likely
        for model, amounts, cost_usd in () if attempted is None else attempted.lost:
            _, tokens, usd = self._spent(decoded.request, amounts, model)
            usd = usd if cost_usd is None else cost_usd
            used = Spent(used.requests, used.tokens + tokens, used.usd + usd)
        if isinstance(answer, Answered):
            saved_usd = 0.0 if attempted is None else attempted.saved_usd
            self.spending.count(job.lane_name, job.identity.tenant, used, saved_usd=saved_usd)
        if hold is not None:
            self.spending.correct(hold, used, publish=partial(self.publish, job))

    async def enter_first(self, job: Job, decoded: Decoded) -> Outcome | None:
        """A gate before all that can end a request, so that `leave_last` is called."""
        return None

    async def leave_last(self, job: Job, decoded: Decoded, outcome: Outcome | None) -> None:
        """Give back what is held for a request that was in a batch, and ended before `enter`: too late, or
        cancelled."""
        if job.batch is None:
            return
        match outcome:
            case Replayed(completion=completion) if completion.code != "cancelled":
                return  # it was delivered twice, and the first one has counted it
            case Refused() | DeadLettered() | Superseded() | Replayed():
                bounds = self._bounds(job, decoded.request)
                self.spending.correct(self._kept(job, bounds, decoded.request), Spent())

    def _bounds(self, job: Job, request: Request) -> tuple[Bound, ...]:
        return self.spending.bounds(job.lane_name, job.identity.tenant, key=request.key, user=request.user)

    async def _take(
        self, job: Job, decoded: Decoded, bounds: tuple[Bound, ...], wanted: Spent, *, nth: str = ""
    ) -> Hold | Over:
        # one that may go into a batch is named again when its request comes back
        nonce = "" if decoded.lane.batches.enabled or job.batch is not None else token_hex(4)
        reservation, publish = _reservation(job, decoded.request, nonce, nth=nth), partial(self.publish, job)
        async with asyncio.timeout(TAKE_WITHIN_S):
            return await self.spending.take(bounds, wanted, publish=publish, reservation=reservation)

    def _kept(self, job: Job, bounds: tuple[Bound, ...], request: Request) -> Hold:
        """What is held since a request was gathered for a batch."""
        return Hold(bounds, Spent(), self.now_ms(), _reservation(job, request))

    def _estimated(self, job: Job, request: Request, routes: Sequence[Route]) -> tuple[Spent, Spent]:
        """What a call is expected to use, and what it can use at most, at the dearest of these routes."""
        likely, most = Spent(), Spent()
        for route in routes:
            amounts = self.estimate(job, request, route)
            likely = _greater(likely, self._spent(request, amounts, route.model, route.name))
            amounts = amounts._replace(output_tokens=max(amounts.output_tokens, request.max_tokens))
            most = _greater(most, self._spent(request, amounts, route.model, route.name))
        return likely, most

    def _spent(self, request: Request, amounts: Amounts, model: str, name: str = "") -> Spent:
        usage = Usage(
            input_tokens=round(amounts.input_tokens),
            output_tokens=round(amounts.output_tokens),
            is_fast=request.is_fast,
        )
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
            fits = over.wanted <= over.bound.limit
            return end_with("deadline_exceeded", text, retry_after_ms=wait_ms if fits else None)
        delay_ms = min(wait_ms + round(self.rng.uniform(0, SPREAD_MS)), left_ms)
        return Deferred(delay_ms=delay_ms, reason=over.bound.reason)


def _reservation(job: Job, request: Request, nonce: str = "", *, nth: str = "") -> AllowanceReservation:
    whose = f"{job.identity.tenant}/{job.identity.id}{nth}"
    return AllowanceReservation(whose, nonce, request.deadline_ms + HELD_AFTER_MS)


def _greater(one: Spent, other: Spent) -> Spent:
    return Spent(*map(max, one, other))


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
            dialect=request.dialect,
            tokens=round(amounts.input_tokens + amounts.output_tokens),
            deadline_ms=request.deadline_ms,
            tenant=job.identity.tenant,
            ticket="" if before is None else before.ticket,
            tries=0 if before is None else before.tries,
        )
        return Batched(params=params)
