"""The budget gate: which request waits, which is refused, what is reserved, and what is given back."""

import asyncio
import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from consumers.budget_gate import WaitingRoom
from consumers.job import Attempted, Route
from consumers.limits.base import Amounts, CallInProgress, Reservation, Wait, WaitTooLong
from consumers.outcomes import Answered, Deferred, Refused, Superseded
from consumers.state.base import Stop
from tests.support.budget_gate import BODY, DONE, ONE, TWO, Ground, story
from tests.support.jobs import decoded
from topology.lanes import BATCH, CRITICAL, LaneSpec


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

        account = on.budgets.queue("one/m").account
        assert [bucket.burst - bucket.level for bucket in account.buckets] == [1, 7, 2]
        assert account.calls.running == 0

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


def test_a_request_that_would_wait_too_long_with_its_delivery_is_deferred_with_the_reason() -> None:
    async def tell(on: Ground) -> None:
        await on.spend("one/m", requests=1000)
        began_s = on.loop.time()
        outcome = await on.enter(on.job(BATCH))

        assert on.loop.time() - began_s == pytest.approx(on.spec.hold_s)
        assert outcome == Deferred(delay_ms=1000, reason="rpm")
        assert on.budgets.waiting() == {}

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


async def seconds_until_deferred(on: Ground, lane: LaneSpec) -> float:
    began_s = on.loop.time()
    assert isinstance(await on.enter(on.job(lane)), Deferred)
    return on.loop.time() - began_s


def test_a_request_for_another_account_that_is_granted_makes_the_next_pause_short_again() -> None:
    async def tell(on: Ground) -> None:
        lane = replace(BATCH, slots=2)
        await on.spend("one/m", requests=10_000)
        waiting = asyncio.ensure_future(on.enter(on.job(lane)))
        await asyncio.sleep(0)
        took_s = []
        for granted_elsewhere in (False, False, True):
            if granted_elsewhere:
                on.routes = (TWO,)
                assert await on.enter(on.job(lane)) is None
                on.routes = (ONE,)
            took_s.append(await seconds_until_deferred(on, lane))

        assert took_s == [pytest.approx(each) for each in (0.25, 0.5, 0.25)]
        waiting.cancel()

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


@pytest.mark.parametrize(
    ("predicted_s", "waited_s", "delay_ms"),
    [(0.2, 0.0, 1000), (7.25, 0.0, 7250), (100.0, 0.0, 15_000), (7.25, 1000.0, 1000)],
)
def test_a_request_that_lets_others_pass_is_deferred_for_its_predicted_wait_of_one_to_fifteen_seconds(
    monkeypatch: pytest.MonkeyPatch, predicted_s: float, waited_s: float, delay_ms: int
) -> None:
    async def tell(on: Ground) -> None:
        async def predicted(*_: object) -> Wait:
            return Wait(predicted_s, "rpm")

        monkeypatch.setattr(type(on.gate), "_wait", predicted)
        job = on.job(BATCH)
        outcome = await on.gate._interrupted(job, job.decoded.request, ONE, waited_s)  # type: ignore[union-attr]
        assert outcome == Deferred(delay_ms=delay_ms, reason="rpm")

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


SLOTS = 3


def enter(room: WaitingRoom, *accounts: str, lane: str = "normal", slots: int = SLOTS) -> list[float | None]:
    return [room.enter(lane, each, slots=slots) for each in accounts]


def test_requests_for_one_account_may_wait_in_all_slots_but_one() -> None:
    room = WaitingRoom()
    assert enter(room, "a", "a", "a") == [None, None, 0.25]
    assert enter(room, "b") == [None]
    assert enter(room, "a", lane="batch") == [None]


@pytest.mark.parametrize(("slots", "first"), [(1, [None, 0.25]), (2, [None, 0.25]), (4, [None, None, None, 0.25])])
def test_of_any_number_of_slots_one_stays_free_but_one_request_may_always_wait(
    slots: int, first: list[float | None]
) -> None:
    assert enter(WaitingRoom(), *"a" * len(first), slots=slots) == first


def test_while_only_requests_for_one_account_follow_the_moments_double_up_to_fifteen_seconds() -> None:
    room = WaitingRoom()
    enter(room, "a", "a")
    found = []
    for _ in range(9):
        found += enter(room, "a")
        room.leave("normal", "a")
    assert found == [0.25, 0.5, 1, 2, 4, 8, 15, 15, 15]


def test_a_request_that_is_granted_at_once_makes_them_short_again_if_others_wait_for_another_account() -> None:
    room = WaitingRoom()
    enter(room, "a", "a", "a")
    for lane, account in (("normal", "a"), ("batch", "b")):
        room.passed(lane, account)
    assert enter(room, "a") == [0.5]
    room.passed("normal", "b")
    assert enter(room, "a") == [0.25]


