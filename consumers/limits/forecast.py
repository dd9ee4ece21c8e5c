"""How long a request would wait, by the rule that grants it (`bucket.py`). Pure.

Two answers. At the earliest: if nothing more came in the lanes above; by this alone a request is sent away, and only
where the limits are known. And as is to be expected: if the lanes above go on spending as they did in the last minute.
What later calls give back makes both shorter.
"""

from collections.abc import Iterator
from math import inf

from consumers.limits.account import Account
from consumers.limits.amounts import CONCURRENCY, PAUSED, REASONS, Amounts
from consumers.limits.base import Wait
from consumers.limits.bucket import Bucket
from consumers.limits.order import Order, Waiter


def wait(account: Account, lane: int, amounts: Amounts, now_s: float) -> Wait:
    """For one that joined the end of its lane's line now."""
    account.refill(now_s)
    ahead, others = account.lines.sums(lane), account.elsewhere[lane]
    wanted = Amounts(*(x + y + z for x, y, z in zip(ahead, others, amounts, strict=True)))
    return _wait(account, lane, wanted, now_s)


def of(account: Account, waiter: Waiter, now_s: float) -> Wait:
    """For one that stands in line."""
    account.refill(now_s)
    ahead, others = account.lines.up_to(waiter), account.elsewhere[waiter.lane]
    wanted = Amounts(*(x + y for x, y in zip(ahead, others, strict=True)))
    return _wait(account, waiter.lane, wanted, now_s)


def first(account: Account, lane: int, amounts: Amounts, now_s: float) -> Wait:
    """For the first of a lane's line."""
    account.refill(now_s)
    return _wait(account, lane, amounts, now_s)


def hopeless(account: Account, now_s: float) -> Iterator[tuple[Waiter, Wait]]:
    """Those in line that will be too late, with what they would wait. Dear: it looks at all of them."""
    account.refill(now_s)
    lane, ahead = -1, (0.0, 0.0, 0.0)
    for waiter in list(account.lines):
        if waiter.lane != lane:
            lane, ahead = waiter.lane, (0.0, 0.0, 0.0)
        requests, input_tokens, output_tokens = waiter.amounts
        with_it = Amounts(ahead[0] + requests, ahead[1] + input_tokens, ahead[2] + output_tokens)
        found = _wait(account, lane, with_it, now_s)
        if found.reason == PAUSED or (waiter.until_s is not None and now_s + found.least_s > waiter.until_s):
            yield waiter, found
        else:
            ahead = with_it


def _wait(account: Account, lane: int, wanted: Amounts, now_s: float) -> Wait:
    """`wanted`: its own and what is before it in its lane's line."""
    if (paused_s := account.paused_s(now_s)) > 0:
        return Wait(paused_s, PAUSED, paused_s)
    order = account.lines.order(now_s)
    longest_s, least_s, reason, is_known = 0.0, 0.0, REASONS[0], True
    for each, bucket in enumerate(account.buckets):
        if wanted[each] <= 0:
            continue
        line = _Line(account, each, bucket, lane, order)
        taken_per_s = account.demand.per_s(order.above[lane], each, now_s)
        if (in_s := line.wait_s(wanted[each], taken_per_s)) > longest_s:
            longest_s, reason, is_known = in_s, REASONS[each], not account.guessed[each]
        if in_s > least_s and not account.guessed[each]:
            least_s = max(least_s, line.wait_s(wanted[each], 0.0))
    stopped_s = account.stopped_s(now_s)
    longest_s, least_s = max(longest_s, stopped_s), max(least_s, stopped_s)
    ahead = sum(account.lines.count(other) for other in (*order.above[lane], lane))
    if (in_s := account.concurrency.wait_s(ahead)) > longest_s:
        longest_s, least_s, reason, is_known = in_s, in_s, CONCURRENCY, True
    return Wait(longest_s, reason, least_s, is_known)


class _Line:
    """A lane's line before one bucket, as if requests were a fluid."""

    __slots__ = ("_bucket", "_filling", "_kept", "_lane", "_slope")

    def __init__(self, account: Account, each: int, bucket: Bucket, lane: int, order: Order) -> None:
        self._bucket = bucket
        self._lane = lane
        self._kept = 0.0
        """What the level must cover beside what is wanted."""
        for other in order.above[lane]:
            self._kept += bucket.reserves[other] + account.lines.sums(other)[each] + account.elsewhere[other][each]
        self._slope = 1.0
        """How much of what comes in is for this lane and those above, while lanes below spend or save theirs."""
        self._filling: list[tuple[float, float]] = []
        """When each lane below that only saves has saved all, and its share."""
        for other in order.below[lane]:
            saved, share = max(0.0, bucket.parts[other]), bucket.shares[other]
            self._kept += saved
            if account.lines.sums(other)[each] + account.elsewhere[other][each] > 0:
                self._slope -= share
            elif share and (missing := bucket.reserves[other] - saved) > 0:
                self._slope -= share
                self._filling.append((missing / (share * bucket.per_s), share))
        self._filling.sort()

    def wait_s(self, wanted: float, taken_per_s: float) -> float:
        """Until so much has gone through: by what the lane saves alone, or by what the others leave; `taken_per_s`:
        what lanes above will have taken of it."""
        bucket = self._bucket
        level_s = (wanted - bucket.level) / bucket.per_s
        part, share = bucket.parts[self._lane], bucket.shares[self._lane]
        if wanted <= part:
            return max(0.0, level_s)
        own_s = max(level_s, (wanted - part) / (share * bucket.per_s)) if share else inf
        return max(0.0, min(own_s, self._left_s(wanted, taken_per_s)))

    def _left_s(self, wanted: float, taken_per_s: float) -> float:
        missing = wanted + self._kept - self._bucket.level
        per_s, passed_s = self._slope * self._bucket.per_s - taken_per_s, 0.0
        if missing <= 0:
            return 0.0
        for in_s, share in self._filling:
            reached = missing - per_s * (in_s - passed_s)
            if reached <= 0:
                break
            missing, passed_s, per_s = reached, in_s, per_s + share * self._bucket.per_s
        return passed_s + missing / per_s if per_s > 0 else inf
