"""Defines a wait that `job.stop` can end: `async with job.interruptible(seconds): …`. A job is a delivery that is
worked on."""

import asyncio
from types import TracebackType
from typing import Protocol, Self

from consumers.state.base import Stop


class Waiter(Protocol):
    """The attributes that a job must have so that `job.stop` can end its wait."""

    stopped: Stop | None
    waiting: "Interruptible | None"


class Interruptible:
    """Ends the wait inside its `async with` block when the job (a delivery that is worked on) is stopped, or when
    `seconds` (None: no limit) are over.

    The block is then left without an exception, and execution continues after the block. If a call to a provider was
    running in it, the call is cancelled and its socket is closed.
    """

    __slots__ = ("_job", "_limit")

    def __init__(self, job: Waiter, seconds: float | None) -> None:
        self._job = job
        self._limit = asyncio.timeout(seconds)

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._job.waiting = self
        if self._job.stopped is not None:
            self.end()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._job.waiting = None  # from now on there is no wait that `Job.stop` could end
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:
            return True
        return isinstance(error, TimeoutError) and self._limit.expired()

    @property
    def until_s(self) -> float | None:
        """When the wait ends by its time limit, by the event loop's clock; None: there is no limit."""
        return self._limit.when()

    def end(self) -> None:
        """End the wait inside the `async with` block now."""
        if not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    def reschedule(self, until_s: float | None) -> None:
        """Change the time limit: the wait now ends at `until_s`, by the event loop's clock (None: no limit). Does
        nothing if the job was stopped or the time limit is over already."""
        if self._job.stopped is None and not self._limit.expired():
            self._limit.reschedule(until_s)
