"""Shares what the gateway's callers compete for among their tenants: places and bytes; and parses bodies."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self, TypeVar

from service.gateway.problems import refused, stopping

T = TypeVar("T")
INLINE_BYTES: Final = 64 * 1024
PARSED_WITHIN_S: Final = 30.0


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

    def taken(self, tenant: str | None, amount: int = 1) -> "SharedTaken":
        return SharedTaken(self, tenant or "", amount)

    @asynccontextmanager
    async def taken_soon(self, tenant: str | None, *, within_s: float) -> "AsyncIterator[SharedTaken]":
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


class SharedTaken:
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


class BodyParsing:
    """Parses and unpacks bodies: small ones at once, all others one after the other in a thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parsing")

    async def run(self, size: float, work: Callable[[], T]) -> T:
        """`size`: infinity if packed or in a file. Raises ApiError if no turn comes. Ends after `work`."""
        if size <= INLINE_BYTES:
            return work()
        begun = self._thread.submit(work)
        parsed = asyncio.wrap_future(begun)
        try:
            async with asyncio.timeout(PARSED_WITHIN_S):
                return await asyncio.shield(parsed)
        except (TimeoutError, asyncio.CancelledError) as error:
            if not begun.cancel():
                await asyncio.wait((parsed,))  # the thread still uses the body
            if isinstance(error, TimeoutError):
                raise refused("too many bodies wait here to be parsed", status=529) from None
            raise
        finally:
            # They hold the error of `work`, and its traceback holds this frame: a circle that would keep the body.
            del begun, parsed

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Shares:
    """What the calls and messages of all tenants take their part of."""

    calls: SharedLimit
    memory: SharedLimit
    parsing: BodyParsing = field(default_factory=BodyParsing)
