"""Gathers calls that can be made together: those that wait in this process at the same time become one call of a
function, which has a result for each. So are called handlers that take many at once, and embeddings. A call that leaves
(its request was cancelled, or its time is over) changes nothing for the others; when all have left, the function's call
is cancelled."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from consumers.background import Background

Given = TypeVar("Given")
Result = TypeVar("Result")
Run = Callable[[Sequence[Given], float, str], Awaitable[Sequence[Result]]]
"""Calls the function with what these calls are given, and a time limit in seconds. Returns a result for each, or raises
for all. The third argument is the tenant whose calls they are, "" if they are of several."""


@dataclass(slots=True, eq=False)
class _Call(Generic[Given, Result]):
    given: Given
    tenant: str
    until_s: float
    result: "asyncio.Future[Result]"
    together: "_Together[Given, Result] | None" = None


@dataclass(slots=True, eq=False)
class _Together(Generic[Given, Result]):
    calls: Sequence[_Call[Given, Result]]
    task: "asyncio.Task[None]" = field(init=False)


class Gathering(Generic[Given, Result]):
    """Of one kind of calls: at most `count` of them, or what came within `window_s` of the first one."""

    def __init__(self, run: Run[Given, Result], *, count: int, window_s: float, background: Background) -> None:
        self._run = run
        self._count = count
        self._window_s = window_s
        self._background = background
        self._waiting: list[_Call[Given, Result]] = []
        self._window: asyncio.TimerHandle | None = None

    @property
    def is_empty(self) -> bool:
        """No call waits to become part of the function's next call."""
        return not self._waiting

    async def call(self, given: Given, timeout_s: float, *, tenant: str = "") -> Result:
        """The result of this call among others. Raises what the function's call raises for all of them; after
        `timeout_s` TimeoutError."""
        loop = asyncio.get_running_loop()
        call: _Call[Given, Result] = _Call(given, tenant, loop.time() + timeout_s, loop.create_future())
        self._waiting.append(call)
        if len(self._waiting) >= self._count:
            self._begin()
        elif self._window is None:
            self._window = loop.call_later(self._window_s, self._begin)
        try:
            async with asyncio.timeout(timeout_s):
                return await call.result
        finally:
            if call.together is None:
                self._waiting.remove(call)
            elif all(each.result.done() for each in call.together.calls):
                call.together.task.cancel()  # nobody waits for it; without effect if it has ended

    def _begin(self) -> None:
        if self._window is not None:
            self._window.cancel()
            self._window = None
        if not self._waiting:  # all have left
            return
        together = _Together(self._waiting)
        self._waiting = []
        together.task = self._background.begin(self._work(together), name="gathered calls")
        for call in together.calls:
            call.together = together

    async def _work(self, together: _Together[Given, Result]) -> None:
        calls = [call for call in together.calls if not call.result.done()]
        if not calls:  # all have left
            return
        left_s = max(call.until_s for call in calls) - asyncio.get_running_loop().time()
        tenants = {call.tenant for call in calls}
        tenant = tenants.pop() if len(tenants) == 1 else ""
        try:
            results = await self._run([call.given for call in calls], left_s, tenant)
        except BaseException as error:
            for call in calls:
                if not call.result.done():
                    call.result.set_exception(error if isinstance(error, Exception) else TimeoutError())
            if not isinstance(error, Exception):
                raise
            return
        for call, result in zip(calls, results, strict=True):
            if not call.result.done():
                call.result.set_result(result)
