"""START HERE: replays one scenario in virtual time against the real `Account`. Pure.

A heap of events replaces the clock. This file replaces the parts of a worker around the account: estimates, the timer
of `Budgets`, retries and the breaker. All requests that have arrived wait at the gate. There are no deadlines, so no
request is refused and all waits are measured.

Several processes can share the account, each with its own estimates. Their steps reach the account as late as they
could through Redis. The Redis script itself is not used.
"""

import heapq
import random
from collections.abc import Callable
from itertools import count
from math import inf

from benchmarks.replaying.calls import Caller, Provider
from benchmarks.replaying.load import Ask, Stand, job, load
from benchmarks.replaying.result import Result
from benchmarks.replaying.scenarios import LANES, Scenario
from consumers.limits.account import Account, Waiter
from consumers.limits.base import Amounts, Feedback, Kind, Reservation
from consumers.limits.budgets import LATE_S

STEP_S = (0.0005, 0.0020)
"""The delay of a step at an account that several processes share."""
SETTLE_S = 0.05
"""How long, at most, an amount that is given back waits for the next step at a shared account."""
BACK_S = 1.0
"""A request that waited longer than `hold_s` at the gate leaves it and comes back after this time."""
WARM_S = 120.0
"""The account is created this long before the first request."""
DRAIN_S = 7200.0
"""The replay ends at most this long after the last arrival."""


class Arrived(Waiter):
    """A waiter at the gate, with its request, its process, and the beginning of its stay."""

    __slots__ = ("ask", "caller", "since_s")

    def __init__(self, lane: int, amounts: Amounts, *, ask: Ask, caller: Caller, since_s: float) -> None:
        super().__init__(lane, amounts, arrived_s=since_s if ask.joined_s is None else ask.joined_s, request=ask.id)
        self.ask = ask
        self.caller = caller
        self.since_s = since_s


def run(scenario: Scenario) -> Result:
    """Replay a scenario. The result is the same each time."""
    return Replay(scenario).run()


class Replay:
    """The state of one replay: clock, events, account and processes."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario, self._load = scenario, load(scenario)
        self._rng = random.Random(scenario.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self.now_s = -WARM_S
        self._timer_s, self._timer = inf, 0
        self._left = len(self._load.asks)
        self._jobs: list[Ask] = []
        provider = Provider(self._load.limits, scenario, clock=lambda: self.now_s)
        self._account = Account("replay", scenario.spec, now_s=self.now_s)
        if not scenario.is_cold:
            rate = None if scenario.steady else provider.warm_up()
            feedback = Feedback(kind=Kind.ANSWERED, rate=rate, counted=Amounts(1, 1000, 0))
            self._account.learn(feedback, self.now_s)
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
            assert isinstance(waiter, Arrived)
            waiter.ask.waits.append(Stand(waiter.since_s, self.now_s, is_granted=False))
        return Result(scenario=self._scenario, load=self._load, asks=[*self._load.asks, *self._jobs])

    def at(self, when_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self.at(self.now_s + seconds, event)

    # ---- called by the processes -------------------------------------------------------------------------------------

    def arrives(self, ask: Ask) -> None:
        """A request arrives or comes back. It goes to a random process."""
        caller = self._rng.choice(self._callers)
        self._soon(STEP_S, lambda: self._joins(ask, caller))

    def settle(self, reservation: Reservation, used: Amounts | None) -> None:
        def settled() -> None:
            self._account.settle(reservation, used, self.now_s)
            self._step()

        self._soon((0.0, SETTLE_S), settled)

    def learn(self, feedback: Feedback) -> None:
        def learned() -> None:
            self._account.learn(feedback, self.now_s)
            self._step()

        self._soon((0.0, SETTLE_S), learned)

    def calls(self, ask: Ask) -> None:
        """A request's first call is sent. If the request is a batch job, the next batch job arrives."""
        if not ask.counts:
            self.after(0.0, self._next_job)

    def answered(self, ask: Ask) -> None:
        if ask.counts:
            self._left -= 1

    # ---- at the gate -------------------------------------------------------------------------------------------------

    def _joins(self, ask: Ask, caller: Caller) -> None:
        amounts = caller.expected(ask)
        waiter = Arrived(LANES.index(ask.lane), amounts, ask=ask, caller=caller, since_s=self.now_s)
        if self._account.join(waiter):
            self._step()
        if ask.reserved is None:
            ask.joined_s = waiter.since_s
            ask.reserved = amounts
        if waiter.reservation is None:
            self.after(self._scenario.spec.hold_s, lambda: self._held(waiter))

    def _held(self, waiter: Arrived) -> None:
        if waiter.reservation is not None:
            return
        waiter.ask.waits.append(Stand(waiter.since_s, self.now_s, is_granted=False))
        if self._account.leave(waiter):
            self._step()
        self.after(BACK_S, lambda: self.arrives(waiter.ask))

    def _step(self) -> None:
        """Grant requests and set the timer, as `OwnBudgetQueue.step` does."""
        waiter, in_s = self._account.grant_next(self.now_s)
        while waiter is not None:
            assert isinstance(waiter, Arrived)
            self._granted(waiter)
            waiter, in_s = self._account.grant_next(self.now_s)
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

    def _granted(self, waiter: Arrived) -> None:
        ask, reservation = waiter.ask, waiter.reservation
        assert reservation is not None
        ask.waits.append(Stand(waiter.since_s, self.now_s, is_granted=True))
        self._soon(STEP_S, lambda: waiter.caller.call(ask, reservation))

    def _next_job(self) -> None:
        ask = job(next(self._load.jobs), self.now_s, self._rng)
        self._jobs.append(ask)
        self.arrives(ask)

    def _soon(self, range_s: tuple[float, float], event: Callable[[], None]) -> None:
        """Run an event: at once with one process, else after a random delay."""
        if self._scenario.processes == 1:
            event()
        else:
            self.after(self._rng.uniform(*range_s), event)
