"""Forecasts how long a request will wait for a provider's budget, by the rule that grants it (`account.py`).

A forecast has two values. The shortest wait assumes that no further requests arrive in more urgent lanes; a request is
refused only because of this value, and only if the limits are known. The expected wait assumes that more urgent lanes
go on using budget as in the last minute.
"""

from collections.abc import Iterator, Sequence
from math import inf

from consumers.limits.account import Account, Bucket, Waiter, flows_in_s
from consumers.limits.base import CONCURRENCY, NOTHING, REASONS, Amounts, Wait


def wait(account: Account, lane: int, amounts: Amounts, now_s: float) -> Wait:
    """How long a request of this lane would wait for the account's budget, if it joined the end of its lane's line
    now."""
    account.refill(now_s)
    ahead = [x + y for x, y in zip(account.lines.sums(lane), account.waiting_elsewhere[lane], strict=True)]
    return _wait(account, lane, amounts, now_s, ahead=ahead, count=account.lines.count(lane))


def of(account: Account, waiter: Waiter, now_s: float) -> Wait:
    """How long a request that has just joined its lane will wait. The requests of its lane that wait in other processes
    are counted as ahead of a new request, but not of a deferred one that comes back, because that keeps its earlier
    place."""
    account.refill(now_s)
    lane, amounts = waiter.lane, waiter.amounts
    ahead, count = account.lines.before(waiter)
    if waiter.arrived_s >= now_s:
        ahead = [x + y for x, y in zip(ahead, account.waiting_elsewhere[lane], strict=True)]
    return _wait(account, lane, amounts, now_s, ahead=ahead, count=count)


def first(account: Account, lane: int, amounts: Amounts, now_s: float) -> Wait:
    """How long the first waiting request of a lane will wait for the account's budget."""
    account.refill(now_s)
    return _wait(account, lane, amounts, now_s, ahead=NOTHING, count=0)


def hopeless(account: Account, now_s: float) -> Iterator[tuple[Waiter, Wait]]:
    """The waiting requests that will certainly be granted too late for their deadline, each with the forecast of its
    wait. This takes much CPU."""
    account.refill(now_s)
    for lane in range(len(account.lanes)):
        count, ahead, lines = 0, [0.0, 0.0, 0.0], _lines(account, lane, now_s)
        for waiter in account.lines.firsts(lane, account.lines.count(lane)):
            found = _wait(account, lane, waiter.amounts, now_s, ahead=ahead, count=count, lines=lines)
            if waiter.until_s is not None and now_s + found.least_s > waiter.until_s:
                yield waiter, found
            else:
                count += 1
                for index, amount in enumerate(waiter.amounts):
                    ahead[index] += amount


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
    longest_s, least_s, reason, is_known = 0.0, 0.0, REASONS[0], True
    for index, line in enumerate(_lines(account, lane, now_s) if lines is None else lines):
        if amounts[index] + ahead[index] <= 0:
            continue
        if (in_s := line.wait_s(ahead[index], amounts[index])) > longest_s:
            longest_s, reason, is_known = in_s, REASONS[index], not account.guessed[index]
        if in_s > least_s and not account.guessed[index]:
            least_s = max(least_s, line.wait_s(ahead[index], amounts[index], earliest=True))
    stopped_s = account.stopped_s(now_s)
    longest_s, least_s = max(longest_s, stopped_s), max(least_s, stopped_s)
    if account.concurrency.is_limited and (count or not account.concurrency.may_begin(lane, now_s)):
        above_it = sum(account.lines.count(other) for other in range(lane))
        count = min(above_it + count, account.concurrency.calls_before(lane, count))
        if (in_s := account.concurrency.wait_s(count)) > longest_s:
            longest_s, reason, is_known = in_s, CONCURRENCY, account.concurrency.is_set
            least_s = in_s if is_known else least_s
    return Wait(longest_s, reason, least_s, is_known)


