"""Counts a lane's running requests and the outcomes of its deliveries, and keeps its waits and run times of the last
hour."""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from ddsketch import DDSketch
from ddsketch.ddsketch import BaseDDSketch

from consumers.clock import NowMs, now_ms
from consumers.outcomes import (
    Answered,
    Batched,
    DeadLettered,
    Deferred,
    Outcome,
    PipelineAdvanced,
    Refused,
    Replayed,
    Retried,
    Superseded,
)
from consumers.state.base import Allowances, StoreUnavailable, period_of
from lanekeeper.telemetry.figures import Histogram, timings

HOUR: Final = 60
WINDOWS: Final = {"5m": 5, "1h": HOUR}
ACCURACY: Final = 0.02
"""By which part a quantile may be off. Sketches can be merged only if they have the same."""
WINDOW_S = 60
DUE_TIMES = 1024
PERIOD_S: Final = 60
NOTE_EVERY_S: Final = 5.0
SEEN_AT_LEAST_S: Final = 20.0
"""At the beginning of each period, the rate counts as unknown for this time."""
UNLIMITED: Final = 1e15


class LaneActivity:
    """What a lane does in this process."""

    def __init__(self, lane: str, *, slots: int, due_slots: int) -> None:
        self.lane = lane
        self._slots = slots
        self._due_slots = due_slots
        self.extra_slots = 0
        self.slots_limit: str | None = None
        self.running = 0
        self.answered = self.failed = self.retried = self.dropped = self.replayed = 0
        self.ended = 0
        self.deferred_for: Counter[str] = Counter()
        self._delayed: dict[str, Counter[int]] = {}
        """How many requests this process sent into the delay queues, by reason and by when they are due, in seconds of
        the monotonic clock, rounded up (`_delay`)."""
        self.recent = Recent()
        self.waits, self.runs, self.totals = Histogram(), Histogram(), Histogram()
        self.ended_by: Counter[str] = Counter()
        self.buried_by: Counter[str] = Counter()
        self.attempts = 0
        self.retried_for: Counter[str] = Counter()
        self.taken: Counter[str] = Counter()
        self.worked = timings()
        self.delivered_ms: dict[str, int] = {}
        """When the request was published that was delivered last, by queue; those that come back from a delay apart."""
        self._ended_by_second: deque[tuple[int, int]] = deque(maxlen=WINDOW_S)

    def end(self, queue: str, *, took_s: float) -> None:
        self.running -= 1
        self.worked[queue].add(took_s)

    def record(
        self,
        outcome: Outcome,
        *,
        wait_ms: int,
        run_ms: int | None,
        total_ms: int = 0,
        cause: str = "other",
        since_delivery: bool = False,
    ) -> None:
        match outcome:
            case Answered():
                self.answered += 1
                self.ended_by["ok"] += 1
            case Refused(problem) | DeadLettered(problem):
                self.failed += 1
                self.ended_by[problem.code] += 1
                if isinstance(outcome, DeadLettered):
                    self.buried_by[problem.code] += 1
            case PipelineAdvanced(answer=None, delay_ms=delay_ms, of=of):
                if of:
                    self._delay("pipeline", delay_ms)
                return  # it goes on without an attempt
            case PipelineAdvanced():
                self.answered += 1
            case Retried(delay_ms=delay_ms):
                self.retried += 1
                self.retried_for[cause] += 1
                self._delay("retry", delay_ms)
            case Batched():
                self.deferred_for["batch"] += 1
                return
            case Deferred(reason=reason, delay_ms=delay_ms):
                self.deferred_for[reason] += 1
                self._delay(reason, delay_ms)
                return
            case Superseded(problem):
                self.dropped += 1
                self.ended_by[problem.code] += 1
            case Replayed(is_reply_only=True):
                return  # the request was counted when it ended
            case Replayed():
                self.replayed += 1
                self.ended_by["replayed"] += 1
        if run_ms is not None:
            self.attempts += 1
            self.waits.add(wait_ms / 1000)
            self.runs.add(run_ms / 1000)
            self.recent.add(wait_ms, run_ms, since_delivery=since_delivery)
        if not isinstance(outcome, Retried):
            self.totals.add(total_ms / 1000)
            self._count_end()

    def snapshot(self) -> Mapping[str, Any]:
        since = int(time.monotonic()) - WINDOW_S
        return {
            "slots": self._slots,
            "due_slots": self._due_slots,
            "extra_slots": self.extra_slots,
            "slots_limit": self.slots_limit,
            "running": self.running,
            "answered": self.answered,
            "failed": self.failed,
            "retried": self.retried,
            "dropped": self.dropped,
            "replayed": self.replayed,
            "deferred": self.deferred_for.total(),
            "deferred_for": dict(self.deferred_for),
            "delayed_for": self.still_delayed(),
            "throughput_per_min": sum(count for second, count in self._ended_by_second if second > since),
            "waits_since_delivery": self.recent.since_delivery,
        }

    @property
    def slots(self) -> int:
        return self._slots + self._due_slots + self.extra_slots

    def _delay(self, reason: str, delay_ms: int) -> None:
        """Count a request that waits in the delay queues. Its due time is rounded up by at most a 16th of the delay, or
        a second."""
        step_s = 1 << (delay_ms // 32_000).bit_length()
        due_s = time.monotonic() + delay_ms / 1000
        delayed = self._delayed.setdefault(reason, Counter())
        delayed[math.ceil(due_s / step_s) * step_s] += 1
        if len(delayed) > DUE_TIMES:
            self.still_delayed()

    def still_delayed(self) -> dict[str, dict[str, int]]:
        now_s = time.monotonic()
        for reason, delayed in list(self._delayed.items()):
            for due_s in [due_s for due_s in delayed if due_s <= now_s]:
                del delayed[due_s]
            if not delayed:
                del self._delayed[reason]
        return {
            reason: {"count": delayed.total(), "last_in_s": round(max(delayed) - now_s)}
            for reason, delayed in self._delayed.items()
        }

    def _count_end(self) -> None:
        self.ended += 1
        second = int(time.monotonic())
        if self._ended_by_second and self._ended_by_second[-1][0] == second:
            self._ended_by_second[-1] = (second, self._ended_by_second[-1][1] + 1)
        else:
            self._ended_by_second.append((second, 1))


@dataclass(slots=True)
class _Minute:
    at: int
    waits: BaseDDSketch = field(default_factory=lambda: DDSketch(ACCURACY))
    runs: BaseDDSketch = field(default_factory=lambda: DDSketch(ACCURACY))
    since_delivery: int = 0


class Recent:
    """The waits and run times (ms) of the last hour's attempts: two sketches for each minute that had any."""

    def __init__(self) -> None:
        self._minutes: deque[_Minute] = deque(maxlen=HOUR)

    def add(self, wait_ms: int, run_ms: int, *, since_delivery: bool) -> None:
        at = int(time.monotonic()) // 60
        if not self._minutes or self._minutes[-1].at != at:
            self._minutes.append(_Minute(at))
        minute = self._minutes[-1]
        minute.waits.add(wait_ms)
        minute.runs.add(run_ms)
        minute.since_delivery += since_delivery

    def over(self, minutes: int) -> tuple[BaseDDSketch, BaseDDSketch]:
        waits, runs, after = DDSketch(ACCURACY), DDSketch(ACCURACY), int(time.monotonic()) // 60 - minutes
        for minute in self._minutes:
            if minute.at > after:
                waits.merge(minute.waits)
                runs.merge(minute.runs)
        return waits, runs

    @property
    def since_delivery(self) -> int:
        after = int(time.monotonic()) // 60 - HOUR
        return sum(minute.since_delivery for minute in self._minutes if minute.at > after)


async def note_ends(store: Allowances, activities: Sequence[LaneActivity], *, now_ms: NowMs = now_ms) -> None:
    """Add the requests that end in this process to the count in the store, until cancelled."""
    noted = {activity.lane: activity.ended for activity in activities}
    while True:
        await asyncio.sleep(NOTE_EVERY_S)  # one write for many requests, because nothing waits for the count
        for activity in activities:
            if ended := activity.ended - noted[activity.lane]:
                with suppress(StoreUnavailable):
                    period = period_of(PERIOD_S, now_ms())
                    await store.take(f"ended:{activity.lane}", ended, limit=UNLIMITED, period=period)
                    noted[activity.lane] += ended


async def ended_per_s(store: Allowances, lane: str, *, now_ms: NowMs = now_ms) -> float | None:
    """How many requests of a lane end each second, in all workers together. None if the period has just begun, or if no
    request has ended in it. Raises StoreUnavailable."""
    period = period_of(PERIOD_S, at_ms := now_ms())
    taken = await store.take(f"ended:{lane}", 0, limit=UNLIMITED, period=period)
    seen_s = PERIOD_S - (period.ends_ms - at_ms) / 1000
    return taken.used / seen_s if taken.used and seen_s >= SEEN_AT_LEAST_S else None
