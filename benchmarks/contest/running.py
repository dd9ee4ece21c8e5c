"""Runs one contestant: starts its provider, sends the load, and reads the provider's counts at the end."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager

from contest.load import Asking, Load, send
from contest.provider import SimulatedProvider, provider
from contest.score import Row

Contestant = Callable[[str, Load], AbstractAsyncContextManager[Asking]]
"""Gets the provider's URL and the load; yields a function that sends a request."""
Trouble = Callable[[SimulatedProvider, Load], Coroutine[None, None, None]]


async def run(
    name: str, contestant: Contestant, load: Load, *, options: Sequence[str] = (), trouble: Trouble | None = None
) -> Row:
    """Run a contestant; returns its row of the table. `options`: options of the provider, such as faults. `trouble`: a
    function that disturbs the provider during the run."""
    async with provider(load, *options) as by, contestant(by.base_url, load) as asking:
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(send(asking, load))
            if trouble is not None:
                group.create_task(trouble(by, load))
            if not load.finish_s:
                await asyncio.sleep(load.real_s)
                counts = await by.counts()  # before the remaining requests are cancelled
        return Row(name=name, board=sending.result(), counts=await by.counts() if load.finish_s else counts)
