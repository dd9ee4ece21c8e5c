"""What the claim gate makes of the store's answer."""

import asyncio
import hashlib
import json
from typing import Any

import pytest
from typing_extensions import override

from consumers.claiming import Claiming
from consumers.decoding import Decoding, Parsing
from consumers.gates import ClaimGate, fetch_body
from consumers.job import Job
from consumers.large_bodies import Fetching, Room
from consumers.outcomes import (
    Answered,
    Deferred,
    Outcome,
    Replayed,
    Superseded,
)
from consumers.state.base import Completion, Ended, Granted, Running, Stop
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import BodyAddress
from tests.support.jobs import NOW_MS, Bench, decoded, read, routes_of
from tests.support.virtual_time import virtually

ANSWERED = Answered(body=b"{}", model="m", provider="p")


class FakeClaiming(Claiming):
    def __init__(self) -> None:
        self.answer: Granted | Running | Ended = Granted(token=1)
        self.released: list[int | None] = []
        self.steps: list[str] = []

    @override
    async def claim(self, job: Job) -> Granted | Running | Ended:
        return self.answer

    @override
    async def release(self, job: Job, *, due_ms: int | None = None, step: str = "") -> None:
        self.released.append(due_ms)
        self.steps.append(step)


class Ground:
    def __init__(self) -> None:
        self.claiming = FakeClaiming()
        self.gate = ClaimGate(self.claiming, now_ms=lambda: NOW_MS)

    def job(self, **given: Any) -> Job:
        return read(Bench().job(**given))

    async def enter(self, answer: Granted | Running | Ended, job: Job | None = None) -> Outcome | None:
        self.claiming.answer = answer
        job = job or self.job()
        return await self.gate.enter(job, decoded(job))

    async def leave(self, job: Job, outcome: Outcome | None) -> list[int | None]:
        await self.gate.leave(job, decoded(job), outcome)
        return self.claiming.released


def dead(times: int) -> Granted:
    return Granted(token=1, deaths=times)


async def test_of_requests_with_two_deaths_one_runs_at_a_time_and_others_beside_it() -> None:
    ground, suspect = Ground(), Ground().job(message_id="one")
    assert await ground.enter(dead(2), suspect) is None
    assert await ground.enter(dead(1)) is None
    assert await ground.enter(dead(0)) is None
    assert await ground.enter(dead(2)) == Deferred(delay_ms=1000, reason="suspect", due_ms=None)
    assert ground.claiming.released == [None]
    await ground.leave(ground.job(message_id="other"), ANSWERED)
    assert isinstance(await ground.enter(dead(3)), Deferred)
    await ground.leave(suspect, ANSWERED)
    assert await ground.enter(dead(2)) is None


@pytest.mark.parametrize(
    ("is_same_message", "redelivered"), [(True, True), (True, False), (False, True), (False, False)]
)
async def test_a_copy_that_was_worked_on_before_may_still_have_to_be_dead_lettered(
    is_same_message: bool, redelivered: bool
) -> None:
    ground = Ground()
    delivery = Bench().delivery()
    delivery.redelivered = redelivered
    ended = Completion(status="ok", code="", body=b"{}", headers={}, ended_ms=1)
    found = await ground.enter(Ended(completion=ended, is_same_message=is_same_message), ground.job(delivery=delivery))
    assert found == Replayed(completion=ended, buries=is_same_message and redelivered)


CONTENT = json.dumps({"model": "claude-x", "max_tokens": 7, "messages": [{"role": "user", "content": "hi"}]}).encode()


class Fetches(Fetching):
    """Returns a body, raises an error, or (None) never ends."""

    def __init__(self, found: bytes | Exception | None) -> None:
        self._found = found

    @override
    async def fetch(self, kept: BodyAddress, *, room: Room) -> bytes:
        if self._found is None:
            await asyncio.Event().wait()
        if isinstance(self._found, Exception):
            raise self._found
        return self._found or b""


def job(*, deadline_ms: int = 60_000) -> Job:
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    headers = {n.BODY: "file:///bodies/one", n.BODY_SHA256: sha256, n.DEADLINE_MS: deadline_ms}
    return read(Bench().job(body=b"", headers={n.SENT_MS: NOW_MS, **headers}))


async def enter(found: bytes | Exception | None, some: Job, *, now_ms: int = NOW_MS) -> Outcome | None:
    decoding = Decoding(Parsing(), routes_of("one").of)
    return await fetch_body(some, decoded(some), fetching=Fetches(found), decoding=decoding, now_ms=lambda: now_ms)


@pytest.mark.parametrize(("deadline_ms", "late_ms", "took_s"), [(20_000, 0, 20), (90_000, 0, 60), (1000, 5000, 0)])
def test_a_fetch_that_hangs_ends_after_a_minute_or_at_the_deadline(
    deadline_ms: int, late_ms: int, took_s: float
) -> None:
    async def story() -> float:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        found = await enter(None, job(deadline_ms=deadline_ms), now_ms=NOW_MS + late_ms)
        assert found == Deferred(delay_ms=2000, reason="body unavailable")
        return clock() - began_s

    assert virtually(story()) == pytest.approx(took_s, abs=0.1)


async def test_a_cancellation_ends_a_fetch_at_once() -> None:
    some = job()
    fetching = asyncio.create_task(enter(None, some))
    await asyncio.sleep(0)
    some.stop(Stop.CANCELLED)
    assert isinstance(await fetching, Superseded)
