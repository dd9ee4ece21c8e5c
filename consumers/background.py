"""Helpers for asyncio: tasks that continue when the caller that awaits them is cancelled, and a periodic loop.

Storing an answer is such a task: the answer is stored even if its delivery is lost meanwhile, because the call to the
provider was paid for."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def every(seconds: float, *, until: asyncio.Event) -> AsyncIterator[None]:
    """An async iterator for a loop that runs periodically: it yields at once, and again after each pause of `seconds`,
    until the event `until` is set."""
    while not until.is_set():
        yield
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await until.wait()


class Background:
    """Runs tasks that continue if the caller that awaits them is cancelled. It holds a reference to each task until the
    task has ended, so that asyncio does not lose it to the garbage collector."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, coroutine: Coroutine[Any, Any, T], *, name: str) -> "asyncio.Task[T]":
        """Start a task in the background. A caller that needs the task's result awaits the task under `asyncio.shield`,
        so that the caller's cancellation does not end the task."""
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved, so that asyncio does not log it: the awaiting caller gets it

    async def finish(self, *, within_s: float) -> None:
        """Wait until the background tasks have ended; cancel those that have not ended after `within_s`."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=within_s)
            for task in late:
                task.cancel()
