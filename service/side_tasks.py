"""Runs background tasks while a block of code runs, and ends them with it."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

CANCEL_AGAIN_S = 2.0


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, object], *, name: str) -> AsyncIterator[None]:
    """Run `work` as a task while the block runs; at its end cancel it, and wait until it has ended."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        await end((task,))


async def end(tasks: Iterable[asyncio.Task[object]]) -> None:
    """Cancel the tasks and wait until they have ended. Cancels again every two seconds, because a cancellation that
    arrives while aiormq waits can be lost (lanekeeper/amqp/driver/border.py)."""
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
