"""Adds slots to queues and takes them back: looks at what the queues need, and carries out what `lending.decide` says.

Added slots are a further consumer of the queue, on a channel of its own, with a prefetch of just these slots. So no
delivery waits for a slot, and no prefetch of a running consumer has to change, which would have no effect
(docs/facts.md, section 2). To take slots back, that consumer is ended; the requests that it holds end by themselves.
The lane that lent them does not wait for that: its own consumer kept its prefetch all the time.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from consumers.background import every
from consumers.capacity.activity import LaneActivity
from consumers.capacity.lending import Seen, Share, decide
from consumers.job import Job, NowMs
from lanekeeper.contract.problems import BrokerError
from lanekeeper.telemetry import logs, signals

LOOK_EVERY_S = 0.25
"""Lent slots must be back within a second. This polls, because the decision depends on levels over some time, not on a
single delivery. It costs a few additions, four times a second."""
ASK_EVERY_S = 1.0
"""How often the broker is asked how many messages wait, for queues whose slots are all in use. A queue grows as
often."""
STEADY_S = 3.0
"""Slots are lent after they were idle for this time, and added ones given up after they were unused for it."""
HELD_FOR_S = 2.0
"""A provider that was the bottleneck within this time still is: a request may have got its turn between two looks."""
SAY_EVERY_S = 60.0
log = logs.logger()

Depths = Callable[[list[str]], Awaitable[Mapping[str, int]]]
"""How many messages wait in each queue."""
WaitingFor = Callable[[], Mapping[str, str]]
"""For each lane whose requests wait for a provider's budget: the part of the budget that they wait for."""


