"""START HERE for the budget: holds one account's token buckets, waiting requests and running calls, and decides which
request gets budget next. Times are passed in.

An account is the limits that a provider enforces together: requests, input tokens and output tokens per minute. Each
limit has a token bucket. `grant_next`, which is called after every change, looks at the first waiting request of each
lane, in order of urgency, and grants the first of them that may take what it needs from all three buckets (`Bucket`
has the rule). Each lane saves its share of what flows into a bucket, and may always spend these savings; beyond them,
it may spend only what leaves the reserves of more urgent lanes (their shares of the bucket's size) untouched. While the
number of calls at a time is limited (`concurrency.py`), each lane has a share of the calls as well.
"""

import asyncio
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from math import exp, inf
from operator import attrgetter
from typing import Final

from consumers.limits.base import (
    CONCURRENCY,
    INPUT,
    NOTHING,
    OUTPUT,
    REASONS,
    ROUNDED_BY,
    Amounts,
    BudgetSpec,
    Feedback,
    Kind,
    RateHeaders,
    Reservation,
    Wait,
    WaitTooLong,
)
from consumers.limits.concurrency import Concurrency
from consumers.limits.learned import MARGIN_MOST, NO_LIMIT, PATIENCE_S, Adaptive, Bursts, Learned, Size