def _lines(account: Account, lane: int, now_s: float) -> "list[_Line]":
    above = [_ahead_of(account, other) for other in range(lane)]
    return [
        _Line(account, index, bucket, lane, above, account.demand.per_s(range(lane), index, now_s))
        for index, bucket in enumerate(account.buckets)
    ]


def _ahead_of(account: Account, lane: int) -> Sequence[float]:
    """How much the waiting requests of a lane are expected to take from each bucket before less urgent lanes get
    anything. From the bucket for which they wait longest, they take all that they need together. From the others they
    take only what the first request needs, because those behind it still wait for the scarcest bucket."""
    sums = [x + y for x, y in zip(account.lines.sums(lane), account.waiting_elsewhere[lane], strict=True)]
    if (head := account.lines.heads[lane]) is None:
        return sums
    waits_s = [(total - bucket.level) / bucket.per_s for total, bucket in zip(sums, account.buckets, strict=True)]
    scarcest = waits_s.index(max(waits_s))
    return [total if index == scarcest else head.amounts[index] for index, total in enumerate(sums)]


class _Line:
    """Computes how long a request of one lane waits for one bucket, behind other requests of that lane. For the
    requests before it only the sum of their amounts counts; for the request itself the bucket's rule (`account.py`) is
    applied."""

    def __init__(
        self,
        account: Account,
        index: int,
        bucket: Bucket,
        lane: int,
        above: Sequence[Sequence[float]],
        taken_per_s: float,
    ) -> None:
        self._bucket = bucket
        self._lane = lane
        self._taken_per_s = taken_per_s
        self._above = sum(takes[index] for takes in above)
        self._held = sum(bucket.reserves[:lane])
        self._per_s = bucket.per_s
        """The amount per second that flows into the bucket for this lane and the more urgent ones: the bucket's rate
        without the shares of those less urgent lanes that have waiting requests or still save."""
        self._filling: list[tuple[float, float]] = []
        """For each less urgent lane that still saves and has no waiting request: the seconds until it has saved all
        that it may, and how much per second it saves."""
        for other in range(lane + 1, len(bucket.shares)):
            held, its_per_s = bucket.held(other), bucket.shares[other] * bucket.per_s
            self._held += held
            if account.lines.sums(other)[index] + account.waiting_elsewhere[other][index] > 0:
                self._per_s -= its_per_s
            elif (missing := bucket.reserves[other] - held) > 0:
                self._per_s -= its_per_s
                self._filling.append((missing / its_per_s, its_per_s))

    def wait_s(self, ahead: float, amount: float, *, earliest: bool = False) -> float:
        """Seconds until a request that needs `amount` may take it, after the requests before it, which together need
        `ahead`. `earliest`: compute the shortest possible wait and not the expected one."""
        bucket = self._bucket
        whole = ahead + (amount if amount < bucket.burst else bucket.burst)
        level_s, before = (whole - bucket.level) / bucket.per_s, ahead + self._above - bucket.level
        saved, own_per_s = bucket.savings[self._lane], bucket.shares[self._lane] * bucket.per_s
        own_s = (whole - saved) / own_per_s
        if earliest and ahead > 0:
            # The shortest wait: those before use only what other lanes leave, and this request the lane's savings.
            own_s = min(own_s, max(0.0, before) / bucket.per_s + (whole - ahead) / own_per_s)
        kept = amount if self._lane else min(amount, bucket.reserves[0])
        return max(0.0, level_s, min(own_s, self._left_s(before, kept, 0.0 if earliest else self._taken_per_s)))

    def _left_s(self, before: float, kept: float, taken_per_s: float) -> float:
        """Seconds until the request may take what other lanes leave. `before`: the amount that must flow into the
        bucket for the requests before it; `kept`: the part of the request's own amount that must flow in as well;
        `taken_per_s`: how much the more urgent lanes take per second."""
        missing = before + kept + self._held
        if missing <= 0:
            return 0.0
        left_per_s = self._bucket.per_s - taken_per_s
        full_s = max(0.0, before + self._bucket.burst) / left_per_s if left_per_s > 0 else inf
        return min(full_s, flows_in_s(missing, self._per_s - taken_per_s, self._filling))
