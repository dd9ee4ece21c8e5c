"""A worker's claims, on top of the store that keeps them."""

import asyncio

from consumers.claiming import Claiming
from consumers.state.base import Cancelling, Completion, Conflict, Copy, Ended, Granted, Identity, Running, Stop
from tests.support.jobs import NOW_MS, Bench
from tests.support.memory_store import MemoryStore


class SlowToTell(MemoryStore):
    """A store that grants a claim at once, but returns later."""

    def __init__(self) -> None:
        super().__init__()
        self.has_claimed = asyncio.Event()
        self.tells = asyncio.Event()

    async def claim(self, identity: Identity, copy: Copy) -> Granted | Running | Ended | Conflict:
        found = await super().claim(identity, copy)
        self.has_claimed.set()
        await self.tells.wait()
        return found


async def test_a_cancellation_stops_a_request_whose_claim_is_granted_but_not_yet_returned() -> None:
    store, job = SlowToTell(), Bench().job()
    claiming = Claiming(store)  # type: ignore[arg-type]
    ending = Completion(status="error", code="cancelled", body=b"{}", headers={}, ended_ms=NOW_MS)

    claimed = asyncio.create_task(claiming.claim(job))
    await store.has_claimed.wait()
    cancelled = asyncio.create_task(claiming.cancel(job.identity, ending))
    await asyncio.sleep(0)
    store.tells.set()

    assert await cancelled is Cancelling.TOLD
    assert job.stopped is Stop.CANCELLED
    assert isinstance(await claimed, Granted)