HOLD_AT_MOST_S = 60.0
HELD_EVERY_S = 60.0
"""Running calls are accepted as the cause of a refusal (429) at most once in this many seconds."""
DEMAND_WITHIN_S = 60.0


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits for the budget of an account. `lane`: the rank of its lane, 0 for the most urgent."""

    lane: int
    amounts: Amounts
    _: KW_ONLY
    arrived_s: float
    until_s: float | None = None
    request: str = ""
    reservation: Reservation | None = None
    future: "asyncio.Future[None] | None" = None

    @property
    def is_gone(self) -> bool:
        """True if the request's wait was cancelled or has timed out. Its task may not have run since, so that the
        request is still in its line; it must not be granted."""
        return self.future is not None and self.future.done()

    def wake(self) -> None:
        if self.future is not None:  # otherwise its task is not waiting yet, and will find `reservation` set
            self.future.set_result(None)

    def refuse(self, wait: Wait) -> None:
        if self.future is not None and not self.is_gone:
            self.future.set_exception(WaitTooLong(wait))


class Account:
    """The budget of one account at a provider."""

    def __init__(self, name: str, spec: BudgetSpec, *, now_s: float) -> None:
        self.name = name
        self.lanes = tuple(spec.shares)
        self.ranks = tuple(spec.ranks.get(lane, number) for number, lane in enumerate(self.lanes))
        self.shares = tuple(spec.shares.values())
        caps = spec.caps(name)
        self._adaptive = Adaptive(spec.start, caps, now_s=now_s)
        self._bursts = Bursts(spec.burst_s)
        self.guessed = self._adaptive.guessed()
        sizes = self._bursts.sizes(guessed=self.guessed)
        limits = zip(self._adaptive.per_minute(), sizes, strict=True)
        self.buckets = tuple(Bucket(*limit, shares=self.shares, now_s=now_s) for limit in limits)
        self.demand = Demand(len(self.lanes), now_s=now_s)
        self.lines = Lines(len(self.lanes))
        self.concurrency = Concurrency(caps.concurrency, self.shares)
        self._running_calls = RunningCalls()
        self.held_until_s = -inf
        self.is_pressed = False
        self.waiting_elsewhere: Sequence[Sequence[float]] = ()
        self.forget_elsewhere()

    @property
    def is_idle(self) -> bool:
        return self.lines.is_empty and not self.concurrency.running

    def refill(self, now_s: float) -> None:
        for bucket in self.buckets:
            bucket.refill(now_s)

    def stopped_s(self, now_s: float) -> float:
        left_s = self.held_until_s - now_s
        return left_s if 0 < left_s < HOLD_AT_MOST_S + 1 else 0.0

    # ---- the line ----------------------------------------------------------------------------------------------------

    def join(self, waiter: Waiter) -> bool:
        """Put a request into its lane's line. Returns True if it is now the first of the line, so that `grant_next` may
        grant it. It needs at most what the limits allow in a minute, because the provider refuses a larger call, for
        which all lanes would stop in vain."""
        requests, input_tokens, output_tokens = waiter.amounts
        input_most, output_most = (60 * self.buckets[index].per_s for index in (INPUT, OUTPUT))
        if self._bursts.margin or input_tokens > input_most or output_tokens > output_most:
            input_tokens = min(input_most, input_tokens * (1 + self._bursts.margin))
            waiter.amounts = Amounts(requests, input_tokens, min(output_most, output_tokens))
        if not self.lines.join(waiter):
            return False
        self._head_changed(waiter.lane)
        return True

    def leave(self, waiter: Waiter) -> bool:
        if not self.lines.leave(waiter):
            return False
        self._head_changed(waiter.lane)
        return True

    def grant_next(self, now_s: float) -> tuple[Waiter | None, float]:
        """Grant the next waiting request, if the budget allows it: take it out of its line and give it a reservation.
        Returns the granted request and 0; or, if none may be granted now, None and the seconds after which to call this
        again."""
        self.refill(now_s)
        if self.lines.is_empty:
            return None, inf
        if (stopped_s := self.stopped_s(now_s)) > 0:
            return None, stopped_s
        calls = self.concurrency
        calls.tick(now_s)
        lanes: Sequence[int] = range(len(self.lanes))
        if calls.is_limited:
            lanes = sorted(lanes, key=lambda lane: not calls.is_due(lane))
        soonest_s = inf
        for lane in lanes:
            while (waiter := self.lines.heads[lane]) is not None and waiter.is_gone:
                self.leave(waiter)
            if waiter is None:
                continue
            if not calls.may_begin(lane, now_s):
                calls.is_wanted = True
                soonest_s = min(soonest_s, calls.changes_in_s(now_s))
                continue
            in_s = 0.0
            for bucket, amount in zip(self.buckets, waiter.amounts):  # noqa: B905  checking costs a tenth of a grant
                if amount > 0 and (wait_s := bucket.wait_s(lane, amount)) > in_s:
                    in_s = wait_s
            if in_s == 0:
                taken = [bucket.take(lane, amount) for bucket, amount in zip(self.buckets, waiter.amounts, strict=True)]
                self._begin(waiter, Amounts(*taken), now_s)
                return waiter, 0.0
            self.is_pressed = True
            if in_s < soonest_s:
                soonest_s = in_s
        return None, soonest_s

    # ---- after a call ------------------------------------------------------------------------------------------------

    def settle(self, reservation: Reservation, used: Amounts | None, now_s: float) -> None:
        if reservation.is_settled:
            return
        reservation.is_settled = True
        self._running_calls.end(reservation)
        lane, reserved, spent = self.lanes.index(reservation.lane), reservation.amounts, used or NOTHING
        self.concurrency.end(lane, reservation.request, reservation.at_s, now_s, is_made=used is not None)
        self.refill(now_s)
        more = Amounts(spent[0] - reserved[0], spent[1] - reserved[1], spent[2] - reserved[2])
        for bucket, amount, saved in zip(self.buckets, more, reservation.from_savings, strict=True):
            if amount < 0:
                bucket.give_back(lane, -amount, from_savings=saved)
            elif amount > 0:
                bucket.take(lane, amount)
        self.demand.add(lane, more, now_s)

    def learn(self, feedback: Feedback, now_s: float) -> bool:
        """Learn the account's limits from one response of the provider. Returns True if calls must stop for a while."""
        if feedback.kind is Kind.OVERLOADED:
            self.concurrency.overloaded(feedback.request, feedback.took_s, now_s)
        return self.learn_limits(feedback, now_s)

    def learn_limits(self, feedback: Feedback, now_s: float) -> bool:
        self.refill(now_s)
        has_limits, stopped, missing = False, False, 0.0
        if feedback.rate is not None:
            has_limits = self._adaptive.learn(feedback.rate, now_s)
            if self._bursts.learn(feedback.rate, feedback.counted) or has_limits:
                self._resize()
            missing = self._lower(feedback, feedback.rate)
        if self._adaptive.is_stale(now_s):
            self._adaptive.forget(now_s)
            self._bursts.forget(self._adaptive.guessed())
            self._resize()
        match feedback.kind:
            case Kind.ANSWERED:
                if feedback.rate is None and self._adaptive.learn_no_rate():
                    self._resize()
                if not has_limits:  # new limits were announced: they may rise only with the next response
                    if self._adaptive.answered(now_s, pressed=self.is_pressed):
                        self._resize()
                        self.is_pressed = False
                    if self._bursts.answered(now_s):
                        self._resize()
            case Kind.RATE_LIMITED:
                if not has_limits and not self._running_calls.hold(missing, now_s):
                    self._refused(feedback.rate, now_s)
                is_explained = feedback.rate is not None and (
                    any(self._bursts.spent(feedback.rate)) or self._is_large(feedback.rate)
                )
                if feedback.retry_after_s is not None and feedback.retry_after_s > 0 and not is_explained:
                    until_s = now_s + min(feedback.retry_after_s, HOLD_AT_MOST_S)
                    self.held_until_s = max(self.held_until_s, until_s)
                    stopped = True
            case Kind.OVERLOADED | Kind.FAILED:
                pass
        return stopped

    def is_stale(self, now_s: float) -> bool:
        return self._adaptive.is_stale(now_s)

    def per_minute(self) -> Amounts:
        return self._adaptive.per_minute()

    def reason(self, waiter: Waiter, now_s: float) -> str:
        if self.stopped_s(now_s) == 0 and not self.concurrency.may_begin(waiter.lane, now_s):
            return CONCURRENCY
        self.refill(now_s)
        waits_s = [
            bucket.wait_s(waiter.lane, amount) if amount > 0 else 0.0
            for bucket, amount in zip(self.buckets, waiter.amounts, strict=True)
        ]
        return REASONS[waits_s.index(max(waits_s))]

    def figures(self, now_s: float) -> Iterator[tuple[str, dict[str, float]]]:
        self.refill(now_s)
        for reason, bucket in zip(REASONS, self.buckets, strict=True):
            if (limit := 60 * bucket.per_s) < NO_LIMIT:
                left = max(0.0, bucket.level)
                yield reason, {"limit": limit, "left": left, "used": bucket.burst - left}
        calls = {"used": float(self.concurrency.running)}
        if self.concurrency.is_limited:
            calls |= {"limit": self.concurrency.limit, "left": max(0.0, self.concurrency.limit - calls["used"])}
        yield CONCURRENCY, calls

    # ---- shared with other processes ---------------------------------------------------------------------------------

    def learned(self) -> Learned:
        return Learned(self._adaptive.learned, self._bursts.learned, self.held_until_s)

    def load(self, learned: Learned) -> None:
        self._adaptive.learned, self._bursts.learned, self.held_until_s = learned
        self._resize()

    def shift(self, jump_s: float) -> None:
        """Add `jump_s` to all times that this account has recorded, because the clock has jumped by so many seconds."""
        self.lines.shift(jump_s)
        self.load(self.learned().shifted(jump_s))
        self._running_calls.shift(jump_s)
        self.concurrency.shift(jump_s)
        self.demand.shift(jump_s)

    def forget_elsewhere(self) -> None:
        self.waiting_elsewhere = [NOTHING for _ in self.lanes]

    def due_for_a_call(self) -> list[bool]:
        return [head is not None and self.concurrency.is_due(lane) for lane, head in enumerate(self.lines.heads)]

    def begin(self, waiter: Waiter, *, from_savings: Amounts, now_s: float) -> bool:
        if waiter.is_gone or waiter not in self.lines:
            return False
        self._begin(waiter, from_savings, now_s)
        return True

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _begin(self, waiter: Waiter, from_savings: Amounts, now_s: float) -> None:
        lane, amounts = waiter.lane, waiter.amounts
        self.concurrency.begin(lane, waiter.request, self.lines.heads, now_s)
        self.lines.leave(waiter)
        self.demand.add(lane, amounts, now_s)
        waiter.reservation = Reservation(
            account=self.name,
            lane=self.lanes[lane],
            amounts=amounts,
            from_savings=from_savings,
            at_s=now_s,
            request=waiter.request,
        )
        self._running_calls.begin(waiter.reservation)
        self._head_changed(lane)

    def _head_changed(self, lane: int) -> None:
        waiter = self.lines.heads[lane]
        for bucket, amount in zip(self.buckets, waiter.amounts if waiter else NOTHING, strict=True):
            bucket.want(lane, amount)

    def _lower(self, feedback: Feedback, rate: RateHeaders) -> float:
        """Lower the buckets to what the provider says is left of its limits. What flows in while the answer travels is
        added to its numbers, and the largest possible rounding error, except after a refusal, which proves that less
        was left than the call needed. Returns by how much the input tokens were lowered."""
        before = self.buckets[INPUT].level
        of_refusal = feedback.kind is Kind.RATE_LIMITED
        for bucket, header, rounded_by in zip(self.buckets, rate, ROUNDED_BY, strict=True):
            if header.remaining is not None:
                bucket.lower(header.remaining + (0 if of_refusal else rounded_by) + feedback.took_s * bucket.per_s)
        return before - self.buckets[INPUT].level

    def _refused(self, rate: RateHeaders | None, now_s: float) -> None:
        """React to a 429. If the response does not say how much of the limits is left, lower the limits. If the refused
        call may have been too large for what is left (`_is_large`), reserve more input tokens for each later call.
        Otherwise make the token buckets smaller, and lower the limits only if smaller buckets have not helped.
        """
        if rate is None or all(header.remaining is None for header in rate):
            self._adaptive.refused(now_s)
        elif self._is_large(rate):
            self._bursts.widen(now_s)
        elif not self._bursts.refused(is_spent := self._bursts.spent(rate), now_s):
            self._adaptive.refused(now_s, is_spent)
        self._resize()

    def _is_large(self, rate: RateHeaders) -> bool:
        """True if the size of a call may explain why it was refused: some input tokens are left of the limit, but fewer
        than the largest running call may need."""
        left = rate.input_tokens.remaining
        return left is not None and not self._bursts.spent(rate)[1] and self._running_calls.needs(left)

    def _resize(self) -> None:
        was_guessed, self.guessed = self.guessed, self._adaptive.guessed()
        sizes = self._bursts.sizes(guessed=self.guessed)
        for index, (bucket, limit) in enumerate(zip(self.buckets, self._adaptive.per_minute(), strict=True)):
            bucket.resize(limit, sizes[index], fills=was_guessed[index] and not self.guessed[index])


