"""The budget gate: a request waits until it is the first of those that wait for an account (one provider's limits for a
class of models), and the account has enough budget for it.

A waiting request keeps its slot (the right to be worked on) if the requests behind it would wait too (`waiting_room.py`
decides that). A request that cannot be answered before its deadline is refused at once, with the expected times.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

from consumers.chain import Route
from consumers.gates.waiting_room import WaitingRoom
from consumers.interruptible import Interruptible
from consumers.job import Decoded, Job, NowMs, Reserved
from consumers.limits.accounts import Budgets
from consumers.limits.base import PAUSED, Amounts, Wait, WaitTooLong
from consumers.limits.estimates import Estimates, UsageClass, task_of
from consumers.limits.spec import BudgetSpec
from consumers.outcomes import Answered, Deferred, Outcome, Refused, ended, stopped_by
from consumers.providers.breakers import Breakers
from topology.codec.request import Request
from topology.lanes import LaneSpec

REPORTED_FROM_S = 1.0
"""A wait for budget is reported (by `BudgetGate.on_wait`) only if it is predicted to last at least this many
seconds."""
LATER_MS = 1000
"""The shortest time, in ms, for which a request that waits for budget is deferred."""
BACK_WITHIN_MS = 15_000
"""A request that is deferred so that others can pass it is deferred for at most this many ms. There is a limit because
the delay is the request's predicted wait for budget, and the prediction may be too long."""
AT_ONCE_S = 0.25
"""A call that could begin within this many seconds is always tried, even if it may not end before the request's
deadline."""
SPREAD_S = 60.0
"""Requests that are deferred because their account is paused (its spend limit was reached) come back after the pause,
at random times within this many seconds. If all came back at once and the limit still applied, each refused call would
end its request. So the calls are spread, and the first ones show whether the account works again."""
OnWait = Callable[[Job, Wait], None]


