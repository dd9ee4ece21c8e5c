"""The budget gate: which requests are deferred instead of waiting with their delivery, and for how long."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from consumers.limits.base import Feedback, Kind, Reservation, Wait, WaitTooLong
from consumers.outcomes import Deferred, Refused
from tests.support.budget_gate import ONE, TWO, Ground, story
from topology.lanes import BATCH, CRITICAL, LaneSpec


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


async def seconds_until_deferred(on: Ground, lane: LaneSpec) -> float:
    began_s = on.loop.time()
    assert isinstance(await on.enter(on.job(lane)), Deferred)
    return on.loop.time() - began_s


def test_while_no_other_request_comes_the_pauses_between_deferrals_grow() -> None:
    async def tell(on: Ground) -> None:
        lane = replace(BATCH, slots=2)
        await on.spend("one/m", requests=10_000)
        waiting = asyncio.ensure_future(on.enter(on.job(lane)))
        await asyncio.sleep(0)
        took_s = [await seconds_until_deferred(on, lane) for _ in range(8)]

        assert took_s[:3] == [pytest.approx(each) for each in (0.25, 0.5, 1.0)]
        assert took_s[-1] == pytest.approx(15)
        waiting.cancel()

    story(tell)


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


def test_a_paused_account_defers_requests_that_can_wait_and_refuses_others() -> None:
    async def tell(on: Ground) -> None:
        on.budgets.learn("one/m", Feedback(kind=Kind.SPEND_LIMIT))
        waits = [await on.enter(on.job(BATCH)) for _ in range(50)]
        assert {each.reason for each in waits if isinstance(each, Deferred)} == {"paused"}
        delays = sorted(each.delay_ms for each in waits if isinstance(each, Deferred))
        assert (len(delays), delays[0] >= 900_000, delays[-1] <= 960_000) == (50, True, True)
        assert delays[1] - delays[0] > 50, "the first finds out before the next is back"
        assert isinstance(await on.enter(on.job(CRITICAL)), Refused)

    story(tell)


def test_a_request_that_waits_for_a_paused_account_is_back_before_its_deadline() -> None:
    async def tell(on: Ground) -> None:
        on.budgets.learn("one/m", Feedback(kind=Kind.SPEND_LIMIT))
        waits = [await on.enter(on.job(BATCH, deadline_ms=905_000)) for _ in range(50)]
        assert max(each.delay_ms for each in waits if isinstance(each, Deferred)) == pytest.approx(905_000, abs=100)

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
