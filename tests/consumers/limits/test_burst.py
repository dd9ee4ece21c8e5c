"""No more is used at once than the provider's bucket has shown to hold. In virtual time."""

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.limits.account import FIRST_BURST_S, Account
from consumers.limits.base import NOTHING, Amounts, BucketHeaders, BudgetSpec, Feedback, Kind, RateHeaders
from consumers.limits.budgets import own_budgets
from service.simulated.buckets import RateLimitBucket
from tests.support.budget import Tokens, Traffic
from tests.support.examples import examples
from tests.support.virtual_time import virtually

pytestmark = pytest.mark.slow

NOTHING_SAID = BucketHeaders()
TRAVEL_S = (0.01, 0.06)


def contest(rng: random.Random) -> int:
    return rng.randint(400, 900)


def unknown(burst_s: float, **given: Any) -> Traffic:
    """An account of which nothing is known; its bucket holds this many seconds."""
    return Traffic(own_budgets(BudgetSpec()), burst_s=burst_s, travel_s=TRAVEL_S, **given)


def told(remaining: float, *, limit: float = 60) -> RateHeaders:
    return RateHeaders(BucketHeaders(limit=limit, remaining=remaining), NOTHING_SAID, NOTHING_SAID)


# ---- a provider that enforces its limits -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("burst_s", "tokens", "most_refused", "longest_s", "least_used"),
    [
        (5, contest, 0, 1.5, 0.95),
        (10, contest, 0, 1.0, 0.95),
        (60, contest, 0, 0.1, 0.90),  # the savings of lanes that seldom have requests stay full
    ],
)
def test_any_size_of_the_providers_bucket_is_used_with_hardly_any_refusal(
    burst_s: float, tokens: Tokens, most_refused: int, longest_s: float, least_used: float
) -> None:
    async def story() -> None:
        on = unknown(burst_s, call_s=(0.8, 1.2))
        on.slots("batch", 8, tokens)
        on.every(2, "critical", tokens(random.Random(1)))
        await on.run(300)

        assert on.refused <= 3 + most_refused
        assert sum(at_s > on.began_s + 10 for at_s in on.refused_at_s) <= most_refused
        assert on.p99_s("critical") < longest_s
        assert max(on.shares()) >= least_used

    virtually(story())


@settings(max_examples=examples(100), deadline=None)
@given(
    capacity=st.floats(1, 60),
    steps=st.lists(st.tuples(st.floats(0, 10), st.integers(1, 4), st.floats(0, 5)), min_size=1, max_size=30),
)
def test_a_bucket_is_no_larger_than_the_providers_but_five_seconds_worth(
    capacity: float, steps: list[tuple[float, int, float]]
) -> None:
    now_s = 0.0
    provider = RateLimitBucket(60, burst_s=capacity, clock=lambda: now_s)
    account = Account("a", BudgetSpec(), now_s=now_s)
    for pause_s, asked, others in steps:
        now_s += pause_s
        provider.take(others)  # another client uses the account too
        for _ in range(asked):
            if provider.wait_s(1) > 0:
                continue
            provider.take(1)
            rate = told(max(0, int(provider.level())))
            account.learn(Feedback(kind=Kind.ANSWERED, rate=rate, counted=Amounts(1, 0, 0)), now_s)
            assert account.buckets[0].burst <= max(FIRST_BURST_S, provider.capacity) + 1e-6


# ---- what is learned -------------------------------------------------------------------------------------------------


@given(
    figures=st.lists(
        st.tuples(st.floats(0, 1e12), st.floats(1, 1e12), st.sampled_from(list(Kind)), st.floats(0, 100)),
        max_size=20,
    )
)
def test_whatever_is_learned_every_bucket_holds_between_one_unit_and_the_setting(
    figures: list[tuple[float, float, Kind, float]],
) -> None:
    account, now_s = Account("a", BudgetSpec(), now_s=0), 0.0
    for remaining, limit, kind, later_s in figures:
        now_s += later_s
        each = BucketHeaders(limit=limit, remaining=min(remaining, limit))
        account.learn(Feedback(kind=kind, rate=RateHeaders(each, each, each), counted=NOTHING, took_s=later_s), now_s)
        for bucket, per_minute in zip(account.buckets, account.per_minute(), strict=True):
            assert 1 <= bucket.burst <= max(1.0, per_minute * (1 + 1e-9))
            assert bucket.level <= bucket.burst
            assert sum(part for part in bucket.savings if part > 0) <= bucket.burst * (1 + 1e-9)


def test_a_provider_that_announces_minutes_but_enforces_seconds_is_not_overrun_ever_more() -> None:
    async def story() -> None:
        on = unknown(1, call_s=(0.2, 0.4))
        on.judge.headers = lambda: {  # type: ignore[method-assign]
            "anthropic-ratelimit-requests-limit": "60",
            "anthropic-ratelimit-requests-remaining": "57",
        }
        for _ in range(40):
            # a pause, and then many requests at once
            await asyncio.gather(*(on.call("batch", 100) for _ in range(5)))
            await asyncio.sleep(15)

        assert sum(at_s > on.began_s + 120 for at_s in on.refused_at_s) <= 20  # without learning, four each time

    virtually(story())
