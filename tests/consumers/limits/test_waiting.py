"""Waiting in one process: leaving makes room, changes are noticed, and requests that cannot be in time are refused."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from consumers.limits.account import Account
from consumers.limits.base import (
    Amounts,
    Feedback,
    Kind,
    RateHeaders,
    Reservation,
    Wait,
    WaitTooLong,
)
from consumers.limits.bucket import ROUNDING
from consumers.limits.budgets import OwnBudgetQueue, own_budgets
from tests.support.budget import ACCOUNT, spec, with_buckets_of
from tests.support.virtual_time import virtually

ONE = Amounts(1, 1, 1)


class Bench:
    """Budgets of one account: 60 requests and 40,000 input tokens a minute, all used up."""

    def __init__(self, **given: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.budgets = own_budgets(spec(**given))
        with_buckets_of(10, self.account)
        self.order: list[str] = []
        self.began_s = self.loop.time()

    @property
    def turns(self) -> OwnBudgetQueue:
        turns = self.budgets.queue(ACCOUNT)
        assert isinstance(turns, OwnBudgetQueue)
        return turns

    @property
    def passed_s(self) -> float:
        return self.loop.time() - self.began_s

    async def line_up(self) -> asyncio.Task[Reservation]:
        """A critical request that stands in line when this returns."""
        waiting = len(self.account.lines)
        asked = self.ask("critical")
        await asyncio.sleep(0)
        assert len(self.account.lines) == waiting + 1
        return asked

    def fill(self, requests: float) -> None:
        for bucket, per_request in zip(self.account.buckets, (1, 700, 2e5), strict=True):
            bucket.level = requests * per_request
            bucket.savings = [requests * per_request, 0.0, 0.0]

    def empty(self) -> None:
        """The lanes' parts too."""
        for bucket in self.account.buckets:
            bucket.level = 0.0
            bucket.savings = [0.0, 0.0, 0.0]

    @property
    def account(self) -> Account:
        return self.budgets.queue(ACCOUNT).account

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


def test_overloads_hold_up_no_request_and_each_end_of_a_call_wakes_the_next_one() -> None:
    async def tell(on: Bench) -> None:
        await asyncio.sleep(60)
        running = [await on.ask("normal") for _ in range(2)]
        for _ in range(20):
            on.hear(Kind.OVERLOADED)
        running.append(await asyncio.wait_for(on.ask("normal"), 0.1))
        waits = on.ask("batch")
        await asyncio.sleep(1)
        assert not waits.done()
        assert on.budgets.waiting()[ACCOUNT]["batch"].reason == "concurrency"
        on.budgets.settle(running[0], ONE)

        await asyncio.wait_for(waits, 0.1)

    story(tell, concurrency=3)


def test_a_request_that_was_cancelled_is_not_granted_what_redis_has_granted_meanwhile() -> None:
    async def tell(on: Bench) -> None:
        asked = await on.line_up()
        waiter = on.account.lines.heads[0]
        assert waiter is not None
        asked.cancel()

        assert not on.account.begin(waiter, from_savings=ONE, now_s=on.loop.time())
        assert on.account.calls.running == 0

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


def test_a_request_leaves_the_line_if_on_wait_raises() -> None:
    def fails(wait: Wait) -> None:
        raise OSError("nobody listens")

    async def tell(on: Bench) -> None:
        on.empty()
        with pytest.raises(OSError, match="nobody listens"):
            await on.budgets.reserve(ACCOUNT, lane="batch", amounts=ONE, until=None, on_wait=fails)
        assert on.budgets.waiting() == {}

    story(tell)


def small(rng: random.Random) -> int:
    return rng.randint(100, 500)