# ---- token buckets ---------------------------------------------------------------------------------------------------

ROUNDING: Final = 1e-6
"""This amount is added to what a request needs, so that rounding errors never make our copy of a bucket fuller than the
provider's bucket."""


class Bucket:
    """One token bucket of a provider's account, and the rule that says when a request of a lane may take from it. Lanes
    "above" are more urgent, lanes "below" less urgent.

    The level is the amount that the provider will accept now. It rises at the rate of the limit, up to the bucket's
    size. A lane's savings are the part of the level that belongs to this lane. They grow by the lane's share of what
    flows in, up to the lane's reserve (its share of the bucket's size), or up to what the lane's first waiting request
    needs if that is more.

    A request may take from the bucket in one of three cases:

    1. Its lane's savings cover the request.
    2. The level covers the sum of what the request needs, the whole reserves of the lanes above, what the first waiting
       requests of those lanes need, and the savings held for the lanes below. (If the request is of the most urgent
       lane and larger than the lane's reserve, only the reserve is counted in this sum: the request takes the rest from
       what is held for other lanes.)
    3. The bucket is full, no request waits in a lane above, and no lane below has saved all that its first waiting
       request needs. The level cannot rise further, so waiting would not help.

    A lane's savings are held, which means that the lanes above may not spend them. If a lane saves more than its
    reserve because its first request is large, the excess is held only as far as the bucket also has room for the other
    lanes' reserves and for the first request of the most urgent lane. When the savings cover the large request, all of
    them are held, and the request is granted next. A bucket that holds a minute's worth of the limit has room for all
    savings; a bucket that holds a second's worth is too small to hold much for a large request.
    """

    def __init__(self, per_minute: float, size: Size, *, shares: Sequence[float], now_s: float) -> None:
        self.shares = tuple(shares)
        self._at_s = now_s
        self.burst = 0.0
        self.level = 0.0
        self._wants = [0.0 for _ in self.shares]
        self.savings = [0.0 for _ in self.shares]
        """What each lane has saved. A negative value is a debt, which the lane must pay before it saves again."""
        self.resize(per_minute, size, fills=True)

    def resize(self, per_minute: float, size: Size, *, fills: bool) -> None:
        """Change the limit and the size; call `refill` before. `fills`: if the bucket becomes larger, raise its level
        by the difference, because the provider's bucket was that large from the beginning, and only our guess of the
        limit was too low."""
        self.per_s = per_minute / 60
        # at least one, because no call could take anything from a smaller bucket
        before, self.burst = self.burst, max(1.0, per_minute * size.burst_s / 60)
        self.most = (1 - size.lost_part) * self.burst
        """The highest level from which a call can take its amount."""
        self.reserves = [share * self.burst for share in self.shares]
        self._caps = [
            max(reserve, min(wanted, self.burst)) for reserve, wanted in zip(self.reserves, self._wants, strict=True)
        ]
        self._share_out()
        if fills and (more := self.burst - before) > 0:
            self.level += more
            self.savings = [saved + share * more for saved, share in zip(self.savings, self.shares, strict=True)]
        self.lower(self.burst)

    def correct(self, level: float, savings: Sequence[float], now_s: float) -> None:
        self.level, self.savings, self._at_s = level, list(savings), now_s

    def refill(self, now_s: float) -> None:
        passed_s = now_s - self._at_s
        if passed_s <= 0:
            return
        self._at_s = now_s
        gained = passed_s * self.per_s
        level = self.level + gained
        self.level = level if level < self.burst else self.burst
        savings, caps = self.savings, self._caps
        for lane, share in enumerate(self.shares):
            saved, cap, step = savings[lane], caps[lane], gained * share
            if saved < cap:
                savings[lane] = saved + step if saved + step < cap else cap
            elif saved > cap:  # the lane saved for a large request that has left its line; it may come back soon
                savings[lane] = saved - step if saved - step > cap else cap

    def want(self, lane: int, amount: float) -> None:
        self._wants[lane] = amount
        reserve = self.reserves[lane]
        cap = reserve if amount <= reserve else min(amount, self.burst)
        if cap == self._caps[lane]:  # the usual case
            return
        self._caps[lane] = cap
        self._share_out()

    def _share_out(self) -> None:
        """Compute for each lane (in `_holds`) up to which amount its savings are held."""
        self._holds = list(self.reserves)
        room = self.burst - self._caps[0] - sum(self.reserves[1:])
        for other in range(1, len(self.reserves)):
            more = max(0.0, min(self._caps[other] - self.reserves[other], room))
            self._holds[other] += more
            room -= more

    def held(self, lane: int) -> float:
        saved = self.savings[lane]
        if saved <= self._holds[lane] or saved >= self._caps[lane]:
            return saved if saved > 0 else 0.0
        return self._holds[lane]

    def take(self, lane: int, amount: float) -> float:
        saved, level, most = self.savings[lane], self.level, self.most
        from_savings = amount if amount <= saved or saved >= self.burst else max(saved, 0.0)
        self.level = (level if level < most else most) - amount
        self.savings[lane] = saved - from_savings
        return from_savings

    def give_back(self, lane: int, amount: float, *, from_savings: float) -> None:
        """Give back an amount that was taken and not used."""
        self.level = min(self.burst, self.level + amount)
        saved = self.savings[lane]
        self.savings[lane] = max(saved, min(self._caps[lane], saved + min(amount, from_savings)))

    def lower(self, level: float) -> None:
        """Lower the level to `level`, the amount that the provider says is left of its limit. If the lanes' savings
        together exceed it, they are scaled down to it; debts stay as they are."""
        if level >= self.level:
            return
        self.level = level
        total = sum(saved for saved in self.savings if saved > 0)
        if total > level:
            self.savings = [saved * max(level, 0.0) / total if saved > 0 else saved for saved in self.savings]

    def wait_s(self, lane: int, amount: float) -> float:
        """Seconds until a request of this lane may take the amount, if nothing else is taken or given back."""
        need, level, saved = amount + ROUNDING, self.level, self.savings[lane]
        whole = need if need < self.burst else self.burst
        level_s = (whole - level) / self.per_s if level < whole else 0.0
        enough = amount if amount < self.burst else self.burst
        if saved >= enough:
            return level_s
        reserve = self.reserves[lane]
        kept, is_first = need if lane or amount < reserve else reserve + ROUNDING, True
        for other in range(lane):
            wanted = self._wants[other]
            kept += self.reserves[other] + wanted
            is_first = is_first and wanted == 0
        below = range(lane + 1, len(self.shares))
        for other in below:  # at a full bucket, a lane below that has saved all that its first request needs goes first
            wanted = self._wants[other]
            is_first = is_first and not 0 < min(wanted, self.burst) <= self.savings[other]
        left_s = max(level_s, self._left_in_s(kept, below, is_first=is_first))
        if left_s == 0:
            return 0.0
        share = self.shares[lane]
        own_s = max(level_s, (enough - saved) / (share * self.per_s))
        return own_s if own_s < left_s else left_s

    def _left_in_s(self, kept: float, below: Sequence[int], *, is_first: bool) -> float:
        """Seconds until a request may take what other lanes leave, that is, until the level covers `kept` (the request,
        and what is kept for more urgent lanes) and the savings that will then be held for the less urgent lanes
        (`below`). `is_first`: True if no lane must go before it when the bucket is full (the third case in the class's
        docstring)."""
        if is_first and self.level >= self.burst:
            return 0.0
        need = kept
        for other in below:
            need += self.held(other)
        missing = need - self.level
        if missing <= 0:
            return 0.0
        full_s = (self.burst - self.level) / self.per_s
        filling = []
        for other in below:  # each saves its share of what flows in, until its savings reach `_holds`
            share, saved = self.shares[other], self.savings[other]
            if saved < self._holds[other]:
                if saved < 0:  # the lane must pay its debt before it saves, so this is the earliest time
                    return min(full_s if is_first else inf, missing / self.per_s)
                filling.append(((self._holds[other] - saved) / (share * self.per_s), share * self.per_s))
        in_s = flows_in_s(missing, self.per_s - sum(per_s for _, per_s in filling), filling)
        if in_s <= full_s:
            return in_s
        return full_s if is_first else inf


