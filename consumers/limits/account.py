"""START HERE for the budget: one account's buckets, lines and calls, and whose turn it is. Pure; time is passed in.

Whose turn it is, again after every change:

1. The first of a lane that can be granted from its own lane's part alone: nobody else loses by it.
2. Else the first of all (`order.py`), from its lane's part and the pool together. It keeps the pool until it is
   granted, so that a large request is not starved by small ones.

What is larger than the whole bucket is granted when that is full, and leaves a debt that all wait for.
"""

from collections.abc import Sequence
from math import inf
from typing import Any

from consumers.limits.adaptive import Adaptive
from consumers.limits.amounts import CONCURRENCY, PAUSED, REASONS, Amounts
from consumers.limits.base import Heard, Kind, Reservation
from consumers.limits.bucket import Bucket
from consumers.limits.concurrency import Concurrency
from consumers.limits.headers import ROUNDED_BY, RateHeaders
from consumers.limits.order import Lines, Waiter
from consumers.limits.spec import BudgetSpec

HOLD_AT_MOST_S = 60.0
"""What a `retry-after` is believed: the buckets are a minute's."""
SPENT = 0.01
"""A bucket with less of its limit left explains a refusal."""
WHOLE = 1 - 1e-9


class Account:
    """Lanes are numbered by rank, as they stand in the spec."""

    def __init__(self, name: str, spec: BudgetSpec, *, now_s: float) -> None:
        self.name = name
        self._spec = spec
        self._names = tuple(spec.lanes)
        self.shares = tuple(lane.share for lane in spec.lanes.values())
        caps = spec.caps(name)
        self._adaptive = Adaptive(spec.start, caps, now_s=now_s)
        self.buckets = tuple(
            Bucket(each, burst_s=spec.burst_s, shares=self.shares, now_s=now_s) for each in self._adaptive.per_minute()
        )
        self.lines = Lines([lane.boost_s for lane in spec.lanes.values()])
        self.concurrency = Concurrency(caps.concurrency)
        self._turns = [0.0 for _ in self._names]
        """Where calls are what is short: each lane's share of them, saved up to one."""
        self.paused_until_s = self.held_until_s = -inf
        self._pressed = False
        self.elsewhere: list[Sequence[float]] = [(0.0, 0.0, 0.0) for _ in self._names]
        """What those of each lane wait for that wait in other processes."""

    def dump(self) -> list[Any]:
        """What was learned, for other processes; as JSON has it."""
        return [self._adaptive.dump(), self.paused_until_s, self.held_until_s]

    def load(self, learned: Sequence[Any]) -> None:
        """What other processes have learned."""
        limits, self.paused_until_s, self.held_until_s = learned
        self._adaptive.load(limits)
        self._resize()

    def lane_to_start(self) -> int | None:
        """Where calls are what is short, and a lane's turn has come: that lane alone."""
        if not self.concurrency.is_limited:
            return None
        return next(
            (lane for lane, head in enumerate(self.lines.heads) if head is not None and self._has_turn(lane)), None
        )

    def begin(self, waiter: Waiter, reservation: Reservation) -> bool:
        """Somebody else has granted it: it leaves its line. False where it is no longer there."""
        if waiter.number not in self.lines:
            return False
        waiter.reservation = reservation
        if self.concurrency.is_limited:
            self._turn_taken(waiter.lane)
        self.lines.leave(waiter)
        self.concurrency.begin()
        self._head_changed(waiter.lane)
        return True

    def refill(self, now_s: float) -> None:
        """What has come in since."""
        for bucket in self.buckets:
            bucket.refill(now_s)

    def paused_s(self, now_s: float) -> float:
        """How long nothing is granted, because of a spend limit."""
        return max(0.0, self.paused_until_s - now_s)

    # ---- the line ----------------------------------------------------------------------------------------------------

    def join(self, waiter: Waiter) -> bool:
        """Whether it is the first of its lane, so that `turn` may find something to do."""
        if not self.lines.join(waiter):
            return False
        self._head_changed(waiter.lane)
        return True

    def leave(self, waiter: Waiter) -> bool:
        """Ungranted; whether another has become the first of its lane."""
        if not self.lines.leave(waiter):
            return False
        self._head_changed(waiter.lane)
        return True

    def turn(self, now_s: float) -> tuple[Waiter | None, float]:
        """The next that may go, taken out of its line, with its reservation; else when to look again, if nothing
        happens before: in so many seconds, or not by time alone.
        """
        self.refill(now_s)
        stopped_s = max(self.paused_until_s, self.held_until_s) - now_s
        if stopped_s > 0:
            return None, stopped_s
        first = self.lines.first(now_s)
        if first is None or self.concurrency.is_full:
            return None, inf
        self._pressed = True
        soonest_s, is_owed = self.lines.boost_in_s(now_s), False
        for waiter in self.lines.heads:
            if waiter is None or not self._has_turn(waiter.lane):
                continue
            in_s = self._part_wait_s(waiter)
            if in_s == 0:
                in_s = self._level_wait_s(waiter)
                if in_s == 0:
                    return self._granted(waiter, now_s, own=True), 0.0
                is_owed = True  # nobody may take from the pool what others have saved for
            if in_s < soonest_s:
                soonest_s = in_s
        if not is_owed:
            in_s = self._shared_wait_s(first)
            if in_s == 0:
                return self._granted(first, now_s, own=False), 0.0
            if in_s < soonest_s:
                soonest_s = in_s
        return None, soonest_s

    # ---- after a call ------------------------------------------------------------------------------------------------

    def settle(self, reservation: Reservation, used: Amounts | None, now_s: float) -> None:
        """Give back what was not used, take what was used beyond it."""
        if reservation.is_settled:
            return
        reservation.is_settled = True
        self.concurrency.end(now_s - reservation.at_s)
        lane = self._names.index(reservation.lane)
        for each, bucket in enumerate(self.buckets):
            over = reservation.amounts[each] - (used[each] if used else 0.0)
            bucket.refill(now_s)
            if over > 0:
                bucket.give_back(lane, over, own=reservation.own[each])
            elif over < 0:
                bucket.charge(lane, -over)

    def learn(self, heard: Heard, now_s: float) -> bool:
        """From one response; whether there is less than before, so that what was predicted does not hold any more."""
        self.refill(now_s)
        before = self._adaptive.per_minute()
        has_limits = heard.rate is not None and self._adaptive.hear(heard.rate)
        if has_limits:
            self._resize()
        is_explained = heard.rate is not None and self._correct(heard.rate)
        stopped = False
        match heard.kind:
            case Kind.ANSWERED:
                self.concurrency.answered()
                if self._adaptive.answered(now_s, pressed=self._pressed):
                    self._resize()
                    self._pressed = False
            case Kind.RATE_LIMITED:
                if not is_explained and not has_limits and self._adaptive.refused(now_s):
                    self._resize()
                if heard.retry_after_s is not None and heard.retry_after_s > 0:
                    until_s = now_s + min(heard.retry_after_s, HOLD_AT_MOST_S)
                    self.held_until_s = max(self.held_until_s, until_s)
                    stopped = True
            case Kind.OVERLOADED:
                self.concurrency.overloaded(now_s)
            case Kind.SPEND_LIMIT:
                self.paused_until_s = now_s + self._spec.spend_pause_s
                stopped = True
            case Kind.FAILED:
                pass
        return stopped or any(new < old for new, old in zip(self._adaptive.per_minute(), before, strict=True))

    def per_minute(self) -> Amounts:
        """The limits as they are taken to be now."""
        return self._adaptive.per_minute()

    def reason(self, waiter: Waiter, now_s: float) -> str:
        """What the first of a lane waits for."""
        if now_s < self.paused_until_s:
            return PAUSED
        if now_s >= self.held_until_s and self.concurrency.is_full:
            return CONCURRENCY
        self.refill(now_s)
        lane, amounts = waiter.lane, waiter.amounts
        buckets = [(each, amount) for each, amount in zip(self.buckets, amounts, strict=True) if amount > 0]
        reasons = [reason for reason, amount in zip(REASONS, amounts, strict=True) if amount > 0]
        own_s = [max(bucket.part_wait_s(lane, amount), bucket.level_wait_s(amount)) for bucket, amount in buckets]
        shared_s = [bucket.shared_wait_s(lane, amount) for bucket, amount in buckets]
        sooner = min(own_s, shared_s, key=lambda each: max(each, default=0.0))
        return reasons[sooner.index(max(sooner))] if sooner else REASONS[0]

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _granted(self, waiter: Waiter, now_s: float, *, own: bool) -> Waiter:
        lane = waiter.lane
        if self.concurrency.is_limited:
            self._turn_taken(lane)
        self.lines.leave(waiter)
        requests, input_tokens, output_tokens = self.buckets
        amounts = waiter.amounts
        waiter.reservation = Reservation(
            account=self.name,
            lane=self._names[lane],
            amounts=amounts,
            own=Amounts(
                requests.take(lane, amounts.requests, own=own),
                input_tokens.take(lane, amounts.input_tokens, own=own),
                output_tokens.take(lane, amounts.output_tokens, own=own),
            ),
            at_s=now_s,
        )
        self.concurrency.begin()
        self._head_changed(lane)
        return waiter

    def _turn_taken(self, lane: int) -> None:
        if self._turns[lane] >= WHOLE:
            self._turns[lane] -= 1
        for each, waiter in enumerate(self.lines.heads):
            if waiter is not None:
                self._turns[each] = min(1.0, self._turns[each] + self.shares[each])

    def _has_turn(self, lane: int) -> bool:
        return not self.concurrency.is_limited or self._turns[lane] >= WHOLE

    def _head_changed(self, lane: int) -> None:
        waiter = self.lines.heads[lane]
        for each, bucket in enumerate(self.buckets):
            bucket.want(lane, waiter.amounts[each] if waiter else 0.0)

    def _part_wait_s(self, waiter: Waiter) -> float:
        longest_s = 0.0
        for bucket, amount in zip(self.buckets, waiter.amounts):  # noqa: B905  checking costs a tenth of a grant
            if amount > 0 and (in_s := bucket.part_wait_s(waiter.lane, amount)) > longest_s:
                longest_s = in_s
        return longest_s

    def _level_wait_s(self, waiter: Waiter) -> float:
        longest_s = 0.0
        for bucket, amount in zip(self.buckets, waiter.amounts):  # noqa: B905
            if amount > 0 and (in_s := bucket.level_wait_s(amount)) > longest_s:
                longest_s = in_s
        return longest_s

    def _shared_wait_s(self, waiter: Waiter) -> float:
        longest_s = 0.0
        for bucket, amount in zip(self.buckets, waiter.amounts):  # noqa: B905
            if amount > 0 and (in_s := bucket.shared_wait_s(waiter.lane, amount)) > longest_s:
                longest_s = in_s
        return longest_s

    def _resize(self) -> None:
        for bucket, limit in zip(self.buckets, self._adaptive.per_minute(), strict=True):
            bucket.resize(limit, burst_s=self._spec.burst_s)
        for lane in range(len(self._names)):
            self._head_changed(lane)

    def _correct(self, rate: RateHeaders) -> bool:
        """Believe the provider where it has less than we thought; whether it has next to nothing."""
        is_spent = False
        for bucket, told, rounded_by in zip(self.buckets, rate.each(), ROUNDED_BY, strict=True):
            if told.remaining is None:
                continue
            bucket.lower(told.remaining + rounded_by)
            least = max(1.0, SPENT * (told.limit or bucket.per_s * 60))
            is_spent = is_spent or told.remaining < least
        return is_spent
