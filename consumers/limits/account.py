"""START HERE for the budget: holds one account's token buckets, waiting requests and running calls, and decides which
request gets budget next. Without I/O; times are passed in.

An account is the limits that a provider enforces together: requests, input tokens and output tokens per minute. Each
limit has a token bucket. `grant_next`, which is called after every change, looks at the first waiting request of each
lane, in order of urgency, and grants the first of them that may take what it needs from all three buckets (`bucket.py`
has the rule). Each lane saves its share of what flows into a bucket, and may always spend these savings; beyond them,
it may spend only what leaves the reserves of more urgent lanes (their shares of the bucket's size) untouched. While the
number of calls at a time is limited (`concurrency.py`), each lane has a share of the calls as well.
"""

from collections.abc import Sequence
from math import inf

from consumers.limits.adaptive import Adaptive
from consumers.limits.base import CONCURRENCY, INPUT, NOTHING, PAUSED, Amounts, Feedback, Kind, Reservation
from consumers.limits.buckets import Buckets
from consumers.limits.burst import Bursts
from consumers.limits.concurrency import Concurrency
from consumers.limits.demand import Demand
from consumers.limits.headers import RateHeaders
from consumers.limits.learned import Learned
from consumers.limits.lines import Lines, Waiter
from consumers.limits.running_calls import RunningCalls
from consumers.limits.spec import BudgetSpec

HOLD_AT_MOST_S = 60.0
"""The longest time, in seconds, for which a header `retry-after` stops the calls to an account. A longer one is cut to
this, because a bucket refills within a minute."""


