"""Looks into the store for all requests that somebody follows here: one look for all of them, every `EVERY_S`.

Who follows asks for what is new after an entry's number, and asks again when it has used that. So a slow reader holds
no more than one answer.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from consumers.state.base import Identity, StoreUnavailable
from consumers.state.following import Following, Look
from service.gateway.problems import refused, stopping

EVERY_S = 0.05
AGAIN_S = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    identity: Identity
    after: int
    news: "asyncio.Future[Look | None]"


class Looking:
    """`followers`: how many may follow at one time."""

    def __init__(self, store: Following, *, followers: int) -> None:
        self._store = store
        self._most = followers
        self._asked: set[_Asked] = set()
        self._task: asyncio.Task[None] | None = None
        self.followers = 0
        self.closing = asyncio.Event()
        """The process stops: whoever follows ends, and goes on at another gateway."""

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Be a follower inside this block. Raises ApiError."""
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
        """Wait for what is new after an entry's number; None where the process stops. While the store is away, it
        waits."""
        if self.closing.is_set():
            return None
        asked = _Asked(identity, after, asyncio.get_running_loop().create_future())
        self._asked.add(asked)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look(), name="looking")
        try:
            return await asked.news
        finally:
            self._asked.discard(asked)

    def close(self) -> None:
        """End all following."""
        self.closing.set()
        for each in self._asked:
            if not each.news.done():
                each.news.set_result(None)

    async def aclose(self) -> None:
        """End what is left of the last look."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _look(self) -> None:
        while asked := list(self._asked):
            pause_s = EVERY_S
            try:
                found = await self._store.look([(each.identity, each.after) for each in asked])
            except StoreUnavailable:
                pause_s = AGAIN_S
            else:
                for each, look in zip(asked, found, strict=True):
                    if look is not None and not each.news.done():
                        each.news.set_result(look)
                        self._asked.discard(each)
            await asyncio.sleep(pause_s)
