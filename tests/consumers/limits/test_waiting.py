"""Waiting in one process: leaving makes room, changes are noticed, and requests that cannot be in time are refused."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from consumers.limits.account import Account
from consumers.limits.accounts import MOST
from consumers.limits.adaptive import FORGOTTEN_AFTER_S
from consumers.limits.base import Amounts, Feedback, Kind, Reservation, Wait, WaitTooLong
from consumers.limits.bucket import ROUNDING
from consumers.limits.concurrency import REGAIN_S
from consumers.limits.headers import BucketHeaders, RateHeaders
from consumers.limits.own_turns import own_accounts
from consumers.limits.spec import BudgetSpec
from tests.support.budget import ACCOUNT, spec
from tests.support.virtual_time import virtually

ONE = Amounts(1, 1, 1)


class Bench:
    """Budgets of one account: 60 requests and 40,000 input tokens a minute, all used up."""

    def __init__(self, **given: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.budgets = own_accounts(spec(**given))
        self.order: list[str] = []

    def empty(self) -> None:
        """The lanes' parts too."""
        for bucket in self.account.buckets:
            bucket.level = 0.0
            bucket.savings = [0.0, 0.0, 0.0]

    @property
    def account(self) -> Account:
        return self.budgets.turns(ACCOUNT).account

    def ask(
        self,
        lane: str,
        name: str = "",
        *,
        amounts: Amounts = ONE,
        until: float | None = None,
        arrived: float | None = None,
    ) -> asyncio.Task[Reservation]:
        async def wait() -> Reservation:
            reservation = await self.budgets.reserve(ACCOUNT, lane=lane, amounts=amounts, until=until, arrived=arrived)
            self.order.append(name or lane)
            return reservation

        return asyncio.ensure_future(wait())

    def hear(self, kind: Kind, *, retry_after_s: float | None = None, rate: RateHeaders | None = None) -> None:
        self.budgets.learn(ACCOUNT, Feedback(kind=kind, rate=rate, retry_after_s=retry_after_s))

    async def since(self, began_s: float, *tasks: asyncio.Task[Reservation]) -> float:
        await asyncio.gather(*tasks)
        return self.loop.time() - began_s


def story(tell: Callable[[Bench], Awaitable[None]], **given: Any) -> None:
    async def told() -> None:
        bench = Bench(**given)
        bench.empty()
        await tell(bench)

    virtually(told())


def test_lanes_go_in_the_order_of_rank_and_a_lane_in_the_order_of_arrival() -> None:
    async def tell(on: Bench) -> None:
        asked = [on.ask("batch"), on.ask("normal", "n1"), on.ask("normal", "n2"), on.ask("critical")]
        await asyncio.gather(*asked)

        assert on.order == ["critical", "n1", "n2", "batch"]

    story(tell)


def test_however_long_a_request_has_waited_it_does_not_go_before_a_lane_above() -> None:
    async def tell(on: Bench) -> None:
        old = on.ask("normal", "old", amounts=Amounts(1, 6_000, 1))  # of 6,666 that the bucket holds
        waits_s = []
        for number in range(120):
            waits_s.append(await on.since(on.loop.time(), on.ask("critical", f"c{number}", amounts=Amounts(1, 200, 1))))
            await asyncio.sleep(1.5)
        assert max(waits_s[10:]) < 1  # nothing was there when it began
        await old  # and yet it is granted in the end: its lane's share has been saved for it

    story(tell)


def test_a_request_that_comes_back_has_its_old_place_in_line() -> None:
    async def tell(on: Bench) -> None:
        first = on.ask("normal", "first")
        await asyncio.sleep(0.1)
        on.ask("normal", "second")
        await asyncio.sleep(0.1)
        first.cancel()
        again = on.ask("normal", "first again", arrived=on.loop.time() - 0.2)
        third = on.ask("normal", "third")
        await asyncio.gather(again, third)

        assert on.order == ["first again", "second", "third"]

    story(tell)


def test_an_arrival_in_the_future_counts_as_now() -> None:
    async def tell(on: Bench) -> None:
        ahead = on.ask("normal", "from the future", arrived=on.loop.time() + 100)
        await asyncio.sleep(0.1)
        await asyncio.gather(ahead, on.ask("normal", "after it"))

        assert on.order == ["from the future", "after it"]

    story(tell)


