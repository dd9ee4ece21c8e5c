"""How many calls may run at a time where a provider answers 529: at random (weather), or to too many calls of ours."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import inf, isfinite

import pytest

from consumers.limits.account import Account, Waiter
from consumers.limits.base import NOTHING, AccountCaps, Amounts, BudgetSpec, Feedback, Kind
from consumers.limits.concurrency import (
    BESIDE_S,
    ENOUGH,
    REFUSED_FROM,
    REMEMBERED,
    TRIAL_S,
    WEATHER_S,
    Concurrency,
    Sample,
    by_chance,
)

CRITICAL, NORMAL, BATCH = 0, 1, 2


def test_several_refused_calls_for_one_request_count_once() -> None:
    calls = Concurrency(None, SHARES)
    for number in range(2 * REFUSED_FROM):
        call(calls, "always the same", 0.1 * number, is_refused=True)
    calls.tick(10.0)
    same = calls.limit
    for number in range(2 * REFUSED_FROM):
        call(calls, str(number), 10 + 0.1 * number, is_refused=True)
    calls.tick(12.0)

    assert (same, calls.limit) == (inf, 2)


def test_a_call_that_was_not_made_does_not_count() -> None:
    calls = Concurrency(None, SHARES)
    for request in ("made", "not made", "runs"):
        calls.begin(NORMAL, request, (), 1.0)
    for request in ("made", "not made"):
        calls.end(NORMAL, request, 1.0, 1.1, is_made=request == "made")

    assert calls._sample.begun == 2


def test_of_many_refused_requests_only_the_latest_are_remembered() -> None:
    sample = Sample()
    for experiment in range(3):
        other = Sample()
        for number in range(REMEMBERED):
            other.refuse(f"{experiment} {number}")
        other.add(sample)
        sample = other

    assert list(sample.requests) == [f"2 {number}" for number in range(REMEMBERED)]


def test_a_trial_ends_where_a_lower_limit_refuses_as_many() -> None:
    calls = lowered()
    for number in range(ENOUGH):
        call(calls, str(number), 2 + 0.01 * number, is_refused=number % 2 == 0)
    calls.tick(4.0)

    assert calls.limit == inf


def test_after_a_trial_that_has_not_helped_there_is_no_other_one_for_a_while() -> None:
    calls = lowered()
    limits = {}
    for second in range(3, 40):
        for number in range(ENOUGH):
            call(calls, f"{second} {number}", second - 1 + 0.01 * number, is_refused=number % 2 == 0)
        calls.tick(float(second))
        limits[second] = calls.limit

    assert limits[3] == inf
    assert next(second for second, limit in limits.items() if limit < inf) == 3 + WEATHER_S


def test_a_trial_without_calls_ends() -> None:
    calls = lowered()
    calls.tick(1.5 + TRIAL_S)
    within = calls.limit
    calls.tick(2.0 + TRIAL_S)

    assert (within, calls.limit) == (2, inf)


def test_a_lower_limit_that_helps_stays_until_more_calls_are_not_refused() -> None:
    calls = lowered()
    for number in range(10):
        call(calls, str(number), 2.1 + 0.01 * number)
    found = []
    for second in range(3, 9):
        calls.tick(float(second))
        found.append(calls.limit)
        calls.is_wanted = True

    assert found == [2, 3, 5, 9, 17, inf]


def test_a_raise_is_taken_back_at_once_if_clearly_more_calls_are_refused() -> None:
    calls = lowered()
    for number in range(20):
        call(calls, str(number), 2.1 + 0.01 * number)
    calls.tick(3.0)
    calls.is_wanted = True
    calls.tick(4.0)
    limits = [calls.limit]
    for number in range(3):
        call(calls, f"more {number}", 4.1, is_refused=True)
        limits.append(calls.limit)

    assert limits == [3, 3, 2, 2]


@pytest.mark.parametrize(("begun", "refused", "limit"), [(2, 0, 5), (2, 1, 3), (10, 1, 5), (2, 2, 2)])
def test_a_raise_is_kept_back_or_goes_on_only_when_it_is_clear_whether_more_calls_are_refused(
    begun: int, refused: int, limit: int
) -> None:
    calls = lowered()
    for number in range(20):
        call(calls, str(number), 2.1 + 0.01 * number)
    calls.tick(3.0)
    calls.is_wanted = True
    calls.tick(4.0)
    for number in range(begun):
        call(calls, f"more {number}", 4.1, is_refused=number < refused)
    calls.is_wanted = True
    calls.tick(5.0)

    assert calls.limit == limit


@pytest.mark.parametrize(
    ("took_s", "round_s"), [([0.5], 1), ([0.9], 2), ([1.5], 2), ([1.7], 4), ([50], 16), ([50, 3], 4), ([50, 0.1], 1)]
)
def test_a_round_is_long_enough_for_most_refusals_to_arrive(took_s: list[float], round_s: float) -> None:
    calls = Concurrency(None, SHARES)
    for each_s in took_s:
        for _ in range(200):
            calls.overloaded("", each_s, 159.0)
    calls.tick(160.0)
    calls.limit = 1

    assert calls.changes_in_s(160.0) == round_s


def test_the_most_urgent_lane_makes_one_call_beside_the_limit_unless_it_was_refused() -> None:
    calls = lowered()
    for number in range(2):
        calls.begin(NORMAL, f"stream {number}", (), 3.0)
    may = [calls.may_begin(lane, 3.0) for lane in (CRITICAL, NORMAL, BATCH)]
    calls.begin(CRITICAL, "urgent", (), 3.0)
    second = calls.may_begin(CRITICAL, 3.0)
    calls.overloaded("urgent", 0.01, 3.1)
    calls.end(CRITICAL, "urgent", 3.0, 3.1, is_made=True)

    assert (may, second) == ([True, False, False], False)
    assert [calls.may_begin(CRITICAL, 3.1 + after_s) for after_s in (0, BESIDE_S - 0.1, BESIDE_S + 0.1)] == [
        False, False, True,
    ]  # fmt: skip


@pytest.mark.parametrize("ceiling", [1, 2, 3])
def test_the_configured_number_of_calls_is_not_exceeded(ceiling: int) -> None:
    calls = Concurrency(ceiling, SHARES)
    calls.tick(0.0)
    begun = 0
    while calls.may_begin(begun % 3, 0.0):
        calls.begin(begun % 3, str(begun), (), 0.0)
        begun += 1
    assert begun == ceiling
    assert not calls.may_begin(CRITICAL, 0.0)

    for number in range(50):
        calls.overloaded(str(number), 0.0, 0.5)
    calls.tick(2.0)
    calls.tick(3.0)
    assert calls.limit == max(1, ceiling - 1)
    calls.tick(1000.0)
    calls.tick(1001.0)
    assert calls.limit == ceiling


def test_beside_a_lowered_limit_the_most_urgent_lane_may_use_the_last_configured_call() -> None:
    calls = Concurrency(3, SHARES)
    calls.limit = 2
    for _ in range(2):
        calls.begin(NORMAL, "", (), 0.0)

    assert [calls.may_begin(lane, 0.0) for lane in (CRITICAL, NORMAL)] == [True, False]


def test_one_call_is_always_allowed() -> None:
    calls = Concurrency(1, SHARES)
    before = calls.may_begin(NORMAL, 0.0)
    calls.begin(NORMAL, "", (), 0.0)

    assert (before, calls.may_begin(NORMAL, 0.0)) == (True, False)
    assert isfinite(calls.wait_s(3))


@pytest.mark.parametrize(
    ("low", "high", "chance"),
    [
        ((20, 0), (1, 1), 1 / 21),
        ((50, 0), (2, 2), 1 / 1326),
        ((10, 5), (10, 5), 0.6719),
        ((0, 0), (5, 5), 1.0),
        ((1000, 100), (1000, 100), 0.5929),
    ],
)
def test_the_chance_of_a_difference_is_that_of_fishers_exact_test(
    low: tuple[int, int], high: tuple[int, int], chance: float
) -> None:
    lower, higher = (Sample(begun=calls, ripe=calls, refused=refused) for calls, refused in (low, high))

    assert by_chance(lower, higher) == pytest.approx(chance, abs=1e-4)


SHARES = (0.5, 0.25, 0.125)


def call(calls: Concurrency, request: str, began_s: float, *, is_refused: bool = False) -> None:
    """A short call of the lane normal."""
    calls.begin(NORMAL, request, (), began_s)
    if is_refused:
        calls.overloaded(request, 0.001, began_s + 0.001)
    calls.end(NORMAL, request, began_s, began_s + 0.001, is_made=True)


def lowered() -> Concurrency:
    """In a trial with two calls at a time, since second 2, after ten at a time have run."""
    calls = Concurrency(None, SHARES)
    calls.tick(0.5)
    for number in range(10):
        calls.begin(NORMAL, f"peak {number}", (), 1.0)
    for number in range(10):
        calls.end(NORMAL, f"peak {number}", 1.0, 1.0, is_made=True)
    for number in range(2 * REFUSED_FROM):
        call(calls, f"refused {number}", 1.5, is_refused=True)
    calls.tick(2.0)
    assert calls.limit == 2
    return calls


CRITICAL, NORMAL, BATCH = 0, 1, 2
ALL = [Waiter(lane, Amounts(1, 1, 1), arrived_s=0.0) for lane in range(3)]


def due(credit: Concurrency) -> list[bool]:
    return [credit.is_due(lane) for lane in range(3)]


def test_a_lane_is_due_after_as_many_calls_as_follow_from_its_share() -> None:
    credit = Concurrency(1, SHARES)
    seen = [due(credit)]
    for _ in range(8):
        credit.begin(CRITICAL, "", [None, *ALL[1:]], 0.0)
        seen.append(due(credit))

    assert [each[NORMAL] for each in seen] == [False] * 4 + [True] * 5
    assert [each[BATCH] for each in seen] == [False] * 8 + [True]
    assert not any(each[CRITICAL] for each in seen)  # it does not wait


def test_a_lane_saves_credit_for_at_most_one_call_which_its_call_uses_up() -> None:
    credit = Concurrency(1, SHARES)
    for _ in range(40):
        credit.begin(CRITICAL, "", [None, *ALL[1:]], 0.0)
    credit.begin(NORMAL, "", [None, None, ALL[BATCH]], 0.0)

    assert due(credit) == [False, False, True]
    for _ in range(3):
        credit.begin(CRITICAL, "", [None, ALL[NORMAL], None], 0.0)
    assert not credit.is_due(NORMAL)
    credit.begin(CRITICAL, "", [None, ALL[NORMAL], None], 0.0)
    assert credit.is_due(NORMAL)


def test_a_call_of_a_lane_without_enough_credit_uses_none() -> None:
    credit = Concurrency(1, SHARES)
    for _ in range(4):
        credit.begin(NORMAL, "", ALL, 0.0)

    assert credit.is_due(NORMAL)


def test_the_more_credit_a_lane_has_the_fewer_calls_begin_before_its_request() -> None:
    credit = Concurrency(1, SHARES)

    assert [credit.calls_before(NORMAL, count) for count in (0, 1, 2)] == [5, 9, 13]
    credit.begin(CRITICAL, "", ALL, 0.0)
    assert credit.calls_before(NORMAL, 0) == 4
    assert credit.calls_before(CRITICAL, 0) == 2


@pytest.mark.parametrize("concurrency", [1, None])
def test_a_lane_goes_first_by_its_credit_only_while_calls_are_limited_and_it_has_a_request(
    concurrency: int | None,
) -> None:
    account = Account("a", BudgetSpec(accounts={"a": AccountCaps(concurrency=concurrency)}), now_s=0.0)
    for number in range(100):
        account.join(Waiter(CRITICAL, Amounts(1, 1, 1), arrived_s=float(number)))
    first = Waiter(NORMAL, Amounts(1, 1, 1), arrived_s=0.0)
    account.join(first)
    assert account.due_for_a_call() == [False, False, False]

    for _ in range(8):
        waiter, _ = account.grant_next(0.0)
        if waiter is first or account.due_for_a_call()[NORMAL]:
            break
        assert waiter is not None
        assert waiter.reservation is not None
        account.settle(waiter.reservation, None, 0.0)

    assert account.due_for_a_call() == [False, concurrency is not None, False]
    account.leave(first)
    assert account.due_for_a_call() == [False, False, False]


@dataclass(kw_only=True)
class World:
    """Processes, each with an account of its own, that call one provider."""

    most_calls: float = 1e9
    weather: float = 0.0
    processes: int = 1
    refusal_s: float = 0.005
    now_s: float = 1000.0
    running: int = 0
    answered: list[tuple[float, float]] = field(default_factory=list)
    """Of each answer: when it came, and how long the call took."""
    waited: list[float] = field(default_factory=list)
    """Of each call: how long it waited for the account."""
    requests: int = 0
    _calls: dict[int, tuple[Waiter, float, int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(1)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self.accounts = [Account("a", BudgetSpec(), now_s=self.now_s) for _ in range(self.processes)]
        self._timers = [0.0] * self.processes
        for account in self.accounts:
            account.learn(Feedback(kind=Kind.ANSWERED), self.now_s)  # no limits per minute

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

    def ask(self, lane: int, call_s: float, *, failing: int = 0, request: str = "", attempt: int = 1) -> None:
        """A request comes to a random process. `failing`: so many of its attempts are refused, whatever else holds."""
        process = self.rng.randrange(self.processes)
        self.requests += attempt == 1
        account, request = self.accounts[process], request or str(next(self._numbers))
        waiter = Waiter(lane, Amounts(1, 10, 10), arrived_s=self.now_s, request=request)
        self._calls[id(waiter)] = (waiter, call_s, failing, attempt)
        account.join(waiter)
        self._step(process)

    def _step(self, process: int) -> None:
        account = self.accounts[process]
        waiter, in_s = account.grant_next(self.now_s)
        while waiter is not None:
            self._call(process, waiter)
            waiter, in_s = account.grant_next(self.now_s)
        if in_s < 1e9 and self._timers[process] <= self.now_s:
            self._timers[process] = self.now_s + in_s + 0.0005
            self.after(in_s + 0.0005, lambda: self._step(process))

    def _call(self, process: int, waiter: Waiter) -> None:
        _, call_s, failing, attempt = self._calls.pop(id(waiter))
        account, reservation, began_s = self.accounts[process], waiter.reservation, self.now_s
        assert reservation is not None
        self.waited.append(began_s - waiter.arrived_s)
        is_refused = failing > 0 or self.running >= self.most_calls or self.rng.random() < self.weather
        self.running += not is_refused

        def ended() -> None:
            kind = Kind.OVERLOADED if is_refused else Kind.ANSWERED
            took_s = self.now_s - began_s
            account.learn(Feedback(kind=kind, request=waiter.request, took_s=took_s), self.now_s)
            account.settle(reservation, NOTHING, self.now_s)
            if is_refused:
                pause_s = min(30.0, 5.0 ** (attempt - 1)) * self.rng.uniform(1, 1.5)
                again = lambda: self.ask(  # noqa: E731
                    waiter.lane, call_s, failing=failing - 1, request=waiter.request, attempt=attempt + 1
                )
                self.after(pause_s, again)
            else:
                self.running -= 1
                self.answered.append((self.now_s, call_s))
            self._step(process)

        self.after(self.refusal_s if is_refused else call_s, ended)

    def used(self, from_s: float) -> float:
        """How many calls the provider worked on at a time, on average, since `from_s`."""
        return sum(call_s for at_s, call_s in self.answered if at_s >= from_s) / (self.now_s - from_s)

    @property
    def limit(self) -> float:
        return sum(account.concurrency.limit for account in self.accounts)


MEAN_S = (7 * 0.05 + 2.0) / 8


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("weather", [0.05, 0.12, 0.3, pytest.param(0.6, marks=pytest.mark.slow)])
def test_refusals_at_random_leave_the_width(weather: float, processes: int) -> None:
    on = World(weather=weather, processes=processes)
    on.load(60, 60)
    limited = 0
    for _ in range(60):
        on.run(1)
        limited += on.limit < inf

    assert limited <= 10  # trials
    waits = sorted(on.waited)
    assert waits[len(waits) * 8 // 10] < 0.01
    on.run(600)
    assert len(on.answered) == on.requests


@pytest.mark.parametrize(
    ("most_calls", "weather", "processes", "refusal_s"),
    [
        (4, 0.0, 1, 0.005),
        (40, 0.0, 1, 0.005),
        (4, 0.12, 1, 0.005),
        pytest.param(40, 0.3, 1, 0.005, marks=pytest.mark.slow),
        pytest.param(40, 0.0, 3, 0.005, marks=pytest.mark.slow),
        pytest.param(40, 0.0, 1, 1.0, marks=pytest.mark.slow),
    ],
)
def test_it_settles_near_the_calls_that_a_provider_can_work_on(
    most_calls: int, weather: float, processes: int, refusal_s: float
) -> None:
    on = World(most_calls=most_calls, weather=weather, processes=processes, refusal_s=refusal_s)
    on.load(1.5 * most_calls / MEAN_S, 90)
    on.run(30)
    from_s, limits = on.now_s, []
    for _ in range(60):
        on.run(1)
        limits.append(on.limit)

    assert on.used(from_s) >= 0.9 * most_calls
    assert 0.75 * most_calls <= sorted(limits)[30] <= (1.25 if refusal_s < 0.1 else 2) * most_calls


def test_without_a_limit_of_calls_none_waits() -> None:
    calls = Concurrency(None, SHARES)
    calls.begin(0, "", (), 0.0)
    assert calls.wait_s(1000) == 0


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


def test_a_call_that_may_begin_now_waits_for_none() -> None:
    assert Concurrency(3, SHARES).wait_s(2) == 0


def test_a_request_needs_at_most_what_the_limits_allow_in_a_minute() -> None:
    account = Account("one", BudgetSpec(start=Amounts(50, 30_000, 8_000)), now_s=0.0)
    waiter = Waiter(NORMAL, Amounts(1, 50_000, 9_000), arrived_s=0.0)
    account.join(waiter)

    assert waiter.amounts == pytest.approx((1, 30_000, 8_000))


@pytest.mark.parametrize(
    ("refused", "begun", "is_bad"), [(8, 8, True), (7.9, 8, False), (8, 80, True), (8, 81, False), (9, 90, True)]
)
def test_a_trial_needs_eight_refused_calls_and_a_tenth_of_all(refused: float, begun: float, is_bad: bool) -> None:
    sample = Sample()
    sample.refused, sample.begun = refused, begun

    assert sample.is_bad is is_bad


@pytest.mark.parametrize(("accepted", "is_lowered"), [(12.4, True), (12.6, False)])
def test_while_the_accepted_calls_grow_by_more_than_a_fifth_no_trial_begins(accepted: float, is_lowered: bool) -> None:
    calls = Concurrency(None, SHARES)
    calls.tick(0.5)
    for number in range(16):
        call(calls, f"refused {number}", 1.5, is_refused=True)
    calls._count_time(2.0)
    calls._accepted, calls._call_s, calls._passed_s = 10.0, accepted, 1.0
    calls.tick(2.0)

    assert (calls.limit < inf) is is_lowered


@pytest.mark.parametrize(("refused", "has_helped"), [(39, True), (41, False)])
def test_a_trial_has_helped_if_a_third_fewer_calls_are_refused(refused: int, has_helped: bool) -> None:
    calls = lowered()
    calls._before = Sample(begun=100, ripe=100, refused=60)
    calls._sample.begun, calls._sample.refused = 100, refused
    calls.tick(3.0)

    assert (calls.limit < inf) is has_helped
