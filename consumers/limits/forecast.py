"""How long a request would wait, by the rule that grants it (`bucket.py`). Pure.

There are two answers. The shortest wait assumes that no more requests come in the lanes above. A request is
refused only because of this one, and only if the limits are known. The expected wait assumes that the lanes above go on
spending as they did in the last minute. What calls give back later makes both shorter.
"""

from collections.abc import Iterator, Sequence
from math import inf

from consumers.limits.account import Account
from consumers.limits.amounts import CONCURRENCY, NOTHING, PAUSED, REASONS, Amounts
from consumers.limits.base import Wait
from consumers.limits.bucket import Bucket
from consumers.limits.waiter import Waiter


def wait(account: Account, lane: int, amounts: Amounts, now_s: float) -> Wait:
    """The forecast for a request that would join the end of its lane's line now."""
    account.refill(now_s)
    ahead = [x + y for x, y in zip(account.lines.sums(lane), account.elsewhere[lane], strict=True)]
    return _wait(account, lane, amounts, now_s, ahead=ahead, count=account.lines.count(lane))


def of(account: Account, waiter: Waiter, now_s: float) -> Wait:
    """For a waiter that has just joined the line. A deferred request that returns may go before waiters of other
    processes."""
    account.refill(now_s)
    lane, amounts = waiter.lane, waiter.amounts
    ahead, count = account.lines.before(waiter)
    if waiter.arrived_s >= now_s:
        ahead = [x + y for x, y in zip(ahead, account.elsewhere[lane], strict=True)]
    return _wait(account, lane, amounts, now_s, ahead=ahead, count=count)


def first(account: Account, lane: int, amounts: Amounts, now_s: float) -> Wait:
    """The forecast for the first waiter of a lane."""
    account.refill(now_s)
    return _wait(account, lane, amounts, now_s, ahead=NOTHING, count=0)


def hopeless(account: Account, now_s: float) -> Iterator[tuple[Waiter, Wait]]:
    """The waiters that will be too late, with their forecasts. Expensive: it looks at every waiter."""
    account.refill(now_s)
    lane, count, ahead = -1, 0, [0.0, 0.0, 0.0]
    lines: list[_Line] = []
    for waiter in list(account.lines):
        if waiter.lane != lane:
            lane, count, ahead = waiter.lane, 0, [0.0, 0.0, 0.0]
            lines = _lines(account, lane, now_s)
        found = _wait(account, lane, waiter.amounts, now_s, ahead=ahead, count=count, lines=lines)
        if found.reason == PAUSED or (waiter.until_s is not None and now_s + found.least_s > waiter.until_s):
            yield waiter, found
        else:
            count += 1
            for each, amount in enumerate(waiter.amounts):
                ahead[each] += amount


def _wait(
    account: Account,
    lane: int,
    amounts: Amounts,
    now_s: float,
    *,
    ahead: Sequence[float],
    count: int,
    lines: "Sequence[_Line] | None" = None,
) -> Wait:
    """The forecast for one request. `ahead`: what the requests before it in its lane's line need; `count`: the number
    of those in this process; `lines`: the lane's lines, if they are computed already."""
    if (paused_s := account.paused_s(now_s)) > 0:
        return Wait(paused_s, PAUSED, paused_s)
    longest_s, least_s, reason, is_known = 0.0, 0.0, REASONS[0], True
    for each, line in enumerate(_lines(account, lane, now_s) if lines is None else lines):
        if amounts[each] + ahead[each] <= 0:
            continue
        if (in_s := line.wait_s(ahead[each], amounts[each], line.taken_per_s)) > longest_s:
            longest_s, reason, is_known = in_s, REASONS[each], not account.guessed[each]
        if in_s > least_s and not account.guessed[each]:
            least_s = max(least_s, line.wait_s(ahead[each], amounts[each], earliest=True))
    stopped_s = account.stopped_s(now_s)
    longest_s, least_s = max(longest_s, stopped_s), max(least_s, stopped_s)
    if account.concurrency.is_limited:
        above_it = sum(account.lines.count(other) for other in range(lane))
        count = min(above_it + count, account.calls_before(lane, count))
        if (in_s := account.concurrency.wait_s(count)) > longest_s:
            longest_s, reason, is_known = in_s, CONCURRENCY, account.concurrency.is_set
            least_s = in_s if is_known else least_s
    return Wait(longest_s, reason, least_s, is_known)


