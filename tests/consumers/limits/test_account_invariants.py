"""In any order of events, nothing is overspent, every lane gets its share, and no request is forgotten."""

from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from consumers.limits.account import Account
from consumers.limits.base import Amounts, Reservation
from consumers.limits.lines import Waiter
from consumers.limits.spec import DEFAULT_SHARES, AccountCaps, BudgetSpec
from tests.support.examples import examples

PER_MINUTE = Amounts(60, 6_000, 600)
BURST = [max(1.0, each / 6) for each in PER_MINUTE]
SHARES = list(DEFAULT_SHARES.values())
SPEC = BudgetSpec(accounts={"a": AccountCaps(requests=60, input_tokens=6_000, output_tokens=600)})
LANES = st.integers(0, 2)


@dataclass
class Bench:
    """An account whose time and events the test controls."""

    account: Account = field(default_factory=lambda: Account("a", SPEC, now_s=0.0))
    now_s: float = 0.0
    look_in_s: float = inf
    waiting: list[Waiter] = field(default_factory=list)
    running: list[Reservation] = field(default_factory=list)
    spent: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    by_lane: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    debt: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def join(self, lane: int, amounts: Amounts) -> None:
        waiter = Waiter(lane, amounts, arrived_s=self.now_s)
        self.waiting.append(waiter)
        self.account.join(waiter)
        self.grant()

    def grant(self) -> None:
        waiter, self.look_in_s = self.account.grant_next(self.now_s)
        while waiter is not None:
            assert waiter.reservation is not None
            self.waiting.remove(waiter)
            self.running.append(waiter.reservation)
            self.by_lane[waiter.lane] += waiter.amounts.input_tokens
            for each in range(3):
                self.spent[each] += waiter.amounts[each]
                self.debt[each] = max(self.debt[each], waiter.amounts[each] - BURST[each])
            waiter, self.look_in_s = self.account.grant_next(self.now_s)

    def settle(self, reservation: Reservation, used: Amounts | None) -> None:
        self.running.remove(reservation)
        self.account.settle(reservation, used, self.now_s)
        for each in range(3):
            over = reservation.amounts[each] - (used[each] if used else 0.0)
            self.spent[each] -= over
            self.debt[each] += max(0.0, -over)
        self.grant()

    def pass_time(self, seconds: float) -> None:
        """Let time pass like a timer: wake the account whenever it asks for it."""
        end_s = self.now_s + seconds
        while self.now_s + self.look_in_s < end_s:
            self.now_s += self.look_in_s + 0.0005
            self.grant()
        self.now_s = max(self.now_s, end_s)
        self.grant()

    def see_that_nothing_is_overspent(self) -> None:
        for each, limit in enumerate(PER_MINUTE):
            most = BURST[each] + self.now_s * limit / 60 + max(0.0, self.debt[each])
            assert self.spent[each] <= most + 1e-3


def amounts(most: float = 1.0) -> st.SearchStrategy[Amounts]:
    """Amounts up to `most` times the burst."""
    return st.builds(
        Amounts, st.just(1.0), *(st.floats(1, most * BURST[each], allow_subnormal=False) for each in (1, 2))
    )


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), LANES, amounts(3)),
        st.tuples(st.just("pass"), st.floats(0.001, 20), st.none()),
        st.tuples(st.just("leave"), st.integers(0, 50), st.none()),
        st.tuples(st.just("settle"), st.integers(0, 50), st.one_of(st.none(), amounts(1))),
    ),
    max_size=60,
)


@settings(max_examples=examples(200), deadline=None)
@given(steps=STEPS)
def test_spending_never_exceeds_burst_plus_refill_and_every_request_is_granted(
    steps: list[tuple[str, int, object]],
) -> None:
    bench = Bench()
    for what, number, given_ in steps:
        match what:
            case "join":
                bench.join(number, given_)  # type: ignore[arg-type]
            case "pass":
                bench.pass_time(number)
            case "leave" if bench.waiting:
                gone = bench.waiting.pop(number % len(bench.waiting))
                bench.account.leave(gone)
                bench.grant()
            case "settle" if bench.running:
                bench.settle(bench.running[number % len(bench.running)], given_)  # type: ignore[arg-type]
        bench.see_that_nothing_is_overspent()

    # all remaining requests are granted by the time their budget has come in, without further events
    owed_s = max(
        (sum(each_.amounts[each] for each_ in bench.waiting) - bench.account.buckets[each].level + BURST[each])
        / (PER_MINUTE[each] / 60)
        for each in range(3)
    )
    bench.pass_time(max(0.0, owed_s) * 2 + 60)
    assert not bench.waiting
    bench.see_that_nothing_is_overspent()


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@example(lane=0, own=[574.0], others=[(1, 902.0)])  # its share is there, but it waits for what others have taken
@example(lane=1, own=[1000.0], others=[(0, 386.0)])  # it needs the whole bucket, which the lane above would take too
@given(
    lane=LANES,
    own=st.lists(st.floats(1, BURST[1]), min_size=1, max_size=8),
    others=st.lists(st.tuples(LANES, st.floats(1, BURST[1])), min_size=1, max_size=8),
)
def test_a_lane_that_always_waits_gets_its_share_whatever_other_lanes_do(
    lane: int, own: list[float], others: list[tuple[int, float]]
) -> None:
    bench = Bench()
    turn = 0
    for other, tokens in others * 10:
        bench.join(other, Amounts(0, tokens, 0))
    for _ in range(60):
        while bench.account.lines.count(lane) < 2:
            bench.join(lane, Amounts(0, own[turn % len(own)], 0))
            turn += 1
        for other, tokens in others:
            if bench.account.lines.count(other) < 10:
                bench.join(other, Amounts(0, tokens, 0))
        bench.pass_time(5)

    entitled = SHARES[lane] * bench.now_s * PER_MINUTE.input_tokens / 60
    # minus what it has saved for its next request and for the one that waits
    largest = max([*own, *(tokens for other, tokens in others if other == lane)])
    assert bench.by_lane[lane] >= entitled - 2 * largest


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(flood=st.lists(st.tuples(LANES, amounts(0.5)), min_size=20, max_size=60))
def test_available_budget_is_used_while_any_request_waits(flood: list[tuple[int, Amounts]]) -> None:
    bench = Bench()
    for _ in range(10):
        for lane, wanted in flood:
            bench.join(lane, wanted)
    # in at least one of the three buckets, no more is unused than the first requests of all lanes wait for
    for _ in range(30):
        bench.pass_time(1)
        assert bench.waiting
        most = [sum(max(w.amounts[each] for w in bench.waiting) for _ in range(3)) for each in range(3)]
        idle = [bench.account.buckets[each].level - sum(SHARES) * BURST[each] for each in range(3)]
        assert any(idle[each] <= most[each] for each in range(3))
