"""Tasks that continue when the caller that awaits them is cancelled.

Storing an answer is such a task: the answer is stored even if its delivery is lost meanwhile, because the call to the
provider was paid for."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def ended(task: "asyncio.Task[Any]", *, within_s: float) -> bool:
    """Wait until a task has ended, for at most `within_s`, and return whether it has. Like `asyncio.wait` for one task,
    with two thirds of its CPU time."""
    loop = asyncio.get_running_loop()
    waiting: asyncio.Future[None] = loop.create_future()

    def wake(_: object = None) -> None:
        if not waiting.done():
            waiting.set_result(None)

    task.add_done_callback(wake)
    timer = loop.call_later(within_s, wake)
    try:
        await waiting
    finally:
        timer.cancel()
        task.remove_done_callback(wake)
    return task.done()


class Background:
    """Runs tasks that continue if the caller that awaits them is cancelled. It holds a reference to each task until the
    task has ended, so that asyncio does not lose it to the garbage collector."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, coroutine: Coroutine[Any, Any, T], *, name: str) -> "asyncio.Task[T]":
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def sheltered(
        self, coroutine: Coroutine[Any, Any, T], *, name: str, if_left: "Callable[[asyncio.Task[T]], None]"
    ) -> T:
        """Await a background task. If the caller is cancelled, the task goes on, and `if_left` is called with it when
        it has ended."""
        task = self.begin(coroutine, name=name)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(if_left)
            raise

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved, so that asyncio does not log it: the awaiting caller gets it

    async def finish(self, *, within_s: float) -> None:
        """Wait until the background tasks, and those that they begin, have ended; cancel those that have not ended
        after `within_s`."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + within_s
        while self._tasks and (left_s := end_s - loop.time()) > 0:
            await asyncio.wait(self._tasks, timeout=left_s)
        for task in self._tasks:
            task.cancel()
