"""Everything that counts its users, behind one interface, and schedules of users that come, go and are cancelled.

A `Counted` has one of the things with its surroundings: `use` takes of it, holds for a while and gives back; `left`
says what is still counted, and `later` uses all that there is, which must succeed at once when everybody has gone.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from enum import IntEnum
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

from typing_extensions import override

from consumers.budget_gate import BudgetGate
from consumers.claiming import Claiming
from consumers.dialects.answers import Answer, OnEvent
from consumers.failures import OverloadedError, RateLimitedError, TransientError
from consumers.gates import CapsGate, ClaimGate, Gate, await_route, refuse_if_late
from consumers.job import Job
from consumers.limits.base import AccountCaps, Amounts, BudgetSpec, CallInProgress
from consumers.limits.budgets import own_budgets
from consumers.limits.estimates import Estimates
from consumers.pool import Pool
from consumers.prices import Prices, Usage
from consumers.providers import breakers as breaking
from consumers.providers.breakers import FAILURES, Breakers, BreakerState
from consumers.providers.registry import Registry
from consumers.slots import admission
from consumers.slots.activity import LaneActivity
from consumers.slots.admission import Admission, LaneSlots, QueueAdmitter, TenantShare
from consumers.spending import Bound, CapsSpec, Hold, Spending, Spent
from consumers.state.base import (
    AllowanceReservation,
    AllowanceTaken,
    AppendRefusal,
    Ended,
    Granted,
    Identity,
    NewEntries,
    Period,
    Stop,
    StoreUnavailable,
)
from lanekeeper.telemetry.tracing import Tracing
from tests.support.jobs import NOW_MS, Bench, attempts, handler, routes_of
from tests.support.memory_store import MemoryAllowances, MemoryStore, daily
from topology.codec.decoding import Request

Holding = Callable[[], Awaitable[None]]
MODEL = "claude-sonnet-5-5"
BODY = b'{"model":"claude-sonnet-5-5","max_tokens":5,"messages":[{"role":"user","content":"hi"}]}'
AWAY_S = 0.3
SHORT_S = 0.0004
"""The limits of things on a real event loop, and the longest wait there."""


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Counted:
    """A thing that counts its users. `is_real`: it is used on an event loop in real time."""

    expected: ClassVar[tuple[type[BaseException], ...]] = ()
    """What a user may get in place of what it wanted."""
    limits: ClassVar[Mapping[str, tuple[ModuleType, float]]] = {}
    """The waits of this thing that have a time limit, by the name of the constant."""
    over_s: ClassVar[float] = 1.0
    """How soon all must have gone when nobody holds on any longer, in virtual time."""

    def __init__(self, *, is_real: bool) -> None:
        self.is_real = is_real

    @classmethod
    def waits_s(cls) -> tuple[float, ...]:
        """For how long users hold and schedules wait: also exactly as long as the limits, so that timers meet."""
        return (0.001, *(limit_s for _, limit_s in cls.limits.values()), 0.5)

    async def use(self, tenant: str, way: int, hold: Holding) -> None:
        raise NotImplementedError

    def poke(self, what: int) -> None:
        """Something happens to the thing."""

    def heal(self) -> None:
        """End a fault that `poke` has begun."""

    async def rest(self) -> None:
        """Let end what goes on without users."""

    def left(self) -> Mapping[str, object]:
        """What is counted; all must be empty or 0 when all have gone."""
        raise NotImplementedError

    async def later(self) -> None:
        """Use all that there is, without waiting."""

    async def aclose(self) -> None: ...


# ---- schedules -------------------------------------------------------------------------------------------------------


class Do(IntEnum):
    TURN = 0
    BEGIN = 1
    CANCEL = 2
    END = 3
    WAIT = 4
    POKE = 5


Step = tuple[Do, int, int]
"""What happens next, of which user, and how. Between two turns of the loop everything happens at the same moment."""


class _User:
    """`how`: its way of using the thing, and whether it holds until it is ended, or for some time."""

    def __init__(self, thing: Counted, number: int, how: int) -> None:
        self._may_go = asyncio.Event()
        waits_s = (SHORT_S,) if thing.is_real else thing.waits_s()
        self._holds_s = waits_s[how % len(waits_s)] if how % 3 else None
        self.task = asyncio.create_task(thing.use("abc"[number % 3], how, self._hold))

    async def _hold(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._holds_s):
                await self._may_go.wait()

    def end(self) -> None:
        self._may_go.set()


class LeftOver(AssertionError):
    """Everybody has gone, and something is still counted."""


async def play(make: type[Counted], schedule: Sequence[Step], *, cancels: int, is_real: bool = False) -> None:
    """Let users come and go as the schedule says; then end them all, or cancel them so many times. When they have gone,
    nothing may be counted, and later users get everything. `is_real`: in real time, with short limits."""
    with ExitStack() as limits:
        if is_real:
            for name, (module, _) in make.limits.items():
                limits.enter_context(patch.object(module, name, SHORT_S))
        await _play(make(is_real=is_real), schedule, cancels, limits)


async def _play(thing: Counted, schedule: Sequence[Step], cancels: int, limits: ExitStack) -> None:
    is_real = thing.is_real
    try:
        users: list[_User] = []
        for do, which, how in schedule:
            match do:
                case Do.BEGIN:
                    users.append(_User(thing, which, how))
                case Do.CANCEL if users:
                    users[which % len(users)].task.cancel()
                case Do.END if users:
                    users[which % len(users)].end()
                case Do.TURN:
                    await turns(1 + how % 3)
                case Do.WAIT:
                    waits_s = thing.waits_s()
                    await asyncio.sleep(SHORT_S if is_real else waits_s[how % len(waits_s)])
                case Do.POKE:
                    thing.poke(how)
        thing.heal()
        for user in users:
            user.end()
        for _ in range(cancels):
            for user in users:
                user.task.cancel()
            await turns(1)
        if users:
            _, late = await asyncio.wait([user.task for user in users], timeout=10 if is_real else thing.over_s)
            for task in late:
                task.cancel()
            if late:
                raise LeftOver(f"{len(late)} users still wait: {thing.left()}")
        for user in users:
            error = None if user.task.cancelled() else user.task.exception()
            if error is not None and not isinstance(error, thing.expected):
                raise error
        limits.close()
        end_s = asyncio.get_running_loop().time() + (10 if is_real else 0)
        while True:
            await thing.rest()
            if not (left := {what: count for what, count in thing.left().items() if count}):
                break
            if asyncio.get_running_loop().time() >= end_s:
                raise LeftOver(str(left))
            await asyncio.sleep(0.001)
        async with asyncio.timeout(10 if is_real else 0.3):
            await thing.later()
    finally:
        await thing.aclose()


# ---- in a worker -----------------------------------------------------------------------------------------------------


class Slots(Counted):
    """The slots of a lane with two queues, in-flight limits and side queues."""

    limits: ClassVar = {"HELD_S": (admission, admission.HELD_S)}

    def __init__(self, *, is_real: bool) -> None:
        super().__init__(is_real=is_real)
        self._aside: set[str] = set()
        shares = {"b": TenantShare(in_flight=1), "c": TenantShare(weight=3)}
        self._lane = LaneSlots(shares, has_aside=self._aside.__contains__)
        self._intake, self._due = self._lane.queue(2), self._lane.queue(1)

    @override
    async def use(self, tenant: str, way: int, hold: Holding) -> None:
        queue = self._due if way % 4 == 3 else self._intake
        if not queue.begin(tenant):
            movable, is_aside = way % 2 == 1, way % 5 == 1
            if await queue.wait(tenant, rank=way % 3, movable=movable, is_aside=is_aside) is Admission.ASIDE:
                return
        try:
            await hold()
        finally:
            queue.end(tenant)

    @override
    def poke(self, what: int) -> None:
        match what % 3:
            case 0:
                self._intake.resize(1 + what % 4)
            case 1:
                self._intake.set_surplus_aside(what % 2 == 1)
            case _:
                self._aside ^= {"abc"[what % 3]}

    @override
    def left(self) -> Mapping[str, object]:
        queues = (self._intake, self._due)
        return {
            "running": [queue.running for queue in queues if queue.running],
            "tenants": [queue._running for queue in queues if queue._running],
            "waiting": [queue.waiting for queue in queues if queue.waiting],
            "passes": [queue._passes for queue in queues if queue._passes],
        }

    @override
    async def later(self) -> None:
        self._intake.resize(2)
        assert all(self._intake.begin("d") for _ in range(2))
        assert self._due.begin("d")
        assert not self._due.begin("d")


class Caps(Counted):
    """What is counted against a daily cap."""

    limits: ClassVar = {}

    def __init__(self, *, is_real: bool) -> None:
        super().__init__(is_real=is_real)
        self._allowances = _SlowAllowances()
        self._spending = Spending(self._allowances, CapsSpec())
        self._bounds = tuple(Bound("tenant", who, "requests", limit) for who, limit in (("x", 5), ("y", 3)))

    @override
    async def use(self, tenant: str, way: int, hold: Holding) -> None:
        found = await self._spending.take(self._bounds, Spent(requests=1 + way % 2), publish=lambda *_, **__: None)
        try:
            await hold()
        finally:
            if isinstance(found, Hold):
                self._spending.correct(found, Spent())

    @override
    async def rest(self) -> None:
        await self._spending.finish(within_s=5)

    @override
    def left(self) -> Mapping[str, object]:
        used = {name: used for name, used in self._allowances.used.items() if used and name.startswith("cap")}
        return {"used": used, "background": self._spending._background._tasks}


class _SlowAllowances(MemoryAllowances):
    @override
    async def take(
        self, name: str, amount: float, *, limit: float, period: Period, reservation: AllowanceReservation | None = None
    ) -> AllowanceTaken:
        await turns(1)
        taken = await super().take(name, amount, limit=limit, period=period, reservation=reservation)
        await turns(1)
        return taken

    @override
    async def settle(self, name: str, used: float, *, period: Period, reservation: AllowanceReservation) -> None:
        await turns(1)
        await super().settle(name, used, period=period, reservation=reservation)
        await turns(1)

    @override
    async def give_back(self, name: str, amount: float, *, period: Period) -> None:
        await turns(1)
        await super().give_back(name, amount, period=period)
        await turns(1)


class Probes(Counted):
    """The probe of an open circuit breaker, of which a process makes one at a time."""

    limits: ClassVar = {name: (breaking, getattr(breaking, name)) for name in ("OPEN_S", "OPEN_MOST_S")}

    def __init__(self, *, is_real: bool) -> None:
        super().__init__(is_real=is_real)
        self._breakers = Breakers(rng=random.Random(1))
        (self._route,) = routes_of("anthropic").of("critical", "", MODEL).routes
        self._breakers._of(self._route).open(asyncio.get_running_loop().time() - breaking.OPEN_MOST_S)

    @override
    async def use(self, tenant: str, way: int, hold: Holding) -> None:
        clock = asyncio.get_running_loop().time
        permit = self._breakers.enter(self._route, clock(), request=tenant)
        if permit is None:
            return
        try:
            await hold()
        except BaseException:
            self._breakers.unknown(permit, clock())
            raise
        if way % 3:
            self._breakers.failed(permit, TransientError("down"), clock(), timeout_s=60)
        else:
            self._breakers.unknown(permit, clock())

    @override
    async def rest(self) -> None:
        await asyncio.sleep(0.001 if self.is_real else 2 * breaking.OPEN_MOST_S)

    @override
    def left(self) -> Mapping[str, object]:
        return {"probing": [each for each in self._breakers._all.values() if each.state is BreakerState.PROBING]}

    @override
    async def later(self) -> None:
        clock = asyncio.get_running_loop().time
        permit = self._breakers.enter(self._route, clock(), request="later")
        assert permit is not None, "no call can probe"
        self._breakers.unknown(permit, clock())


class _SlowStore(MemoryStore):
    """A store in memory; each call takes some turns of the loop, before and after what it does."""

    @override
    async def append(self, parts: Sequence[NewEntries]) -> Sequence[AppendRefusal | None]:
        await turns(2)
        self._at()
        return [None for _ in parts]


def _slowed(name: str) -> Callable[..., Awaitable[Any]]:
    async def call(self: _SlowStore, *given: Any, **more: Any) -> Any:
        await turns(1)
        found = await getattr(MemoryStore, name)(self, *given, **more)
        await turns(1)
        return found

    return call


for _name in ("claim", "renew", "shelter", "note_waiting", "release", "complete", "defer"):
    setattr(_SlowStore, _name, _slowed(_name))


# ---- the whole pipeline ----------------------------------------------------------------------------------------------


class Provider:
    """A provider that answers after a few turns of the loop, or fails."""

    name = "anthropic"
    batches = None

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.takes_s = 0.0
        self.used: Amounts | None = None
        self.calls = 0
        self.holds: dict[str, Holding] = {}
        """How long calls take, by the id of the request; others take `takes_s`."""

    async def stream(
        self,
        request: Request,
        *,
        timeout_s: float,
        parts: OnEvent | None,
        in_progress: CallInProgress | None = None,
        **_: Any,
    ) -> Answer:
        self.calls += 1
        if in_progress is not None and self.used is not None:
            in_progress.used = lambda: self.used
        await turns(3)
        if (hold := self.holds.get(request.id)) is not None:
            await hold()
        else:
            await asyncio.sleep(self.takes_s)
        if self.error is not None:
            raise self.error
        return Answer(body=b"{}", model=MODEL, provider=self.name, usage=Usage(input_tokens=9, output_tokens=4))

    async def probe(self, model: str, *, by_call: bool) -> None: ...

    async def aclose(self) -> None: ...


class Ground:
    """The whole pipeline with one account."""

    def __init__(self, *, concurrency: int | None = None, capped: int = 10) -> None:
        self.bench = Bench()
        self.provider = Provider()
        limits = AccountCaps(requests=6000, input_tokens=600_000, output_tokens=600_000, concurrency=concurrency)
        spec = BudgetSpec(accounts={"anthropic": limits})
        self.budgets = own_budgets(spec)
        self.breakers = Breakers(rng=random.Random(1))
        self.store = _SlowAllowances()
        self.spending = Spending(self.store, CapsSpec(lanes={"critical": daily(requests=capped, usd=1)}))
        rng = random.Random(1)
        self.gate = budget = BudgetGate(
            self.budgets,
            self.breakers,
            Estimates(first_output_tokens=5, first_bytes_per_token=3.5),
            spec=spec,
            now_ms=lambda: NOW_MS,
            on_wait=lambda job, wait: None,
        )
        self.caps = CapsGate(
            self.spending,
            self.breakers,
            prices=Prices(),
            estimate=budget.amounts,
            now_ms=lambda: NOW_MS,
            rng=rng,
            publish=lambda _, __, **___: None,
        )
        claim = ClaimGate(self.bench.claiming, now_ms=lambda: NOW_MS)
        self.handler = handler(
            attempts(
                Registry(self.provider, tracing=Tracing()),
                breakers=self.breakers,
                budget_gate=budget,
                replies=self.bench.replies,
                lifecycle=self.bench.lifecycle,
            ),
            gates=(
                Gate(partial(refuse_if_late, breakers=self.breakers, now_ms=lambda: NOW_MS)),
                Gate(claim.enter, claim.leave),
                Gate(partial(await_route, breakers=self.breakers, now_ms=lambda: NOW_MS, rng=rng)),
                Gate(self.caps.enter, self.caps.leave),
                Gate(budget.enter, budget.leave),
            ),
            provider="anthropic",
            replies=self.bench.replies,
        )

    def job(self, **headers: Any) -> Job:
        return self.bench.job(body=BODY, headers=headers)

    async def held(self, *jobs: Job) -> dict[str, Any]:
        """What requests still hold after all background work has ended; empty: nothing."""
        await self.spending.finish(within_s=30)
        await self.bench.claiming.finish(within_s=30)
        account = self.budgets.queue("anthropic/sonnet").account
        found = {
            "running": account.calls.running,
            "waiting": len(account.lines),
            "waiting room": any(self.gate._waiting_room._waiting.values()),
            "reservations": [job for job in jobs if job.reserved],
            "caps": len(self.caps._held),
            "background": [*self.spending._background._tasks, *self.bench.claiming._background._tasks],
            "waiting for": [job for job in jobs if job.waiting],
            "probing": [each for each in self.breakers._all.values() if each.state is BreakerState.PROBING],
        }
        return {what: value for what, value in found.items() if value}

    @property
    def counted(self) -> float:
        return self.store.used.get("cap lane critical requests", 0)

    async def deaths(self, id: str = "m-1") -> int:
        """How many holders never released the claim, as reported to the next holder."""
        delivery = self.bench.delivery(body=BODY, message_id=id)
        delivery.redelivered = True
        found = await self.bench.store.claim(Identity("", id), self.bench.job(delivery=delivery).fingerprint)
        assert isinstance(found, Granted)
        return found.deaths

    async def open_breaker(self) -> None:
        """Open the breaker, and wait until it may be probed."""
        clock = asyncio.get_running_loop().time
        (route,) = routes_of("anthropic").of("critical", "", MODEL).routes
        for each in range(FAILURES):
            entered = self.breakers.enter(route, clock(), request=str(each))
            assert entered
            self.breakers.failed(entered, TransientError("down"), clock(), timeout_s=60)
        wait_s = self.breakers.wait_s(route, clock())
        assert wait_s > 0
        await asyncio.sleep(wait_s)


class Pipeline(Counted):
    """A pool with the steps of a request: slot, claim, caps, budget, breaker, call, outcome."""

    limits: ClassVar = {"HELD_S": (admission, admission.HELD_S)}
    over_s: ClassVar = 3600.0

    def __init__(self, *, is_real: bool) -> None:
        super().__init__(is_real=is_real)
        with patch("tests.support.jobs.MemoryStore", lambda *_: _SlowStore()):
            self._ground = Ground(concurrency=2, capped=1000)
        bench = self._ground.bench
        self._lane = LaneSlots({"b": TenantShare(in_flight=1)})
        self._jobs: list[Job] = []
        self._pool = Pool(
            SimpleNamespace(prefetch=4, queue="lane.critical", trouble=None),  # type: ignore[arg-type]
            job_of=self._job_of,
            handle=self._ground.handler.handle,
            settler=bench.settler,
            activity=LaneActivity("critical", slots=4, due_slots=1),
            tracing=Tracing(),
            admitter=QueueAdmitter(self._lane.queue(3)),
        )

    def _job_of(self, delivery: Any) -> Job:
        self._jobs.append(self._ground.bench.job(delivery=delivery))
        return self._jobs[-1]

    @override
    async def use(self, tenant: str, way: int, hold: Holding) -> None:
        id = f"m-{len(self._jobs)}-{way}" if way % 4 else f"m-{tenant}"
        self._ground.provider.holds[id] = hold
        delivery = self._ground.bench.delivery(body=BODY, message_id=id, user_id=tenant)
        await self._pool._take(delivery)

    @override
    def poke(self, what: int) -> None:
        errors = (None, OverloadedError("529"), RateLimitedError("429"), TransientError("cut", type="cut"), None)
        match what % 4:
            case 0:
                self._ground.provider.error = errors[what % 5]
            case 1 if self._jobs:
                self._jobs[what % len(self._jobs)].stop((Stop.CANCELLED, Stop.FENCED)[what % 2])
            case 2 if not self.is_real:
                self._ground.bench.store.failing = StoreUnavailable("away")
                asyncio.get_running_loop().call_later(AWAY_S, self.heal)
            case 3 if self._jobs and (limit := self._jobs[what % len(self._jobs)].waiting) is not None:
                limit.reschedule(asyncio.get_running_loop().time() + (SHORT_S if self.is_real else 0.5))

    @override
    def heal(self) -> None:
        self._ground.bench.store.failing = None

    @override
    async def rest(self) -> None:
        self._left = await self._ground.held(*self._jobs)

    @override
    def left(self) -> Mapping[str, object]:
        return {
            **self._left,
            "counted without a call": max(0, self._ground.counted - self._ground.provider.calls),
            "in hand": self._pool.in_hand,
            "jobs": self._pool.jobs,
            "undecided": self._pool._undecided,
            "activity": self._pool._activity.running,
            "slots": self._lane.running,
            "waiting for slots": self._lane.in_hand,
            "claims": self._ground.bench.claiming._held,
        }

    @override
    async def later(self) -> None:
        claiming_later = Claiming(self._ground.bench.store)
        for mine in {mine.id: mine for mine in self._jobs}.values():
            delivery = self._ground.bench.delivery(body=BODY, message_id=mine.id, user_id=mine.identity.tenant)
            found = await claiming_later.claim(self._ground.bench.job(delivery=delivery))
            assert isinstance(found, Granted | Ended), found
            assert isinstance(found, Ended) or found.deaths == 0


EVERYTHING: Sequence[type[Counted]] = (Slots, Caps, Probes, Pipeline)
