"""What stops a worker's pools, and what puts a lane right that stands still.

`Pausing` pauses all work while an answer could not be sent, or could not be stored. A condition is a function that
returns None, or a text that says what is wrong. Before each call to a provider the conditions are checked once more,
because something may have failed since the last regular check. It also pauses the pools of a lane that an operator has
paused (`consumers/brake.py`).

`Watchdog` finds lanes that stand still although nothing else is wrong. A queue is no longer delivered to this process
if messages wait in it, its pool has room for a delivery, and none came for `STILL_S`: then it is consumed again. A lane
has lost slots if for `STILL_S` more of them count as used than requests run. Nobody would give them back, so then the
process must end.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from typing import Final, Protocol

import structlog

from lanekeeper.contract.problems import BrokerError
from lanekeeper.telemetry import signals

LOOK_EVERY_S: Final = 0.05
"""The time between two checks of the conditions. They are polled, because they are attributes of very different
objects, without a common event to wait for."""
BRAKES_EVERY: Final = 5
"""At each fifth check also what an operator has paused: there may be a hundred pools."""
LATE_EVERY_S: Final = 2.0
LOGGED_AFTER_S: Final = 0.5
WATCH_EVERY_S: Final = 2.0
EMPTY_FOR: Final = 5
STILL_S: Final = 30.0
Condition = Callable[[], str | None]
log = structlog.get_logger()


class Pausable(Protocol):
    """Something that takes deliveries from the broker and can be paused, such as a pool."""

    @property
    def is_paused(self) -> bool: ...

    @property
    def brake(self) -> str | None:
        """Why it must be paused although no condition holds."""

    async def pause(self, reason: str) -> None: ...

    async def resume(self) -> None:
        """Take deliveries again. If too many are still being worked on, do nothing; `Pausing` then calls this again."""


class PausableQueue(Pausable, Protocol):
    """A pool, which consumes one queue."""

    async def end_late(self) -> None:
        """While `brake` holds: end the requests whose deadline has passed."""


class Pausing:
    """Stops all pools of this worker from taking requests while one of the `conditions` (by name) holds, and resumes
    them afterwards."""

    def __init__(self, conditions: Mapping[str, Condition]) -> None:
        self._conditions = conditions
        self._open = asyncio.Event()

    def reasons(self) -> dict[str, str]:
        return {name: why for name, condition in self._conditions.items() if (why := condition()) is not None}

    async def opened(self) -> None:
        while self.reasons():
            self._open.clear()
            await self._open.wait()

    async def run(self, takers: Sequence[Pausable]) -> None:
        loop = asyncio.get_running_loop()
        since_s = loop.time()
        is_logged = False
        known: str | None = None
        for look in count():
            if reasons := self.reasons():
                if not is_logged and loop.time() >= since_s + LOGGED_AFTER_S:
                    is_logged = True
                    log.warning(signals.TAKING_PAUSED, reasons=reasons)
            elif is_logged:
                is_logged = False
                log.info(signals.TAKING_RESUMED, paused_s=round(loop.time() - since_s, 2))
            why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            # a pool that holds too many deliveries does not resume yet, and is asked again
            if why != known or look % BRAKES_EVERY == 0:
                known = why
                await asyncio.gather(
                    *(
                        taker.resume() if must is None else taker.pause(must)
                        for taker in takers
                        if ((must := why or taker.brake) is not None) is not taker.is_paused
                    )
                )
            if not reasons:
                self._open.set()
                since_s = loop.time()
            await asyncio.sleep(LOOK_EVERY_S)

    async def end_late(self, takers: Sequence[PausableQueue]) -> None:
        """Without an end, look into the queues of lanes that an operator has paused for requests that are late."""
        while True:
            await asyncio.sleep(LATE_EVERY_S)
            for taker in takers:
                if taker.brake is not None and taker.is_paused and not self.reasons():
                    await taker.end_late()


class Consumer(Protocol):
    """What the watchdog must know of a pool, which consumes one queue."""

    @property
    def queue(self) -> str: ...
    @property
    def trouble(self) -> str | None: ...
    @property
    def is_paused(self) -> bool: ...
    @property
    def has_room(self) -> bool: ...
    @property
    def taken(self) -> int: ...
    async def consume_again(self) -> None: ...


@dataclass(slots=True, eq=False)
class Watchdog:
    """Checks whether lanes of a worker stand still. `unfetched`: how many messages wait in the queues of some pools.
    `lost_slots`: for each lane, how many slots count as used without a running request."""

    pools: Sequence[Consumer]
    _: KW_ONLY
    unfetched: Callable[[list[str]], Awaitable[Mapping[str, int]]]
    lost_slots: Callable[[], Mapping[str, int]]
    trouble: str | None = field(default=None, init=False)
    _taken: dict[str, int] = field(default_factory=dict, init=False)
    _empty_for: dict[str, int] = field(default_factory=dict, init=False)
    _looks: dict[str, int] = field(default_factory=dict, init=False)

    async def run(self) -> None:
        """Check the lanes, and consume again the queues that are not delivered. Returns if a lane has lost slots, so
        that the process must end."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            lost = {f"lane {lane} has lost slots" for lane, count in self.lost_slots().items() if count > 0}
            still = {f"{pool.queue} is not delivered": pool for pool in await self._undelivered()}
            self._looks = {what: self._looks.get(what, 0) + 1 for what in (*lost, *still)}
            most = round(STILL_S / WATCH_EVERY_S)
            stuck = [what for what, looks in self._looks.items() if looks >= most]
            self.trouble = "; ".join(stuck) or None
            for what in stuck:
                if self._looks[what] % most == 0:
                    log.error(signals.LANE_STUCK, reason=what, still_s=STILL_S)
                    if what in lost:
                        return
                    await still[what].consume_again()

    async def _undelivered(self) -> list[Consumer]:
        quiet = {
            pool.queue: pool
            for pool in self.pools
            if pool.trouble is None
            and not pool.is_paused
            and pool.has_room
            and self._taken.get(pool.queue) == pool.taken
        }
        self._taken = {pool.queue: pool.taken for pool in self.pools}
        self._empty_for = {queue: left - 1 for queue, left in self._empty_for.items() if left > 1}
        quiet = {queue: pool for queue, pool in quiet.items() if queue not in self._empty_for}
        if not quiet:
            return []
        try:
            waiting = await self.unfetched(list(quiet))
        except BrokerError:  # the pools report it
            return []
        self._empty_for |= {queue: EMPTY_FOR for queue in quiet if not waiting[queue]}
        return [pool for queue, pool in quiet.items() if waiting[queue] and pool.taken == self._taken[queue]]
