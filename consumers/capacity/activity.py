"""Counts what a lane does: running requests, outcomes, waits. For `status` and the log; of bounded size."""

import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from consumers.outcomes import Answered, Buried, Deferred, Dropped, Outcome, Refused, Replayed, Retried

SAMPLES = 256
"""How many of the latest waits and run times are kept for each lane."""
WINDOW_S = 60
SHOWN = (
    "extra_slots", "slots_limit", "running", "answered", "failed", "retried", "deferred", "dropped", "replayed",
)  # fmt: skip
"""Figures that are shown as they are."""


class LaneActivity:
    """Counts of one lane in this process, since it started."""

    def __init__(self, lane: str, *, slots: int, due_slots: int) -> None:
        self.lane = lane
        self._slots = slots
        self._due_slots = due_slots
        self.extra_slots = 0
        """Slots added to its two queues, lent or grown."""
        self.slots_limit: str | None = None
        """What keeps the lane from getting more slots although its requests wait too long; None: nothing."""
        self.running = 0
        self.answered = 0
        self.failed = 0
        self.retried = 0
        self.deferred = 0
        self.deferred_for: Counter[str] = Counter()
        """Deferred requests, by reason."""
        self.dropped = 0
        self.replayed = 0
        self._waits_ms: deque[int] = deque(maxlen=SAMPLES)
        self._runs_ms: deque[int] = deque(maxlen=SAMPLES)
        self._since_delivery: deque[bool] = deque(maxlen=SAMPLES)
        self._ended_by_second: deque[tuple[int, int]] = deque(maxlen=WINDOW_S)

    def record(self, outcome: Outcome, *, wait_ms: int, run_ms: int | None, since_delivery: bool = False) -> None:
        """Count the outcome of a delivery. `run_ms`: None if the provider was not called. `since_delivery`: the time of
        publishing is unknown, so the wait counts from the first delivery."""
        match outcome:
            case Answered():
                self.answered += 1
            case Refused() | Buried():
                self.failed += 1
            case Retried():
                self.retried += 1
            case Deferred(reason=reason):
                self.deferred += 1
                self.deferred_for[reason] += 1
                return
            case Dropped():
                self.dropped += 1
            case Replayed(retold=True):
                return  # it was counted when it ended
            case Replayed():
                self.replayed += 1
        if run_ms is not None:
            self._waits_ms.append(wait_ms)
            self._runs_ms.append(run_ms)
            self._since_delivery.append(since_delivery)
        if not isinstance(outcome, Retried):
            self._count_end()

    def snapshot(self) -> Mapping[str, Any]:
        """The figures as JSON: counts, `throughput_per_min` of the last minute, and the latest waits and run times."""
        since = int(time.monotonic()) - WINDOW_S
        return {
            "slots": self._slots,
            "due_slots": self._due_slots,
            **{name: getattr(self, name) for name in SHOWN},
            "deferred_for": dict(self.deferred_for),
            "throughput_per_min": sum(count for second, count in self._ended_by_second if second > since),
            "waits_ms": list(self._waits_ms),
            "runs_ms": list(self._runs_ms),
            "waits_since_delivery": sum(self._since_delivery),
        }

    def _count_end(self) -> None:
        second = int(time.monotonic())
        if self._ended_by_second and self._ended_by_second[-1][0] == second:
            self._ended_by_second[-1] = (second, self._ended_by_second[-1][1] + 1)
        else:
            self._ended_by_second.append((second, 1))


def quantile(ordered: Sequence[int], share: float) -> int | None:
    """The value that `share` (0 to 1) of the ordered values do not exceed (nearest rank); None of no values."""
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)] if ordered else None
