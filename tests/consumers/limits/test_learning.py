"""What an account learns from a response."""

import time
from dataclasses import replace

import pytest

from consumers.limits import headers
from consumers.limits.account import Account
from consumers.limits.adaptive import FORGOTTEN_AFTER_S
from consumers.limits.base import NO_FEEDBACK, Amounts, Feedback, Kind, Reservation
from consumers.limits.concurrency import REGAIN_S
from consumers.limits.headers import BucketHeaders, RateHeaders
from consumers.limits.lines import Waiter
from consumers.limits.spec import BudgetSpec
from service.simulated.buckets import Limits

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
    made.refill(100)
    return made


def heard(
    kind: Kind = Kind.ANSWERED, *, requests: BucketHeaders = NOTHING_SAID, input_tokens: BucketHeaders = NOTHING_SAID
) -> Feedback:
    return Feedback(kind=kind, rate=RateHeaders(requests, input_tokens, NOTHING_SAID))


def levels(of: Account) -> list[float]:
    return [bucket.level for bucket in of.buckets]


def test_the_account_learns_the_limits_of_the_simulated_provider() -> None:
    judge = Limits(requests=120, input_tokens=60_000, output_tokens=6_000, burst_s=60)
    rate = headers.read(judge.headers(), now_s=time.time())
    made = Account("a", BudgetSpec(), now_s=0)
    made.learn(Feedback(kind=Kind.ANSWERED, rate=rate), 0)

    assert made.per_minute() == (120, 60_000, 6_000)


def test_lower_remaining_amounts_correct_our_level_and_higher_ones_do_not() -> None:
    account = new_account()
    account.learn(heard(requests=BucketHeaders(limit=60, remaining=59)), 100)
    assert levels(account) == [10, 1000, 100]
    account.learn(heard(requests=BucketHeaders(limit=60, remaining=2)), 100)
    assert levels(account) == [3, 1000, 100]  # almost three are announced as two
    account.learn(heard(requests=BucketHeaders(limit=60, remaining=50)), 100)
    assert levels(account) == [3, 1000, 100]


def test_an_amount_rounded_to_thousands_is_read_as_its_highest_possible_value() -> None:
    account = new_account()
    account.learn(heard(input_tokens=BucketHeaders(limit=60_000, remaining=10_000)), 100)
    account.refill(200)
    account.learn(heard(input_tokens=BucketHeaders(limit=60_000, remaining=1000)), 200)
    assert levels(account)[1] == 1500
    account.learn(heard(input_tokens=BucketHeaders(limit=60_000, remaining=0)), 200)
    assert levels(account)[1] == 500


def test_what_was_refilled_since_the_answer_is_added() -> None:
    account = new_account()
    told = RateHeaders(BucketHeaders(limit=60, remaining=2), NOTHING_SAID, NOTHING_SAID)
    account.learn(Feedback(kind=Kind.ANSWERED, rate=told, counted=Amounts(1, 0, 0), took_s=3.0), 100)
    assert account.buckets[0].burst == 3  # and not more than is proven
    assert levels(account)[0] == 3


def test_lanes_do_not_save_more_than_the_provider_has() -> None:
    account = new_account()
    account.buckets[1].lower(100)
    parts = account.buckets[1].savings
    assert sum(parts) <= 100
    assert parts[0] == pytest.approx(6 * parts[2])
    account.join(batch := Waiter(2, Amounts(0, 100, 0), arrived_s=100))

    in_s = account.grant_next(100)[1]
    assert account.grant_next(100 + in_s - 0.1)[0] is None
    assert account.grant_next(100 + in_s + 0.1)[0] is batch


def proven() -> Account:
    """An account with 600,000 input tokens a minute, all of which the bucket is proven to hold."""
    account = Account("a", BudgetSpec(), now_s=0)
    account.learn(Feedback(kind=Kind.ANSWERED, rate=FULL), 0)
    account.refill(100)
    return account


def underway(account: Account, calls: int, *, input_tokens: float) -> list[Reservation]:
    waiters = [Waiter(0, Amounts(1, input_tokens, 1), arrived_s=100) for _ in range(calls)]
    for waiter in waiters:
        account.join(waiter)
        assert account.grant_next(100)[0] is waiter
    return [waiter.reservation for waiter in waiters if waiter.reservation is not None]


def test_amounts_that_the_provider_reserves_for_running_calls_return_when_they_end() -> None:
    account = proven()
    burst, calls = account.buckets[1].burst, underway(account, 5, input_tokens=20_000)
    before = levels(account)[1]
    account.learn(heard(Kind.RATE_LIMITED, input_tokens=BucketHeaders(limit=600_000, remaining=460_000)), 100)
    assert levels(account)[1] == 460_000
    assert account.buckets[1].burst == burst, "what may be used at once is no less for it"
    for call in calls:
        account.settle(call, Amounts(1, 20_000, 1), 100)

    assert levels(account)[1] == pytest.approx(before)


