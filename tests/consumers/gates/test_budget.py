"""The budget gate: which request waits, which is refused, what is reserved, and what is given back."""

import asyncio
import json
from dataclasses import replace

import pytest

from consumers.budget_gate import WaitingRoom
from consumers.job import Attempted
from consumers.limits.base import Amounts, CallInProgress
from consumers.outcomes import Answered, Deferred, Refused, Superseded
from consumers.state.base import Stop
from tests.support.budget_gate import DONE, ONE, TWO, Ground, story
from tests.support.jobs import decoded
from topology.lanes import BATCH


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


@pytest.mark.parametrize(("why", "outcome"), [(Stop.CANCELLED, Superseded), (Stop.FENCED, Deferred)])
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
        assert [id for id, _ in on.told] == [job.id], "its wait of seconds was told"
        assert on.gate.waits == {("one/m", "critical", "rpm"): 1}

    story(tell)


def asking(*content: object) -> bytes:
    return json.dumps({"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": content}]}).encode()


LONG = asking({"type": "text", "text": "word " * 200_000})


def used(on: Ground) -> list[float]:
    return [bucket.burst - bucket.level for bucket in on.budgets.queue("one/m").account.buckets]


def test_a_call_without_usage_is_charged_its_input_and_the_output_that_it_had_time_for() -> None:
    async def tell(on: Ground) -> None:
        known = on.job()
        await on.enter(known)
        known.attempted = Attempted(started_ms=on.now_ms(), run_ms=40_000, usage=Amounts(1, 90, 2))
        await on.gate.leave(known, decoded(known), DONE)
        await asyncio.sleep(60)
        job = on.job()
        await on.enter(job)
        job.attempted, job.in_progress = Attempted(started_ms=on.now_ms()), CallInProgress(on.loop.time())
        await asyncio.sleep(15)  # a quarter of the time that such a call is expected to take

        assert job.reserved is not None
        assert on.gate.likely(job, job.reserved) == pytest.approx((1, 90, 3 / 4))

    story(tell)


def test_a_stream_that_was_cut_is_charged_what_has_come_of_it() -> None:
    async def tell(on: Ground) -> None:
        job = on.job(body=LONG)
        await on.enter(job)
        job.attempted = Attempted(started_ms=on.now_ms())
        job.in_progress = CallInProgress(on.loop.time(), lambda: Amounts(1, 70, 3))
        await on.gate.leave(job, decoded(job), None)

        assert used(on) == [1, 70, 3]
        assert job.in_progress is None, "what has come of the stream takes no memory while its outcome is stored"

    story(tell)


def test_waiting_for_one_account_does_not_delay_a_lanes_requests_for_another() -> None:
    async def tell(on: Ground) -> None:
        lane = replace(BATCH, slots=4)
        await on.spend("one/m", requests=1000)
        waiting = [asyncio.ensure_future(on.enter(on.job(lane))) for _ in range(3)]
        await asyncio.sleep(0)
        began_s = on.loop.time()
        last = on.job(lane)
        outcome = await on.enter(last)  # the fourth slot

        assert isinstance(outcome, Deferred)
        assert outcome.reason == "rpm"
        assert on.loop.time() - began_s < 1
        on.routes = (TWO,)
        assert await on.enter(on.job(lane)) is None
        assert [each.done() for each in waiting] == [False] * 3
        for each in waiting:
            each.cancel()

    story(tell)


def test_a_deferred_request_goes_before_later_ones() -> None:
    async def tell(on: Ground) -> None:
        await on.spend("one/m")
        back = on.job(BATCH)
        await asyncio.sleep(0.01)
        others = [asyncio.ensure_future(on.enter(on.job(BATCH))) for _ in range(2)]
        await asyncio.sleep(0.01)
        back.hop = replace(back.hop, redelivered=True)
        first = asyncio.ensure_future(on.enter(back))
        await asyncio.wait((first, *others), return_when=asyncio.FIRST_COMPLETED)

        assert [each.done() for each in (first, *others)] == [True, False, False]
        for each in others:
            each.cancel()

    story(tell)


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


def test_after_a_failed_call_the_reservation_moves_to_another_account_and_the_first_is_settled() -> None:
    async def tell(on: Ground) -> None:
        job = on.job()
        await on.enter(job)
        assert await on.gate.move(job, decoded(job), TWO, Amounts(1))

        assert job.reserved is not None
        assert job.reserved.route == TWO
        assert job.reserved.reservation.account == "two/m2"
        spent = [bucket.burst - bucket.level for bucket in on.budgets.queue("one/m").account.buckets]
        assert spent == [1, 0, 0]  # the request is counted, its tokens are not

    story(tell, ONE, TWO)


SLOTS = 3


def enter(room: WaitingRoom, *accounts: str, lane: str = "normal", slots: int = SLOTS) -> list[float | None]:
    return [room.enter(lane, each, slots=slots) for each in accounts]


def test_requests_for_one_account_may_wait_in_all_slots_but_one() -> None:
    room = WaitingRoom()
    assert enter(room, "a", "a", "a") == [None, None, 0.25]
    assert enter(room, "b") == [None]
    assert enter(room, "a", lane="batch") == [None]


def test_what_was_reserved_is_given_back_if_no_call_was_made_and_nothing_is_reserved_for_a_batchs_result() -> None:
    async def tell(on: Ground) -> None:
        job = on.job()
        await on.enter(job)
        assert used(on)[0] == 1
        await on.gate.leave(job, decoded(job), Deferred(delay_ms=1, reason="paused"))
        assert used(on) == [0, 0, 0]
        job.batch_result = b"{}"
        assert await on.enter(job) is None
        assert (job.reserved, used(on)) == (None, [0, 0, 0])
        await on.gate.leave(job, decoded(job), DONE)

    story(tell)
