"""What an account learns from a response."""

from dataclasses import dataclass, field, replace
from math import inf

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from consumers.limits.account import NO_LIMIT, Account, Waiter
from consumers.limits.base import (
    DEFAULT_SHARES,
    AccountCaps,
    Amounts,
    BucketHeaders,
    BudgetSpec,
    Feedback,
    Kind,
    RateHeaders,
    Reservation,
)
from tests.support.budget import with_buckets_of
from tests.support.examples import examples

NOTHING_SAID = BucketHeaders()
FULL = RateHeaders(
    BucketHeaders(limit=600), BucketHeaders(limit=600_000, remaining=600_000), BucketHeaders(limit=60_000)
)


def new_account() -> Account:
    """An account with announced limits of 60 requests, 6000 input and 600 output tokens a minute."""
    made = Account("a", BudgetSpec(), now_s=0)
    made.learn(
        Feedback(
            kind=Kind.ANSWERED,
            rate=RateHeaders(BucketHeaders(limit=60), BucketHeaders(limit=6000), BucketHeaders(limit=600)),
        ),
        0,
    )
    with_buckets_of(10, made)
    made.refill(100)
    return made


def heard(
    kind: Kind = Kind.ANSWERED, *, requests: BucketHeaders = NOTHING_SAID, input_tokens: BucketHeaders = NOTHING_SAID
) -> Feedback:
    return Feedback(kind=kind, rate=RateHeaders(requests, input_tokens, NOTHING_SAID))


def levels(of: Account) -> list[float]:
    return [bucket.level for bucket in of.buckets]


def test_lower_remaining_amounts_correct_our_level_and_higher_ones_do_not() -> None:
    account = new_account()
    account.learn(heard(requests=BucketHeaders(limit=60, remaining=9)), 100)
    assert levels(account) == [10, 1000, 100]
    account.learn(heard(requests=BucketHeaders(limit=60, remaining=2)), 100)
    assert levels(account) == [3, 1000, 100]  # almost three are announced as two
    account.learn(heard(requests=BucketHeaders(limit=60, remaining=8)), 100)
    assert levels(account) == [3, 1000, 100]


def proven() -> Account:
    """An account with 600,000 input tokens a minute, all of which the bucket is proven to hold."""
    account = Account("a", BudgetSpec(), now_s=0)
    account.learn(Feedback(kind=Kind.ANSWERED, rate=FULL), 0)
    account.refill(100)
    return account


def in_progress(account: Account, calls: int, *, input_tokens: float) -> list[Reservation]:
    waiters = [Waiter(0, Amounts(1, input_tokens, 1), arrived_s=100) for _ in range(calls)]
    for waiter in waiters:
        account.join(waiter)
        assert account.grant_next(100)[0] is waiter
    return [waiter.reservation for waiter in waiters if waiter.reservation is not None]


def test_a_single_refused_large_request_halves_nothing_and_blocks_no_other() -> None:
    account = proven()
    burst = account.buckets[1].burst
    in_progress(account, 1, input_tokens=400_000)
    account.refill(160)
    refused = heard(Kind.RATE_LIMITED, input_tokens=BucketHeaders(limit=600_000, remaining=500_000))
    account.learn(replace(refused, retry_after_s=5), 160)

    assert account.buckets[1].burst == burst
    assert account.stopped_s(160) == 0
    account.join(chat := Waiter(0, Amounts(1, 100, 1), arrived_s=160))
    assert account.grant_next(160)[0] is chat


@pytest.mark.parametrize(
    "cause",
    [
        {"requests": BucketHeaders(limit=60, remaining=0)},
        {"input_tokens": BucketHeaders(limit=6000, remaining=0)},
        {"requests": BucketHeaders(limit=30)},
    ],
    ids=["requests are spent", "tokens are spent", "the limit is lower"],
)
def test_a_refusal_explained_by_its_headers_only_corrects_the_levels(cause: dict[str, BucketHeaders]) -> None:
    account = new_account()
    account.learn(heard(Kind.RATE_LIMITED, **cause), 100)

    assert account.per_minute().input_tokens == 6000


@pytest.mark.parametrize("retry_after_s", [None, 0.0, 3.0, 3600.0])
def test_a_refusal_that_says_how_long_to_wait_stops_all_calls_for_that_long(retry_after_s: float | None) -> None:
    account = new_account()

    account.learn(Feedback(kind=Kind.RATE_LIMITED, retry_after_s=retry_after_s), 100)
    assert account.stopped_s(100) == (retry_after_s or 0)


REFUSED, ANSWERED = Feedback(kind=Kind.RATE_LIMITED), Feedback(kind=Kind.ANSWERED)


def test_a_refusal_halves_the_limits_which_come_back_by_a_tenth_every_ten_seconds() -> None:
    account = new_account()
    account.learn(REFUSED, 100)
    found = [account.per_minute().requests]
    for second in range(101, 161):
        account.learn(ANSWERED, second)
        if second % 10 == 0:
            found.append(account.per_minute().requests)

    assert found == pytest.approx([30, 36, 42, 48, 54, 60, 60])


