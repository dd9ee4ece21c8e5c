"""Tasks that run beside other code. None of them ends without a trace: an unforeseen error reaches the block that the
task runs beside (`background_task`), or is logged and the task runs again (`restarted`), or is logged
(`Background.detached`).

Some continue when the caller that awaits them is cancelled (`Background`). Storing an answer is such a task: the answer
is stored even if its delivery is lost meanwhile, because the call to the provider was paid for."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import structlog

from lanekeeper.telemetry import signals

T = TypeVar("T")
CANCEL_AGAIN_S = 2.0
RESTART_S = 1.0
log = structlog.get_logger()


@asynccontextmanager
async def background_task(work: Coroutine[Any, Any, object], *, name: str) -> AsyncIterator[None]:
    """Run `work` as a task while the block runs; at its end cancel it, and wait until it has ended. If the task fails,
    the block is cancelled, and the task's error raised in its place."""
    task = asyncio.create_task(work, name=name)
    block = asyncio.timeout(None)

    def end_block(_: object) -> None:
        if not task.cancelled() and task.exception() is not None:
            block.reschedule(asyncio.get_running_loop().time())

    try:
        async with block:
            task.add_done_callback(end_block)
            try:
                yield
            finally:
                task.remove_done_callback(end_block)
    except TimeoutError:
        if block.expired() and not task.cancelled() and (error := task.exception()) is not None:
            raise error from None
        raise
    finally:
        await end((task,))
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the block has ended by itself at the same moment


async def end(tasks: Iterable[asyncio.Task[object]]) -> None:
    """Cancel the tasks and wait until they have ended. Cancels again every two seconds, because a cancellation that
    arrives while aiormq waits can be lost (lanekeeper/amqp/driver.py)."""
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)


async def restarted(run: Callable[[], Coroutine[Any, Any, object]], *, name: str) -> None:
    """Run an endless task; whenever it fails, log why, and run it again a second later. For tasks without which the
    rest of the process still works."""
    while True:
        try:
            await run()
            return
        except Exception as error:
            log.exception(signals.HANDLER_FAILED, where=name, error=type(error).__name__)
        await asyncio.sleep(RESTART_S)


async def end_within(task: "asyncio.Task[Any]", *, within_s: float) -> bool:
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

    def detached(self, coroutine: Coroutine[Any, Any, T], *, name: str) -> "asyncio.Task[T]":
        """Begin a task whose result nobody takes; its error is logged."""
        task = self.begin(coroutine, name=name)
        task.add_done_callback(_log_failure)
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
        finally:
            del task  # its error's traceback holds this frame: a circle that would keep what the coroutine holds

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


def _log_failure(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error(signals.HANDLER_FAILED, where=task.get_name(), error=type(error).__name__, exc_info=error)
