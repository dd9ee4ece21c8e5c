"""The turns of an account that one process has alone: who is granted when, and when it looks again. In virtual time."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from consumers.limits.accounts import Accounts, OwnTurns, own_accounts
from consumers.limits.base import (
    Amounts,
    Feedback,
    Kind,
    Reservation,
    WaitTooLong,
)
from tests.support.budget import ACCOUNT, spec
from tests.support.virtual_time import virtually

ONE = Amounts(1, 1, 1)


class Bench:
    """One account of 60 requests a minute, with nothing left."""

    def __init__(self) -> None:
        self.budgets: Accounts[OwnTurns] = own_accounts(spec())
        self.turns = self.budgets.turns(ACCOUNT)
        self.account = self.turns.account
        self.loop = asyncio.get_running_loop()
        self.began_s = self.loop.time()
        for bucket in self.account.buckets:
            bucket.level, bucket.savings = 0.0, [0.0, 0.0, 0.0]

    async def ask(self) -> asyncio.Task[Reservation]:
        """A request that stands in line when this returns."""
        waiting = len(self.account.lines)
        asked = asyncio.ensure_future(self.budgets.reserve(ACCOUNT, lane="critical", amounts=ONE, until=None))
        await asyncio.sleep(0)
        assert len(self.account.lines) == waiting + 1
        return asked

    def fill(self, requests: float) -> None:
        for bucket, per_request in zip(self.account.buckets, (1, 700, 2e5), strict=True):
            bucket.level = requests * per_request
            bucket.savings = [requests * per_request, 0.0, 0.0]

    @property
    def passed_s(self) -> float:
        return self.loop.time() - self.began_s


def story(tell: Callable[[Bench], Awaitable[None]]) -> None:
    async def told() -> None:
        await tell(Bench())

    virtually(told())


def test_what_was_granted_to_a_cancelled_request_goes_to_the_next_at_once() -> None:
    async def tell(on: Bench) -> None:
        first, second = await on.ask(), await on.ask()
        on.fill(1.1)
        first.cancel()
        on.turns.step()  # before the cancelled task has run
        await second

        assert on.passed_s == 0
        assert on.account.concurrency.running == 1

    story(tell)


def test_what_was_granted_to_the_last_in_line_that_was_cancelled_is_there_again() -> None:
    async def tell(on: Bench) -> None:
        asked = await on.ask()
        on.fill(2.0)
        asked.cancel()
        on.turns.step()

        assert on.account.buckets[0].level == 2.0
        assert on.turns.is_idle

    story(tell)


def test_a_request_whose_time_is_up_is_not_granted_what_comes_back_at_that_moment() -> None:
    async def tell(on: Bench) -> None:
        until = on.loop.time() + 5
        asked = asyncio.ensure_future(on.budgets.reserve(ACCOUNT, lane="critical", amounts=ONE, until=until))
        await asyncio.sleep(0)
        on.account.held_until_s = until + 5

        def come_back() -> None:
            on.account.held_until_s = until
            on.fill(2.0)
            on.turns.step()

        on.loop.call_at(until, come_back)  # after the timer of the wait, before its task runs
        with pytest.raises(WaitTooLong):
            await asked

        assert on.turns.is_idle

    story(tell)


def test_a_request_that_was_cancelled_is_not_granted_what_redis_has_granted_meanwhile() -> None:
    async def tell(on: Bench) -> None:
        asked = await on.ask()
        waiter = on.account.lines.heads[0]
        assert waiter is not None
        asked.cancel()

        assert not on.account.begin(waiter, from_savings=ONE, now_s=on.loop.time())
        assert on.account.concurrency.running == 0

    story(tell)


def test_the_wake_up_moves_when_the_request_may_go_later() -> None:
    async def tell(on: Bench) -> None:
        asked = await on.ask()
        on.turns.learn(Feedback(kind=Kind.RATE_LIMITED, retry_after_s=30.0))
        await asyncio.sleep(29)
        assert on.turns.wake_ups == 0
        await asked

        assert on.turns.wake_ups == 1
        assert on.passed_s == pytest.approx(30.0, abs=0.01)

    story(tell)
