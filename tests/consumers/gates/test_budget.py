"""The budget gate: which request waits, which is refused, what is reserved, and what is given back."""

import asyncio

import pytest

from consumers.job import Attempted
from consumers.limits.base import Amounts
from consumers.outcomes import Answered, Deferred, Dropped, Refused
from consumers.state.base import Stop
from tests.support.budget_gate import BODY, DONE, ONE, Ground, story
from tests.support.jobs import decoded


def test_a_request_within_the_budget_passes_with_its_route_and_an_estimated_reservation() -> None:
    async def tell(on: Ground) -> None:
        job = on.job()

        assert await on.enter(job) is None
        assert job.reserved is not None
        assert job.reserved.route == ONE
        assert job.reserved.reservation.amounts == pytest.approx((1, len(BODY) / 3.5, 5))  # max_tokens
        assert on.told == []

    story(tell)


def test_the_actual_usage_is_settled_and_the_rest_is_given_back() -> None:
    async def tell(on: Ground) -> None:
        job = on.job()
        await on.enter(job)
        job.attempted = Attempted(started_ms=on.now_ms(), usage=Amounts(1, 7, 2))
        await on.gate.leave(job, decoded(job), DONE)

        account = on.budgets.turns("one/m").account
        assert [bucket.burst - bucket.level for bucket in account.buckets] == [1, 7, 2]
        assert account.concurrency.running == 0

    story(tell)


def test_a_request_that_was_never_sent_gives_everything_back() -> None:
    async def tell(on: Ground) -> None:
        job = on.job()
        await on.enter(job)
        await on.gate.leave(job, decoded(job), None)

        assert [bucket.burst - bucket.level for bucket in on.budgets.turns("one/m").account.buckets] == [0, 0, 0]

    story(tell)


def test_the_usage_of_an_answer_is_the_estimate_for_the_next_request_of_its_kind() -> None:
    async def tell(on: Ground) -> None:
        first, second = on.job(), on.job()
        await on.enter(first)
        first.attempted = Attempted(started_ms=on.now_ms(), usage=Amounts(1, 50, 2))
        await on.gate.leave(first, decoded(first), DONE)
        await on.enter(second)

        assert second.reserved is not None
        assert second.reserved.reservation.amounts == pytest.approx((1, 50, 3))

    story(tell)


def test_a_request_that_has_to_wait_keeps_its_place_and_has_the_reason() -> None:
    async def tell(on: Ground) -> None:
        await on.spend("one/m", requests=5)
        job, began_s = on.job(), on.loop.time()

        assert await on.enter(job) is None
        assert on.loop.time() - began_s >= 6
        assert [(request, wait.reason) for request, wait in on.told] == [(job.id, "rpm")]
        assert on.told[0][1].seconds == pytest.approx(on.loop.time() - began_s, rel=0.5)

    story(tell)


def test_a_request_that_cannot_start_before_its_deadline_is_refused_at_once_with_the_figures() -> None:
    async def tell(on: Ground) -> None:
        await on.spend("one/m", requests=100)
        began_s = on.loop.time()
        outcome = await on.enter(on.job(deadline_ms=30_000))

        assert on.loop.time() == began_s
        assert isinstance(outcome, Refused)
        assert outcome.problem.code == "deadline_exceeded"
        assert "30000 ms" in outcome.problem.detail
        assert "rpm of one/m" in outcome.problem.detail
        assert on.budgets.waiting() == {}

    story(tell)


def test_a_request_whose_call_could_not_end_before_its_deadline_is_refused_without_a_call() -> None:
    async def tell(on: Ground) -> None:
        known = on.job()
        assert await on.enter(known) is None
        known.attempted = Attempted(started_ms=on.now_ms(), run_ms=4000, usage=Amounts(1, 10, 10))
        await on.gate.leave(known, decoded(known), Answered(body=b"{}", model="m", provider="one"))
        assert await on.enter(on.job(deadline_ms=3000)) is None, "what may begin at once may try"
        await on.spend("one/m", requests=5)

        refused = await on.enter(on.job(deadline_ms=9000))

        assert isinstance(refused, Refused)
        assert "its call may take 6000 ms" in refused.problem.detail
        assert await on.enter(on.job(deadline_ms=20_000)) is None

    story(tell)


@pytest.mark.parametrize(("why", "outcome"), [(Stop.CANCELLED, Dropped), (Stop.FENCED, Deferred)])
def test_a_request_that_is_told_to_stop_ends_its_wait_for_the_budget(why: Stop, outcome: type) -> None:
    async def tell(on: Ground) -> None:
        await on.spend("one/m", requests=50)
        job, began_s = on.job(), on.loop.time()
        entering = asyncio.ensure_future(on.enter(job))
        await asyncio.sleep(3)
        job.stop(why)

        assert isinstance(await entering, outcome)
        assert on.loop.time() - began_s == pytest.approx(3)
        assert on.budgets.waiting() == {}

    story(tell)