@dataclass(slots=True, eq=False)
class BudgetGate:
    """Reserves budget (requests and tokens per minute) for the call of a job. Of the providers that may be called for
    the job, it chooses the first that will have enough budget soon; if there is none, the provider with the shortest
    predicted wait. `on_wait` is called when a wait begins that is predicted to last at least `REPORTED_FROM_S`."""

    budgets: Budgets
    breakers: Breakers
    estimates: Estimates
    _: KW_ONLY
    spec: BudgetSpec
    now_ms: NowMs
    rng: random.Random
    on_wait: OnWait
    _waiting_room: WaitingRoom = field(default_factory=WaitingRoom, init=False)

    async def enter(self, job: Job, decoded: Decoded) -> Outcome | None:
        routes = self.breakers.usable(decoded.chain.routes)
        route = routes[0]
        began_s = asyncio.get_running_loop().time()
        try:
            async with job.interruptible(self.spec.hold_s) as limit:
                if len(routes) > 1 and (found := await self._overflowing(job, decoded, routes, limit)) is not None:
                    job.reserved = found
                    return None
                route = await self._soonest(job, decoded.request, routes)
                until = self._start_by(job, decoded.request, route)
                job.reserved = await self._reserve(job, decoded, route, until, limit)
                return None
        except WaitTooLong as too_long:
            return self._too_long(job, decoded.request, route, too_long.wait)
        return await self._interrupted(job, decoded.request, route, asyncio.get_running_loop().time() - began_s)

    def _start_by(self, job: Job, request: Request, route: Route) -> float:
        """The latest time at which the call may begin, by the event loop's clock: the request's deadline minus the
        usual run time of such a call, but at least `AT_ONCE_S` from now, unless the deadline itself is earlier."""
        left_s = (request.deadline_ms - self.now_ms()) / 1000
        spare_s = max(left_s - self.estimates.run_s(self._usage_class(job, route)), min(left_s, AT_ONCE_S))
        return asyncio.get_running_loop().time() + spare_s

    async def leave(self, job: Job, decoded: Decoded, outcome: Outcome | None) -> None:
        """Replace what was reserved for the job in the provider's budget by what the call used; if that is unknown, all
        that was reserved counts as used. If no call was made, return the whole reservation."""
        reserved, job.reserved = job.reserved, None
        if reserved is None:
            return
        attempted = job.attempted
        if attempted is None:
            self.budgets.settle(reserved.reservation, None)
            return
        usage, kind = attempted.usage, self._usage_class(job, reserved.route)
        self.budgets.settle(reserved.reservation, reserved.reservation.amounts if usage is None else usage)
        if isinstance(outcome, (Answered, Refused)):
            self.estimates.learn_run(kind, attempted.run_ms / 1000, was_cut=isinstance(outcome, Refused))
        if isinstance(outcome, Answered) and usage is not None:
            self.estimates.learn(
                kind,
                body_bytes=decoded.request.text_bytes,
                input_tokens=usage.input_tokens,
                output_tokens=usage.output_tokens,
            )

    async def move(self, job: Job, decoded: Decoded, route: Route, used: Amounts | None) -> bool:
        """Move a job's reservation to another provider: reserve budget for `route` without waiting, and settle the
        earlier reservation. Return False, and change nothing, if the account of `route` has too little budget. `used`:
        the requests and tokens that the call on the earlier route used; None: no call was made."""
        amounts = self.amounts(job, decoded.request, route)
        found = await self.budgets.try_reserve(route.account, lane=job.lane_name, amounts=amounts)
        if found is None:
            return False
        before, job.reserved = job.reserved, Reserved(route, found)
        if before is not None:
            self.budgets.settle(before.reservation, used)
        return True

    def amounts(self, job: Job, request: Request, route: Route) -> Amounts:
        """The amounts (one request, and tokens) that the request is expected to use of the provider's limits."""
        return Amounts(
            1.0,
            self.estimates.input_tokens(route.model, request.text_bytes),
            self.estimates.output_tokens(self._usage_class(job, route), max_tokens=request.max_tokens),
        )

    async def _overflowing(
        self, job: Job, decoded: Decoded, routes: Sequence[Route], limit: Interruptible
    ) -> Reserved | None:
        """Reserve budget on the first route (a provider and model) whose predicted wait is at most the setting
        `overflow_s` (by default the lane's target wait), and short enough for the deadline. Return None if there is no
        such route."""
        patience_s = decoded.lane.target_wait_s if self.spec.overflow_s is None else self.spec.overflow_s
        for route in routes:
            until = self._start_by(job, decoded.request, route)
            soon = min(until, asyncio.get_running_loop().time() + patience_s)
            if (await self._wait(job, decoded.request, route)).seconds > soon - asyncio.get_running_loop().time():
                continue
            try:
                return await self._reserve(job, decoded, route, soon, limit)
            except WaitTooLong:
                continue
        return None

    async def _soonest(self, job: Job, request: Request, routes: Sequence[Route]) -> Route:
        """The provider and model for which the wait for budget is predicted to be the shortest."""
        if len(routes) == 1:
            return routes[0]
        waits = [await self._wait(job, request, route) for route in routes]
        return routes[min(range(len(routes)), key=lambda index: waits[index].seconds)]

    async def _reserve(self, job: Job, decoded: Decoded, route: Route, until: float, limit: Interruptible) -> Reserved:
        """Wait for budget on a route (a provider and model), and reserve it. Raises WaitTooLong if the call could not
        begin by `until`, by the event loop's clock."""
        has_to_wait = False

        def on_wait(wait: Wait) -> None:
            nonlocal has_to_wait
            has_to_wait = True
            self._wait_begins(job, decoded.lane, route, wait, limit)

        amounts, arrived = self.amounts(job, decoded.request, route), self._arrived(job, decoded.request)
        ends_s = limit.until_s
        try:
            reservation = await self.budgets.reserve(
                route.account, lane=job.lane_name, amounts=amounts, until=until, arrived=arrived, on_wait=on_wait
            )
        except WaitTooLong:
            limit.reschedule(ends_s)  # undo the shorter limit of `_wait_begins`: another route may be tried
            raise
        finally:
            if has_to_wait:
                self._waiting_room.leave(job.lane_name, route.account)
        if not has_to_wait:
            self._waiting_room.passed(job.lane_name, route.account)
        return Reserved(route, reservation)

    def _wait_begins(self, job: Job, lane: LaneSpec, route: Route, wait: Wait, limit: Interruptible) -> None:
        """Called when a wait for budget begins: limit the wait if the request must let others of its lane pass, and
        report the wait if it will be long. `wait`: the predicted wait."""
        patience_s = self._waiting_room.enter(lane.name, route.account, slots=lane.slots)
        if patience_s is not None:
            limit.reschedule(asyncio.get_running_loop().time() + min(patience_s, self.spec.hold_s))
        if wait.seconds >= REPORTED_FROM_S:
            self.on_wait(job, wait)

    def _arrived(self, job: Job, request: Request) -> float | None:
        """The time that decides a request's place among those that wait for an account, by the event loop's clock. A
        request that comes back after a deferral or redelivery keeps its place, so it gets the time at which its wait
        began. None for a new request: it goes to the end, even if its headers say that it was published long ago."""
        if not job.came_before:
            return None
        return asyncio.get_running_loop().time() - max(0, self.now_ms() - request.start_ms) / 1000

    async def _wait(self, job: Job, request: Request, route: Route) -> Wait:
        amounts = self.amounts(job, request, route)
        return await self.budgets.predicted_wait(route.account, lane=job.lane_name, amounts=amounts)

    def _too_long(self, job: Job, request: Request, route: Route, wait: Wait) -> Outcome:
        """The outcome of a job whose call could not begin in time for its deadline: the request is refused, unless the
        account is paused and works again before the deadline; then the request is deferred."""
        left_s = (request.deadline_ms - self.now_ms()) / 1000
        run_s = self.estimates.run_s(self._usage_class(job, route))
        if wait.reason == PAUSED and wait.seconds < left_s:
            back_s = min(left_s, wait.seconds + self.rng.uniform(0, SPREAD_S))
            return Deferred(delay_ms=round(1000 * back_s), reason=PAUSED)
        bound_ms = request.deadline_ms - request.start_ms
        return ended(
            "deadline_exceeded",
            f"not answered within {bound_ms} ms: it could start in {round(1000 * wait.least_s)} ms at the earliest "
            f"(waiting for {wait.reason} of {route.account}), its call may take {round(1000 * run_s)} ms, and "
            f"{max(0, round(1000 * left_s))} ms are left",
        )

    async def _interrupted(self, job: Job, request: Request, route: Route, waited_s: float) -> Outcome:
        """The outcome of a job whose wait for budget was ended early: because the job was stopped; because it had
        waited for `hold_s` (the longest time that a delivery may wait here); or to let other requests of the lane pass.
        """
        if job.stopped is not None:
            return stopped_by(job.stopped, doing="waited for the budget")
        wait = await self._wait(job, request, route)
        lets_others_pass = waited_s < self.spec.hold_s
        delay_ms = max(LATER_MS, min(BACK_WITHIN_MS, round(1000 * wait.seconds))) if lets_others_pass else LATER_MS
        return Deferred(delay_ms=delay_ms, reason=wait.reason)

    def _usage_class(self, job: Job, route: Route) -> UsageClass:
        return UsageClass(job.lane_name, task_of(job.routing_key), route.model)
