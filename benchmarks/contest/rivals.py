"""Contestants without Lanekeeper: they call the provider and retry after a 429, with or without a semaphore."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from contest.calling import CONNECTING_S, Call, calling
from contest.load import Ask, Asking, Load

from topology.lanes import DEFAULT_LANES

AT_ONCE = 8


@asynccontextmanager
async def no_gate(base_url: str, load: Load) -> AsyncIterator[Asking]:
    """A contestant without a budget gate: it makes the call of each request at once, and repeats it after the
    `retry-after` of a 429. Each lane has as many slots as in Lanekeeper, so that no critical request waits behind batch
    jobs."""
    slots = {lane.name: asyncio.Semaphore(lane.slots) for lane in DEFAULT_LANES}
    async with calling(base_url) as call:

        async def ask(ask: Ask) -> None:
            async with slots[ask.lane]:
                await _until_answered(call, ask.body, speed=load.speed)

        yield ask


@asynccontextmanager
async def semaphore(base_url: str, load: Load) -> AsyncIterator[Asking]:
    """A contestant that makes at most `AT_ONCE` calls at a time, in order of arrival, and repeats a call after the
    `retry-after` of a 429."""
    slots = asyncio.Semaphore(AT_ONCE)
    async with calling(base_url) as call:

        async def ask(ask: Ask) -> None:
            async with slots:
                await _until_answered(call, ask.body, speed=load.speed)

        yield ask


async def _until_answered(call: Call, body: bytes, *, speed: float) -> None:
    while True:
        reply = await call(body)
        if reply.status == 200:
            return
        # scaled like every other interval
        await asyncio.sleep((reply.retry_after_s or CONNECTING_S) / speed)
