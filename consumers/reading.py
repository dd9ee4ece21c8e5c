"""Large bodies are read one after the other, and at most half of the time: the event loop belongs to everybody.

Parsing cannot be interrupted. Each step of it is short (`topology/codec/bounds.py`), but what comes in one piece of
a socket would be read in one turn of the loop, however many bodies that is; and who sends one after the other would
leave the loop little time for anything else. So there is a pause after reading, as long as the reading took.
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
"""Of reading in one go, before a pause: some twenty bodies of 100 KB."""
TINY_BYTES: Final = 4096
"""Is read in a millisecond, whatever it says, and waits for no turn."""
_ENDED: Final = ""


class Reading:
    """The turns of all who read in this process. The lowest `rank` goes first: of the lane, then of the size."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._left_s = AT_ONCE_S
        self._at_s = clock()
        self._is_taken = False
        self._waiting: list[tuple[tuple[int, int], int, asyncio.Future[None]]] = []
        self._numbers = count()

    async def turn(self, work: Callable[[], T], *, rank: tuple[int, int]) -> T:
        """Do `work` when it is its turn; at once while the allowance lasts, or where it is tiny."""
        if rank[1] <= TINY_BYTES:
            return work()
        if self._is_taken:
            await self._wait(rank)
        self._is_taken = True
        began_s = self._clock()
        collects = gc.isenabled()
        gc.disable()  # so many new objects would have all others looked at, which takes longer than the reading
        try:
            return work()
        finally:
            if collects:
                gc.enable()
            self._pass_on(began_s, self._clock())

    async def excess(self, raw: bytes, *, values: int, rank: tuple[int, int]) -> str | None:
        """As `bounds.excess`, in as many turns as it takes."""
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
        """Whoever is first of those that wait."""
        self._is_taken = False
        while self._waiting:
            *_, turn = heappop(self._waiting)
            if not turn.done():
                self._is_taken = True
                turn.set_result(None)
                return