def test_a_level_that_stays_low_within_a_minute_reduces_the_burst() -> None:
    account = proven()
    burst = account.buckets[1].burst
    underway(account, 5, input_tokens=20_000)
    for now_s, remaining in ((100, 460_000), (101, 450_000), (120, 400_000)):
        assert account.buckets[1].burst == burst
        account.learn(heard(Kind.RATE_LIMITED, input_tokens=BucketHeaders(limit=600_000, remaining=remaining)), now_s)

    assert account.buckets[1].burst == burst / 2


def test_a_single_refused_large_request_halves_nothing_and_blocks_no_other() -> None:
    account = proven()
    burst = account.buckets[1].burst
    underway(account, 1, input_tokens=400_000)
    account.refill(160)
    refused = heard(Kind.RATE_LIMITED, input_tokens=BucketHeaders(limit=600_000, remaining=500_000))
    account.learn(replace(refused, retry_after_s=5), 160)

    assert account.buckets[1].burst == burst
    assert account.stopped_s(160) == 0
    account.join(chat := Waiter(0, Amounts(1, 100, 1), arrived_s=160))
    assert account.grant_next(160)[0] is chat


def test_a_refusal_that_our_counts_cannot_explain_halves_the_limits() -> None:
    account = new_account()
    assert account.learn(Feedback(kind=Kind.RATE_LIMITED), 100)
    assert account.per_minute() == (30, 3000, 300)


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


def test_absurd_headers_change_nothing() -> None:
    account = new_account()
    before = (account.per_minute(), levels(account))
    for name in ("requests", "input-tokens", "output-tokens"):
        for what in ("limit", "remaining"):
            for value in ("-1", "NaN", "inf", "none", ""):
                told = {f"anthropic-ratelimit-{name}-{what}": value}
                account.learn(Feedback(kind=Kind.ANSWERED, rate=headers.read(told, now_s=0)), 100)
        told = {f"anthropic-ratelimit-{name}-limit": "0", f"anthropic-ratelimit-{name}-remaining": "0"}
        account.learn(Feedback(kind=Kind.ANSWERED, rate=headers.read(told, now_s=0)), 100)
        told = {f"anthropic-ratelimit-{name}-limit": "7", f"anthropic-ratelimit-{name}-reset": "3000-01-01T00:00:00Z"}
        account.learn(Feedback(kind=Kind.ANSWERED, rate=headers.read(told, now_s=0)), 100)

    assert (account.per_minute(), levels(account)) == before


@pytest.mark.parametrize("limit", ["1", "999", "0.5"])
def test_an_implausibly_low_token_limit_is_ignored(limit: str) -> None:
    for name in ("input-tokens", "output-tokens"):
        told = {f"anthropic-ratelimit-{name}-limit": limit, f"anthropic-ratelimit-{name}-remaining": "0"}
        assert headers.read(told, now_s=0) is None
    least = headers.read({"anthropic-ratelimit-input-tokens-limit": "1000"}, now_s=0)
    assert least is not None
    assert least.input_tokens == BucketHeaders(limit=1000)


def test_a_low_limit_that_is_not_announced_again_is_forgotten_and_a_repeated_one_stays() -> None:
    account = Account("a", BudgetSpec(), now_s=0)
    account.learn(heard(requests=BucketHeaders(limit=10), input_tokens=BucketHeaders(limit=1500, remaining=0)), 0)
    for second in range(0, int(2 * FORGOTTEN_AFTER_S), 10):
        account.learn(heard(requests=BucketHeaders(limit=10)), second)
        assert account.per_minute().requests == 10
        assert account.per_minute().input_tokens == (1500 if second < FORGOTTEN_AFTER_S else 30_000)
    assert account.buckets[1].burst > 1000  # but not what was proven of the other limit


def test_a_high_limit_is_not_forgotten_during_a_pause_without_requests() -> None:
    account = Account("a", BudgetSpec(), now_s=0)
    account.learn(heard(requests=BucketHeaders(limit=4000)), 0)
    assert not account.is_stale(86_400)


def test_at_the_lowest_limit_a_call_is_tried_again_after_minutes_without_an_answer() -> None:
    account = Account("a", BudgetSpec(), now_s=0)
    account.learn(heard(requests=BucketHeaders(limit=60)), 0)
    for refusal in range(10):
        account.learn(Feedback(kind=Kind.RATE_LIMITED), 6.0 * refusal)
    assert account.per_minute().requests < 1
    assert not account.is_stale(54 + FORGOTTEN_AFTER_S - 1)
    assert account.is_stale(54 + FORGOTTEN_AFTER_S)
    account.learn(NO_FEEDBACK, 54 + FORGOTTEN_AFTER_S)

    assert account.per_minute().requests == 60


