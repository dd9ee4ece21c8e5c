"""How long a request would wait, if nothing came that goes before it. Pure.

Every waiter before it is served first, by what comes in and is lent to it; or its lane's own part alone is sooner. What
later calls give back makes it shorter, what comes in more urgent lanes longer.
"""

from collections.abc import Iterator
from math import inf

from consumers.limits.account import Account
from consumers.limits.amounts import CONCURRENCY, PAUSED, REASONS, Amounts
from consumers.limits.base import Wait
from consumers.limits.bucket import Bucket
from consumers.limits.order import Waiter


def wait(account: Account, lane: int, amounts: Amounts, now_s: float) -> Wait:
    """For one that joined the end of its lane's line now."""
    account.refill(now_s)
    ahead, others = account.lines.sums(lane), account.elsewhere[lane]
    wanted = Amounts(*(x + y + z for x, y, z in zip(ahead, others, amounts, strict=True)))
    return _wait(account, lane, wanted, now_s)


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
        if found.reason == PAUSED or (waiter.until_s is not None and now_s + found.seconds > waiter.until_s):
            yield waiter, found
        else:
            ahead = with_it


def _wait(account: Account, lane: int, wanted: Amounts, now_s: float) -> Wait:
    """`wanted`: its own and what is before it in its lane's line."""
    if (paused_s := account.paused_s(now_s)) > 0:
        return Wait(paused_s, PAUSED)
    longest_s, reason = 0.0, REASONS[0]
    for each, bucket in enumerate(account.buckets):
        if wanted[each] > 0 and (in_s := _for(account, each, bucket, lane, wanted[each])) > longest_s:
            longest_s, reason = in_s, REASONS[each]
    longest_s = max(longest_s, account.stopped_s(now_s))
    ahead = sum(account.lines.count(other) for other in range(lane + 1))
    if (in_s := account.concurrency.wait_s(ahead)) > longest_s:
        longest_s, reason = in_s, CONCURRENCY
    return Wait(longest_s, reason)


def _for(account: Account, each: int, bucket: Bucket, lane: int, wanted: float) -> float:
    """Of one bucket."""
    shares, lines = account.shares, account.lines
    share = shares[lane]
    own_s = (wanted - bucket.parts[lane]) / (share * bucket.per_s) if share else inf
    own_s = max(0.0, own_s, (wanted - bucket.level) / bucket.per_s)  # after a debt the part is there before the level
    work, free, lent = wanted, bucket.level, 1.0
    filling, filling_share = 0.0, 0.0
    for other in range(len(shares)):
        if other == lane:
            continue
        waits_for = lines.sums(other)[each] + account.elsewhere[other][each]
        if waits_for > 0 and other < lane:
            work += waits_for
            continue
        part = max(0.0, bucket.parts[other])
        free -= part
        if waits_for > 0:
            lent -= shares[other]
        elif (missing := shares[other] * bucket.burst - part) > 0:  # nobody waits for it, and yet it is filled first
            filling += missing
            filling_share += shares[other]
    if work <= free:
        return 0.0
    while_filling_s = (work - free) / ((lent - filling_share) * bucket.per_s) if lent > filling_share else inf
    filled_s = (work - free + filling) / (lent * bucket.per_s) if lent > 0 else inf
    return min(own_s, while_filling_s, filled_s)
