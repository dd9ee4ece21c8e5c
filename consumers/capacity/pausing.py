"""Pauses all work while an answer could be neither sent nor stored.

    pausing = Pausing({"publish connection": lambda: publishing.trouble, …})
    await pausing.opened() before a provider is called: returns at once if no condition holds
    await pausing.run(pools)              pauses and resumes them, until cancelled

A condition returns None, or what is wrong. It is checked before each call, so that no call is made after something went
wrong and before the next regular check."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from lanekeeper.telemetry import logs, signals

LOOK_EVERY_S = 0.05
"""Polled, because conditions are attributes of very different parts: four reads, 20 times a second (0.01 % CPU)."""
LOGGED_AFTER_S = 0.5
"""A shorter pause, as at every start, is not logged."""
Condition = Callable[[], str | None]
log = logs.logger()


class Pausable(Protocol):
    """A pool, or anything else that takes deliveries."""

    @property
    def is_paused(self) -> bool: ...

    async def pause(self, reason: str) -> None:
        """Take no new delivery; keep those that are held."""

    async def resume(self) -> None:
        """Take deliveries again as soon as there is room."""


class Pausing:
    """The conditions under which work is taken."""

    def __init__(self, conditions: Mapping[str, Condition]) -> None:
        self._conditions = dict(conditions)
        self._asked = tuple(self._conditions.values())
        self._open = asyncio.Event()

    def reasons(self) -> dict[str, str]:
        """The conditions that hold now, by name; empty while work is taken."""
        return {name: why for name, condition in self._conditions.items() if (why := condition()) is not None}

    async def opened(self) -> None:
        """Wait until no condition holds; 0.5 µs if none does. The caller limits the wait by its deadline."""
        while self._holds():
            self._open.clear()
            await self._open.wait()

    async def run(self, takers: Sequence[Pausable]) -> None:
        """Pause the takers while any condition holds."""
        loop = asyncio.get_running_loop()
        since_s: float | None = None
        is_logged = False
        while True:
            if reasons := self.reasons():
                if since_s is None:
                    since_s = loop.time()
                if not is_logged and loop.time() >= since_s + LOGGED_AFTER_S:
                    is_logged = True
                    log.warning(signals.TAKING_PAUSED, reasons=reasons)
                why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
                await asyncio.gather(*(each.pause(why) for each in takers if not each.is_paused))
            else:
                self._open.set()
                if since_s is not None and is_logged:
                    log.info(signals.TAKING_RESUMED, paused_s=round(loop.time() - since_s, 2))
                since_s, is_logged = None, False
                # a pool that held too many deliveries to resume is asked again
                await asyncio.gather(*(each.resume() for each in takers if each.is_paused))
            await asyncio.sleep(LOOK_EVERY_S)

    def _holds(self) -> bool:
        for condition in self._asked:  # noqa: SIM110  any() with a generator takes twice the time
            if condition() is not None:
                return True
        return False
