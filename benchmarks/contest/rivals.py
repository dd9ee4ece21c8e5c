"""What people do without Lanekeeper: call and try again on 429, or a semaphore before that."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from contest.calling import CONNECTING_S, Call, calling
from contest.load import Ask, Asking, Load

from topology.lanes import DEFAULT_LANES

AT_ONCE = 8


@asynccontextmanager
async def no_gate(base_url: str, load: Load) -> AsyncIterator[Asking]:
    """Lanes with Lanekeeper's slots, so that a critical request never stands behind a batch job; and no gate: whoever
    calls first, wins, and on 429 calls again when `retry-after` says."""
    slots = {lane.name: asyncio.Semaphore(lane.slots) for lane in DEFAULT_LANES}
    async with calling(base_url) as call:

        async def ask(ask: Ask) -> None:
            async with slots[ask.lane]:
                await _until_answered(call, ask.body, speed=load.speed)

        yield ask


@asynccontextmanager
async def semaphore(base_url: str, load: Load) -> AsyncIterator[Asking]:
    """So many at once, in the order of arrival; on 429 again when `retry-after` says."""
    slots = asyncio.Semaphore(AT_ONCE)
    async with calling(base_url) as call:

        async def ask(ask: Ask) -> None:
            async with slots:
                await _until_answered(call, ask.body, speed=load.speed)

        yield ask


async def _until_answered(call: Call, body: bytes, *, speed: float) -> None:
    while True:
        said = await call(body)
        if said.status == 200:
            return
        # told in whole seconds of the clock: scaled like every other interval
        await asyncio.sleep((said.retry_after_s or CONNECTING_S) / speed)
