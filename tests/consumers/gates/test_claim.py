"""What the claim gate makes of the store's answer."""

from typing import Any

import pytest
from typing_extensions import override

from consumers.claiming import Claiming
from consumers.gates.claim import ClaimGate
from consumers.job import Job
from consumers.outcomes import Answered, Buried, Deferred, Outcome, Replayed, Retried
from consumers.state.base import Completion, Ended, Granted, Running
from tests.support.jobs import NOW_MS, Bench, decoded, read

ANSWERED = Answered(body=b"{}", model="m", provider="p")
RETRIED = Retried(delay_ms=700, error="a prompt", brief="overloaded")
DEFERRED = Deferred(delay_ms=300, reason="scheduled", due_ms=None)


class FakeClaiming(Claiming):
    def __init__(self) -> None:
        self.answer: Granted | Running | Ended = Granted(token=1)
        self.released: list[int | None] = []

    @override
    async def claim(self, job: Job) -> Granted | Running | Ended:
        return self.answer

    @override
    async def release(self, job: Job, *, due_ms: int | None = None) -> None:
        self.released.append(due_ms)


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


@pytest.mark.parametrize(
    ("for_ms", "wait_ms"), [(0, 200), (199, 200), (201, 201), (3_000, 3_000), (5_000, 5_000), (9_000, 5_000)]
)
async def test_a_request_that_runs_elsewhere_is_asked_about_after_as_long_as_it_has_run(
    for_ms: int, wait_ms: int
) -> None:
    found = await Ground().enter(Running(for_ms=for_ms))
    assert found == Deferred(delay_ms=wait_ms, reason="running elsewhere", due_ms=None)


async def test_after_four_deaths_of_its_holders_a_request_is_dead_lettered() -> None:
    assert await Ground().enter(dead(3)) is None
    found = await Ground().enter(dead(4))
    assert isinstance(found, Buried)
    assert (found.problem.code, "delivered 5 times" in str(found.problem.detail)) == ("poison", True)


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


@pytest.mark.parametrize(
    ("outcome", "released"),
    [
        (ANSWERED, []),
        (None, [None]),
        (Retried(delay_ms=700, error=""), [NOW_MS + 700]),
        (Deferred(delay_ms=300, reason="", due_ms=None), [NOW_MS + 300]),
    ],
)
async def test_only_a_request_that_goes_on_gives_its_claim_back(
    outcome: Outcome | None, released: list[int | None]
) -> None:
    ground = Ground()
    assert await ground.leave(ground.job(), outcome) == released


class Told:
    """In place of a `Trail`."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, dict[str, Any]]] = []

    def tell(self, kind: str, **detail: Any) -> None:
        self.entries.append((kind, detail))


@pytest.mark.parametrize("outcome", [RETRIED, DEFERRED, ANSWERED])
async def test_those_who_follow_a_request_are_told_of_a_retry_alone(outcome: Outcome) -> None:
    ground = Ground()
    job = ground.job()
    job.trail = told = Told()  # type: ignore[assignment]
    await ground.leave(job, outcome)
    retrying = [("retrying", {"attempt": 0, "delay_ms": 700, "error": "overloaded"})]
    assert told.entries == (retrying if outcome is RETRIED else [])
