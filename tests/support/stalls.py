"""Measures how long the event loop was blocked at a time.

    with Stalls() as stalls:
        …                       whatever else runs on the loop
    stalls.longest_s

The default clock is the CPU time of the loop's thread, so that other load on the machine is not counted. Use
`time.perf_counter` to measure how long somebody waits. Objects that exist at the start are hidden from the garbage
collector meanwhile: three thousand tests leave more of them than a worker ever has.
"""

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Self

EVERY_S = 0.001


class Stalls:
    """Reads the clock every millisecond, or as soon as the loop gets to it."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._last_s = 0.0
        self._next: asyncio.TimerHandle | None = None
        self.longest_s = 0.0

    def __enter__(self) -> Self:
        gc.freeze()
        self.longest_s = 0.0
        self._last_s = self._clock()
        self._tick()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._next is not None
        self._next.cancel()
        self._look()
        gc.unfreeze()

    def _look(self) -> None:
        now_s = self._clock()
        self.longest_s = max(self.longest_s, now_s - self._last_s)
        self._last_s = now_s

    def _tick(self) -> None:
        self._look()
        self._next = asyncio.get_running_loop().call_later(EVERY_S, self._tick)
