"""Tasks that go on when their waiter is cancelled, because what they store was paid for."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """Owns these tasks until they have ended."""

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
