"""The budget gate: which of several providers is charged."""

import pytest

from consumers.chain import Route
from consumers.limits.base import Amounts, Feedback, Kind
from tests.support.budget_gate import ONE, TWO, Ground, story
from tests.support.jobs import decoded
from topology.lanes import BATCH, CRITICAL, LaneSpec


def test_a_request_goes_to_the_next_provider_if_the_wait_is_too_long_for_its_lane() -> None:
    async def tell(on: Ground) -> None:
        await on.spend("one/m", requests=30)
        job, began_s = on.job(), on.loop.time()

        assert await on.enter(job) is None
        assert on.loop.time() == began_s
        assert job.reserved is not None
        assert job.reserved.route == TWO
        assert job.reserved.reservation.account == "two/m2"
        assert "one/m" not in on.budgets.waiting()

    story(tell, ONE, TWO)


@pytest.mark.parametrize(("lane", "taken"), [(CRITICAL, TWO), (BATCH, ONE)])
def test_a_request_stays_with_its_provider_if_the_wait_is_short_for_its_lane(lane: LaneSpec, taken: Route) -> None:
    async def tell(on: Ground) -> None:
        await on.spend("one/m", requests=5)
        job = on.job(lane)
        assert await on.enter(job) is None
        assert job.reserved is not None
        assert job.reserved.route == taken

    story(tell, ONE, TWO)


def test_if_all_providers_have_long_waits_the_shortest_is_chosen() -> None:
    async def tell(on: Ground) -> None:
        await on.spend("one/m", requests=60)
        await on.spend("two/m2", requests=20)
        job = on.job()
        assert await on.enter(job) is None
        assert job.reserved is not None
        assert job.reserved.route == TWO

    story(tell, ONE, TWO)


def test_a_paused_account_is_skipped() -> None:
    async def tell(on: Ground) -> None:
        on.budgets.learn("one/m", Feedback(kind=Kind.SPEND_LIMIT))
        job = on.job()
        assert await on.enter(job) is None
        assert job.reserved is not None
        assert job.reserved.route == TWO

    story(tell, ONE, TWO)


def test_after_a_failed_call_the_reservation_moves_to_another_account_and_the_first_is_settled() -> None:
    async def tell(on: Ground) -> None:
        job = on.job()
        await on.enter(job)
        assert await on.gate.move(job, decoded(job), TWO, Amounts(1))

        assert job.reserved is not None
        assert job.reserved.route == TWO
        assert job.reserved.reservation.account == "two/m2"
        spent = [bucket.burst - bucket.level for bucket in on.budgets.turns("one/m").account.buckets]
        assert spent == [1, 0, 0]  # the request is counted, its tokens are not

    story(tell, ONE, TWO)


def test_after_a_failed_call_without_budget_elsewhere_the_reservation_stays() -> None:
    async def tell(on: Ground) -> None:
        await on.spend("two/m2")
        job = on.job()
        await on.enter(job)
        kept = job.reserved
        assert not await on.gate.move(job, decoded(job), TWO, None)

        assert job.reserved is kept
        assert on.budgets.waiting() == {}

    story(tell, ONE, TWO)