@pytest.mark.parametrize(("after_s", "requests"), [(0.5, 30), (4.9, 30), (5.0, 15)])
def test_refusals_within_five_seconds_count_once(after_s: float, requests: float) -> None:
    account = new_account()
    for at_s in (100, 100 + after_s):
        account.learn(REFUSED, at_s)

    assert account.per_minute().requests == requests


@pytest.mark.parametrize("kind", [Kind.OVERLOADED, Kind.FAILED])
def test_other_errors_change_no_limit(kind: Kind) -> None:
    account = new_account()
    before = (account.per_minute(), levels(account))
    for number in range(100):
        account.learn(Feedback(kind=kind, request=str(number), took_s=0.1), 100)

    assert (account.per_minute(), levels(account), account.stopped_s(100)) == (*before, 0)


def test_only_guessed_limits_that_requests_wait_for_grow_and_by_a_tenth_every_ten_seconds() -> None:
    caps = AccountCaps(input_tokens=9_000)
    account = Account("a", BudgetSpec(accounts={"a": caps}), now_s=0)
    account.learn(heard(requests=BucketHeaders(limit=60)), 0)
    for at_s in (5, 10, 15, 20):
        account.join(waiter := Waiter(0, Amounts(1, 1, 8_000), arrived_s=at_s))
        account.grant_next(at_s)
        account.leave(waiter)
        account.learn(heard(), at_s)
    assert account.per_minute() == pytest.approx((60, 9_000, 8_000 * 1.2))
    account.learn(heard(), 30)
    assert account.per_minute().output_tokens == pytest.approx(8_000 * 1.2), "none waited since"


def test_a_provider_that_announces_no_limits_has_none_until_it_refuses_a_call() -> None:
    account = Account("a", BudgetSpec(), now_s=0)
    account.learn(ANSWERED, 0)
    assert account.per_minute().requests == NO_LIMIT
    account.learn(REFUSED, 1)
    assert account.per_minute() == pytest.approx(BudgetSpec().start)
    account.learn(ANSWERED, 2)
    account.learn(REFUSED, 7)
    assert account.per_minute() == pytest.approx((25, 15_000, 4_000))


def test_a_request_larger_than_the_bucket_leaves_a_debt_that_delays_all() -> None:
    account = new_account()
    account.join(Waiter(1, Amounts(1, 3000, 1), arrived_s=100))
    assert account.grant_next(100)[0] is not None
    assert levels(account)[1] == -2000
    account.join(critical := Waiter(0, Amounts(1, 100, 1), arrived_s=100))

    assert account.grant_next(119)[0] is None
    assert account.grant_next(119)[1] == pytest.approx(2.0, abs=0.01)
    assert account.grant_next(121.1)[0] is critical


PER_MINUTE = Amounts(60, 6_000, 600)
BURST = [max(1.0, each / 6) for each in PER_MINUTE]
SHARES = list(DEFAULT_SHARES.values())
SPEC = BudgetSpec(accounts={"a": AccountCaps(requests=60, input_tokens=6_000, output_tokens=600)})
LANES = st.integers(0, 2)


@dataclass
class Bench:
    """An account whose time and events the test controls."""

    account: Account = field(default_factory=lambda: with_buckets_of(10, Account("a", SPEC, now_s=0.0)))
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


@pytest.mark.slow
@settings(max_examples=examples(200), deadline=None)
@example(  # the reserve of the lane above is kept for a minute, each time that a large request has emptied the bucket
    steps=[
        ("join", 0, Amounts(1, 1, 1)),
        ("join", 1, Amounts(1, 1, 152)),
        ("join", 1, Amounts(1, 1, 83)),
        ("join", 2, Amounts(1, 587, 1)),
    ]
)
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

    # All remaining requests are granted by the time their budget has come in, without further events. Each may wait a
    # minute more, until what the lanes above have used lately keeps no reserve for them.
    owed_s = max(
        (sum(each_.amounts[each] for each_ in bench.waiting) - bench.account.buckets[each].level + BURST[each])
        / (PER_MINUTE[each] / 60)
        for each in range(3)
    )
    bench.pass_time(max(0.0, owed_s) * 2 + 60 * (1 + len(bench.waiting)))
    assert not bench.waiting
    bench.see_that_nothing_is_overspent()


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@example(lane=0, own=[574.0], others=[(1, 902.0)])  # its share is there, but it waits for what others have taken
@example(lane=1, own=[1.0], others=[(0, 1.0), (0, 709.0), (1, 302.0)])  # larger than its reserve
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
    # While it waits for the level with enough saved for a request that is larger than its reserve, it saves no more.
    part = 1.0 if largest <= SHARES[lane] * BURST[1] else 0.8
    assert bench.by_lane[lane] >= part * entitled - 2 * largest


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