def test_a_guessed_limit_refuses_no_request() -> None:
    async def tell(on: Bench) -> None:
        budgets = own_accounts(BudgetSpec())
        asked = [
            asyncio.ensure_future(
                budgets.reserve("new/model", lane="critical", amounts=Amounts(1, 2_000, 500), until=on.loop.time() + 30)
            )
            for _ in range(100)
        ]
        await asyncio.sleep(0.15)
        assert (await budgets.predicted_wait("new/model", lane="critical", amounts=Amounts(1, 1, 1))).is_known is False
        rate = RateHeaders(
            BucketHeaders(limit=1000, remaining=999),
            BucketHeaders(limit=2_000_000, remaining=1_998_000),
            BucketHeaders(limit=400_000),
        )
        budgets.learn("new/model", Feedback(kind=Kind.ANSWERED, rate=rate, counted=Amounts(1, 2_000, 0)))

        found = await asyncio.gather(*asked, return_exceptions=True)
        assert not [each for each in found if isinstance(each, WaitTooLong)]

    story(tell)


def test_batch_does_not_overtake_critical_however_long_it_has_waited() -> None:
    async def tell(on: Bench) -> None:
        on.ask("batch", "old", amounts=Amounts(1, 6_000, 1))
        await asyncio.sleep(31)
        assert on.order == ["old"] or not on.order
        began_s = on.loop.time()
        assert await on.since(began_s, on.ask("critical")) < 1

    story(tell)


def test_a_cancelled_request_delays_none_of_those_behind_it() -> None:
    async def tell(on: Bench) -> None:
        big = on.ask("normal", "big", amounts=Amounts(1, 6_000, 1))
        small = [on.ask("normal", "small") for _ in range(3)]
        await asyncio.sleep(2)
        assert on.order == []
        began_s = on.loop.time()
        big.cancel()

        assert await on.since(began_s, *small) < 5  # three, after the two that critical's reserve lacks
        with pytest.raises(asyncio.CancelledError):
            await big

    story(tell)


@pytest.mark.parametrize("granted_first", [True, False])
def test_a_grant_and_a_cancellation_in_one_turn_of_the_loop_lose_nothing(granted_first: bool) -> None:
    async def tell(on: Bench) -> None:
        first, second = on.ask("critical", "first"), on.ask("critical", "second")
        await asyncio.sleep(0)
        if not granted_first:
            first.cancel()
        for bucket in on.account.buckets:
            bucket.level = bucket.savings[0] = 1.5  # enough for one, at once
        on.budgets.turns(ACCOUNT).step()
        if granted_first:
            first.cancel()
        began_s = on.loop.time()

        assert await on.since(began_s, second) < 0.01
        assert on.order == ["second"]
        assert on.account.concurrency.running == 1

    story(tell)


def test_a_higher_limit_applies_to_requests_that_wait_already() -> None:
    async def tell(on: Bench) -> None:
        asked = [on.ask("batch") for _ in range(20)]
        await asyncio.sleep(5)
        on.hear(Kind.ANSWERED, rate=RateHeaders(BucketHeaders(limit=600), BucketHeaders(), BucketHeaders()))
        began_s = on.loop.time()

        assert await on.since(began_s, *asked) < 4  # 20 at 10 a second, after what the other lanes keep

    story(tell, requests=None)


def test_a_lower_limit_applies_to_requests_that_wait_already() -> None:
    async def tell(on: Bench) -> None:
        asked = [on.ask("batch") for _ in range(6)]
        await asyncio.sleep(0)
        on.hear(Kind.ANSWERED, rate=RateHeaders(BucketHeaders(limit=6), BucketHeaders(), BucketHeaders()))
        began_s = on.loop.time()

        assert await on.since(began_s, *asked) >= 50

    story(tell)


def test_an_unused_amount_is_granted_to_the_next_request() -> None:
    async def tell(on: Bench) -> None:
        reservation = await on.ask("critical", amounts=Amounts(1, 5_000, 1))
        next_ = on.ask("critical", amounts=Amounts(1, 5_000, 1))
        await asyncio.sleep(2)
        assert not next_.done()
        began_s = on.loop.time()
        on.budgets.settle(reservation, Amounts(1, 10, 1))
        on.budgets.settle(reservation, None)  # a second time does nothing

        assert await on.since(began_s, next_) < 0.5

    story(tell)


def test_a_request_that_cannot_start_in_time_is_refused_at_once_with_the_wait_and_its_reason() -> None:
    async def tell(on: Bench) -> None:
        for _ in range(30):
            on.ask("batch")
        await asyncio.sleep(0)
        began_s = on.loop.time()
        with pytest.raises(WaitTooLong) as caught:
            await on.budgets.reserve(ACCOUNT, lane="batch", amounts=ONE, until=began_s + 10)

        assert on.loop.time() == began_s
        assert caught.value.wait.reason == "rpm"
        assert caught.value.wait.seconds == pytest.approx(36)  # 31, and what the other lanes keep

    story(tell)


