"""Everything that counts its users is as at the start when they are gone, however and whenever they end."""

import asyncio
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.failures import (
    UNREACHABLE,
    AccountError,
    OverloadedError,
    RateLimitedError,
    RejectedError,
    TransientError,
)
from consumers.limits.base import Amounts
from consumers.outcomes import Answered, DeadLettered, Deferred, Refused, Retried, Superseded
from consumers.providers.breakers import FAILURES
from consumers.state.base import Granted, Stop
from lanekeeper.contract import names as n
from tests.support.counted import (
    BODY,
    EVERYTHING,
    Caps,
    Counted,
    Do,
    Ground,
    Pipeline,
    Probes,
    Slots,
    Step,
    play,
)
from tests.support.examples import examples
from tests.support.virtual_time import virtually
from tests.support.waiting import until

STEPS = st.lists(
    st.tuples(st.sampled_from([*Do, Do.BEGIN, Do.BEGIN]), st.integers(0, 11), st.integers(0, 11)), max_size=40
)
FOUND: list[tuple[type[Counted], list[Step], int]] = [
    (Slots, [(Do.BEGIN, 1, 0), (Do.BEGIN, 7, 0), (Do.WAIT, 0, 0)], 1),
    (Pipeline, [(Do.BEGIN, 10, 0), (Do.BEGIN, 1, 0), (Do.TURN, 0, 0)], 1),
    (Caps, [(Do.BEGIN, 0, 0), (Do.TURN, 0, 0)], 1),
    (Probes, [(Do.BEGIN, 0, 3), (Do.WAIT, 0, 0)], 2),
]
"""The shortest schedules after which something was left once."""


@pytest.mark.parametrize(("thing", "schedule", "cancels"), FOUND)
def test_what_was_left_once_is_given_back(thing: type[Counted], schedule: list[Step], cancels: int) -> None:
    virtually(play(thing, schedule, cancels=cancels))


@pytest.mark.slow
@pytest.mark.parametrize("thing", EVERYTHING)
@given(schedule=STEPS, cancels=st.integers(0, 2))
@settings(max_examples=examples(500), deadline=None)
def test_what_is_taken_is_given_back_whoever_is_cancelled_at_whatever_await(
    thing: type[Counted], schedule: list[Step], cancels: int
) -> None:
    virtually(play(thing, schedule, cancels=cancels))


@pytest.mark.slow
@pytest.mark.parametrize("thing", EVERYTHING)
@given(schedule=STEPS, cancels=st.integers(0, 2))
@settings(max_examples=examples(100), deadline=None)
def test_what_is_taken_is_given_back_on_uvloop(thing: type[Counted], schedule: list[Step], cancels: int) -> None:
    uvloop.run(play(thing, schedule, cancels=cancels, is_real=True))


CUT = TransientError("cut", type="cut")
FAULT = ValueError("a fault of ours")


@pytest.mark.parametrize(
    ("error", "outcome", "counted"),
    [
        (None, Answered, 1),
        (OverloadedError("529"), Retried, 0),
        (TransientError("down", type=UNREACHABLE), Retried, 0),
        (RateLimitedError("429"), Retried, 0),
        (CUT, Retried, 1),
        (RejectedError("400", status=400), DeadLettered, 0),
        (AccountError("429", reason="spent", status=429), Deferred, 0),
    ],
)
async def test_everything_is_given_back_after_a_call(error: Exception | None, outcome: type, counted: int) -> None:
    ground = Ground()
    ground.provider.error, job = error, ground.job()

    assert isinstance(await ground.handler.handle(job), outcome)

    assert await ground.held(job) == {}
    assert ground.counted == counted
    assert (job.claim is not None) == (outcome in (Answered, DeadLettered)), (
        "what has ended keeps it until it is stored"
    )


