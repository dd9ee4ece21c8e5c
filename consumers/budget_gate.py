"""The last check before a call: the provider's budget (requests and tokens a minute), and a place to wait for it."""

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

from consumers.clock import NowMs, now_ms
from consumers.dialects import DIALECTS
from consumers.job import Decoded, Interruptible, Job, Reserved, Route
from consumers.limits.base import Amounts, BudgetSpec, Wait, WaitTooLong
from consumers.limits.budgets import Budgets
from consumers.limits.estimates import Estimates, UsageClass, task_of
from consumers.outcomes import LATER_MS, Answered, Deferred, Outcome, Refused, end_with, stopped_by
from consumers.providers.breakers import Breakers
from topology.codec.decoding import Request

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
        used = self.likely(job, reserved) if usage is None else usage
        self.budgets.settle(reserved.reservation, _counted(decoded.request, used))
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
        decoded, in_progress = job.decoded, job.in_progress
        assert decoded is not None
        expected = reserved.reservation.amounts
        if DIALECTS[decoded.request.dialect].joins_tokens:  # the reservation has both in one
            expected = self.amounts(job, decoded.request, reserved.route)
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
        amounts = _counted(decoded.request, self.amounts(job, decoded.request, route))
        found = await self.budgets.try_reserve(route.account, lane=job.lane_name, amounts=amounts, request=job.id)
        if found is None:
            return False
        before, job.reserved = job.reserved, Reserved(route, found)
        if before is not None:
            self.budgets.settle(before.reservation, None if used is None else _counted(decoded.request, used))
        return True

    def give_up(self, job: Job, used: Amounts | None) -> None:
        """Settle a job's reservation before the attempt ends: its call failed, and an earlier answer is the job's."""
        if job.reserved is not None:
            assert job.decoded is not None
            counted = None if used is None else _counted(job.decoded.request, used)
            self.budgets.settle(job.reserved.reservation, counted)
            job.reserved = None

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
                amounts=_counted(decoded.request, self.amounts(job, decoded.request, route)),
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
        amounts = _counted(request, self.amounts(job, request, route))
        return await self.budgets.predicted_wait(route.account, lane=job.lane_name, amounts=amounts)

    def _too_long(self, job: Job, request: Request, route: Route, wait: Wait) -> Outcome:
        left_ms = request.deadline_ms - self.now_ms()
        bound_ms = request.deadline_ms - request.start_ms
        return end_with(
            "deadline_exceeded",
            f"not answered within {bound_ms} ms: it could start in {round(1000 * wait.seconds)} ms at the earliest "
            f"(waiting for {wait.reason} of {route.account}), its call may take "
            f"{round(1000 * self._run_s(job, request, route))} ms, and {max(0, left_ms)} ms are left{job.last_failure}",
            retry_after_ms=math.ceil(1000 * wait.seconds) or None,
        )

    async def _interrupted(self, job: Job, request: Request, route: Route, waited_s: float) -> Outcome:
        if job.stopped is not None:
            return stopped_by(job.stopped, doing="waited for the budget")
        wait = await self._wait(job, request, route)
        lets_others_pass = waited_s < self.spec.hold_s
        delay_ms = max(LATER_MS, min(BACK_WITHIN_MS, round(1000 * wait.seconds))) if lets_others_pass else LATER_MS
        return Deferred(delay_ms=delay_ms, reason=wait.reason)


def _counted(request: Request, amounts: Amounts) -> Amounts:
    """What counts against the account's limits. OpenAI has one limit for all tokens: it is the one of the input."""
    if not DIALECTS[request.dialect].joins_tokens:
        return amounts
    return amounts._replace(input_tokens=amounts.input_tokens + amounts.output_tokens)


def _usage_class(job: Job, route: Route) -> UsageClass:
    return UsageClass(job.lane_name, task_of(job.routing_key), route.model)


def _loop_s() -> float:
    return asyncio.get_running_loop().time()
