"""Checks the guarantees of docs/budget.md request by request. Pure."""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

from benchmarks.replaying.bounds import Own, own_starts_s
from benchmarks.replaying.load import Ask
from benchmarks.replaying.result import Result, Spread
from consumers.limits.base import Amounts

SAME_S = 0.05
"""Two starts that differ by no more than this count as equal: timers fire half a millisecond late, and a call takes
some milliseconds to reach the provider."""
WINDOW_S = 240.0
STEP_S = 5.0


@dataclass(frozen=True)
class Beside:
    """A lane at the gate, compared with an account of its own."""

    lane: str
    own: Own
    waits: Spread
    """Waits in the account of its own."""
    count: int
    late: int
    """Requests that started later at the gate."""
    latest_s: float
    """The longest such delay; below zero: all requests started earlier at the gate."""


@dataclass(frozen=True)
class Reserve:
    """How much of its reserve a lane got in its worst four minutes. Only windows in which the lane always had work
    count."""

    lane: str
    windows: int
    """The number of windows of four minutes that count."""
    least: float | None
    """The smallest part of the reserve; 1: the whole reserve. None: there was no such window."""


def beside_own(result: Result, lane: str, own: Own | None = None) -> Beside:
    """Compare the start of every request of a lane with its start in an account of the lane's own. A request starts
    when its answered call is sent."""
    own = own or Own.of(result.scenario, lane)
    asks = [ask for ask in result.of(lane) if ask.counts]
    starts = own_starts_s(asks, own, limits=result.load.limits, bucket_s=result.scenario.bucket_s)
    later = [_started_s(ask) - start_s for ask, start_s in zip(asks, starts, strict=True)]
    return Beside(
        lane=lane,
        own=own,
        waits=Spread.of([start_s - ask.arrived_s for ask, start_s in zip(asks, starts, strict=True)]),
        count=len(asks),
        late=sum(seconds > SAME_S for seconds in later),
        latest_s=max(later, default=0.0),
    )


def reserve(result: Result, lane: str) -> Reserve:
    """The lane's worst four minutes. In each window, the limit of which the lane got the largest part counts. One
    request of the largest size is added, for calls that cross the window's edges."""
    share = result.scenario.spec.shares[lane]
    reserved = Amounts(*(share * limit * WINDOW_S / 60 for limit in result.load.limits))
    calls = sorted((ask.started_s, ask.used) for ask in result.of(lane) if ask.started_s is not None)
    times = [at_s for at_s, _ in calls]
    sums = [list(accumulate((used[each] for _, used in calls), initial=0.0)) for each in range(3)]
    largest = [max((used[each] for _, used in calls), default=0.0) for each in range(3)]
    found: list[float] = []
    for since_s, until_s in result.busy(lane):
        at_s = since_s
        while at_s + WINDOW_S <= min(until_s, result.load.ends_s):
            first, last = bisect_left(times, at_s), bisect_left(times, at_s + WINDOW_S)
            got = (sums[each][last] - sums[each][first] + largest[each] for each in range(3))
            found.append(max(amount / part for amount, part in zip(got, reserved, strict=True)))
            at_s += STEP_S
    return Reserve(lane, len(found), min(found, default=None))


def _started_s(ask: Ask) -> float:
    """When the answered call was sent; infinite if the request was not answered within the replay."""
    return float("inf") if ask.started_s is None else ask.started_s