def flows_in_s(missing: float, per_s: float, filling: Sequence[tuple[float, float]]) -> float:
    """Seconds until the amount `missing` has flowed into a bucket for a request. `filling`: for each lane
    that will have saved enough, after how many seconds the rate rises, and by how much per second."""
    passed_s = 0.0
    for in_s, more_per_s in sorted(filling):
        reached = missing - per_s * (in_s - passed_s)
        if reached <= 0:
            break
        missing, passed_s, per_s = reached, in_s, per_s + more_per_s
    return passed_s + missing / per_s if per_s > 0 else inf


# ---- waiting requests and running calls ------------------------------------------------------------------------------

_arrival = attrgetter("arrived_s")


class Lines:
    """The requests that wait for the budget of one account: one line for each lane, in the order of arrival. A request
    that was deferred and comes back gets its old place."""

    def __init__(self, lanes: int) -> None:
        self._lines: list[list[Waiter]] = [[] for _ in range(lanes)]
        self._sums = [[0.0, 0.0, 0.0] for _ in range(lanes)]
        self.heads: list[Waiter | None] = [None for _ in range(lanes)]

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines)

    def __contains__(self, waiter: Waiter) -> bool:
        return self._at(waiter) is not None

    def __iter__(self) -> Iterator[Waiter]:
        for line in self._lines:
            yield from line

    @property
    def is_empty(self) -> bool:
        return not any(self.heads)

    def count(self, lane: int) -> int:
        return len(self._lines[lane])

    def firsts(self, lane: int, most: int) -> Sequence[Waiter]:
        return self._lines[lane][:most]

    def sums(self, lane: int) -> Sequence[float]:
        return self._sums[lane]

    def before(self, waiter: Waiter) -> tuple[Sequence[float], int]:
        line = self._lines[waiter.lane]
        if line[-1] is waiter:
            sums = self._sums[waiter.lane]
            return [total - amount for total, amount in zip(sums, waiter.amounts, strict=True)], len(line) - 1
        before = line[: self._at(waiter)]
        sums = [0.0, 0.0, 0.0]
        for other in before:
            for index, amount in enumerate(other.amounts):
                sums[index] += amount
        return sums, len(before)

    def join(self, waiter: Waiter) -> bool:
        line, sums = self._lines[waiter.lane], self._sums[waiter.lane]
        insort(line, waiter, key=_arrival)
        for index, amount in enumerate(waiter.amounts):
            sums[index] += amount
        self.heads[waiter.lane] = line[0]
        return line[0] is waiter

    def leave(self, waiter: Waiter) -> bool:
        at = self._at(waiter)
        if at is None:
            return False
        line, sums = self._lines[waiter.lane], self._sums[waiter.lane]
        del line[at]
        if not line:  # set to exactly 0, to clear rounding errors
            sums[:] = (0.0, 0.0, 0.0)
        else:
            for index, amount in enumerate(waiter.amounts):
                sums[index] -= amount
        self.heads[waiter.lane] = line[0] if line else None
        return at == 0

    def shift(self, jump_s: float) -> None:
        for waiter in self:
            waiter.arrived_s += jump_s
            if waiter.until_s is not None:
                waiter.until_s += jump_s

    def _at(self, waiter: Waiter) -> int | None:
        line = self._lines[waiter.lane]
        try:
            return line.index(waiter, bisect_left(line, waiter.arrived_s, key=_arrival))
        except ValueError:
            return None


