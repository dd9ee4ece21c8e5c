"""A worker's claims, on top of the store that keeps them."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

from typing_extensions import override

from consumers.claiming import Claiming
from consumers.gates.claim import ClaimGate
from consumers.job import Job
from consumers.outcomes import Answered, Deferred, Outcome
from consumers.state.base import (
    Cancelling,
    ClaimAnswer,
    Completion,
    Fingerprint,
    Found,
    Granted,
    Held,
    Identity,
    Stop,
    StoreUnavailable,
)
from consumers.state.following import Part, Refused
from lanekeeper.contract import names as n
from tests.support.jobs import NOW_MS, Bench, decoded, read
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


class Renewed(MemoryStore):
    """A store that counts how many claims were renewed at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.renewed: list[int] = []

    @override
    async def renew(self, held: Sequence[Held]) -> Mapping[Held, Stop]:
        self.renewed.append(len(held))
        return await super().renew(held)


def test_claims_are_renewed_twice_a_second_while_they_are_held_and_otherwise_the_store_is_not_asked() -> None:
    async def story() -> list[int]:
        store = Renewed()
        claiming = Claiming(store)
        running = asyncio.create_task(claiming.run())
        found = []
        for _ in range(2):
            await asyncio.sleep(60)
            jobs = [Bench().job(message_id=each) for each in ("one", "two")]
            for job in jobs:
                await claiming.claim(job)
            await asyncio.sleep(3.1)
            for job in jobs:
                await claiming.release(job)
            await asyncio.sleep(60)
            found.append(len(store.renewed))
        running.cancel()
        assert set(store.renewed) == {2}
        return found

    assert virtually(story()) == [6, 12]


class Followed(MemoryStore):
    """A store whose requests are followed. It writes their entries when `writes` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = asyncio.Event()
        self.writes = asyncio.Event()

    @override
    async def claim(self, identity: Identity, fingerprint: Fingerprint) -> ClaimAnswer:
        found = await super().claim(identity, fingerprint)
        return replace(found, followed=True) if isinstance(found, Granted) else found

    @override
    async def append(self, parts: Sequence[Part]) -> Sequence[Refused | None]:
        self.is_asked.set()
        await self.writes.wait()
        return [None] * len(parts)


async def lost_while_its_entries_are_written(store: Followed, outcome: Outcome, completion: Completion | None) -> None:
    """Let a request have this outcome, and lose its delivery before all of its entries are written."""
    claiming = Claiming(store)
    gate, job = ClaimGate(claiming, now_ms=lambda: NOW_MS), read(Bench().job())

    async def ended(job: Job) -> None:
        await gate.leave(job, decoded(job), outcome)
        if completion is not None:
            await claiming.complete(job, completion)

    await gate.enter(job, decoded(job))
    assert job.trail is not None
    job.trail.tell("started")
    ending = asyncio.create_task(ended(job))
    await store.is_asked.wait()
    ending.cancel()
    with suppress(asyncio.CancelledError):
        await ending
    store.writes.set()
    await claiming.finish(within_s=30)


async def test_a_claim_is_given_back_although_the_delivery_is_lost_while_entries_are_written() -> None:
    store = Followed()
    await lost_while_its_entries_are_written(store, Deferred(delay_ms=10, reason="paused"), None)
    assert store.log == ["claim", "release"]


async def test_an_answer_is_stored_although_the_delivery_is_lost_while_entries_are_written() -> None:
    store = Followed()
    answer = Completion(status="ok", body=b"{}", headers={}, ended_ms=NOW_MS)
    await lost_while_its_entries_are_written(store, Answered(body=b"{}", model="m", provider="p"), answer)
    assert store.log == ["claim", "stored"]


def test_a_store_that_is_unavailable_is_asked_again_at_least_once_a_second() -> None:
    class Away(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self.asked_s: list[float] = []

        async def find(self, identity: Identity) -> Found | None:
            self.asked_s.append(asyncio.get_running_loop().time())
            if len(self.asked_s) < 15:
                raise StoreUnavailable("locked")
            return None

    async def story() -> None:
        store = Away()

        assert await Claiming(store).find(Identity("", "m-1")) is None

        pauses_s = [after - before for before, after in pairwise(store.asked_s)]
        assert 0 < pauses_s[0] <= 0.05
        assert max(pauses_s) <= 1

    virtually(story())


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
