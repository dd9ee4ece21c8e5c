"""Shares what the gateway's callers compete for among their tenants: places, bytes, and the CPU time of parsing."""

import asyncio
import gc
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self, TypeVar

from cachetools import FIFOCache

from service.gateway.problems import refused, stopping

T = TypeVar("T")
INLINE_BYTES: Final = 64 * 1024
AT_ONCE_S: Final = 0.02
INLINE_SHARE: Final = 0.2
REMEMBERED_S: Final = 5.0
PARSED_WITHIN_S: Final = 30.0
TENANTS_KEPT: Final = 10_000


class SharedLimit:
    """A total of places or bytes, of which a tenant may take all but the `spared` part of what others leave free."""

    def __init__(self, total: int, what: str, *, spared: int = 4) -> None:
        self._total = total
        self._what = what
        self._spared = spared
        self._of: dict[str, int] = {}
        self._given_back = asyncio.Event()
        self.used = 0
        self.is_closed = False

    def fits(self, tenant: str | None, more: int) -> bool:
        own = self._of.get(tenant or "", 0)
        free = self._total - self.used + own
        return own + more <= free - free // self._spared

    def taken(self, tenant: str | None, amount: int = 1) -> "Taken":
        return Taken(self, tenant or "", amount)

    @asynccontextmanager
    async def taken_soon(self, tenant: str | None, *, within_s: float) -> "AsyncIterator[Taken]":
        try:
            async with asyncio.timeout(within_s):
                while not self.fits(tenant, 1):
                    await self._given_back.wait()
        except TimeoutError:
            raise self._refusal() from None
        with self.taken(tenant) as taken:
            yield taken

    async def close(self) -> None:
        self.is_closed = True
        while self.used:
            await self._given_back.wait()

    def _take(self, tenant: str, more: int) -> None:
        if more > 0:
            if self.is_closed:
                raise stopping()
            if not self.fits(tenant, more):
                raise self._refusal()
        self.used += more
        if left := self._of.get(tenant, 0) + more:
            self._of[tenant] = left
        else:
            self._of.pop(tenant, None)
        if more < 0:
            self._given_back.set()
            self._given_back = asyncio.Event()

    def _refusal(self) -> Exception:
        return refused(f"as many {self._what} of this tenant are under way here as fit beside others", status=529)


class Taken:
    """What one user has taken of a `SharedLimit`."""

    __slots__ = ("_amount", "_limit", "_tenant", "amount")

    def __init__(self, limit: SharedLimit, tenant: str, amount: int) -> None:
        self._limit = limit
        self._tenant = tenant
        self._amount = amount
        self.amount = 0

    def change(self, amount: int) -> None:
        if amount != self.amount:
            self._limit._take(self._tenant, amount - self.amount)
            self.amount = amount

    def __enter__(self) -> Self:
        self.change(self._amount)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.change(0)


class UsedTime:
    """How much CPU time each tenant has used in the event loop lately."""

    def __init__(self) -> None:
        self._used: FIFOCache[str, tuple[float, float]] = FIFOCache(TENANTS_KEPT)

    def of(self, tenant: str) -> float:
        used_s, at_s = self._used.get(tenant, (0.0, 0.0))
        return max(0.0, used_s - (time.monotonic() - at_s) * INLINE_SHARE)

    def pause_s(self, tenant: str) -> float:
        used_s = self.of(tenant)
        return 0.0 if used_s < AT_ONCE_S else (used_s - AT_ONCE_S / 2) / INLINE_SHARE

    def add(self, tenant: str, cpu_s: float) -> None:
        used_s = min(REMEMBERED_S, self.of(tenant) + cpu_s)
        self._used[tenant] = used_s, time.monotonic()


class ParsingTime:
    """Runs what costs CPU for a caller: unpacking and parsing its bodies.

    Small bodies of a tenant that has used little time lately are parsed at once. All others wait for their turn in one
    thread. The next turn is that of the tenant that has used the least time, and each is followed by a pause that is as
    long, so that the event loop has at least half of the time for everything else.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parsing")
        self._used = UsedTime()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._is_taken = False

    async def run(self, tenant: str | None, size: float, work: Callable[[], T]) -> T:
        """`size`: infinity if packed or in a file. Raises ApiError if no turn comes. Ends after `work`."""
        name = tenant or ""
        if size <= INLINE_BYTES and self._used.of(name) < AT_ONCE_S:
            began_s = time.perf_counter()
            try:
                return work()
            finally:
                self._used.add(name, time.perf_counter() - began_s)
        await self._turn(name)
        loop, began_s, cpu_s = asyncio.get_running_loop(), time.monotonic(), 0.0

        def measured() -> T:
            nonlocal cpu_s
            began_cpu_s, collects = time.thread_time(), gc.isenabled()
            gc.disable()  # parsing creates many objects; collecting would stop the event loop for longer than parsing
            try:
                return work()
            finally:
                if collects:
                    gc.enable()
                cpu_s = time.thread_time() - began_cpu_s

        def pass_on(job: "asyncio.Future[T]") -> None:
            if not job.cancelled():
                job.exception()  # else it is logged where nobody waits any longer
            self._used.add(name, cpu_s)
            loop.call_later(time.monotonic() - began_s, self._next)

        try:
            job = loop.run_in_executor(self._thread, measured)
        except BaseException:
            self._next()
            raise
        job.add_done_callback(pass_on)
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            await asyncio.wait((job,))  # the thread still uses the body
            raise

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, tenant: str) -> None:
        if not self._is_taken:
            self._is_taken = True
            return
        turn = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(tenant, deque())
        queue.append(turn)
        try:
            async with asyncio.timeout(PARSED_WITHIN_S):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._next()
            elif turn in queue:
                queue.remove(turn)
                if not queue:
                    self._waiting.pop(tenant, None)
            if isinstance(error, TimeoutError):
                raise refused("too many bodies wait here to be parsed", status=529) from None
            raise

    def _next(self) -> None:
        self._is_taken = False
        while self._waiting:
            tenant = min(self._waiting, key=self._used.of)
            turn = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if not turn.done():
                self._is_taken = True
                turn.set_result(None)
                return


@dataclass(frozen=True, slots=True)
class Shares:
    """What the calls and messages of all tenants take their part of."""

    calls: SharedLimit
    memory: SharedLimit
    parsing: ParsingTime = field(default_factory=ParsingTime)
    receiving: UsedTime = field(default_factory=UsedTime)
