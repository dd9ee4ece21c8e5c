"""A request may run until its deadline and not at it; its problem says where the time was spent."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from consumers.claiming import Claiming
from consumers.failures import AccountError, OverloadedError, ProviderError
from consumers.gates import defer_until_due, refuse_if_late
from consumers.job import Attempted, Job
from consumers.large_bodies import Fetching
from consumers.outcomes import Deferred, Outcome, Refused, Superseded
from consumers.providers.breakers import Breakers
from consumers.state.base import Completion, Found, Identity, WaitingLimit
from lanekeeper.bodies import BodyStore
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import BodyAddress
from tests.support.completions import answered, failed
from tests.support.jobs import NOW_MS, Bench, decoded, read
from topology.codec.headers import BatchHop, FlowHop, HopHeaders, hop_headers


def job() -> Job:
    return read(Bench().job(headers={n.DEADLINE_MS: 5_000, n.SENT_MS: NOW_MS - 700}))


async def late(some: Job, now_ms: int) -> Outcome | None:
    return await refuse_if_late(some, decoded(some), breakers=Breakers(), now_ms=lambda: now_ms)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            OverloadedError("529 overloaded_error: Overloaded", status=529),
            "; attempt 1: 529 overloaded_error: Overloaded",
        ),
        (
            AccountError("401: key sk-1 of org-1", reason="it refuses the key", status=401),
            "; attempt 1: it refuses the key",
        ),
        (None, "1 ms in attempt 1"),
    ],
)
async def test_the_error_of_an_attempt_ends_the_problem_without_texts_about_the_account(
    error: ProviderError | None, told: str
) -> None:
    some = job()
    some.attempted = Attempted(started_ms=NOW_MS, run_ms=1, error=error)
    found = await late(some, NOW_MS + 5_000)

    assert isinstance(found, Refused)
    assert found.problem.detail.endswith(told)


MINUTE_MS = 60_000


class FakeClaiming(Claiming):
    """Notes what it is asked. `may_wait` False: the request has ended already."""

    def __init__(
        self,
        limit: WaitingLimit = WaitingLimit.WITHIN,
        *,
        may_wait: bool = True,
        ended: Completion | None = None,
        waits: bool = False,
    ) -> None:
        self.limit, self.may_wait, self.ended, self.waits = limit, may_wait, ended, waits
        self.is_last = True
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

    @override
    async def debounce(self, job: Job, key: str, *, until_ms: int) -> bool:
        self.noted.append(f"{key} until {until_ms - NOW_MS}")
        return self.is_last

    @override
    async def find(self, identity: Identity) -> Found | None:
        return Found(completion=self.ended, running=False) if self.ended is not None or self.waits else None


async def entered(
    claiming: FakeClaiming,
    delay_ms: int | None,
    *,
    late_ms: int = 0,
    bodies: Fetching | None = None,
    headers: Mapping[str, Any] | None = None,
    **given: Any,
) -> Outcome | None:
    delay = {} if delay_ms is None else {n.DELAY_MS: delay_ms}
    job = read(Bench().job(headers={**(headers or {}), **delay}, **given))
    bodies = bodies or Fetching(None, most_bytes=0)
    return await defer_until_due(job, decoded(job), claiming=claiming, bodies=bodies, now_ms=lambda: NOW_MS + late_ms)


@pytest.mark.parametrize(("delay_ms", "noted", "weights"), [(MINUTE_MS, "short", []), (MINUTE_MS + 1, "long", [1])])
async def test_a_wait_of_more_than_a_minute_is_counted(delay_ms: int, noted: str, weights: list[int]) -> None:
    claiming = FakeClaiming()
    assert isinstance(await entered(claiming, delay_ms), Deferred)
    assert (claiming.noted, claiming.weights) == ([noted], weights)


async def test_a_wait_that_a_worker_has_counted_before_is_not_refused() -> None:
    claiming = FakeClaiming(WaitingLimit.TOTAL)
    headers = {n.DUE_MS: NOW_MS + 2 * MINUTE_MS}
    assert isinstance(await entered(claiming, 2 * MINUTE_MS, headers=headers, exchange="lane.due"), Deferred)
    assert (claiming.noted, claiming.weights) == (["short"], [])


async def test_a_body_in_a_store_weighs_as_much_as_one_in_the_message(tmp_path: Path) -> None:
    claiming, stores = FakeClaiming(), [BodyStore(f"file://{tmp_path}/{name}") for name in ("own", "old")]
    bodies = Fetching(stores[0], others=stores[1:], most_bytes=32 * 1024)
    for store in stores:
        kept = await store.keep([b"a" * 40_000])
        await entered(claiming, 2 * MINUTE_MS, bodies=bodies, body=b"", headers=kept.headers)
    await stores[0].drop(gone := await stores[0].keep([b"a"]))
    await entered(claiming, 2 * MINUTE_MS, bodies=bodies, body=b"", headers=gone.headers)
    elsewhere = BodyAddress("https://files.example.com/prompt", gone.sha256)
    await entered(claiming, 2 * MINUTE_MS, bodies=bodies, body=b"", headers=elsewhere.headers)
    await bodies.aclose(within_s=1)
    assert claiming.weights == [3, 3, 1, 1]


@pytest.mark.parametrize("limit", [WaitingLimit.TENANT, WaitingLimit.TOTAL])
async def test_a_request_that_has_ended_is_not_refused_because_others_wait(limit: WaitingLimit) -> None:
    for ended in (answered(), failed("cancelled")):
        assert await entered(FakeClaiming(limit, ended=ended), 2 * MINUTE_MS) is None
    for of_one_message in ("invalid_request", "too_many_waiting"):
        found = await entered(FakeClaiming(limit, ended=failed(of_one_message)), 2 * MINUTE_MS)
        assert isinstance(found, Refused)


@pytest.mark.parametrize("waits", [False, True])
async def test_only_a_message_whose_request_waits_already_is_refused_in_silence(waits: bool) -> None:
    found = await entered(FakeClaiming(WaitingLimit.TENANT, waits=waits), 2 * MINUTE_MS)
    assert isinstance(found, Refused)
    assert found.is_silent is waits


DEBOUNCED = {n.DEBOUNCE: "doc"}
DUE_AGAIN: Mapping[str, Any] = {"exchange": "lane.due", "late_ms": 500}


@pytest.mark.parametrize("how", [{}, DUE_AGAIN])
async def test_an_update_that_is_not_the_last_is_superseded_at_its_arrival_or_when_it_is_due(
    how: Mapping[str, Any],
) -> None:
    claiming = FakeClaiming()
    claiming.is_last = False
    found = await entered(claiming, 500, headers={**DEBOUNCED, **({n.DUE_MS: NOW_MS + 500} if how else {})}, **how)
    assert isinstance(found, Superseded)
    assert found.problem.code == "superseded"
    assert claiming.noted[-1] == "doc until 3600500", "the last update is known for an hour after it is due"


async def test_an_update_that_arrives_when_it_is_due_is_superseded_by_a_newer_one() -> None:
    claiming = FakeClaiming()
    claiming.is_last = False
    assert isinstance(await entered(claiming, 500, late_ms=500, headers=DEBOUNCED), Superseded)


@pytest.mark.parametrize(
    "begun",
    [
        HopHeaders(attempts=1),
        HopHeaders(batch=BatchHop(ticket="t")),
        HopHeaders(flow=FlowHop(step="second", deadline_ms=NOW_MS + 60_000)),
    ],
    ids=["attempt", "batch", "step"],
)
async def test_an_update_that_has_begun_is_not_superseded(begun: HopHeaders) -> None:
    claiming = FakeClaiming()
    claiming.is_last = False
    headers = {**DEBOUNCED, **hop_headers(replace(begun, due_ms=NOW_MS + 500))}
    assert await entered(claiming, 500, headers=headers, **DUE_AGAIN) is None


@pytest.mark.parametrize("late_ms", [0, 500])
async def test_a_repeated_message_of_a_request_that_has_ended_supersedes_nothing(late_ms: int) -> None:
    claiming = FakeClaiming(may_wait=False, ended=answered())
    assert await entered(claiming, 500, headers=DEBOUNCED, late_ms=late_ms) is None
    assert "doc" not in str(claiming.noted)
