"""Forecasts how long a request will wait for a provider's budget, by the rule that grants it (`bucket.py`), if no more
urgent requests arrive meanwhile. So no request is refused that could begin in time."""

from collections.abc import Iterator, Sequence

from consumers.limits.account import Account, Waiter
from consumers.limits.base import CONCURRENCY, NOTHING, REASONS, Amounts, Wait
from consumers.limits.bucket import Bucket, flows_in_s


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
        count, ahead, lines = 0, [0.0, 0.0, 0.0], _lines(account, lane)
        for waiter in account.lines.firsts(lane, account.lines.count(lane)):
            found = _wait(account, lane, waiter.amounts, now_s, ahead=ahead, count=count, lines=lines)
            if found.is_too_late(now_s, waiter.until_s):
                yield waiter, found
            else:
                count += 1
                ahead = [x + y for x, y in zip(ahead, waiter.amounts, strict=True)]


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
    longest_s, reason, is_known = account.stopped_s(now_s), REASONS[0], True
    for index, line in enumerate(_lines(account, lane) if lines is None else lines):
        if amounts[index] + ahead[index] > 0 and (in_s := line.wait_s(ahead[index], amounts[index])) > longest_s:
            longest_s, reason, is_known = in_s, REASONS[index], not account.guessed[index]
    if count or not account.calls.may_begin:
        above = sum(account.lines.count(other) for other in range(lane))
        if (in_s := account.calls.wait_s(lane, above + count, count)) > longest_s:
            longest_s, reason, is_known = in_s, CONCURRENCY, True
    return Wait(longest_s, reason, is_known)


def _lines(account: Account, lane: int) -> "list[_Line]":
    above = [_ahead_of(account, other) for other in range(lane)]
    return [_Line(account, index, bucket, lane, above) for index, bucket in enumerate(account.buckets)]


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
    requests before it only the sum of their amounts counts; for the request itself the bucket's rule is applied."""

    def __init__(
        self, account: Account, index: int, bucket: Bucket, lane: int, above: Sequence[Sequence[float]]
    ) -> None:
        self._bucket = bucket
        self._lane = lane
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

    def wait_s(self, ahead: float, amount: float) -> float:
        """Seconds until a request that needs `amount` may take it, after the requests before it, which together need
        `ahead`."""
        bucket = self._bucket
        whole = ahead + (amount if amount < bucket.burst else bucket.burst)
        level_s, before = (whole - bucket.level) / bucket.per_s, ahead + self._above - bucket.level
        own_per_s = bucket.shares[self._lane] * bucket.per_s
        own_s = (whole - bucket.savings[self._lane]) / own_per_s
        if ahead > 0:  # at best, those before use only what other lanes leave, and this request the lane's savings
            own_s = min(own_s, max(0.0, before) / bucket.per_s + (whole - ahead) / own_per_s)
        kept = amount if self._lane else min(amount, bucket.reserves[0])
        return max(0.0, level_s, min(own_s, self._left_s(before, kept)))

    def _left_s(self, before: float, kept: float) -> float:
        """Seconds until the request may take what other lanes leave. `before`: the amount that must flow into the
        bucket for the requests before it; `kept`: the part of the request's own amount that must flow in as well."""
        missing = before + kept + self._held
        if missing <= 0:
            return 0.0
        full_s = max(0.0, before + self._bucket.burst) / self._bucket.per_s
        return min(full_s, flows_in_s(missing, self._per_s, self._filling))