def test_the_predicted_wait_is_the_real_one_if_no_other_request_comes() -> None:
    async def tell(on: Bench) -> None:
        for _ in range(30):
            on.ask("normal", amounts=Amounts(1, 1_500, 1))
        await asyncio.sleep(0)
        told: list[Wait] = []
        began_s = on.loop.time()
        await on.budgets.reserve(
            ACCOUNT, lane="normal", amounts=Amounts(1, 1_500, 1), until=began_s + 600, on_wait=told.append
        )

        assert told[0].reason == "itpm"
        assert on.loop.time() - began_s == pytest.approx(told[0].seconds, rel=0.05)

    story(tell)


def test_a_request_that_was_not_granted_as_predicted_is_refused_when_its_time_is_over() -> None:
    async def tell(on: Bench) -> None:
        late = on.ask("batch", until=on.loop.time() + 3, amounts=Amounts(1, 1_500, 1))
        for _ in range(20):
            on.ask("critical", amounts=Amounts(1, 1_500, 1))
        with pytest.raises(WaitTooLong):
            await late
        assert on.budgets.waiting()[ACCOUNT].keys() == {"critical"}

    story(tell)


def test_when_a_limit_falls_requests_that_are_now_too_late_are_refused() -> None:
    async def tell(on: Bench) -> None:
        began_s = on.loop.time()
        asked = [on.ask("batch", until=began_s + 30) for _ in range(20)]
        await asyncio.sleep(0)
        on.hear(Kind.RATE_LIMITED)  # nothing explains it: 30 a minute from now on
        found = await asyncio.gather(*asked, return_exceptions=True)

        hopeless = [each for each in found if isinstance(each, WaitTooLong)]
        assert 5 <= len(hopeless) <= 9
        assert on.loop.time() - began_s <= 30

    story(tell)


def test_a_spend_limit_refuses_all_requests_at_once_until_the_pause_is_over() -> None:
    async def tell(on: Bench) -> None:
        asked = [on.ask("batch") for _ in range(3)]
        await asyncio.sleep(0)
        on.hear(Kind.SPEND_LIMIT)
        found = await asyncio.gather(*asked, return_exceptions=True)
        began_s = on.loop.time()
        with pytest.raises(WaitTooLong) as caught:
            await on.budgets.reserve(ACCOUNT, lane="critical", amounts=ONE, until=None)
        assert await on.budgets.try_reserve(ACCOUNT, lane="critical", amounts=ONE) is None

        assert all(isinstance(each, WaitTooLong) and each.wait.reason == "paused" for each in found)
        assert caught.value.wait == Wait(900, "paused", 900)
        assert on.loop.time() == began_s
        assert on.budgets.paused() == {ACCOUNT: 900}
        await asyncio.sleep(900)
        assert on.budgets.paused() == {}
        await on.budgets.reserve(ACCOUNT, lane="critical", amounts=ONE, until=None)

    story(tell)


def test_all_lanes_wait_until_a_retry_after_is_over() -> None:
    async def tell(on: Bench) -> None:
        began_s = on.loop.time()
        on.hear(Kind.RATE_LIMITED, retry_after_s=20)
        assert await on.since(began_s, on.ask("critical")) == pytest.approx(20, abs=0.1)

    story(tell)


def test_after_an_overload_fewer_calls_run_and_each_end_wakes_the_next_request() -> None:
    async def tell(on: Bench) -> None:
        await asyncio.sleep(60)
        running = [await on.ask("normal") for _ in range(6)]
        for _ in range(3):
            on.hear(Kind.OVERLOADED)
        waits = on.ask("critical")
        await asyncio.sleep(2 * REGAIN_S + 1)  # five may run by now, and six do
        assert not waits.done()
        assert on.budgets.waiting()[ACCOUNT]["critical"].reason == "concurrency"
        for reservation in running[:4]:
            on.budgets.settle(reservation, ONE)

        await asyncio.wait_for(waits, 0.1)

    story(tell)


@pytest.mark.slow
def test_where_calls_are_short_a_flood_of_critical_leaves_batch_its_share_of_them() -> None:
    async def tell(on: Bench) -> None:
        served = {"critical": 0, "batch": 0}

        async def worker(lane: str) -> None:
            while True:
                reservation = await on.budgets.reserve(ACCOUNT, lane=lane, amounts=ONE, until=None)
                served[lane] += 1
                await asyncio.sleep(1)
                on.budgets.settle(reservation, ONE)

        workers = [asyncio.ensure_future(worker(lane)) for lane in ("critical", "batch") for _ in range(8)]
        await asyncio.sleep(600)
        for each in workers:
            each.cancel()

        assert served["batch"] >= 0.045 * sum(served.values())
        assert served["critical"] >= 0.9 * sum(served.values())

    story(tell, requests=6_000, concurrency=4)