@pytest.mark.parametrize("used", [None, Amounts(1, 9, 2)])
@pytest.mark.parametrize("error", [None, CUT])
async def test_a_call_that_was_cut_is_charged_what_is_known_of_it(
    used: Amounts | None, error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground = Ground()
    ground.provider.used, ground.provider.error, job = used, error, ground.job()
    ground.provider.takes_s = 0 if error else 3600
    charged: list[Amounts | None] = []
    monkeypatch.setattr(ground.budgets, "settle", lambda _, each: charged.append(each))
    working = asyncio.create_task(ground.handler.handle(job))
    await until(lambda: ground.provider.calls)
    if error is None:
        job.stop(Stop.CANCELLED)
    await working

    assert charged == [used or pytest.approx((1, len(BODY) / 3.5, 5))]


async def test_everything_is_given_back_after_an_internal_error() -> None:
    ground = Ground()
    ground.provider.error, job = FAULT, ground.job()

    with pytest.raises(ValueError, match="a fault of ours"):
        await ground.handler.handle(job)

    assert await ground.held(job) == {}
    assert await ground.deaths() == 0


@pytest.mark.parametrize(("why", "outcome"), [(Stop.CANCELLED, Superseded), (Stop.FENCED, Deferred)])
async def test_everything_is_given_back_by_a_request_that_is_told_to_stop(why: Stop, outcome: type) -> None:
    ground = Ground()
    ground.provider.takes_s, job = 30, ground.job()
    working = asyncio.create_task(ground.handler.handle(job))
    await until(lambda: ground.provider.calls)
    job.stop(why)

    assert isinstance(await working, outcome)

    assert await ground.held(job) == {}
    assert ground.counted == 1, "it may have been paid"


@pytest.mark.slow
@pytest.mark.parametrize("is_probe", [False, True])
def test_everything_is_given_back_wherever_the_request_is_cancelled(is_probe: bool) -> None:
    async def story(turns: int) -> bool:
        ground = Ground()
        if is_probe:
            await ground.open_breaker()
        ground.provider.takes_s, job = 30, ground.job()
        working = asyncio.create_task(ground.handler.handle(job))
        for _ in range(turns):
            await asyncio.sleep(0)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working

        assert await ground.held(job) == {}, turns
        assert ground.counted == (1 if ground.provider.calls else 0), turns
        assert await ground.deaths() == 0, turns
        return ground.provider.calls > 0

    called = [virtually(story(turns)) for turns in range(30)]
    assert called[-1]
    assert not called[0]


async def test_a_claim_is_released_although_the_worker_stops_during_the_release() -> None:
    ground = Ground()
    job, may_go = ground.job(), asyncio.Event()
    store, claiming = ground.bench.store, ground.bench.claiming
    assert isinstance(await claiming.claim(job), Granted)
    release = store.release

    async def release_slowly(*given: Any, **more: Any) -> None:
        await may_go.wait()
        await release(*given, **more)

    store.release = release_slowly  # type: ignore[method-assign]
    letting_go = asyncio.create_task(claiming.release(job))
    await asyncio.sleep(0)
    letting_go.cancel()
    await asyncio.wait([letting_go])
    may_go.set()
    await claiming.finish(within_s=30)
    assert letting_go.cancelled()
    assert await ground.deaths() == 0


async def test_a_request_takes_nothing_while_no_provider_may_be_called() -> None:
    ground = Ground()
    ground.provider.error = TransientError("500", status=500)
    for each in range(FAILURES):
        job = ground.bench.job(body=BODY, message_id=f"m-{each}")
        await ground.handler.handle(job)
        assert await ground.held(job) == {}

    calls, job = ground.provider.calls, ground.job(**{n.DEADLINE_MS: 300})
    outcome = await ground.handler.handle(job)

    assert isinstance(outcome, Refused)
    assert "no provider may be called for" in outcome.problem.detail
    assert (await ground.held(job), ground.counted, ground.provider.calls) == ({}, 0, calls)
