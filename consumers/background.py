"""Tasks that continue when their waiter is cancelled, because what they store was paid for; and periodic loops."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def every(seconds: float, *, until: asyncio.Event) -> AsyncIterator[None]:
    """Yield at once and then after every pause of so many seconds, until the event is set."""
    while not until.is_set():
        yield
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await until.wait()


class Background:
    """Holds such tasks until they have ended."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, doing: Coroutine[Any, Any, T], *, name: str) -> "asyncio.Task[T]":
        """Start a task. Wait for it under `asyncio.shield`."""
        task = asyncio.create_task(doing, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # so that asyncio does not log it: the waiter of the task gets it

    async def finish(self, *, within_s: float) -> None:
        """Wait for the remaining tasks; cancel those that do not end in time."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=within_s)
            for task in late:
                task.cancel()
