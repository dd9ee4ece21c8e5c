"""A small event loop that a driver steps. Each simulated process has one, so it can be halted between two steps.

Its time is the world's. A step runs what is ready and never waits; the driver decides what happens next.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any


class SteppedLoop(asyncio.AbstractEventLoop):
    """The parts of an event loop that tasks, futures, locks and timeouts need."""

    def __init__(self, time_s: Callable[[], float]) -> None:
        self._time_s = time_s
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[asyncio.TimerHandle] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.unhandled: list[str] = []

    def step(self) -> None:
        """Run until every task waits."""
        asyncio._set_running_loop(self)
        try:
            now_s = self._time_s()
            while self._timers and self._timers[0].when() <= now_s:
                self._ready.append(heapq.heappop(self._timers))
            while self._ready:
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(None)

    def next_timer_s(self) -> float | None:
        """The time of the next timer."""
        while self._timers and self._timers[0].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0].when() if self._timers else None

    def discard(self) -> None:
        """Cancel every task. What they still do must have no effect any more."""
        for _ in range(5):
            left = [task for task in self.tasks if not task.done()]
            for task in left:
                task.cancel()
            self.step()
            if not left:
                break
        self.tasks.clear()
        self._timers.clear()

    # what asyncio requires of a loop

    def time(self) -> float:
        return self._time_s()

    def call_soon(  # type: ignore[override]  # typeshed has type variables here
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._time_s() + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None, **_: Any
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self.tasks.append(task)
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.unhandled.append(f"{context.get('message')}: {context.get('exception')!r}")

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Does nothing: a cancelled timer stays in the heap until its time has come."""