class Account:
    """The budget of one account at a provider: its three token buckets, the requests that wait for it, and its running
    calls. Lanes are numbered by urgency: 0 is the most urgent, which comes first in `BudgetSpec.shares`."""

    def __init__(self, name: str, spec: BudgetSpec, *, now_s: float) -> None:
        self.name = name
        self.spec = spec
        self.lanes = tuple(spec.shares)
        self.shares = tuple(spec.shares.values())
        caps = spec.caps(name)
        self._adaptive = Adaptive(spec.start, caps, now_s=now_s)
        self._bursts = Bursts(spec.burst_s)
        self.guessed = self._adaptive.guessed()
        """For each limit (requests, input tokens, output tokens): True if its value is a guess, because the provider
        has not announced it and the operator has not set it."""
        sizes = self._bursts.sizes(guessed=self.guessed)
        self.buckets = Buckets(self._adaptive.per_minute(), sizes=sizes, shares=self.shares, now_s=now_s)
        self.demand = Demand(len(self.lanes), now_s=now_s)
        self.lines = Lines(len(self.lanes))
        self.concurrency = Concurrency(caps.concurrency, self.shares)
        self._running_calls = RunningCalls()
        self.paused_until_s = self.held_until_s = -inf
        self.is_pressed = False
        """True if a request has waited for the account's budget since a guessed limit was last raised."""
        self.waiting_elsewhere: Sequence[Sequence[float]] = ()
        """For each lane: the total of what its requests that wait in other processes need (requests, input tokens and
        output tokens)."""
        self.forget_elsewhere()

    @property
    def is_idle(self) -> bool:
        """True if no request waits for the account's budget, and no call to the account runs."""
        return self.lines.is_empty and not self.concurrency.running

    def refill(self, now_s: float) -> None:
        self.buckets.refill(now_s)

    def paused_s(self, now_s: float) -> float:
        """The seconds for which no request will get budget, because the account's spend limit is reached; 0 if it is
        not reached."""
        return _left_s(self.paused_until_s, now_s, self.spec.spend_pause_s)

    def stopped_s(self, now_s: float) -> float:
        """The seconds for which no request will get budget, because the account's spend limit is reached or the
        provider sent `retry-after`; 0 if requests may get budget now."""
        return max(self.paused_s(now_s), _left_s(self.held_until_s, now_s, HOLD_AT_MOST_S))

    # ---- the line ----------------------------------------------------------------------------------------------------

    def join(self, waiter: Waiter) -> bool:
        """Put a request into its lane's line, the list of requests that wait for the account's budget. Returns True if
        it is now the first of the line, so that `grant_next` may grant it."""
        if self._bursts.margin:
            waiter.amounts = waiter.amounts._replace(
                input_tokens=waiter.amounts.input_tokens * (1 + self._bursts.margin)
            )
        if not self.lines.join(waiter):
            return False
        self._head_changed(waiter.lane)
        return True

    def leave(self, waiter: Waiter) -> bool:
        """Take a waiting request out of its lane's line without granting it. Returns True if it was the first of the
        line."""
        if not self.lines.leave(waiter):
            return False
        self._head_changed(waiter.lane)
        return True

    def grant_next(self, now_s: float) -> tuple[Waiter | None, float]:
        """Grant the next waiting request, if the budget allows it: take it out of its line and give it a reservation.
        Returns the granted request and 0; or, if none may be granted now, None and the seconds after which to call this
        again (infinite if time alone changes nothing)."""
        self.refill(now_s)
        if self.lines.is_empty:
            return None, inf
        if (stopped_s := self.stopped_s(now_s)) > 0:
            return None, stopped_s
        self.concurrency.regain(now_s)
        if self.concurrency.is_full:
            return None, self.concurrency.regains_in_s(now_s)
        soonest_s = inf
        for lane in self._by_credit():
            waiter = self.lines.heads[lane]
            if waiter is None:
                continue
            in_s = self.buckets.wait_s(lane, waiter.amounts)
            if in_s == 0:
                self._begin(waiter, self.buckets.take(lane, waiter.amounts), now_s)
                return waiter, 0.0
            self.is_pressed = True
            if in_s < soonest_s:
                soonest_s = in_s
        return None, soonest_s

    # ---- after a call ------------------------------------------------------------------------------------------------

    def settle(self, reservation: Reservation, used: Amounts | None, now_s: float) -> None:
        """After a call: return to the buckets what was reserved and not used, and take out what the call used beyond
        its reservation."""
        if reservation.is_settled:
            return
        reservation.is_settled = True
        self._running_calls.end(reservation)
        self.concurrency.end(now_s - reservation.at_s)
        lane = self.lanes.index(reservation.lane)
        self.refill(now_s)
        used = used or NOTHING
        self.buckets.settle(lane, reservation.amounts, from_savings=reservation.from_savings, used=used)
        reserved = reservation.amounts
        self.demand.add(lane, Amounts(used[0] - reserved[0], used[1] - reserved[1], used[2] - reserved[2]), now_s)

    def learn(self, feedback: Feedback, now_s: float) -> bool:
        """Learn the account's limits from one response of the provider. Returns True if a limit fell or calls must stop
        for a while, so that earlier forecasts of waits are too short."""
        self.refill(now_s)
        before = self._adaptive.per_minute()
        has_limits, stopped, missing = False, False, 0.0
        if feedback.rate is not None:
            has_limits = self._adaptive.learn(feedback.rate, now_s)
            if self._bursts.learn(feedback.rate, feedback.counted) or has_limits:
                self._resize()
            level = self.buckets[INPUT].level
            self.buckets.lower(feedback.rate, took_s=feedback.took_s, of_refusal=feedback.kind is Kind.RATE_LIMITED)
            missing = level - self.buckets[INPUT].level
        if self._adaptive.is_stale(now_s):
            self._adaptive.forget(now_s)
            self._bursts.forget(self._adaptive.guessed())
            self._resize()
        match feedback.kind:
            case Kind.ANSWERED:
                self.concurrency.answered()
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
            case Kind.OVERLOADED:
                self.concurrency.overloaded(now_s)
            case Kind.SPEND_LIMIT:
                self.paused_until_s = now_s + self.spec.spend_pause_s
                stopped = True
            case Kind.FAILED:
                pass
        return stopped or any(new < old for new, old in zip(self._adaptive.per_minute(), before, strict=True))

    def is_stale(self, now_s: float) -> bool:
        """True if a low limit may delay requests although no response has confirmed it for minutes, so that it should
        be discarded."""
        return self._adaptive.is_stale(now_s)

    def per_minute(self) -> Amounts:
        return self._adaptive.per_minute()

    def reason(self, waiter: Waiter, now_s: float) -> str:
        """The name of the limit for which `waiter`, the first request in its lane's line, waits; `paused` if the
        account's spend limit is reached."""
        if self.paused_s(now_s) > 0:
            return PAUSED
        if self.stopped_s(now_s) == 0 and self.concurrency.is_full:
            return CONCURRENCY
        self.refill(now_s)
        return self.buckets.reason(waiter.lane, waiter.amounts)

    # ---- shared with other processes ---------------------------------------------------------------------------------

    def learned(self) -> Learned:
        return Learned(self._adaptive.learned, self._bursts.learned, self.paused_until_s, self.held_until_s)

    def load(self, learned: Learned) -> None:
        self._adaptive.learned, self._bursts.learned, self.paused_until_s, self.held_until_s = learned
        self._resize()

    def shift(self, jump_s: float) -> None:
        """Add `jump_s` to all times that this account has recorded, because the clock has jumped by so many seconds,
        and learned limits must get neither older nor younger."""
        self.lines.shift(jump_s)
        self.load(self.learned().shifted(jump_s))
        self._running_calls.shift(jump_s)
        self.concurrency.shift(jump_s)
        self.demand.shift(jump_s)

    def forget_elsewhere(self) -> None:
        """Forget what the requests that wait in other processes need, because Redis last reported this too long ago."""
        self.waiting_elsewhere = [NOTHING for _ in self.lanes]

    def due_for_a_call(self) -> list[bool]:
        """For each lane: True if it has a waiting request, and its credit, which grows by the lane's share whenever a
        call begins, has reached one call. The requests of such lanes are granted before those of others."""
        return [head is not None and self.concurrency.is_due(lane) for lane, head in enumerate(self.lines.heads)]

    def begin(self, waiter: Waiter, *, from_savings: Amounts, now_s: float) -> bool:
        """Give a waiting request the reservation that the script in Redis has granted. `from_savings`: how much of the
        reservation came from the part of the budget that the lane has saved up. Returns False if the request no longer
        waits."""
        if waiter not in self.lines:
            return False
        self._begin(waiter, from_savings, now_s)
        return True

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _by_credit(self) -> Sequence[int]:
        """The lanes in the order in which their requests may be granted: first those whose credit, which grows by the
        lane's share whenever a call begins, has reached one call; then the others. Each group is ordered by urgency."""
        lanes = range(len(self.lanes))
        if not self.concurrency.is_limited:
            return lanes
        return sorted(lanes, key=lambda lane: not self.concurrency.is_due(lane))

    def _begin(self, waiter: Waiter, from_savings: Amounts, now_s: float) -> None:
        lane, amounts = waiter.lane, waiter.amounts
        self.concurrency.begin(lane, self.lines.heads)
        self.lines.leave(waiter)
        self.demand.add(lane, amounts, now_s)
        waiter.reservation = Reservation(
            account=self.name, lane=self.lanes[lane], amounts=amounts, from_savings=from_savings, at_s=now_s
        )
        self._running_calls.begin(waiter.reservation)
        self._head_changed(lane)

    def _head_changed(self, lane: int) -> None:
        waiter = self.lines.heads[lane]
        self.buckets.want(lane, waiter.amounts if waiter else NOTHING)

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
        fills = [was and not now for was, now in zip(was_guessed, self.guessed, strict=True)]
        sizes = self._bursts.sizes(guessed=self.guessed)
        self.buckets.resize(self._adaptive.per_minute(), sizes=sizes, fills=fills)


def _left_s(until_s: float, now_s: float, most_s: float) -> float:
    """The seconds until `until_s`, when the account may be called again; 0 if that time is past. Also 0 if it is more
    than `most_s` ahead, because then the clock was set back."""
    left_s = until_s - now_s
    return left_s if 0 < left_s < most_s + 1 else 0.0
