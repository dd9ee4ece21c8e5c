"""Pauses all work of a worker while it could not send an answer, or could not store it.

    pausing = Pausing({"publish connection": lambda: publishing.trouble, …})
    await pausing.opened()                before each call to a provider: waits until no condition holds
    await pausing.run(pools)              pauses the pools while a condition holds, until cancelled

A condition is a function that returns None if nothing is wrong (the condition does not hold), otherwise a text that
says what is wrong. For the pools (consumers of queues) the conditions are checked regularly; before each call to a
provider the conditions are checked once more, because something may have failed since the last regular check."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from lanekeeper.telemetry import logs, signals

LOOK_EVERY_S = 0.05
"""The seconds between two regular checks whether all work must pause. The conditions are polled, because they are
attributes of very different objects, without a common event to wait for. Reading them 20 times a second takes 0.01 % of
a CPU."""
LOGGED_AFTER_S = 0.5
"""Pauses that are shorter than this many seconds are not logged, because each start of a worker causes a short
pause."""
Condition = Callable[[], str | None]
log = logs.logger()


class Pausable(Protocol):
    """Something that takes deliveries from the broker and can be paused, such as a pool."""

    @property
    def is_paused(self) -> bool: ...

    async def pause(self, reason: str) -> None:
        """Take no new delivery from the broker; continue to work on those that were taken."""

    async def resume(self) -> None:
        """Take deliveries again. If too many are still being worked on, do nothing; `Pausing` then calls this again."""


class Pausing:
    """Stops all pools (consumers of queues) of this worker from taking requests while an answer could not be sent, or
    could not be stored, and resumes them afterwards. `conditions`: functions, by name, each of which returns a text
    that says what is wrong, or None if nothing is wrong."""

    def __init__(self, conditions: Mapping[str, Condition]) -> None:
        self._conditions = conditions
        self._open = asyncio.Event()

    def reasons(self) -> dict[str, str]:
        """The conditions because of which work is paused, by name, each with a text that says what is wrong; empty
        while work is not paused."""
        return {name: why for name, condition in self._conditions.items() if (why := condition()) is not None}

    async def opened(self) -> None:
        """Wait until no condition requires a pause. The wait has no time limit of its own."""
        while self.reasons():
            self._open.clear()
            await self._open.wait()

    async def run(self, takers: Sequence[Pausable]) -> None:
        """Pause the takers (pools that take deliveries) while any condition says that something is wrong. Runs until
        cancelled."""
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
                await asyncio.gather(*(taker.pause(why) for taker in takers if not taker.is_paused))
            else:
                self._open.set()
                if since_s is not None and is_logged:
                    log.info(signals.TAKING_RESUMED, paused_s=round(loop.time() - since_s, 2))
                since_s, is_logged = None, False
                # a pool that holds too many deliveries does not resume yet, and is asked again at the next check
                await asyncio.gather(*(taker.resume() for taker in takers if taker.is_paused))
            await asyncio.sleep(LOOK_EVERY_S)
