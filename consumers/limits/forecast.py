"""Forecasts how long a request will wait for a provider's budget, by the rule that grants it (`bucket.py`), if no more
urgent requests arrive meanwhile. So no request is refused that could begin in time."""

from collections.abc import Sequence

from consumers.limits.account import Account, Waiter
from consumers.limits.base import CONCURRENCY, NOTHING, REASONS, Amounts, Wait
from consumers.limits.bucket import flows_in_s


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


def _wait(
    account: Account,
    lane: int,
    amounts: Amounts,
    now_s: float,
    *,
    ahead: Sequence[float],
    count: int,
) -> Wait:
    longest_s, reason, is_known = account.stopped_s(now_s), REASONS[0], True
    above = [_ahead_of(account, other) for other in range(lane)]
    for index, (amount, before) in enumerate(zip(amounts, ahead, strict=True)):
        if amount + before <= 0:
            continue
        in_s = _bucket_wait_s(account, index, lane, amount, ahead=before, above=sum(takes[index] for takes in above))
        if in_s > longest_s:
            longest_s, reason, is_known = in_s, REASONS[index], not account.guessed[index]
    if count or not account.calls.may_begin:
        before = count + sum(account.lines.count(other) for other in range(lane))
        if (in_s := account.calls.wait_s(lane, before, count)) > longest_s:
            longest_s, reason, is_known = in_s, CONCURRENCY, True
    return Wait(longest_s, reason, is_known)


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


def _bucket_wait_s(account: Account, index: int, lane: int, amount: float, *, ahead: float, above: float) -> float:
    """Seconds until a request of a lane that needs `amount` of a bucket may take it, by the bucket's rule, after the
    requests of its lane before it, which together need `ahead`, and those of more urgent lanes (`above`)."""
    bucket = account.buckets[index]
    held, per_s = sum(bucket.reserves[:lane]), bucket.per_s
    # What flows into the bucket for this lane and the more urgent ones: without the shares of those less urgent lanes
    # that have waiting requests or still save. `filling`: for each that saves and has none, for how many seconds it
    # does, and how much per second.
    filling: list[tuple[float, float]] = []
    for other in range(lane + 1, len(bucket.shares)):
        its, its_per_s = bucket.held(other), bucket.shares[other] * bucket.per_s
        held += its
        if account.lines.sums(other)[index] + account.waiting_elsewhere[other][index] > 0:
            per_s -= its_per_s
        elif (missing := bucket.reserves[other] - its) > 0:
            per_s -= its_per_s
            filling.append((missing / its_per_s, its_per_s))
    whole = ahead + (amount if amount < bucket.burst else bucket.burst)
    level_s, before = (whole - bucket.level) / bucket.per_s, ahead + above - bucket.level
    own_per_s = bucket.shares[lane] * bucket.per_s
    own_s = (whole - bucket.savings[lane]) / own_per_s
    if ahead > 0:  # at best, those before use only what other lanes leave, and this request the lane's savings
        own_s = min(own_s, max(0.0, before) / bucket.per_s + (whole - ahead) / own_per_s)
    # or the request takes what other lanes leave
    missing = before + held + (amount if lane else min(amount, bucket.reserves[0]))
    full_s = max(0.0, before + bucket.burst) / bucket.per_s
    left_s = 0.0 if missing <= 0 else min(full_s, flows_in_s(missing, per_s, filling))
    return max(0.0, level_s, min(own_s, left_s))
