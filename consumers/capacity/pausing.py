"""Nothing is taken, and no provider is called, while an answer could be neither sent nor recorded.

    pausing = Pausing({"publish connection": lambda: publishing.trouble, …})
    await pausing.opened()                before a provider is called: at once while all is well
    await pausing.run(pools)              pauses and resumes them, until cancelled

A condition gives None, or what is wrong. It is asked where it matters, not remembered, so that nothing slips through
between its change and our noticing.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from lanekeeper.telemetry import logs, signals

LOOK_EVERY_S = 0.05
"""Looked at, because conditions are attributes of very different parts: four reads, 20 times a second (0.01 % CPU)."""
TOLD_AFTER_S = 0.5
"""A pause that is shorter, as at every start, is no news."""
Condition = Callable[[], str | None]
log = logs.logger()


class Pausable(Protocol):
    """A pool, or whoever else takes what is delivered."""

    @property
    def is_paused(self) -> bool: ...

    async def pause(self, reason: str) -> None:
        """Take nothing new; what is in hand stays."""

    async def resume(self) -> None:
        """Take again, as soon as there is room."""


class Pausing:
    """The conditions under which work is taken."""

    def __init__(self, conditions: Mapping[str, Condition]) -> None:
        self._conditions = dict(conditions)
        self._asked = tuple(self._conditions.values())
        self._open = asyncio.Event()

    def reasons(self) -> dict[str, str]:
        """What holds at present, by the condition's name; empty while work is taken."""
        return {name: why for name, condition in self._conditions.items() if (why := condition()) is not None}

    async def opened(self) -> None:
        """Wait until nothing holds; 0.5 µs where nothing does. Whoever has a deadline bounds it."""
        while self._holds():
            self._open.clear()
            await self._open.wait()

    async def run(self, takers: Sequence[Pausable]) -> None:
        """Pause the takers while anything holds."""
        loop = asyncio.get_running_loop()
        since_s: float | None = None
        is_told = False
        while True:
            if reasons := self.reasons():
                if since_s is None:
                    since_s = loop.time()
                if not is_told and loop.time() >= since_s + TOLD_AFTER_S:
                    is_told = True
                    log.warning(signals.TAKING_PAUSED, reasons=reasons)
                why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
                await asyncio.gather(*(each.pause(why) for each in takers if not each.is_paused))
            else:
                self._open.set()
                if since_s is not None and is_told:
                    log.info(signals.TAKING_RESUMED, paused_s=round(loop.time() - since_s, 2))
                since_s, is_told = None, False
                # one that had its hands full when it was told is told again
                await asyncio.gather(*(each.resume() for each in takers if each.is_paused))
            await asyncio.sleep(LOOK_EVERY_S)

    def _holds(self) -> bool:
        for condition in self._asked:  # noqa: SIM110  any() with a generator takes twice the time
            if condition() is not None:
                return True
        return False
