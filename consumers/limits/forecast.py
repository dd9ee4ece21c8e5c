"""How long a request would wait, by the rule that grants it (`bucket.py`). Pure.

Two answers. At the earliest: if nothing more came in the lanes above; by this alone a request is sent away, and only
where the limits are known. And as is to be expected: if the lanes above go on spending as they did in the last minute.
What later calls give back makes both shorter.
"""

from collections.abc import Iterator, Sequence
from math import inf

from consumers.limits.account import Account
from consumers.limits.amounts import CONCURRENCY, NOTHING, PAUSED, REASONS, Amounts
from consumers.limits.base import Wait
from consumers.limits.bucket import Bucket
from consumers.limits.order import Order
from consumers.limits.waiter import Waiter


def wait(account: Account, lane: int, amounts: Amounts, now_s: float) -> Wait:
    """For one that joined the end of its lane's line now."""
    account.refill(now_s)
    ahead = [x + y for x, y in zip(account.lines.sums(lane), account.elsewhere[lane], strict=True)]
    return _wait(account, lane, amounts, now_s, ahead=ahead, count=account.lines.count(lane))


def of(account: Account, waiter: Waiter, now_s: float) -> Wait:
    """For one that has just joined the line. What has come back may stand before those of other processes."""
    account.refill(now_s)
    lane, amounts = waiter.lane, waiter.amounts
    ahead, count = account.lines.before(waiter)
    if waiter.arrived_s >= now_s:
        ahead = [x + y for x, y in zip(ahead, account.elsewhere[lane], strict=True)]
    return _wait(account, lane, amounts, now_s, ahead=ahead, count=count)


def first(account: Account, lane: int, amounts: Amounts, now_s: float) -> Wait:
    """For the first of a lane's line."""
    account.refill(now_s)
    return _wait(account, lane, amounts, now_s, ahead=NOTHING, count=0)


def hopeless(account: Account, now_s: float) -> Iterator[tuple[Waiter, Wait]]:
    """Those in line that will be too late, with what they would wait. Dear: it looks at all of them."""
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
    """`ahead`: what those before it in its lane's line wait for; `count`: how many they are in this process; `lines`:
    the lane's, if they are known."""
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
        above_it = sum(account.lines.count(other) for other in account.lines.order(now_s).above[lane])
        count = min(above_it + count, account.calls_before(lane, count))
        if (in_s := account.concurrency.wait_s(count)) > longest_s:
            longest_s, reason, is_known = in_s, CONCURRENCY, account.concurrency.is_set
            least_s = in_s if is_known else least_s
    return Wait(longest_s, reason, least_s, is_known)


def _lines(account: Account, lane: int, now_s: float) -> "list[_Line]":
    """Before each bucket."""
    order = account.lines.order(now_s)
    above = [(other, _ahead_of(account, other)) for other in order.above[lane]]
    lines = [_Line(account, each, bucket, lane, order, above) for each, bucket in enumerate(account.buckets)]
    for each, line in enumerate(lines):
        line.taken_per_s = account.demand.per_s(order.above[lane], each, now_s)
    return lines


def _ahead_of(account: Account, lane: int) -> Sequence[float]:
    """What a lane above will take before those below it. It waits for one bucket most of all; of the others it takes no
    more meanwhile than its first request needs."""
    sums = [x + y for x, y in zip(account.lines.sums(lane), account.elsewhere[lane], strict=True)]
    if sums[0] == 0 or (head := account.lines.heads[lane]) is None:
        return sums
    waits_s = [(total - bucket.level) / bucket.per_s for total, bucket in zip(sums, account.buckets, strict=True)]
    most = waits_s.index(max(waits_s))
    return [total if each == most else head.amounts[each] for each, total in enumerate(sums)]


class _Line:
    """A lane's line before one bucket: those ahead as if they were a fluid, the one asked for by the bucket's rule."""

    __slots__ = ("_above", "_bucket", "_filling", "_held", "_is_top", "_lane", "_slope", "taken_per_s")

    def __init__(
        self,
        account: Account,
        each: int,
        bucket: Bucket,
        lane: int,
        order: Order,
        above: Sequence[tuple[int, Sequence[float]]],
    ) -> None:
        self._bucket = bucket
        self._lane = lane
        self._is_top = not above
        self.taken_per_s = 0.0
        """What the lanes above will go on taking, as is to be expected."""
        self._above = self._held = 0.0
        """What those above will take; what the level must cover beside what is wanted."""
        for other, takes in above:
            self._above += takes[each]
            self._held += bucket.reserves[other]
        self._slope = 1.0
        """How much of what comes in is for this lane and those above, while lanes below spend or save theirs."""
        self._filling: list[tuple[float, float]] = []
        """When each lane below that only saves has saved all, and its share."""
        for other in order.below[lane]:
            saved, share = bucket.held(other), bucket.shares[other]
            self._held += saved
            if account.lines.sums(other)[each] + account.elsewhere[other][each] > 0:
                self._slope -= share
            elif share and (missing := bucket.reserves[other] - saved) > 0:
                self._slope -= share
                self._filling.append((missing / (share * bucket.per_s), share))
        self._filling.sort()

    def wait_s(self, ahead: float, amount: float, taken_per_s: float = 0.0, *, earliest: bool = False) -> float:
        """Until it may go, behind `ahead`: on what the lane saves alone, or on what the others leave; `taken_per_s`:
        what lanes above will have taken of it."""
        bucket = self._bucket
        whole = ahead + (amount if amount < bucket.burst else bucket.burst)
        level_s, before = (whole - bucket.level) / bucket.per_s, ahead + self._above - bucket.level
        part, share = bucket.parts[self._lane], bucket.shares[self._lane]
        if whole <= part:
            return max(0.0, level_s)
        own_s = (whole - part) / (share * bucket.per_s) if share else inf
        if earliest and ahead > 0 and share:  # the one before may go on what the others leave, and this one on its own
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
