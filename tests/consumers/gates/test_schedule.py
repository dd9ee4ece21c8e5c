"""A request that is not due yet is deferred; a long wait is counted first."""

from typing import Any

import pytest
from typing_extensions import override

from consumers.claiming import Claiming
from consumers.gates.schedule import ScheduleGate
from consumers.job import Job
from consumers.outcomes import Deferred, Outcome, Refused
from consumers.state.base import WaitingLimit
from lanekeeper.contract import names as n
from tests.support.jobs import NOW_MS, Bench, decoded, read

MINUTE_MS = 60_000


class FakeClaiming(Claiming):
    """Notes what it is asked. `may_wait` False: the request has ended already."""

    def __init__(self, limit: WaitingLimit = WaitingLimit.WITHIN, *, may_wait: bool = True) -> None:
        self.limit, self.may_wait = limit, may_wait
        self.noted: list[str] = []
        self.weights: list[int] = []

    @override
    async def defer(self, job: Job, *, due_ms: int, deadline_ms: int) -> bool:
        self.noted.append("short")
        return self.may_wait

    @override
    async def defer_for_long(self, job: Job, *, due_ms: int, deadline_ms: int) -> bool:
        self.noted.append("long")
        return self.may_wait

    @override
    async def reserve(self, job: Job, *, weight: int, until_ms: int) -> WaitingLimit:
        self.weights.append(weight)
        return self.limit


async def entered(claiming: FakeClaiming, delay_ms: int | None, *, late_ms: int = 0, **given: Any) -> Outcome | None:
    job = read(Bench().job(headers={} if delay_ms is None else {n.DELAY_MS: delay_ms}, **given))
    gate = ScheduleGate(claiming, now_ms=lambda: NOW_MS + late_ms)
    return await gate.enter(job, decoded(job))


@pytest.mark.parametrize(("delay_ms", "late_ms"), [(None, 0), (500, 500), (500, 501)])
async def test_what_is_due_goes_on(delay_ms: int | None, late_ms: int) -> None:
    claiming = FakeClaiming()
    assert await entered(claiming, delay_ms, late_ms=late_ms) is None
    assert claiming.noted == []


async def test_what_is_not_due_is_deferred_until_it_is() -> None:
    found = await entered(FakeClaiming(), 500, late_ms=499)
    assert found == Deferred(delay_ms=1, reason="scheduled", due_ms=NOW_MS + 500)


@pytest.mark.parametrize(("delay_ms", "noted", "weights"), [(MINUTE_MS, "short", []), (MINUTE_MS + 1, "long", [1])])
async def test_a_wait_of_more_than_a_minute_is_counted(delay_ms: int, noted: str, weights: list[int]) -> None:
    claiming = FakeClaiming()
    assert isinstance(await entered(claiming, delay_ms), Deferred)
    assert (claiming.noted, claiming.weights) == ([noted], weights)


async def test_each_16_kib_of_a_body_count_as_a_request() -> None:
    claiming = FakeClaiming()
    body = b'{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"%s"}]}' % (b"a" * 40_000)
    await entered(claiming, 2 * MINUTE_MS, body=body)
    assert claiming.weights == [3]


@pytest.mark.parametrize("limit", [WaitingLimit.TENANT, WaitingLimit.TOTAL])
async def test_a_long_wait_without_room_is_refused_and_a_short_one_is_not(limit: WaitingLimit) -> None:
    found = await entered(FakeClaiming(limit), 2 * MINUTE_MS)
    assert isinstance(found, Refused)
    assert found.problem.code == "too_many_waiting"
    assert "60 s ahead or more" in str(found.problem.detail)
    assert isinstance(await entered(FakeClaiming(limit), MINUTE_MS), Deferred)


async def test_a_request_that_has_ended_does_not_wait() -> None:
    assert await entered(FakeClaiming(may_wait=False), 500) is None
    ended = FakeClaiming(may_wait=False)
    assert await entered(ended, 2 * MINUTE_MS) is None
    assert ended.weights == []