def test_the_status_shows_how_many_requests_wait_for_which_limit() -> None:
    async def tell(on: Bench) -> None:
        on.ask("critical", amounts=Amounts(1, 6_000, 1))
        for _ in range(3):
            on.ask("batch")
        await asyncio.sleep(0.5)
        waiting = on.budgets.waiting()[ACCOUNT]

        assert (waiting["critical"].count, waiting["critical"].reason) == (1, "itpm")
        assert (waiting["batch"].count, waiting["batch"].reason) == (3, "rpm")
        assert waiting["batch"].oldest_s == pytest.approx(0.5)
        assert "normal" not in waiting

    story(tell)


@pytest.mark.slow
def test_a_turn_less_than_a_millisecond_away_is_granted_on_uvloop_too() -> None:
    """What is to happen within half a millisecond is no timer there, and cannot tell when it will."""

    async def tell() -> None:
        on, waited = Bench(), 0
        for _ in range(40):  # half of the time the rounding of the clock makes it less
            on.account.refill(on.loop.time())
            on.empty()
            for bucket in on.account.buckets:
                bucket.level = 1 + ROUNDING * (1 - 1e-9)
            at_once = await on.budgets.try_reserve(ACCOUNT, lane="critical", amounts=ONE)
            waited += at_once is None  # else the clock has gone on since
            assert await asyncio.wait_for(on.ask("critical"), 5)
        assert waited > 10

    uvloop.run(tell())


@pytest.mark.slow
def test_unused_accounts_are_forgotten_when_there_are_many() -> None:
    async def tell(on: Bench) -> None:
        running = await on.budgets.reserve("used", lane="batch", amounts=ONE, until=None)
        waits = on.ask("batch")
        await asyncio.sleep(0)
        for number in range(2000):
            reservation = await on.budgets.reserve(f"model-{number}", lane="batch", amounts=ONE, until=None)
            on.budgets.settle(reservation, ONE)

        known = on.budgets
        assert len(known) <= 2 + MOST
        assert "used" in known
        assert ACCOUNT in known
        on.budgets.settle(running, ONE)
        await waits

    story(tell)


def test_a_low_limit_that_was_announced_once_does_not_block_an_account_for_ever() -> None:
    async def told() -> None:
        budgets, loop = own_accounts(BudgetSpec()), asyncio.get_running_loop()
        call, in_vain = Amounts(1, 10_000, 500), 0
        once = RateHeaders(BucketHeaders(limit=1), BucketHeaders(limit=1000), BucketHeaders(limit=1000))
        budgets.learn(ACCOUNT, Feedback(kind=Kind.ANSWERED, rate=once, counted=call))
        taken = await budgets.reserve(ACCOUNT, lane="critical", amounts=call, until=None)
        budgets.settle(taken, call)
        began_s = loop.time()
        while True:
            try:
                taken = await budgets.reserve(ACCOUNT, lane="critical", amounts=call, until=loop.time() + 20)
                break
            except WaitTooLong:
                in_vain += 1
                await asyncio.sleep(5)
        budgets.learn(ACCOUNT, Feedback(kind=Kind.ANSWERED))
        assert in_vain > 5
        assert loop.time() - began_s < FORGOTTEN_AFTER_S + 20

        for _ in range(100):  # from now on it is one that says nothing of limits
            await budgets.reserve(ACCOUNT, lane="critical", amounts=call, until=loop.time() + 1)

    virtually(told())


def test_a_request_leaves_the_line_if_on_wait_raises() -> None:
    def fails(wait: Wait) -> None:
        raise OSError("nobody listens")

    async def tell(on: Bench) -> None:
        on.empty()
        with pytest.raises(OSError, match="nobody listens"):
            await on.budgets.reserve(ACCOUNT, lane="batch", amounts=ONE, until=None, on_wait=fails)
        assert on.budgets.waiting() == {}

    story(tell)


def test_the_budgets_of_256_unused_accounts_are_kept() -> None:
    async def told() -> None:
        budgets = own_accounts(BudgetSpec())
        for number in range(MOST):
            budgets.turns(f"account-{number}")
        before = len(budgets)
        budgets.turns("one more")
        assert (MOST, before, len(budgets)) == (256, 256, 1)

    asyncio.run(told())
