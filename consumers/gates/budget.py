"""The budget gate: before its call a request waits for its turn, and until the account has enough budget left.

A waiting request keeps its slot if the requests behind it would wait as well (`waiting_room.py` decides that). A
request that cannot be in time is refused at once, with the figures.
"""

import asyncio
import random
from collections.abc import Callable, Sequence

from consumers.chain import Route
from consumers.failures import ProviderError
from consumers.gates.waiting_room import WaitingRoom
from consumers.job import Answered, Deferred, Dropped, Job, NowMs, Outcome, Refused
from consumers.limits.amounts import PAUSED, Amounts
from consumers.limits.base import Budgets, Reservation, Wait, WaitTooLong
from consumers.limits.estimates import Estimates, UsageClass, task_of
from consumers.limits.spec import BudgetSpec
from consumers.providers.breaker import Breakers
from consumers.providers.counting import spent
from consumers.state.base import Stop
from lanekeeper.contract.problems import RequestProblem
from topology.codec.request import Request

TOLD_FROM_S = 1.0
"""A shorter wait is not reported."""
LATER_MS = 1000
BACK_WITHIN_MS = 15_000
"""A deferred request is back in line after this time at most, because the forecast may be too long."""
AT_ONCE_S = 0.25
"""A start this soon counts as immediate: finding out more would take as long."""
SPREAD_S = 60.0
"""Requests that wait for a paused account come back spread over this time: the first one finds out for all, because a
call that is refused again ends its request."""
OnWait = Callable[[Job, Wait], None]