def test_a_repeated_limit_is_passed_to_other_processes_at_most_once_a_minute() -> None:
    account = Account("a", BudgetSpec(), now_s=0)
    known = set()
    for second in range(600):
        account.learn(heard(requests=BucketHeaders(limit=60)), second)
        known.add(str(account.learned().limits.told_s))
    assert len(known) == 10


def test_using_more_than_reserved_makes_a_debt_and_using_less_is_given_back() -> None:
    account = new_account()
    for used, left in ((Amounts(1, 500, 10), 500), (Amounts(1, 0, 10), 500)):
        account.join(waiter := Waiter(0, Amounts(1, 90, 10), arrived_s=100))
        assert account.grant_next(100)[0] is waiter
        assert waiter.reservation is not None
        account.settle(waiter.reservation, used, 100)
        assert levels(account)[1] == pytest.approx(left)


def test_a_request_larger_than_the_bucket_leaves_a_debt_that_delays_all() -> None:
    account = new_account()
    account.join(Waiter(1, Amounts(1, 3000, 1), arrived_s=100))
    assert account.grant_next(100)[0] is not None
    assert levels(account)[1] == -2000
    account.join(critical := Waiter(0, Amounts(1, 100, 1), arrived_s=100))

    assert account.grant_next(119)[0] is None
    assert account.grant_next(119)[1] == pytest.approx(2.0, abs=0.01)
    assert account.grant_next(121.1)[0] is critical


def test_a_clock_that_is_set_back_delays_nothing() -> None:
    account = new_account()
    account.learn(Feedback(kind=Kind.RATE_LIMITED, retry_after_s=20), 10_000)
    account.learn(Feedback(kind=Kind.SPEND_LIMIT), 10_000)
    assert account.stopped_s(10_000) == 900
    assert account.stopped_s(100) == 0
    assert account.per_minute().requests == 30
    for second in range(100, 300):
        account.learn(Feedback(kind=Kind.ANSWERED), second)

    assert account.per_minute().requests == 60


@pytest.mark.parametrize("jump_s", [-1000.0, 1000.0])
def test_a_jump_of_the_clock_does_not_change_the_age_of_learned_limits(jump_s: float) -> None:
    def lived(jump_s: float) -> tuple[Account, Reservation]:
        account = proven()
        account.learn(Feedback(kind=Kind.RATE_LIMITED), 100)
        call, _ = underway(account, 2, input_tokens=100)
        for _ in range(3):
            account.learn(Feedback(kind=Kind.OVERLOADED), 100)
        account.shift(jump_s)
        for bucket in account.buckets:  # as after Redis's answer
            bucket.correct(bucket.level, bucket.savings, 100 + jump_s)
        return account, call

    def seen(account: Account, call: Reservation, now_s: float) -> list[object]:
        found: list[object] = [account.is_stale(now_s)]
        for passed_s in (1, 2, 4, 8):
            account.learn(Feedback(kind=Kind.ANSWERED), now_s + passed_s)
            account.learn(Feedback(kind=Kind.RATE_LIMITED), now_s + passed_s)
            found += [*account.per_minute(), *(bucket.burst for bucket in account.buckets)]
        account.concurrency.regain(now_s + 8)
        found.append(account.concurrency.limit)
        account.settle(call, None, now_s + 10)
        found.append(account.concurrency.call_s)
        found.append(account.demand.per_s((0, 1, 2), 1, now_s + 10))
        return found

    assert seen(*lived(jump_s), 100 + jump_s) == pytest.approx(seen(*lived(0), 100))


def test_a_long_stream_after_an_overload_does_not_block_other_calls_until_it_ends() -> None:
    account = new_account()

    def one(now_s: float) -> Reservation | None:
        account.join(Waiter(0, Amounts(1, 10, 10), arrived_s=now_s))
        waiter, _ = account.grant_next(now_s)
        return None if waiter is None else waiter.reservation

    assert one(100) is not None  # the stream goes on
    for second in (102, 104, 106):
        refused = one(second)
        assert refused is not None
        account.learn(heard(Kind.OVERLOADED), second)
        account.settle(refused, None, second)
    assert one(107) is None
    waiter, in_s = account.grant_next(107)
    assert waiter is None
    assert in_s == REGAIN_S - 1
    waiter, _ = account.grant_next(107 + in_s)
    assert waiter is not None


def test_when_the_clock_jumps_a_waiting_request_keeps_its_age_and_its_place() -> None:
    account = proven()
    first, second = (Waiter(0, Amounts(1, 10, 1), arrived_s=arrived_s) for arrived_s in (100, 101))
    account.join(first)
    account.join(second)
    account.shift(-50)

    assert (first.arrived_s, second.arrived_s) == (50, 51)
    assert not account.join(Waiter(0, Amounts(1, 10, 1), arrived_s=52))
