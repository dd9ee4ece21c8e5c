"""The gate of the brake: for how long what is paused waits, and what it does not hold."""

import random
from typing import Any

import pytest
from typing_extensions import override

from consumers.brake import Brake
from consumers.gates import BrakeGate
from consumers.job import Job
from consumers.outcomes import Deferred, Outcome
from consumers.state.base import Pause
from lanekeeper.contract import names as n
from tests.support.completions import answered
from tests.support.jobs import NOW_MS, Bench, HeldPauses, a_pause, decoded, read

PAUSE = a_pause("app", "shop", since_ms=NOW_MS)


class Share(random.Random):
    """Draws what lies so far between the two bounds."""

    share = 1.0

    @override
    def uniform(self, a: float, b: float) -> float:
        return a + self.share * (b - a)


class World:
    def __init__(self, *pauses: Pause) -> None:
        self.bench = Bench()
        self.now_ms = NOW_MS
        self.rng = Share()
        self.store = HeldPauses(*pauses)
        self.brake = Brake(self.store, now_ms=lambda: self.now_ms)
        self.gate = BrakeGate(
            self.brake,
            self.bench.claiming,
            now_ms=lambda: self.now_ms,
            rng=self.rng,
            publish=self.bench.lifecycle.publish,
        )

    def job(self, *, deadline_ms: int = 3_600_000, **properties: Any) -> Job:
        headers = {n.DEADLINE_MS: deadline_ms, n.SENT_MS: NOW_MS}
        return read(self.bench.job(headers=headers, **properties), now_ms=NOW_MS)

    async def enter(self, job: Job | None = None) -> Outcome | None:
        await self.brake.read()
        job = job or self.job()
        return await self.gate.enter(job, decoded(job))

    async def delay_ms(self, job: Job | None = None) -> int:
        outcome = await self.enter(job)
        assert isinstance(outcome, Deferred)
        assert outcome.reason == "paused"
        return outcome.delay_ms


async def test_it_comes_back_at_its_deadline_and_soon_after_the_pause_ends() -> None:
    world = World(PAUSE)
    assert await world.delay_ms(world.job(deadline_ms=300)) == 300
    world.store.held = {PAUSE.id: a_pause("app", "shop", since_ms=NOW_MS - 3_600_000, until_ms=NOW_MS + 2000)}
    assert await world.delay_ms() == 3000
    world.rng.share = 0.0
    assert await world.delay_ms() == 2000


async def test_what_comes_back_with_the_result_of_its_batch_passes() -> None:
    world = World(PAUSE)
    job = world.job()
    job.batch_result = b"{}"
    assert await world.enter(job) is None
    assert world.bench.log == []


@pytest.mark.slow
async def test_of_very_many_only_some_come_back_in_a_second() -> None:
    world = World(PAUSE)
    job = world.job()
    delays = [await world.delay_ms(job) for _ in range(4000)]
    assert delays[-1] == 20_000, "200 in a second"
    world.gate._next_ms[PAUSE] = NOW_MS + 1e9
    assert await world.delay_ms(job) == 300_000
    world.store.held = {PAUSE.id: a_pause("app", "shop", since_ms=NOW_MS - 1)}
    assert await world.delay_ms(job) <= 1500, "another pause begins anew"
    assert len(world.gate._next_ms) == 1, "what has ended takes no memory"


async def test_a_request_that_has_ended_is_answered_by_the_claim_gate() -> None:
    world = World(PAUSE)
    job = world.job()
    await world.bench.claiming.claim(job)
    await world.bench.claiming.complete(job, answered())
    assert await world.enter(world.job()) is None