def test_a_short_wait_limit_at_one_account_does_not_apply_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async def tell(on: Ground) -> None:
        lane, reserve = replace(BATCH, slots=2, target_wait_s=3.0), on.budgets.reserve
        await on.spend("one/m", requests=1)
        on.routes = (ONE,)
        standing = asyncio.ensure_future(on.enter(on.job(lane)))
        await asyncio.sleep(0)
        on.routes = (ONE, TWO)

        async def fails_at_first(account: str, **asked: Any) -> Reservation:
            if account == "one/m":
                asked["on_wait"](Wait(0.1, "rpm"))
                raise WaitTooLong(Wait(9.0, "rpm"))
            await asyncio.sleep(1)
            return await reserve(account, **asked)

        async def soon(*_: object, **__: object) -> Wait:
            return Wait(0.1, "rpm")

        monkeypatch.setattr(on.budgets, "reserve", fails_at_first)
        monkeypatch.setattr(on.budgets, "predicted_wait", soon)
        job = on.job(lane)

        assert await on.enter(job) is None
        assert job.reserved is not None
        assert job.reserved.route == TWO
        standing.cancel()

    story(tell)


@pytest.mark.parametrize(("wait_s", "is_told"), [(0.99, False), (1.0, True)])
def test_a_wait_of_at_least_a_second_is_told(monkeypatch: pytest.MonkeyPatch, wait_s: float, is_told: bool) -> None:
    async def tell(on: Ground) -> None:
        reserve = on.budgets.reserve

        async def waits(account: str, **asked: Any) -> Reservation:
            asked["on_wait"](Wait(wait_s, "rpm"))
            return await reserve(account, **asked)

        monkeypatch.setattr(on.budgets, "reserve", waits)
        job = on.job()
        assert await on.enter(job) is None
        assert on.told == ([(job.id, Wait(wait_s, "rpm"))] if is_told else [])

    story(tell)


def test_with_a_single_provider_no_wait_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def tell(on: Ground) -> None:
        asked: list[object] = []
        monkeypatch.setattr(on.budgets, "predicted_wait", asked.append)
        assert await on.enter(on.job()) is None
        assert asked == []

    story(tell)


@dataclass
class Asked:
    """A budget that notes what it is asked, and grants nothing."""

    asked: list[dict[str, Any]] = field(default_factory=list)

    async def reserve(self, account: str, **asked: Any) -> Reservation:
        self.asked.append(asked)
        raise WaitTooLong(Wait(6.5, "rpm"))


@pytest.mark.parametrize(
    ("left_ms", "run_ms", "by_s"),
    [
        (20_000, 4000, 14.0),  # half as much again as the last call took
        (6200, 4000, 0.25),  # what can begin at once is tried
        (100, 4000, 0.1),
        (20_000, 0, 20.0),
    ],
)
def test_a_call_may_begin_until_it_could_no_longer_end_before_the_deadline(
    monkeypatch: pytest.MonkeyPatch, left_ms: int, run_ms: int, by_s: float
) -> None:
    async def tell(on: Ground) -> None:
        known, budget = on.job(), Asked()
        assert await on.enter(known) is None
        if run_ms:
            known.attempted = Attempted(started_ms=on.now_ms(), run_ms=run_ms, usage=Amounts(1, 10, 10))
            await on.gate.leave(known, decoded(known), DONE)
        monkeypatch.setattr(on.budgets, "reserve", budget.reserve)
        refused = await on.enter(on.job(deadline_ms=left_ms))
        assert isinstance(refused, Refused)
        assert refused.problem.detail == (
            f"not answered within {left_ms} ms: it could start in 6500 ms at the earliest (waiting for rpm of one/m), "
            f"its call may take {run_ms * 3 // 2} ms, and {left_ms} ms are left"
        )
        assert budget.asked[0]["until"] - on.loop.time() == pytest.approx(by_s)

    story(tell)


@pytest.mark.parametrize(("came_before", "since_s"), [(True, 1.5), (False, None)])
def test_only_a_request_that_comes_back_stands_where_it_stood(
    monkeypatch: pytest.MonkeyPatch, came_before: bool, since_s: float | None
) -> None:
    async def tell(on: Ground) -> None:
        job, budget = on.job(), Asked()
        job.hop = replace(job.hop, redelivered=came_before)
        monkeypatch.setattr(on.budgets, "reserve", budget.reserve)
        await asyncio.sleep(1.5)
        await on.enter(job)
        arrived = budget.asked[0]["arrived"]
        assert (None if arrived is None else on.loop.time() - arrived) == pytest.approx(since_s)

    story(tell)


@pytest.mark.parametrize(
    ("overflow_s", "wait_s", "taken"), [(None, 1.0, ONE), (None, 1.01, TWO), (5.0, 5.0, ONE), (5.0, 5.01, TWO)]
)
def test_a_request_stays_with_its_provider_for_the_lanes_target_or_as_the_operator_says(
    monkeypatch: pytest.MonkeyPatch, overflow_s: float | None, wait_s: float, taken: Route
) -> None:
    async def tell(on: Ground) -> None:
        async def predicted(account: str, **_: Any) -> Wait:
            return Wait(wait_s if account == "one/m" else 0.0, "rpm")

        monkeypatch.setattr(on.budgets, "predicted_wait", predicted)
        on.gate.spec = replace(on.spec, overflow_s=overflow_s)
        job = on.job()
        assert await on.enter(job) is None
        assert job.reserved is not None
        assert job.reserved.route == taken

    story(tell, ONE, TWO)


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
