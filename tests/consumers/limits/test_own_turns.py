"""The turns of an account that one process has alone: who is granted when, and when it looks again. In virtual time."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import structlog

from consumers.limits.accounts import Accounts
from consumers.limits.base import NO_FEEDBACK, Amounts, Feedback, Kind, Reservation
from consumers.limits.headers import BucketHeaders, RateHeaders
from consumers.limits.own_turns import OwnTurns, own_accounts
from lanekeeper.telemetry import signals
from tests.support.budget import ACCOUNT, spec
from tests.support.virtual_time import virtually

ONE = Amounts(1, 1, 1)


class Bench:
    """One account of 60 requests a minute, with nothing left."""

    def __init__(self) -> None:
        self.budgets: Accounts[OwnTurns] = own_accounts(spec(spend_pause_s=600.0))
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


def test_a_request_that_waits_has_one_wake_up_however_often_the_account_is_looked_at() -> None:
    async def tell(on: Bench) -> None:
        asked = await on.ask()
        for _ in range(50):
            on.turns.learn(NO_FEEDBACK)
            await asyncio.sleep(0.01)
        await asked

        assert on.turns.wake_ups == 1
        assert on.passed_s == pytest.approx(1 / 0.75, abs=0.01)  # one a second, a quarter of which lanes below save

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


def test_after_closing_no_request_is_woken() -> None:
    async def tell(on: Bench) -> None:
        asked = await on.ask()
        await on.turns.aclose()
        await asyncio.sleep(60)

        assert on.turns.wake_ups == 0
        assert not asked.done()
        asked.cancel()

    story(tell)


@pytest.mark.parametrize("kind", Kind)
def test_only_an_account_that_has_spent_its_limit_is_reported_as_paused(kind: Kind) -> None:
    async def tell(on: Bench) -> None:
        with structlog.testing.capture_logs() as logs:
            on.turns.learn(Feedback(kind=kind))
        told = [each for each in logs if each["event"] == signals.ACCOUNT_PAUSED]

        assert [(each["account"], each["for_s"]) for each in told] == (
            [(ACCOUNT, 600.0)] if kind is Kind.SPEND_LIMIT else []
        )

    story(tell)


def test_limits_are_logged_when_they_change_and_not_again() -> None:
    async def tell(on: Bench) -> None:
        told = Feedback(kind=Kind.ANSWERED, rate=RateHeaders(BucketHeaders(limit=30), BucketHeaders(), BucketHeaders()))
        with structlog.testing.capture_logs() as logs:
            on.turns.learn(told)
        with structlog.testing.capture_logs() as again:
            on.turns.learn(told)

        (learned,) = (each for each in logs if each["event"] == signals.LIMITS_LEARNED)
        assert not again
        assert (learned["account"], learned["requests"], learned["input_tokens"]) == (ACCOUNT, 30, 40_000)

    story(tell)
