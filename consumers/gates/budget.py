"""The budget gate: before its call a request waits for its turn, and until the account has enough budget left.

A waiting request keeps its slot if the requests behind it would wait as well (`waiting_room.py` decides that). A
request that cannot be in time is refused at once, with the figures.
"""

import asyncio
import random
from collections.abc import Callable, Sequence

from consumers.chain import Route
from consumers.gates.waiting_room import WaitingRoom
from consumers.interruptible import Interruptible
from consumers.job import Asked, Job, NowMs, Reserved
from consumers.limits.accounts import Budgets
from consumers.limits.amounts import PAUSED, Amounts
from consumers.limits.base import Wait, WaitTooLong
from consumers.limits.estimates import Estimates, UsageClass, task_of
from consumers.limits.spec import BudgetSpec
from consumers.outcomes import Answered, Deferred, Outcome, Refused, stopped_by
from consumers.providers.breakers import Breakers
from lanekeeper.contract.problems import RequestProblem
from topology.codec.request import Request
from topology.lanes import LaneSpec

REPORTED_FROM_S = 1.0
"""A shorter wait is not reported."""
LATER_MS = 1000
BACK_WITHIN_MS = 15_000
"""A deferred request is back in line after this time at most, because the forecast may be too long."""
AT_ONCE_S = 0.25
"""A start within this time counts as immediate: looking for a faster route would take as long."""
SPREAD_S = 60.0
"""Requests that wait for a paused account come back spread over this time. The first one finds out whether the account
works again; a call that is refused ends its request, so the others should not all try."""
OnWait = Callable[[Job, Wait], None]


class BudgetGate:
    """Reserves budget for a job, on the best route that has enough. `on_wait` is called at the beginning of each wait
    that is not short."""

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

    async def enter(self, job: Job, asked: Asked) -> Outcome | None:
        routes = self._breakers.callable(asked.chain.routes)
        route = routes[0]
        until = self._start_by(job, asked.request, route)
        began_s = asyncio.get_running_loop().time()
        try:
            async with job.interruptible(self._spec.hold_s) as wait:
                if len(routes) > 1 and (found := await self._overflowing(job, asked, routes, wait)) is not None:
                    job.reserved = found
                    return None
                route = await self._soonest(job, asked.request, routes)
                until = self._start_by(job, asked.request, route)
                job.reserved = await self._reserve(job, asked, route, until, wait)
                return None
        except WaitTooLong as too_long:
            return self._too_long(job, asked.request, route, too_long.wait)
        return await self._held(job, asked.request, route, asyncio.get_running_loop().time() - began_s)

    def _start_by(self, job: Job, request: Request, route: Route) -> float:
        """When its call must begin to be answered in time. A call that may begin at once is always tried."""
        left_s = (request.deadline_ms - self._now_ms()) / 1000
        spare_s = max(left_s - self._estimates.run_s(self._usage_class(job, route)), min(left_s, AT_ONCE_S))
        return asyncio.get_running_loop().time() + spare_s

    async def leave(self, job: Job, asked: Asked, outcome: Outcome | None) -> None:
        """Give back what was not used. If it is unknown what a failed call used, all that was reserved counts."""
        reserved, job.reserved = job.reserved, None
        if reserved is None:
            return
        attempted = job.attempted
        if attempted is None:
            self._budgets.settle(reserved.reservation, None)
            return
        usage, kind = attempted.usage, self._usage_class(job, reserved.route)
        self._budgets.settle(reserved.reservation, reserved.reservation.amounts if usage is None else usage)
        if isinstance(outcome, (Answered, Refused)):
            self._estimates.learn_run(kind, attempted.run_ms / 1000, was_cut=isinstance(outcome, Refused))
        if isinstance(outcome, Answered) and usage is not None:
            self._estimates.learn(
                kind,
                body_bytes=asked.request.text_bytes,
                input_tokens=usage.input_tokens,
                output_tokens=usage.output_tokens,
            )

    async def move(self, job: Job, asked: Asked, route: Route, used: Amounts | None) -> bool:
        """Reserve for another route at once; False if that is not possible. If it is, the reservation for the earlier
        route is settled by what its call used, or given back if no call was made (None)."""
        amounts = self.amounts(job, asked.request, route)
        found = await self._budgets.try_reserve(route.account, lane=job.lane_name, amounts=amounts)
        if found is None:
            return False
        before, job.reserved = job.reserved, Reserved(route, found)
        if before is not None:
            self._budgets.settle(before.reservation, used)
        return True

    def amounts(self, job: Job, request: Request, route: Route) -> Amounts:
        """What the request is expected to use on that route."""
        return Amounts(
            1.0,
            self._estimates.input_tokens(route.model, request.text_bytes),
            self._estimates.output_tokens(self._usage_class(job, route), max_tokens=request.max_tokens),
        )

    async def _overflowing(
        self, job: Job, asked: Asked, routes: Sequence[Route], wait: Interruptible
    ) -> Reserved | None:
        """The first route that has room soon enough."""
        patience_s = asked.lane.target_wait_s if self._spec.overflow_s is None else self._spec.overflow_s
        for route in routes:
            until = self._start_by(job, asked.request, route)
            soon = min(until, asyncio.get_running_loop().time() + patience_s)
            if (await self._wait(job, asked.request, route)).seconds > soon - asyncio.get_running_loop().time():
                continue
            try:
                return await self._reserve(job, asked, route, soon, wait)
            except WaitTooLong:
                continue
        return None

    async def _soonest(self, job: Job, request: Request, routes: Sequence[Route]) -> Route:
        if len(routes) == 1:
            return routes[0]
        waits = [await self._wait(job, request, route) for route in routes]
        return routes[min(range(len(routes)), key=lambda each: waits[each].seconds)]

    async def _reserve(self, job: Job, asked: Asked, route: Route, until: float, held: Interruptible) -> Reserved:
        has_to_wait = False

        def on_wait(wait: Wait) -> None:
            nonlocal has_to_wait
            has_to_wait = True
            self._waits(job, asked.lane, route, wait, held)

        amounts, arrived = self.amounts(job, asked.request, route), self._arrived(job, asked.request)
        held_until = held.until_s
        try:
            reservation = await self._budgets.reserve(
                route.account, lane=job.lane_name, amounts=amounts, until=until, arrived=arrived, on_wait=on_wait
            )
        except WaitTooLong:
            held.bound(held_until)  # then the wait ends and the request is deferred
            raise
        finally:
            if has_to_wait:
                self._room.leave(job.lane_name, route.account)
        if not has_to_wait:
            self._room.passed(job.lane_name, route.account)
        return Reserved(route, reservation)

    def _waits(self, job: Job, lane: LaneSpec, route: Route, wait: Wait, held: Interruptible) -> None:
        patience_s = self._room.enter(lane.name, route.account, slots=lane.slots)
        if patience_s is not None:
            held.bound(asyncio.get_running_loop().time() + min(patience_s, self._spec.hold_s))
        if self._on_wait is not None and wait.seconds >= REPORTED_FROM_S:
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
        if job.stopped is not None:
            return stopped_by(job.stopped, doing="waited for the budget", due_ms=job.hop.due_ms)
        wait = await self._wait(job, request, route)
        passing = held_s < self._spec.hold_s
        delay_ms = max(LATER_MS, min(BACK_WITHIN_MS, round(1000 * wait.seconds))) if passing else LATER_MS
        return Deferred(delay_ms=delay_ms, reason=wait.reason, due_ms=job.hop.due_ms)

    def _usage_class(self, job: Job, route: Route) -> UsageClass:
        return UsageClass(job.lane_name, task_of(job.routing_key), route.model)
