"""START HERE: one scenario, played in virtual time against the real `Account`. Pure.

A heap of events stands for the clock, and this file for what surrounds the account in a worker: estimates, the timer
of `Accounts`, retries and the breaker. Without `slots` whoever has come waits at the gate. There are no
deadlines: nobody is refused, so that all waits are seen.

Several processes share one account here, each with estimates of its own, and what one does reaches the account as late
as it may over Redis. It is not the Redis script.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from itertools import count
from math import inf

from benchmarks.replaying.calls import Caller
from benchmarks.replaying.load import Ask, Stand, job, load
from benchmarks.replaying.provider import Provider
from benchmarks.replaying.result import Result
from benchmarks.replaying.scenarios import LANES, Scenario
from consumers.limits import forecast
from consumers.limits.account import Account
from consumers.limits.amounts import NOTHING, Amounts
from consumers.limits.base import NO_NEWS, Heard, Kind, Reservation
from consumers.limits.turns import LATE_S
from consumers.limits.waiter import Waiter

STEP_S = (0.0005, 0.0020)
"""To the account and back, where several processes share it."""
SETTLE_S = 0.05
"""There what is given back waits for the next step, at most so long."""
BACK_S = 1.0
"""Whoever was held too long comes back after it."""
WARM_S = 120.0
DRAIN_S = 7200.0
"""So long after the last arrival somebody may still wait."""


class Standing(Waiter):
    """A waiter, whose it is, and since when it stands there."""

    __slots__ = ("ask", "caller", "since_s")

    def __init__(self, lane: int, amounts: Amounts, *, ask: Ask, caller: Caller, since_s: float) -> None:
        super().__init__(lane, amounts, arrived_s=since_s if ask.joined_s is None else ask.joined_s)
        self.ask = ask
        self.caller = caller
        self.since_s = since_s


def run(scenario: Scenario) -> Result:
    """The same result for the same scenario and the same rule."""
    return Replay(scenario).run()


class Replay:
    """One run."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario, self._load = scenario, load(scenario)
        self._rng = random.Random(scenario.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self.now_s = -WARM_S
        self._timer_s, self._timer = inf, 0
        self._left = len(self._load.asks)
        self._jobs: list[Ask] = []
        provider = Provider(
            self._load.limits, bucket_s=scenario.bucket_s, down_s=scenario.down_s, clock=lambda: self.now_s
        )
        self._account = Account("replay", scenario.spec, now_s=self.now_s)
        if not scenario.is_cold:
            heard = Heard(kind=Kind.ANSWERED, rate=provider.warm_up(), counted=Amounts(1, 1000, 0))
            self._account.learn(heard, self.now_s)
        self._free = dict(scenario.slots or {})
        self._queues: dict[str, deque[Ask]] = {lane: deque() for lane in LANES}
        """In the broker."""
        self._callers = [Caller(self, provider, scenario.spec, self._rng) for _ in range(scenario.processes)]

    def run(self) -> Result:
        for ask in self._load.asks:
            self.at(ask.arrived_s, lambda ask=ask: self.arrives(ask))  # type: ignore[misc]
        for _ in range(self._scenario.jobs):
            self.at(0.0, self._next_job)
        until_s = self._load.ends_s + DRAIN_S
        while self._events and (self._left or self.now_s < self._load.ends_s) and self.now_s < until_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        for waiter in self._account.lines:
            assert isinstance(waiter, Standing)
            waiter.ask.waits.append(Stand(waiter.since_s, self.now_s, is_granted=False))
        return Result(scenario=self._scenario, load=self._load, asks=[*self._load.asks, *self._jobs])

    def at(self, when_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self.at(self.now_s + seconds, event)

    # ---- what callers tell the account -------------------------------------------------------------------------------

    def arrives(self, ask: Ask) -> None:
        """It comes, or comes back, to one of the processes; or into the broker's queue, where its lane has no slot."""
        if self._scenario.slots is not None:
            if not self._free[ask.lane]:
                self._queues[ask.lane].append(ask)
                return
            self._free[ask.lane] -= 1
        caller = self._rng.choice(self._callers)
        self._soon(STEP_S, lambda: self._joins(ask, caller))

    def settle(self, reservation: Reservation, used: Amounts | None) -> None:
        def settled() -> None:
            self._account.settle(reservation, used, self.now_s)
            self._step()

        self._soon((0.0, SETTLE_S), settled)

    def learn(self, heard: Heard) -> None:
        def learned() -> None:
            self._account.learn(heard, self.now_s)
            self._step()

        self._soon((0.0, SETTLE_S), learned)

    def calls(self, ask: Ask) -> None:
        """Its first call leaves: the next batch job takes its place in the line."""
        if not ask.counts:
            self.after(0.0, self._next_job)

    def leaves(self, ask: Ask) -> None:
        """Answered, or put off: its slot is the next one's."""
        if self._scenario.slots is not None:
            self._free[ask.lane] += 1
            if self._queues[ask.lane]:
                self.arrives(self._queues[ask.lane].popleft())

    def answered(self, ask: Ask) -> None:
        self.leaves(ask)
        if ask.counts:
            self._left -= 1

    # ---- at the gate -------------------------------------------------------------------------------------------------

    def _joins(self, ask: Ask, caller: Caller) -> None:
        if self._account.is_stale(self.now_s):
            self._account.learn(NO_NEWS, self.now_s)
        amounts = caller.expected(ask)
        waiter = Standing(LANES.index(ask.lane), amounts, ask=ask, caller=caller, since_s=self.now_s)
        if self._account.join(waiter):
            self._step()
        if ask.reserved is None:
            ask.joined_s = waiter.since_s
            ask.reserved = amounts
            if waiter.reservation is None:
                ask.predicted_s = forecast.wait(self._account, waiter.lane, NOTHING, self.now_s).seconds
        if waiter.reservation is None:
            self.after(self._scenario.spec.hold_s, lambda: self._held(waiter))

    def _held(self, waiter: Standing) -> None:
        if waiter.reservation is not None:
            return
        waiter.ask.waits.append(Stand(waiter.since_s, self.now_s, is_granted=False))
        if self._account.leave(waiter):
            self._step()
        self.leaves(waiter.ask)
        self.after(BACK_S, lambda: self.arrives(waiter.ask))

    def _step(self) -> None:
        """As `OwnTurns` does it."""
        waiter, in_s = self._account.turn(self.now_s)
        while waiter is not None:
            assert isinstance(waiter, Standing)
            self._granted(waiter)
            waiter, in_s = self._account.turn(self.now_s)
        when_s = self.now_s + in_s + LATE_S
        if abs(when_s - self._timer_s) < LATE_S:
            return
        self._timer_s, self._timer = when_s, self._timer + 1
        if when_s < inf:
            number = self._timer
            self.at(when_s, lambda: self._fires(number))

    def _fires(self, number: int) -> None:
        if number == self._timer:
            self._timer_s = inf
            self._step()

    def _granted(self, waiter: Standing) -> None:
        ask, reservation = waiter.ask, waiter.reservation
        assert reservation is not None
        ask.waits.append(Stand(waiter.since_s, self.now_s, is_granted=True))
        if ask.granted_s is None:
            ask.granted_s = self.now_s
        self._soon(STEP_S, lambda: waiter.caller.call(ask, reservation))

    def _next_job(self) -> None:
        ask = job(next(self._load.jobs), self.now_s, self._rng)
        self._jobs.append(ask)
        self.arrives(ask)

    def _soon(self, range_s: tuple[float, float], event: Callable[[], None]) -> None:
        """At once in one process."""
        if self._scenario.processes == 1:
            event()
        else:
            self.after(self._rng.uniform(*range_s), event)
