"""Five minutes of one account, 60 requests and 40,000 input tokens a minute, in virtual time.

The account judges: it has buckets of its own, and refuses what is too much.
"""

import asyncio
import random

import pytest

from consumers.limits.base import Amounts
from consumers.limits.own_turns import own_accounts
from tests.support.budget import ACCOUNT, Tokens, Traffic, spec, traffic
from tests.support.virtual_time import virtually

FIVE_MINUTES_S = 300


def small(rng: random.Random) -> int:
    return rng.randint(100, 500)


def large(rng: random.Random) -> int:
    return rng.randint(1000, 4000)


@pytest.mark.parametrize("tokens", [small, large], ids=["requests are short", "tokens are short"])
@pytest.mark.parametrize("burst_s", [10, 60])
def test_batch_uses_the_free_budget_and_critical_hardly_waits(tokens: Tokens, burst_s: float) -> None:
    async def story() -> None:
        on = traffic(burst_s=burst_s)
        on.slots("batch", 4, tokens)
        on.every(2, "critical", 400)
        await on.run(FIVE_MINUTES_S)

        assert on.refused == 0
        assert len(on.waits_s["critical"]) == 150
        assert on.p99_s("critical") < 1
        on.burst_s = 10  # the initial content of our own account
        assert max(on.shares()) >= 0.95

    virtually(story())


@pytest.mark.parametrize("tokens", [small, large], ids=["requests are short", "tokens are short"])
def test_batch_alone_uses_the_whole_budget(tokens: Tokens) -> None:
    async def story() -> None:
        on = traffic()
        on.slots("batch", 4, tokens)
        await on.run(FIVE_MINUTES_S)

        assert on.refused == 0
        assert max(on.shares()) >= 0.95

    virtually(story())


@pytest.mark.slow
def test_a_flood_of_critical_requests_leaves_batch_and_normal_their_shares() -> None:
    async def story() -> None:
        on = traffic()
        on.slots("batch", 4, small)
        on.slots("normal", 4, small)
        on.every(0.1, "critical", 400)
        await on.run(FIVE_MINUTES_S)

        assert on.refused == 0
        assert on.shares("batch")[0] >= 0.05 * 0.95
        assert on.shares("normal")[0] >= 0.20 * 0.95
        assert on.shares()[0] >= 0.95

    virtually(story())


def test_a_request_larger_than_the_burst_is_not_starved_by_small_ones() -> None:
    async def story() -> None:
        on = traffic()
        on.slots("normal", 8, small)
        on.slots("critical", 8, small)
        big = asyncio.ensure_future(on.call("batch", 12_000))
        await on.run(FIVE_MINUTES_S)

        assert big.done()
        # its lane's share alone fills the whole bucket in 200 s: 5 % of 667 tokens a second
        assert on.waits_s["batch"][0] <= 205

    virtually(story())


def test_a_lanes_unused_share_is_lent_and_returned_within_seconds() -> None:
    async def story() -> None:
        on = traffic()
        on.slots("batch", 8, small)
        await asyncio.sleep(60)
        began_s, before = on.loop.time(), on.used["batch"][0]
        on.slots("normal", 8, small)
        on.slots("critical", 8, small)
        await asyncio.sleep(5)
        first = on.used["normal"][0] + on.used["critical"][0]
        await on.run(55)

        assert before >= 0.95 * 60  # all of it, because no other lane has requests
        assert first >= 5  # what they had saved, at once
        took_min = (on.loop.time() - began_s) / 60
        assert on.used["batch"][0] - before <= (0.05 * 60 + 6) * took_min  # and its own share from then on

    virtually(story())


def test_a_waiting_request_is_woken_once_and_does_not_poll() -> None:
    async def story() -> None:
        budgets = own_accounts(spec())
        on = Traffic(budgets)
        on.slots("batch", 100, small)
        await on.run(FIVE_MINUTES_S)

        assert len(on.waits_s["batch"]) >= 290
        assert budgets.turns(ACCOUNT).wake_ups <= 2 * len(on.waits_s["batch"])

    virtually(story())


def test_an_account_without_waiting_requests_is_not_looked_at() -> None:
    async def story() -> None:
        budgets = own_accounts(spec())
        await budgets.reserve(ACCOUNT, lane="batch", amounts=Amounts(1, 1, 1), until=None)
        await asyncio.sleep(3600)

        assert budgets.turns(ACCOUNT).wake_ups == 0

    virtually(story())
