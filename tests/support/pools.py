"""A pool without deliveries, for tests of what starts and stops pools."""

import asyncio

from consumers.job import Job


class FakePool:
    """Runs until it is told to stop. Its times are `loop.time()`; 0: not yet."""

    def __init__(self, queue: str, slots: int = 0) -> None:
        self.queue, self.slots, self.in_hand = queue, slots, 0
        self.jobs: set[Job] = set()
        self.began_s = self.stopped_s = 0.0
        self.is_over = False
        self._stopped = asyncio.Event()

    @property
    def running(self) -> int:
        return self.in_hand

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    async def run(self) -> None:
        self.began_s = asyncio.get_running_loop().time()
        await self._stopped.wait()
        self.is_over = True

    async def stop(self) -> None:
        self.stopped_s = asyncio.get_running_loop().time()
        self._stopped.set()

    def give_back_waiting(self) -> None:
        self.in_hand = 0