class BudgetGate:
    """Sets the job's route and reservation. `on_wait` is told of each wait that is not short, when it begins."""

    def __init__(
        self,
        budgets: Budgets,
        breakers: Breakers,
        estimates: Estimates,
        *,
        spec: BudgetSpec,
        now_ms: NowMs,
        rng: random.Random,
        on_wait: OnWait | None = None,
    ) -> None:
        self._rng = rng
        self._budgets = budgets
        self._breakers = breakers
        self._estimates = estimates
        self._spec = spec
        self._now_ms = now_ms
        self._on_wait = on_wait
        self._room = WaitingRoom()

    async def enter(self, job: Job) -> Outcome | None:
        assert job.request is not None
        routes = self._breakers.callable(job.chain.routes)
        route = routes[0]
        until = self._start_by(job, job.request, route)
        began_s = asyncio.get_running_loop().time()
        try:
            # `job.stop` ends the wait as it ends an attempt
            async with asyncio.timeout(self._spec.hold_s) as job.limit:
                if job.stopped is not None:
                    job.stop(job.stopped)
                if len(routes) > 1 and (found := await self._overflowing(job, job.request, routes)) is not None:
                    job.route, job.reservation = found
                    return None
                route = await self._soonest(job, job.request, routes)
                until = self._start_by(job, job.request, route)
                job.reservation = await self._reserve(job, job.request, route, until)
                job.route = route
        except WaitTooLong as too_long:
            return self._too_long(job, job.request, route, too_long.wait)
        except TimeoutError:
            if job.limit is None or not job.limit.expired():
                raise
            return await self._held(job, job.request, route, asyncio.get_running_loop().time() - began_s)
        finally:
            job.limit = None
        return None

    def _start_by(self, job: Job, request: Request, route: Route) -> float:
        """When its call must begin to be answered in time. A call that may begin at once is always tried."""
        left_s = (request.deadline_ms - self._now_ms()) / 1000
        spare_s = max(left_s - self._estimates.run_s(self._usage_class(job, route)), min(left_s, AT_ONCE_S))
        return asyncio.get_running_loop().time() + spare_s

    async def leave(self, job: Job, outcome: Outcome | None) -> None:
        """Give back what was not used. If it is unknown what a failed call used, all that was reserved counts."""
        reservation, job.reservation = job.reservation, None
        if reservation is None:
            return
        if job.attempt_started_ms is None and job.usage is None:
            self._budgets.settle(reservation, None)
            return
        self._budgets.settle(reservation, reservation.amounts if job.usage is None else job.usage)
        if job.request is None or job.route is None:
            return
        kind = self._usage_class(job, job.route)
        if isinstance(outcome, (Answered, Refused)) and job.run_ms is not None:
            self._estimates.learn_run(kind, job.run_ms / 1000, was_cut=isinstance(outcome, Refused))
        if isinstance(outcome, Answered) and job.usage is not None:
            self._estimates.learn(
                kind,
                body_bytes=len(job.request.body),
                input_tokens=job.usage.input_tokens,
                output_tokens=job.usage.output_tokens,
            )

    async def move(self, job: Job, route: Route, error: ProviderError | None) -> bool:
        """Reserve for another route at once, or not at all; whether it could. Then what was reserved for the one before
        is settled: by the error of its call, or given back where none was made (None).
        """
        assert job.request is not None
        amounts = self.amounts(job, job.request, route)
        found = await self._budgets.try_reserve(route.account, lane=job.lane_name, amounts=amounts)
        if found is None:
            return False
        before, model = job.reservation, job.route.model if job.route else ""
        job.reservation, job.route = found, route
        if before is not None:
            used = None if error is None else spent(error, before.amounts)
            if used is not None and used.output_tokens > 0:
                job.lost.append((model, used))
            self._budgets.settle(before, used)
        return True

    def amounts(self, job: Job, request: Request, route: Route) -> Amounts:
        """What the request is expected to use on that route."""
        return Amounts(
            1.0,
            self._estimates.input_tokens(route.model, len(request.body)),
            self._estimates.output_tokens(self._usage_class(job, route), max_tokens=request.max_tokens),
        )

    async def _overflowing(
        self, job: Job, request: Request, routes: Sequence[Route]
    ) -> tuple[Route, Reservation] | None:
        """The first route that has room soon enough."""
        assert job.lane is not None
        patience_s = job.lane.target_wait_s if self._spec.overflow_s is None else self._spec.overflow_s
        for route in routes:
            until = self._start_by(job, request, route)
            soon = min(until, asyncio.get_running_loop().time() + patience_s)
            if (await self._wait(job, request, route)).seconds > soon - asyncio.get_running_loop().time():
                continue
            try:
                return route, await self._reserve(job, request, route, soon)
            except WaitTooLong:
                continue
        return None

    async def _soonest(self, job: Job, request: Request, routes: Sequence[Route]) -> Route:
        if len(routes) == 1:
            return routes[0]
        waits = [await self._wait(job, request, route) for route in routes]
        return routes[min(range(len(routes)), key=lambda each: waits[each].seconds)]

    async def _reserve(self, job: Job, request: Request, route: Route, until: float) -> Reservation:
        has_to_wait = False

        def on_wait(wait: Wait) -> None:
            nonlocal has_to_wait
            has_to_wait = True
            self._waits(job, route, wait)

        amounts, arrived = self.amounts(job, request, route), self._arrived(job, request)
        held_until = None if job.limit is None else job.limit.when()
        try:
            reservation = await self._budgets.reserve(
                route.account, lane=job.lane_name, amounts=amounts, until=until, arrived=arrived, on_wait=on_wait
            )
        except WaitTooLong:
            if job.limit is not None and job.stopped is None and not job.limit.expired():
                job.limit.reschedule(held_until)  # then it waits in a delay
            raise
        finally:
            if has_to_wait:
                self._room.leave(job.lane_name, route.account)
        if not has_to_wait:
            self._room.passed(job.lane_name, route.account)
        return reservation

    def _waits(self, job: Job, route: Route, wait: Wait) -> None:
        slots = 1 if job.lane is None else job.lane.slots
        patience_s = self._room.enter(job.lane_name, route.account, slots=slots)
        if patience_s is not None and job.limit is not None and job.stopped is None:
            job.limit.reschedule(asyncio.get_running_loop().time() + min(patience_s, self._spec.hold_s))
        if self._on_wait is not None and wait.seconds >= TOLD_FROM_S:
            self._on_wait(job, wait)

    def _arrived(self, job: Job, request: Request) -> float | None:
        """The time that decides its place in the line. A request that was deferred, or taken over from another worker,
        keeps its place. None: a new one, which takes its place now whatever its headers say."""
        if not job.came_before:
            return None
        return asyncio.get_running_loop().time() - max(0, self._now_ms() - request.start_ms) / 1000

    async def _wait(self, job: Job, request: Request, route: Route) -> Wait:
        amounts = self.amounts(job, request, route)
        return await self._budgets.predicted_wait(route.account, lane=job.lane_name, amounts=amounts)

    def _too_long(self, job: Job, request: Request, route: Route, wait: Wait) -> Outcome:
        left_s = (request.deadline_ms - self._now_ms()) / 1000
        run_s = self._estimates.run_s(self._usage_class(job, route))
        if wait.reason == PAUSED and wait.seconds < left_s:
            back_s = min(left_s, wait.seconds + self._rng.uniform(0, SPREAD_S))
            return Deferred(delay_ms=round(1000 * back_s), reason=PAUSED, due_ms=job.hop.due_ms)
        bound_ms = request.deadline_ms - request.start_ms
        return Refused(
            RequestProblem(
                "deadline_exceeded",
                f"not answered within {bound_ms} ms: it could start in {round(1000 * wait.least_s)} ms at the earliest "
                f"(waiting for {wait.reason} of {route.account}), its call may take {round(1000 * run_s)} ms, and "
                f"{max(0, round(1000 * left_s))} ms are left",
            )
        )

    async def _held(self, job: Job, request: Request, route: Route, held_s: float) -> Outcome:
        """The outcome of a wait that was ended: by a stop, by the longest time that a delivery may be held, or to let
        others of its lane pass."""
        match job.stopped:
            case Stop.CANCELLED:
                return Dropped(RequestProblem("cancelled", "cancelled by its owner while it waited for the budget"))
            case Stop.FENCED:
                return Deferred(delay_ms=LATER_MS, reason="running elsewhere", due_ms=job.hop.due_ms)
            case None:
                wait = await self._wait(job, request, route)
                passing = held_s < self._spec.hold_s
                delay_ms = max(LATER_MS, min(BACK_WITHIN_MS, round(1000 * wait.seconds))) if passing else LATER_MS
                return Deferred(delay_ms=delay_ms, reason=wait.reason, due_ms=job.hop.due_ms)

    def _usage_class(self, job: Job, route: Route) -> UsageClass:
        return UsageClass(job.lane_name, task_of(job.routing_key), route.model)
