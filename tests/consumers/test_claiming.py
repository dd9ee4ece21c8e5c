"""A worker's claims, on top of the store that keeps them."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs
from typing_extensions import override

from consumers.claiming import Claiming
from consumers.job import Attempted
from consumers.state.base import (
    Cancelling,
    ClaimAnswer,
    Completion,
    Fingerprint,
    Granted,
    Held,
    Identity,
    Stop,
    StoreUnavailable,
)
from lanekeeper.contract import names as n
from lanekeeper.telemetry import signals
from tests.support.jobs import NOW_MS, Bench
from tests.support.memory_store import MemoryStore
from tests.support.virtual_time import virtually


class SlowToTell(MemoryStore):
    """A store that grants a claim at once, but returns later."""

    def __init__(self) -> None:
        super().__init__()
        self.has_claimed = asyncio.Event()
        self.tells = asyncio.Event()

    @override
    async def claim(self, identity: Identity, fingerprint: Fingerprint) -> ClaimAnswer:
        found = await super().claim(identity, fingerprint)
        self.has_claimed.set()
        await self.tells.wait()
        return found


async def test_a_cancellation_stops_a_request_whose_claim_is_granted_but_not_yet_returned() -> None:
    store, job = SlowToTell(), Bench().job()
    claiming = Claiming(store)
    ending = Completion(status="error", code="cancelled", body=b"{}", headers={}, ended_ms=NOW_MS)

    claimed = asyncio.create_task(claiming.claim(job))
    await store.has_claimed.wait()
    cancelled = asyncio.create_task(claiming.cancel(job.identity, ending))
    await asyncio.sleep(0)
    store.tells.set()

    assert await cancelled is Cancelling.TOLD
    assert job.stopped is Stop.CANCELLED
    assert isinstance(await claimed, Granted)


class SlowToRelease(MemoryStore):
    """A store that needs `takes_s` for each release, or fails `fails` times before it."""

    def __init__(self, *, takes_s: float = 0, fails: int = 0) -> None:
        super().__init__()
        self.takes_s, self.fails = takes_s, fails

    @override
    async def release(self, held: Held, **how: Any) -> None:
        await asyncio.sleep(self.takes_s)
        if self.fails:
            self.fails -= 1
            raise StoreUnavailable("locked")
        await super().release(held, **how)


@pytest.mark.parametrize("slow", [{"takes_s": 8}, {"fails": 9}, {"takes_s": 25}])
def test_a_request_that_is_deferred_again_and_again_is_no_poison_because_its_releases_are_slow(
    slow: dict[str, Any],
) -> None:
    async def story() -> list[int]:
        store = SlowToRelease()
        claiming = Claiming(store)
        deaths = []
        for _ in range(6):
            store.fails, store.takes_s = slow.get("fails", 0), slow.get("takes_s", 0)
            job, began_s = Bench().job(exchange="lane.due"), asyncio.get_running_loop().time()
            found = await claiming.claim(job)
            assert isinstance(found, Granted)
            deaths.append(found.deaths)
            await claiming.release(job, due_ms=NOW_MS)
            assert asyncio.get_running_loop().time() - began_s <= 1.01
            await asyncio.sleep(30)
            store.now_ms += 30_000
        return deaths

    assert virtually(story()) == [0] * 6


def test_a_claim_that_the_store_grants_too_late_is_given_back() -> None:
    async def story() -> list[str]:
        store, job = SlowToTell(), Bench().job()
        claiming = Claiming(store)
        with pytest.raises(StoreUnavailable):
            await claiming.claim(job)
        store.tells.set()
        await claiming.finish(within_s=30)
        return store.log

    assert virtually(story()) == ["claim", "release"]


class Refusing(MemoryStore):
    """A store that knows an outcome of each request."""

    @override
    async def defer(self, *_: object, **__: object) -> bool:
        return False


async def test_a_request_that_has_ended_does_not_wait_unless_it_is_a_dead_letter_that_was_published_again() -> None:
    bench, claiming = Bench(), Claiming(Refusing())
    ended = bench.job(exchange="lane.due")
    again = bench.job(exchange="lane.due", headers={n.DEAD_AT: "2026-11-21T18:00:00.000Z"})

    for defer in (claiming.defer, claiming.defer_for_long):
        assert not await defer(ended, due_ms=NOW_MS, deadline_ms=NOW_MS)
        assert await defer(again, due_ms=NOW_MS, deadline_ms=NOW_MS)


def test_a_claim_is_released_if_the_outcome_could_not_be_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(MemoryStore):
        @override
        async def complete(self, *_: Any, **__: Any) -> Completion | None:
            raise StoreUnavailable("full")

    async def story() -> list[str]:
        store, job = Full(), Bench().job()
        claiming = Claiming(store)
        await claiming.claim(job)
        with pytest.raises(StoreUnavailable):
            await claiming.complete(job, Completion(status="ok", body=b"{}", headers={}, ended_ms=NOW_MS))
        await claiming.finish(within_s=30)
        return store.log

    assert virtually(story()) == ["claim", "release"]


class Hangs(MemoryStore):
    """A store that never answers what is asked of it by these methods."""

    async def _hang(self, *_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()

    defer = release = shelter = _hang


def test_a_store_that_hangs_delays_no_request_that_can_do_without_its_answer_by_more_than_a_second() -> None:
    async def paid() -> str:
        return "kept"

    async def story() -> None:
        claiming, job, clock = Claiming(Hangs()), Bench().job(), asyncio.get_running_loop().time
        assert await claiming.defer(job, due_ms=NOW_MS, deadline_ms=NOW_MS)
        assert clock() == pytest.approx(1001)
        await claiming.claim(job)
        assert await claiming.sheltered(job, paid()) == "kept"
        assert clock() == pytest.approx(1002)
        await claiming.claim(job)
        with capture_logs() as logs:
            await claiming.release(job)
            assert clock() == pytest.approx(1003)
            await claiming.finish(within_s=120)
        assert clock() == pytest.approx(1062, abs=1), "a release is given up after a minute"
        assert {each["event"] for each in logs} == {signals.CLAIM_UNRELEASED}

    virtually(story())


async def test_a_claim_is_given_back_if_its_delivery_was_lost_before_the_store_has_answered() -> None:
    store, job = SlowToTell(), Bench().job()
    claiming = Claiming(store)
    claimed = asyncio.create_task(claiming.claim(job))
    await store.has_claimed.wait()
    claimed.cancel()
    await asyncio.gather(claimed, return_exceptions=True)
    store.tells.set()
    await claiming.finish(within_s=30)
    assert store.log == ["claim", "release"]


async def test_a_holder_whose_claim_was_taken_over_says_that_it_lives_and_has_no_outcome() -> None:
    class TakenOver(MemoryStore):
        @override
        async def complete(self, *_: Any, **__: Any) -> Completion | None:
            return None

    store, job, late = TakenOver(), Bench().job(), Bench().job(message_id="m-2")
    claiming, ending = Claiming(store), Completion(status="ok", body=b"{}", headers={}, ended_ms=NOW_MS)
    await claiming.claim(job)
    assert await claiming.complete(job, ending) is None
    assert await claiming.complete(late, ending) is None
    assert store.log == ["claim", "release"]


@pytest.mark.parametrize(
    ("waits_s", "calls", "counted"), [(0.0, True, 1), (5.0, False, 0), (5.0, True, 1)], ids=["at once", "waits", "late"]
)
def test_a_death_counts_for_a_request_only_if_its_call_had_begun(waits_s: float, calls: bool, counted: int) -> None:
    async def story() -> int:
        store = MemoryStore()
        claiming, job = Claiming(store), Bench().job(exchange="lane.due")
        renewing = asyncio.create_task(claiming.run())
        assert isinstance(await claiming.claim(job), Granted)
        await asyncio.sleep(waits_s)
        if calls:
            await claiming.call_begins(job)
            job.attempted = Attempted(started_ms=NOW_MS)
            await asyncio.sleep(2)
        renewing.cancel()  # the worker dies
        again = Bench().job(exchange="lane.due")
        again.delivery.redelivered = True
        found = await Claiming(store).claim(again)
        assert isinstance(found, Granted)
        return found.deaths

    assert virtually(story()) == counted
