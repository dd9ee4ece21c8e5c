"""Polls the store for new entries (stored steps of a request, and events of its answer) of all requests that this
gateway's clients follow, with one query for all of them every `EVERY_S` seconds.

A follower (the HTTP call of one client) asks for the entries whose number is above that of the last one it has sent,
and asks again only after it has sent these. So for a slow client, the entries of only one query are kept in memory.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from consumers.state.base import Identity, StoreUnavailable
from consumers.state.following import Following, Look
from lanekeeper.telemetry import signals
from lanekeeper.telemetry.logs import logger
from service.gateway.problems import ApiError, refused, stopping

LARGEST_NUMBER = 1 << 53
"""The largest number of an entry (a stored step or event of a request) that a client may name. No request has so many
entries."""
EVERY_S = 0.05
"""The seconds between two queries of the store for new entries of the requests that clients follow."""
AGAIN_S = 0.5
"""The pause, in seconds, before the store is asked again after a query has failed."""
FAULTS_AT_MOST = 3
"""After this many unexpected errors in a row while polling the store, all clients that follow requests are answered
with an error."""
log = logger()


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """A client's call that waits for the entries of a request whose number is above `after`. They become the result of
    the future `news`."""

    identity: Identity
    after: int
    news: "asyncio.Future[Look | None]"


class Poller:
    """Polls the store as long as any client waits for entries. `followers`: the most calls that may follow requests at
    the same time."""

    def __init__(self, store: Following, *, followers: int) -> None:
        self._store = store
        self._most = followers
        self._waiters: set[_Waiter] = set()
        self._task: asyncio.Task[None] | None = None
        self.followers = 0
        self.closing = asyncio.Event()
        """Set when the process stops: this process then follows no requests any longer, and clients continue at another
        gateway."""

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Count the caller as a follower of a request while the `with` block runs. Raises ApiError if there are too
        many followers, or if the process stops."""
        if self.closing.is_set():
            raise stopping()
        if self.followers >= self._most:
            raise refused(f"{self.followers} calls follow requests here, and no more fit", status=529)
        self.followers += 1
        try:
            yield
        finally:
            self.followers -= 1

    async def news(self, identity: Identity, after: int) -> Look | None:
        """Wait until the request has entries with a number above `after`, or has ended, and return what the store has.
        While the store cannot be reached, the wait goes on. Returns None if the process stops. Raises ApiError 500
        after several unexpected errors in a row."""
        if self.closing.is_set():
            return None
        waiter = _Waiter(identity, after, asyncio.get_running_loop().create_future())
        self._waiters.add(waiter)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll(), name="poller")
        try:
            return await waiter.news
        finally:
            self._waiters.discard(waiter)

    def close(self) -> None:
        """Make all clients stop following requests, because the process stops."""
        self.closing.set()
        for waiter in self._waiters:
            if not waiter.news.done():
                waiter.news.set_result(None)

    async def aclose(self) -> None:
        """Stop asking the store for new entries of followed requests."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _poll(self) -> None:
        faults = 0
        while waiters := list(self._waiters):
            pause_s = EVERY_S
            try:
                found = await self._store.look([(waiter.identity, waiter.after) for waiter in waiters])
            except StoreUnavailable:
                pause_s = AGAIN_S
            except Exception:
                log.exception(signals.HANDLER_FAILED, where="look")
                pause_s, faults = AGAIN_S, faults + 1
                if faults >= FAULTS_AT_MOST:
                    self._fail(waiters)
            else:
                faults = 0
                for waiter, look in zip(waiters, found, strict=True):
                    if look is not None and not waiter.news.done():
                        waiter.news.set_result(look)
                        self._waiters.discard(waiter)
            await asyncio.sleep(pause_s)

    def _fail(self, waiters: list[_Waiter]) -> None:
        for waiter in waiters:
            self._waiters.discard(waiter)
            if not waiter.news.done():
                waiter.news.set_exception(ApiError(500, "a fault of Lanekeeper; its log tells of it"))
