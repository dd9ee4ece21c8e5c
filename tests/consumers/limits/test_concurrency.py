"""How many calls may run at a time: as many as the operator has set. A provider that answers 529 changes nothing."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import pytest

from consumers.limits.account import Account, Waiter
from consumers.limits.base import NOTHING, AccountCaps, Amounts, BudgetSpec, Feedback, Kind

CRITICAL, NORMAL, BATCH = 0, 1, 2


@pytest.mark.parametrize("most", [1, 2, 3])
def test_the_configured_number_of_calls_is_not_exceeded_and_no_overload_lowers_it(most: int) -> None:
    account = Account("a", BudgetSpec(accounts={"a": AccountCaps(concurrency=most)}), now_s=0.0)
    account.learn(Feedback(kind=Kind.ANSWERED), 0.0)
    for number in range(50):
        account.learn(Feedback(kind=Kind.OVERLOADED, request=str(number)), 0.5)
    for _ in range(10):
        account.join(Waiter(NORMAL, Amounts(1, 1, 1), arrived_s=1.0))
    while (granted := account.grant_next(1.0)[0]) is not None:
        assert granted.reservation is not None

    assert account.calls.running == most


@pytest.mark.parametrize("concurrency", [1, None])
def test_a_lane_goes_first_by_its_credit_only_while_calls_are_limited_and_it_has_a_request(
    concurrency: int | None,
) -> None:
    account = Account("a", BudgetSpec(accounts={"a": AccountCaps(concurrency=concurrency)}), now_s=0.0)
    account.learn(Feedback(kind=Kind.ANSWERED), 0.0)
    for number in range(100):
        account.join(Waiter(CRITICAL, Amounts(1, 1, 1), arrived_s=float(number)))
    first = Waiter(NORMAL, Amounts(1, 1, 1), arrived_s=0.0)
    account.join(first)
    assert account.lanes_due() == [False, False, False]

    for _ in range(8):
        waiter, _ = account.grant_next(0.0)
        if waiter is first or account.lanes_due()[NORMAL]:
            break
        assert waiter is not None
        assert waiter.reservation is not None
        account.settle(waiter.reservation, None, 0.0)

    assert account.lanes_due() == [False, concurrency is not None, False]
    account.leave(first)
    assert account.lanes_due() == [False, False, False]


def test_a_due_lane_is_granted_before_more_urgent_ones() -> None:
    spec = BudgetSpec(start=Amounts(6e4, 6e7, 6e7), accounts={"one": AccountCaps(concurrency=1)})
    account, granted = Account("one", spec, now_s=0.0), []
    for lane in (*[CRITICAL] * 7, NORMAL):
        account.join(Waiter(lane, Amounts(1, 1, 1), arrived_s=0.0))
    for _ in range(8):
        waiter, _in_s = account.grant_next(0.0)
        assert waiter is not None
        assert waiter.reservation is not None
        granted.append(waiter.lane)
        account.settle(waiter.reservation, waiter.amounts, 0.0)

    assert granted == [*[CRITICAL] * 5, NORMAL, *[CRITICAL] * 2]  # normal's share of the calls is a fifth


@dataclass(kw_only=True)
class World:
    """Processes, each with an account of its own, that call one provider without limits per minute."""

    weather: float = 0.0
    processes: int = 1
    now_s: float = 1000.0
    answered: list[float] = field(default_factory=list)
    """When each answer came."""
    waited: list[list[float]] = field(default_factory=lambda: [[], [], []])
    """How long the calls of each lane waited for the account."""
    requests: int = 0
    _calls: dict[int, tuple[Waiter, float, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(1)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self.accounts = [Account("a", BudgetSpec(), now_s=self.now_s) for _ in range(self.processes)]
        for account in self.accounts:
            account.learn(Feedback(kind=Kind.ANSWERED), self.now_s)

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._numbers), event))

    def run(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self._events and self._events[0][0] < until_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        self.now_s = until_s

    def load(self, per_s: float, seconds: float) -> None:
        """Requests of all lanes come at random times; most calls are short, one in eight is long."""
        at_s = 0.0
        while (at_s := at_s + self.rng.expovariate(per_s)) < seconds:
            lane, call_s = self.rng.randrange(3), 2.0 if self.rng.random() < 1 / 8 else 0.05
            self.after(at_s, lambda lane=lane, call_s=call_s: self.ask(lane, call_s))  # type: ignore[misc]

    def ask(self, lane: int, call_s: float, *, request: str = "", attempt: int = 1) -> None:
        """A request comes to a random process."""
        account, request = self.rng.choice(self.accounts), request or str(next(self._numbers))
        self.requests += attempt == 1
        waiter = Waiter(lane, Amounts(1, 10, 10), arrived_s=self.now_s, request=request)
        self._calls[id(waiter)] = (waiter, call_s, attempt)
        account.join(waiter)
        while (granted := account.grant_next(self.now_s)[0]) is not None:
            self._call(account, granted)

    def _call(self, account: Account, waiter: Waiter) -> None:
        _, call_s, attempt = self._calls.pop(id(waiter))
        reservation, began_s = waiter.reservation, self.now_s
        assert reservation is not None
        self.waited[waiter.lane].append(began_s - waiter.arrived_s)
        is_refused = self.rng.random() < self.weather

        def ended() -> None:
            kind = Kind.OVERLOADED if is_refused else Kind.ANSWERED
            account.learn(Feedback(kind=kind, request=waiter.request, took_s=self.now_s - began_s), self.now_s)
            account.settle(reservation, NOTHING, self.now_s)
            if is_refused:
                pause_s = min(30.0, 5.0 ** (attempt - 1)) * self.rng.uniform(1, 1.5)
                again = lambda: self.ask(waiter.lane, call_s, request=waiter.request, attempt=attempt + 1)  # noqa: E731
                self.after(pause_s, again)
            else:
                self.answered.append(self.now_s)

        self.after(0.005 if is_refused else call_s, ended)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("weather", [0.05, 1 / 8, 0.3, 0.6])
def test_refusals_at_random_hold_up_no_request(weather: float, processes: int) -> None:
    """The provider's weather of one in eight, at 50 requests a second: critical p95 below 0.5 s, and no backlog."""
    on = World(weather=weather, processes=processes)
    on.load(50, 60)
    on.run(60)
    in_time = len(on.answered)
    on.run(600)

    assert max(map(max, on.waited)) == 0
    assert len(on.answered) == on.requests
    if weather <= 1 / 8:
        assert in_time >= 0.97 * on.requests