class RunningCalls:
    """The reservations of an account's running calls, which may explain why the provider refuses a further call (429).

    A provider estimates a request's input tokens when its call begins, and corrects the estimate when the call ends.
    Until then it may count more tokens for the call than we have reserved.
    """

    def __init__(self) -> None:
        self._calls: dict[int, Reservation] = {}
        self._held_s = -inf

    def begin(self, reservation: Reservation) -> None:
        self._calls[id(reservation)] = reservation

    def end(self, reservation: Reservation) -> None:
        self._calls.pop(id(reservation), None)

    def shift(self, jump_s: float) -> None:
        self._held_s += jump_s
        for reservation in self._calls.values():
            reservation.at_s += jump_s

    def needs(self, left: float) -> bool:
        largest = max((reservation.amounts.input_tokens for reservation in self._calls.values()), default=0.0)
        return left < (1 + MARGIN_MOST) * largest

    def hold(self, missing: float, now_s: float) -> bool:
        """Decide whether the running calls explain a refusal: the provider may count `missing` more input tokens for
        them than were reserved. If so, raise the reservations of these calls by `missing` tokens in total, and return
        True."""
        running = sum(reservation.amounts.input_tokens for reservation in self._calls.values())
        is_same = 0 <= now_s - self._held_s < PATIENCE_S
        if not 0 < missing <= MARGIN_MOST * running or not (is_same or now_s - self._held_s > HELD_EVERY_S):
            return False
        if not is_same:
            self._held_s = now_s
        for reservation in self._calls.values():
            amount = reservation.amounts.input_tokens
            reservation.amounts = reservation.amounts._replace(input_tokens=amount * (1 + missing / running))
        return True


class Demand:
    """How much each lane has taken from each token bucket lately."""

    def __init__(self, lanes: int, *, now_s: float) -> None:
        self._spent = [[0.0, 0.0, 0.0] for _ in range(lanes)]
        self._at_s = [now_s for _ in range(lanes)]

    def add(self, lane: int, amounts: Amounts, now_s: float) -> None:
        requests, input_tokens, output_tokens = self._spent[lane]
        passed_s = now_s - self._at_s[lane]
        self._at_s[lane] = now_s
        kept = exp(-passed_s / DEMAND_WITHIN_S) if passed_s > 0 else 1.0
        self._spent[lane] = [
            requests * kept + amounts[0],
            input_tokens * kept + amounts[1],
            output_tokens * kept + amounts[2],
        ]

    def shift(self, jump_s: float) -> None:
        self._at_s = [at_s + jump_s for at_s in self._at_s]

    def per_s(self, lanes: Sequence[int], index: int, now_s: float) -> float:
        within_s = DEMAND_WITHIN_S
        return sum(
            max(0.0, self._spent[lane][index]) * exp(min(0.0, self._at_s[lane] - now_s) / within_s) / within_s
            for lane in lanes
        )