class Working(Protocol):
    """A pool."""

    @property
    def queue(self) -> str: ...
    @property
    def slots(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def in_hand(self) -> int: ...
    @property
    def jobs(self) -> Collection[Job]: ...
    async def run(self) -> None: ...
    async def stop(self) -> None: ...
    def give_back_waiting(self) -> None: ...


@dataclass(slots=True)
class _Added:
    """Slots that were added to a queue together."""

    pool: Working
    is_ending: bool = False


@dataclass(slots=True, kw_only=True)
class Line:
    """A queue whose number of slots changes, and what is known of it."""

    lane: str
    pool: Working
    """The pool with its own slots."""
    more: Callable[[int], Working]
    """Makes a pool with the given number of slots on the same queue."""
    kept: int
    most: int
    target_wait_s: float
    activity: LaneActivity
    side: Working | None = None
    """The pool of requests that were set aside; it uses the same slots."""
    resize: Callable[[int], None] = lambda slots: None
    """Called with the number of slots whenever it changes."""
    added: list[_Added] = field(default_factory=list)
    used: deque[int] = field(default_factory=lambda: deque(maxlen=round(STEADY_S / LOOK_EVERY_S)))
    share: Share = field(default_factory=Share)
    waiting_since_ms: int | None = None
    said_s: float | None = None

    @property
    def open(self) -> list[_Added]:
        return [each for each in self.added if not each.is_ending]

    @property
    def open_slots(self) -> int:
        return sum(each.pool.slots for each in self.open)

    @property
    def ending(self) -> int:
        return sum(each.pool.in_hand for each in self.added if each.is_ending)

    @property
    def in_hand(self) -> int:
        aside = 0 if self.side is None else self.side.running
        return self.pool.in_hand + aside + sum(each.pool.in_hand for each in self.added)

    @property
    def is_full(self) -> bool:
        return self.in_hand - self.ending >= self.pool.slots + self.open_slots

    def wait_s(self, now_ms: int) -> float:
        """The longest wait of the requests taken lately, or the time that requests have waited while none was taken."""
        parts = [self.pool, *(each.pool for each in self.added), *([] if self.side is None else [self.side])]
        jobs = [job for part in parts for job in part.jobs]
        waits = [
            job.taken_ms - job.asked.request.start_ms
            for job in jobs
            if job.asked is not None and job.taken_ms >= now_ms - 1000 * STEADY_S
        ]
        if self.waiting_since_ms is not None:
            taken_ms = max((job.taken_ms for job in jobs), default=0)
            waits.append(now_ms - max(self.waiting_since_ms, taken_ms))
        return max(waits, default=0) / 1000


class Slots:
    """Adds slots to queues and takes them back. `lines`: the most urgent first."""

    def __init__(self, lines: Sequence[Line], *, depths: Depths, now_ms: NowMs, waiting_for: WaitingFor = dict) -> None:
        self._lines = lines
        self._depths = depths
        self._now_ms = now_ms
        self._waiting_for = waiting_for
        self._held: dict[str, tuple[str, float]] = {}
        self._ask_at_s = 0.0
        self._paused = False
        self._stopping = asyncio.Event()
        self._group = asyncio.TaskGroup()
        for line in lines:  # before that, no slot is lent
            line.used.append(line.pool.slots)

    async def run(self) -> None:
        """Add slots and take them back until stopped; return when the requests on added slots have ended. Cancel it to
        end at once."""
        async with self._group:
            async for _ in every(LOOK_EVERY_S, until=self._stopping):
                await self._look()

    async def stop(self) -> None:
        self._stopping.set()
        await self._take_all_back()

    def give_back_waiting(self) -> None:
        """After `stop`: return deliveries on added slots whose call has not begun (`Pool.give_back_waiting`)."""
        for line in self._lines:
            for each in line.added:
                each.pool.give_back_waiting()

    @property
    def is_paused(self) -> bool:
        return self._paused

    async def pause(self, reason: str) -> None:
        """Take all added slots back. Slots that are idle during a pause do not count as idle."""
        self._paused = True
        await self._take_all_back()

    async def resume(self) -> None:
        """Add slots again when they are needed."""
        self._paused = False

    async def _look(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for lane, reason in self._waiting_for().items():
            self._held[lane] = (reason, now_s + HELD_FOR_S)
        if asks := now_s >= self._ask_at_s:
            self._ask_at_s = now_s + ASK_EVERY_S
        waiting = await self._ask() if asks else {}
        if self._paused or self._stopping.is_set():
            return
        shares = decide([self._seen(line, waiting.get(line.pool.queue, 0), asks, now_s) for line in self._lines])
        for line, share in zip(self._lines, shares, strict=True):
            limit = share.limit if asks else line.share.limit  # known only for lanes whose requests wait
            self._carry_out(line, Share(share.lent, share.grown, limit))
            if asks and limit is not None:
                self._say(line, limit, now_s)
        self._show()

    async def _ask(self) -> Mapping[str, int]:
        full = [line.pool.queue for line in self._lines if line.is_full]
        if not full or self._paused:
            return {}
        try:
            return await self._depths(full)
        except BrokerError:  # the pools report it
            return {}

    def _seen(self, line: Line, waiting: int, asked: bool, now_s: float) -> Seen:
        line.used.append(line.in_hand)
        now_ms = self._now_ms()
        if not waiting and asked:
            line.waiting_since_ms = None
        elif waiting and line.waiting_since_ms is None:
            line.waiting_since_ms = now_ms
        reason, until_s = self._held.get(line.lane, ("", 0.0))
        return Seen(
            slots=line.pool.slots,
            kept=line.kept,
            most=line.most,
            target_wait_s=line.target_wait_s,
            extra=max(line.open_slots + line.ending, line.share.extra),  # `in_hand` if many have ended since
            grown=line.share.grown,
            ending=line.ending,
            busiest=max(line.used),
            waiting=waiting,
            wait_s=line.wait_s(now_ms) if waiting else 0.0,
            held=reason if now_s < until_s else None,
        )

    def _carry_out(self, line: Line, share: Share) -> None:
        while (excess := line.open_slots - share.extra) > 0:
            least = min(line.open, key=lambda each: (each.pool.slots < excess, abs(each.pool.slots - excess)))
            least.is_ending = True
            self._group.create_task(least.pool.stop(), name=f"take back {line.pool.queue}")
        while (room := share.extra - line.open_slots - line.ending) > 0:
            # in pools of 1, 2, 4, … slots, so that taking some back seldom takes back more than needed
            added = _Added(line.more(1 << room.bit_length() - 1))
            line.added.append(added)
            line.used.append(line.pool.slots + line.open_slots + line.ending)  # not idle before they are consumed
            self._group.create_task(self._work(line, added), name=f"added slots {line.pool.queue}")
        line.resize(line.pool.slots + line.open_slots)
        if (share.lent, share.grown) != (line.share.lent, line.share.grown):
            log.debug(
                signals.SLOTS_CHANGED,
                lane=line.lane,
                queue=line.pool.queue,
                slots=line.pool.slots,
                lent=share.lent,
                grown=share.grown,
            )
        line.share = share

    async def _work(self, line: Line, added: _Added) -> None:
        try:
            await added.pool.run()
        finally:
            line.added.remove(added)

    async def _take_all_back(self) -> None:
        ending = [each for line in self._lines for each in line.open]
        for each in ending:
            each.is_ending = True
        for line in self._lines:
            line.share = Share()
            line.resize(line.pool.slots)
        self._show()
        await asyncio.gather(*(each.pool.stop() for each in ending))

    def _say(self, line: Line, limit: str, now_s: float) -> None:
        if line.said_s is None or now_s >= line.said_s + SAY_EVERY_S:
            line.said_s = now_s
            log.info(
                signals.SLOTS_LIMITED,
                lane=line.lane,
                queue=line.pool.queue,
                limit=limit,
                wait_s=round(line.wait_s(self._now_ms()), 1),
            )

    def _show(self) -> None:
        """Publish the numbers for `status`."""
        for line in self._lines:
            line.activity.extra_slots = 0
            line.activity.slots_limit = None
        for line in self._lines:
            line.activity.extra_slots += line.share.extra
            line.activity.slots_limit = line.activity.slots_limit or line.share.limit
