"""Counts a lane's running requests and the outcomes of its deliveries, and keeps its latest waits and run times, for
the command `lanekeeper status` and the log."""

import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from consumers.outcomes import Answered, Buried, Deferred, Dropped, Outcome, Refused, Replayed, Retried

SAMPLES = 256
"""For how many of each lane's latest attempts the wait and the run time are kept."""
WINDOW_S = 60
"""A lane's throughput is computed from the requests that ended within this many seconds."""
SHOWN = ("extra_slots", "slots_limit", "running", "answered", "failed", "retried", "dropped", "replayed")
"""The attributes of `LaneActivity` that its method `snapshot` copies under the same name."""


class LaneActivity:
    """Counts a lane's running and ended requests in this process, and keeps its latest waits and run times, for the
    command `lanekeeper status`."""

    def __init__(self, lane: str, *, slots: int, due_slots: int) -> None:
        self.lane = lane
        self._slots = slots
        self._due_slots = due_slots
        self.extra_slots = 0
        """How many slots (each works on one request at a time) the lane's two queues, intake and due queue, have in
        addition to the configured ones (`lending.py`)."""
        self.slots_limit: str | None = None
        """Why the lane gets no more slots although its requests wait longer than its target wait; None: nothing
        prevents more slots, or none are needed."""
        self.running = 0
        self.answered = 0
        self.failed = 0
        self.retried = 0
        self.deferred_for: Counter[str] = Counter()
        """How many deliveries were deferred, by the reason of the deferral."""
        self.dropped = 0
        self.ended = 0
        """How many requests of the lane have ended, with any outcome."""
        self.replayed = 0
        self._samples: deque[tuple[int, int, bool]] = deque(maxlen=SAMPLES)
        """For each of the latest attempts: how long the request had waited and how long the attempt ran, in ms, and
        whether the wait was measured from the first delivery, because the time of publishing is unknown."""
        self._ended_by_second: deque[tuple[int, int]] = deque(maxlen=WINDOW_S)
        """For each of the latest seconds in which requests of the lane ended: the second (by the monotonic clock), and
        how many requests ended in it."""

    def record(self, outcome: Outcome, *, wait_ms: int, run_ms: int | None, since_delivery: bool = False) -> None:
        """Count the outcome of a delivery. `run_ms`: how long the attempt ran; None if no provider was called, or if
        the attempt does not count, because the provider was down. `since_delivery`: whether the wait is measured from
        the first delivery, because the time of publishing is unknown."""
        match outcome:
            case Answered():
                self.answered += 1
            case Refused() | Buried():
                self.failed += 1
            case Retried():
                self.retried += 1
            case Deferred(reason=reason):
                self.deferred_for[reason] += 1
                return
            case Dropped():
                self.dropped += 1
            case Replayed(is_reply_only=True):
                return  # the request was counted when it ended
            case Replayed():
                self.replayed += 1
        if run_ms is not None:
            self._samples.append((wait_ms, run_ms, since_delivery))
        if not isinstance(outcome, Retried):
            self._count_end()

    def snapshot(self) -> Mapping[str, Any]:
        """The lane's counts, its throughput of the last minute, and its latest waits and run times, as JSON values for
        the command `lanekeeper status`."""
        since = int(time.monotonic()) - WINDOW_S
        return {
            "slots": self._slots,
            "due_slots": self._due_slots,
            **{name: getattr(self, name) for name in SHOWN},
            "deferred": self.deferred_for.total(),
            "deferred_for": dict(self.deferred_for),
            "throughput_per_min": sum(count for second, count in self._ended_by_second if second > since),
            "waits_ms": [wait_ms for wait_ms, _, _ in self._samples],
            "runs_ms": [run_ms for _, run_ms, _ in self._samples],
            "waits_since_delivery": sum(since_delivery for _, _, since_delivery in self._samples),
        }

    def _count_end(self) -> None:
        self.ended += 1
        second = int(time.monotonic())
        if self._ended_by_second and self._ended_by_second[-1][0] == second:
            self._ended_by_second[-1] = (second, self._ended_by_second[-1][1] + 1)
        else:
            self._ended_by_second.append((second, 1))


def quantile(ordered: Sequence[int], share: float) -> int | None:
    """A quantile of values that are in ascending order, by the nearest-rank method: the smallest value such that at
    least the share `share` (0 to 1) of all values are less than or equal to it. None if there are no values."""
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)] if ordered else None