def _lines(account: Account, lane: int, now_s: float) -> "list[_Line]":
    """The lane's line before each bucket."""
    above = [_ahead_of(account, other) for other in range(lane)]
    lines = [_Line(account, each, bucket, lane, above) for each, bucket in enumerate(account.buckets)]
    for each, line in enumerate(lines):
        line.taken_per_s = account.demand.per_s(range(lane), each, now_s)
    return lines


def _ahead_of(account: Account, lane: int) -> Sequence[float]:
    """What a lane above will take before those below it. It waits longest for one bucket; from the others it meanwhile
    takes no more than its first request needs."""
    sums = [x + y for x, y in zip(account.lines.sums(lane), account.elsewhere[lane], strict=True)]
    if sums[0] == 0 or (head := account.lines.heads[lane]) is None:
        return sums
    waits_s = [(total - bucket.level) / bucket.per_s for total, bucket in zip(sums, account.buckets, strict=True)]
    most = waits_s.index(max(waits_s))
    return [total if each == most else head.amounts[each] for each, total in enumerate(sums)]


class _Line:
    """A lane's waiting requests, for one bucket. The requests ahead count as one sum; the request itself follows the
    bucket's rule."""

    __slots__ = ("_above", "_bucket", "_filling", "_held", "_is_top", "_lane", "_slope", "taken_per_s")

    def __init__(
        self, account: Account, each: int, bucket: Bucket, lane: int, above: Sequence[Sequence[float]]
    ) -> None:
        self._bucket = bucket
        self._lane = lane
        self._is_top = not above
        self.taken_per_s = 0.0
        """The rate at which the lanes above are expected to keep spending."""
        self._above = self._held = 0.0
        """`_above`: what the lanes above will take. `_held`: what the level must cover besides the request."""
        for other, takes in enumerate(above):
            self._above += takes[each]
            self._held += bucket.reserves[other]
        self._slope = 1.0
        """The part of what comes in for this lane and those above, while the lanes below spend or save their shares."""
        self._filling: list[tuple[float, float]] = []
        """For each lane below that only saves: in how many seconds it has saved all, and its share."""
        for other in range(lane + 1, len(bucket.shares)):
            saved, share = bucket.held(other), bucket.shares[other]
            self._held += saved
            if account.lines.sums(other)[each] + account.elsewhere[other][each] > 0:
                self._slope -= share
            elif share and (missing := bucket.reserves[other] - saved) > 0:
                self._slope -= share
                self._filling.append((missing / (share * bucket.per_s), share))
        self._filling.sort()

    def wait_s(self, ahead: float, amount: float, taken_per_s: float = 0.0, *, earliest: bool = False) -> float:
        """Seconds until the request may go, after those `ahead` of it: with the lane's savings alone, or with what
        other lanes leave. `taken_per_s`: the part of the latter that the lanes above take."""
        bucket = self._bucket
        whole = ahead + (amount if amount < bucket.burst else bucket.burst)
        level_s, before = (whole - bucket.level) / bucket.per_s, ahead + self._above - bucket.level
        part, share = bucket.parts[self._lane], bucket.shares[self._lane]
        if whole <= part:
            return max(0.0, level_s)
        own_s = (whole - part) / (share * bucket.per_s) if share else inf
        if earliest and ahead > 0 and share:
            # Earliest if those ahead use only what other lanes leave, and this request its lane's savings.
            own_s = min(own_s, max(0.0, before) / bucket.per_s + (whole - ahead) / (share * bucket.per_s))
        return max(0.0, level_s, min(own_s, self._left_s(ahead, amount, taken_per_s)))

    def _left_s(self, ahead: float, amount: float, taken_per_s: float) -> float:
        bucket = self._bucket
        before = ahead + self._above - bucket.level
        kept = min(amount, bucket.reserves[self._lane]) if self._is_top else amount
        missing = before + kept + self._held
        if missing <= 0:
            return 0.0
        left_per_s = bucket.per_s - taken_per_s
        full_s = max(0.0, before + bucket.burst) / left_per_s if left_per_s > 0 else inf
        per_s, passed_s = self._slope * bucket.per_s - taken_per_s, 0.0
        for in_s, share in self._filling:
            reached = missing - per_s * (in_s - passed_s)
            if reached <= 0:
                break
            missing, passed_s, per_s = reached, in_s, per_s + share * bucket.per_s
        return min(full_s, passed_s + missing / per_s if per_s > 0 else inf)
