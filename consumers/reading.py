"""Large bodies are parsed one after the other, for at most half of the time, because the event loop has other work too.

Parsing cannot be interrupted. Each step is short (`topology/codec/bounds.py`), but all bodies that arrive in one piece
of a socket would be parsed in one turn of the loop, and a sender of one body after the other would leave the loop
little time for anything else. So parsing is followed by a pause that is as long as the parsing took.
"""

import asyncio
import gc
import time
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Final, TypeVar

from topology.codec import bounds

T = TypeVar("T")
AT_ONCE_S: Final = 0.01
"""How long may be parsed before a pause: some twenty bodies of 100 KB."""
TINY_BYTES: Final = 4096
"""A body this small is parsed in a millisecond, whatever it holds, and waits for no turn."""
_ENDED: Final = ""


class Reading:
    """The order in which bodies are parsed in this process. The lowest `rank` goes first: the lane's urgency, then the
    size."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._left_s = AT_ONCE_S
        self._at_s = clock()
        self._is_taken = False
        self._waiting: list[tuple[tuple[int, int], int, asyncio.Future[None]]] = []
        self._numbers = count()

    async def turn(self, work: Callable[[], T], *, rank: tuple[int, int]) -> T:
        """Do `work` when its turn comes; at once while the allowance lasts, or if the body is tiny."""
        if rank[1] <= TINY_BYTES:
            return work()
        if self._is_taken:
            await self._wait(rank)
        self._is_taken = True
        began_s = self._clock()
        collects = gc.isenabled()
        gc.disable()  # so many new objects would start collections, which take longer than the parsing
        try:
            return work()
        finally:
            if collects:
                gc.enable()
            self._pass_on(began_s, self._clock())

    async def excess(self, raw: bytes, *, values: int, rank: tuple[int, int]) -> str | None:
        """The result of `bounds.excess`, computed in several turns if the body is large."""
        steps = bounds.measured(raw, values=values)
        while True:
            found = await self.turn(lambda: next(steps, _ENDED), rank=rank)
            if found is not None:
                return found or None

    async def _wait(self, rank: tuple[int, int]) -> None:
        turn = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (rank, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next()
            raise

    def _pass_on(self, began_s: float, ended_s: float) -> None:
        self._left_s = min(AT_ONCE_S, self._left_s + began_s - self._at_s) - (ended_s - began_s)
        self._at_s = ended_s
        if self._left_s >= 0 and not self._waiting:
            self._is_taken = False
        else:
            asyncio.get_running_loop().call_later(max(0.0, -self._left_s), self._next)

    def _next(self) -> None:
        """Let the first waiting body be parsed."""
        self._is_taken = False
        while self._waiting:
            *_, turn = heappop(self._waiting)
            if not turn.done():
                self._is_taken = True
                turn.set_result(None)
                return
