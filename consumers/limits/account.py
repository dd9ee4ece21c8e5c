"""START HERE for the budget: holds one account's token buckets, waiting requests and running calls, and decides which
request gets budget next. Times are passed in.

An account is the limits that a provider enforces together: requests, input tokens and output tokens per minute. Each
limit has a token bucket. `grant_next`, which is called after every change, looks at the first waiting request of each
lane, in order of urgency, and grants the first of them that may take what it needs from all three buckets (`Bucket`
has the rule). Each lane saves its share of what flows into a bucket, and may always spend these savings; beyond them,
it may spend only what leaves the reserves of more urgent lanes (their shares of the bucket's size) untouched. If the
operator has set how many calls may run at a time, each lane has a share of the calls as well (`RunningCalls`).

The limits are those that the provider's responses announce, at most the operator's. A limit that no response has
announced is a guess, which rises while requests wait for it; a provider that announces none has no limits until it
answers 429. A 429 that the announced remaining amounts do not explain halves all limits; they rise again by a tenth
every ten seconds.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from math import ceil, inf
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from consumers.limits.base import (
    CONCURRENCY,
    INPUT,
    NOTHING,
    OUTPUT,
    REASONS,
    ROUNDED_BY,
    ROUNDED_UP_BY,
    Amounts,
    BudgetSpec,
    Feedback,
    Kind,
    Reservation,
)
from consumers.limits.bucket import Bucket

if TYPE_CHECKING:
    import asyncio

FIRST_BURST_S: Final = 5.0
"""A bucket has this size, in seconds' worth of its limit, until a response shows that the provider's own holds more."""
STEP: Final = 0.1
STEP_EVERY_S: Final = 10.0
REFUSED_WITHIN_S: Final = 5.0
"""Refusals (429) within this time halve the limits only once: the calls began before the limits were halved."""
LEAST_FACTOR: Final = 1 / 64
NO_LIMIT: Final = 1e9
"""This number stands for "no limit"."""
ESTIMATED_BY: Final = 1.5
"""While a call runs, a provider may count this many times the tokens that we have reserved for it."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits for the budget of an account. `lane`: the rank of its lane, 0 for the most urgent."""

    lane: int
    amounts: Amounts
    _: KW_ONLY
    arrived_s: float
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


@dataclass(slots=True)
class News:
    """What responses have said about an account's limits. Lists are in the order of `Amounts`."""

    announced: list[float | None] = field(default_factory=lambda: [None, None, None])
    shown: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """What the provider's buckets have held at least: what remained, and what the call took."""
    left: list[float | None] = field(default_factory=lambda: [None, None, None])
    stop_s: float = 0.0
    """How long no call may begin."""
    is_refused: bool = False
    is_answered: bool = False
    is_silent: bool = False
    """An answer had no headers about limits."""

    def add(self, later: "News") -> None:
        self.announced = [new or old for new, old in zip(later.announced, self.announced, strict=True)]
        self.shown = [max(each) for each in zip(self.shown, later.shown, strict=True)]
        self.left = [
            min((each for each in pair if each is not None), default=None)
            for pair in zip(self.left, later.left, strict=True)
        ]
        self.stop_s = max(self.stop_s, later.stop_s)
        self.is_refused |= later.is_refused
        self.is_answered |= later.is_answered
        self.is_silent |= later.is_silent


@dataclass(slots=True)
class Learned:
    """What is known of an account's limits."""

    announced: list[float | None] = field(default_factory=lambda: [None, None, None])
    shown: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    factor: float = 1.0
    """The part of the limits that may be used after a refusal."""
    growth: float = 0.0
    """By which part of the first guess the guessed limits have grown."""
    is_silent: bool = False
    refused_s: float = -inf
    raised_s: float = -inf
    stopped_until_s: float = -inf


class Account:
    """The budget of one account at a provider."""

    def __init__(self, name: str, spec: BudgetSpec, *, now_s: float) -> None:
        self.name = name
        self.lanes = tuple(spec.shares)
        self.ranks = tuple(spec.ranks.get(lane, number) for number, lane in enumerate(self.lanes))
        self.shares = tuple(spec.shares.values())
        caps = spec.caps(name)
        self.caps = caps.per_minute()
        self.start = spec.start
        self.burst_s = spec.burst_s
        self.learned = Learned(raised_s=now_s)
        self.buckets = tuple(Bucket(60, 1, shares=self.shares, now_s=now_s) for _ in REASONS)
        self.resize(fills=True)
        self.lines = WaitingLines(len(self.lanes))
        self.calls = RunningCalls(caps.concurrency, self.shares)
        self.is_pressed = False
        """A request has waited for a bucket since the limits were raised."""
        self.waiting_elsewhere: Sequence[Sequence[float]] = ()
        self.forget_elsewhere()

    def refill(self, now_s: float) -> None:
        for bucket in self.buckets:
            bucket.refill(now_s)

    def stopped_s(self, now_s: float) -> float:
        return max(0.0, self.learned.stopped_until_s - now_s)

    # ---- the line ----------------------------------------------------------------------------------------------------

    def join(self, waiter: Waiter) -> bool:
        """Put a request into its lane's line. Returns True if it is now the first of the line, so that `grant_next` may
        grant it. It needs at most what the limits allow in a minute, because the provider refuses a larger call, for
        which all lanes would stop in vain."""
        requests, input_tokens, output_tokens = waiter.amounts
        input_most, output_most = (60 * self.buckets[index].per_s for index in (INPUT, OUTPUT))
        if input_tokens > input_most or output_tokens > output_most:
            waiter.amounts = Amounts(requests, min(input_most, input_tokens), min(output_most, output_tokens))
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
        lanes: Sequence[int] = range(len(self.lanes))
        if self.calls.is_limited:
            lanes = sorted(lanes, key=lambda lane: not self.calls.is_due(lane))
        soonest_s = inf
        for lane in lanes:
            while (waiter := self.lines.heads[lane]) is not None and waiter.is_gone:
                self.leave(waiter)
            if waiter is None or not self.calls.may_begin:
                continue
            in_s = self.wait_s(waiter)
            if in_s == 0:
                taken = [bucket.take(lane, amount) for bucket, amount in zip(self.buckets, waiter.amounts, strict=True)]
                self._begin(waiter, Amounts(*taken), now_s)
                return waiter, 0.0
            self.is_pressed = True
            soonest_s = min(soonest_s, in_s)
        return None, soonest_s

    def wait_s(self, waiter: Waiter) -> float:
        """Seconds until the buckets allow the first request of a lane; call `refill` before."""
        in_s = 0.0
        for bucket, amount in zip(self.buckets, waiter.amounts):  # noqa: B905  checking costs a tenth of a grant
            if amount > 0 and (wait_s := bucket.wait_s(waiter.lane, amount)) > in_s:
                in_s = wait_s
        return in_s

    # ---- after a call ------------------------------------------------------------------------------------------------

    def settle(self, reservation: Reservation, used: Amounts | None, now_s: float) -> Sequence[float]:
        """Replace what was reserved for a call by what it has used. Returns for each bucket how much was given back;
        less than 0: how much more was taken."""
        if reservation.is_settled:
            return NOTHING
        reservation.is_settled = True
        lane, reserved, spent = self.lanes.index(reservation.lane), reservation.amounts, used or NOTHING
        if reservation.is_refused:
            spent = Amounts(spent[0], reserved[1] * (ESTIMATED_BY - 1), spent[2])
        self.calls.end(reservation, now_s)
        self.refill(now_s)
        unused = [amount - used for amount, used in zip(reserved, spent, strict=True)]
        for bucket, amount, saved in zip(self.buckets, unused, reservation.from_savings, strict=True):
            if amount > 0:
                bucket.give_back(lane, amount, from_savings=saved)
            elif amount < 0:
                bucket.take(lane, -amount)
        return unused

    def read(self, feedback: Feedback) -> News:
        """What a response says about the limits."""
        news = News(is_answered=feedback.kind is Kind.ANSWERED)
        news.is_silent = news.is_answered and feedback.rate is None
        is_429, is_explained = feedback.kind is Kind.RATE_LIMITED, False
        if is_429:
            self.calls.refuse(feedback.request)
        for index, header in enumerate(feedback.rate or ()):
            news.announced[index] = header.limit
            if header.remaining is None:
                continue
            per_s = self.buckets[index].per_s if header.limit is None else header.limit / 60
            # what flows in while the answer travels is added; a refusal proves that less was left than the call needed
            news.left[index] = header.remaining + (0 if is_429 else ROUNDED_BY[index]) + feedback.took_s * per_s
            if (left := header.remaining - ROUNDED_UP_BY[index]) >= 0:  # else the call may have left a debt
                news.shown[index] = left + feedback.counted[index]
            is_explained = is_explained or left < ESTIMATED_BY * self.calls.largest(index)
        if is_429 and not is_explained:
            news.is_refused = not self.announces(news)
            news.stop_s = feedback.retry_after_s or 0.0
        return news

    def announces(self, news: News) -> bool:
        """Whether it has a limit that was not known."""
        return any(new not in (None, old) for new, old in zip(news.announced, self.learned.announced, strict=True))

    def learn(self, feedback: Feedback, now_s: float) -> None:
        """Learn the limits from one response."""
        self.refill(now_s)
        news, known, announced, shown = self.read(feedback), self.learned, self.learned.announced, self.learned.shown
        known.announced = [new or old for new, old in zip(news.announced, announced, strict=True)]
        known.shown = [max(each) for each in zip(news.shown, shown, strict=True)]
        if news.is_silent and known.refused_s == -inf and not any(known.announced):
            known.is_silent = True
        self.resize(fills=(announced, shown) != (known.announced, known.shown))
        if news.is_refused:
            self._refused(now_s)
        elif news.is_answered and announced == known.announced:
            self._answered(now_s)
        for bucket, left in zip(self.buckets, news.left, strict=True):
            if left is not None:
                bucket.lower(left)
        if news.stop_s > 0:
            known.stopped_until_s = max(known.stopped_until_s, now_s + news.stop_s)

    def per_minute(self) -> Amounts:
        return Amounts(*(60 * bucket.per_s for bucket in self.buckets))

    @property
    def guessed(self) -> Sequence[bool]:
        """For each limit, whether it is only a guess, because of which no request is refused."""
        known = self.learned
        return [
            not known.is_silent and announced is None and cap is None
            for announced, cap in zip(known.announced, self.caps, strict=True)
        ]

    def reason(self, waiter: Waiter, now_s: float) -> str:
        if self.stopped_s(now_s) == 0 and not self.calls.may_begin:
            return CONCURRENCY
        self.refill(now_s)
        waits_s = [
            bucket.wait_s(waiter.lane, amount) if amount > 0 else 0.0
            for bucket, amount in zip(self.buckets, waiter.amounts, strict=True)
        ]
        return REASONS[waits_s.index(max(waits_s))]

    @property
    def reserves(self) -> dict[str, float]:
        """The part of each limit that is kept for each lane."""
        return dict(zip(self.lanes, self.buckets[0].shares, strict=True))

    def figures(self, now_s: float) -> Iterator[tuple[str, dict[str, float]]]:
        self.refill(now_s)
        for reason, bucket in zip(REASONS, self.buckets, strict=True):
            if (limit := 60 * bucket.per_s) < NO_LIMIT:
                left = max(0.0, bucket.level)
                yield reason, {"limit": limit, "left": left, "used": bucket.burst - left}
        calls = {"used": float(self.calls.running)}
        if self.calls.is_limited:
            calls |= {"limit": self.calls.most, "left": max(0.0, self.calls.most - calls["used"])}
        yield CONCURRENCY, calls

    # ---- shared with other processes ---------------------------------------------------------------------------------

    def forget_elsewhere(self) -> None:
        self.waiting_elsewhere = [NOTHING for _ in self.lanes]

    def lanes_due(self) -> list[bool]:
        return [head is not None and self.calls.is_due(lane) for lane, head in enumerate(self.lines.heads)]

    def begin(self, waiter: Waiter, *, from_savings: Amounts, now_s: float) -> bool:
        if waiter.is_gone or waiter not in self.lines:
            return False
        self._begin(waiter, from_savings, now_s)
        return True

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _begin(self, waiter: Waiter, from_savings: Amounts, now_s: float) -> None:
        lane = waiter.lane
        waiter.reservation = Reservation(
            account=self.name,
            lane=self.lanes[lane],
            amounts=waiter.amounts,
            from_savings=from_savings,
            at_s=now_s,
            request=waiter.request,
        )
        self.calls.begin(waiter.reservation, lane, self.lines.heads)
        self.lines.leave(waiter)
        self._head_changed(lane)

    def _head_changed(self, lane: int) -> None:
        waiter = self.lines.heads[lane]
        for bucket, amount in zip(self.buckets, waiter.amounts if waiter else NOTHING, strict=True):
            bucket.want(lane, amount)

    def _refused(self, now_s: float) -> None:
        known = self.learned
        if known.is_silent:  # it has limits, and they are guessed from now on
            known.is_silent = False
        elif now_s - known.refused_s >= REFUSED_WITHIN_S:
            known.factor = max(LEAST_FACTOR, known.factor / 2)
        else:
            return
        known.refused_s = known.raised_s = now_s
        self.resize()

    def _answered(self, now_s: float) -> None:
        known = self.learned
        if now_s - known.raised_s < STEP_EVERY_S:
            return
        known.raised_s = now_s
        if known.factor < 1:
            known.factor = min(1.0, known.factor + STEP)
        elif self.is_pressed and any(self.guessed):
            known.growth += STEP
            self.is_pressed = False
        self.resize()

    def resize(self, *, fills: bool = False) -> None:
        """Set the buckets to what is known of the limits."""
        for index, bucket in enumerate(self.buckets):
            limit, shown = self._limit(index), self.learned.factor * self.learned.shown[index]
            bucket.resize(limit, min(max(shown, limit * FIRST_BURST_S / 60), limit * self.burst_s / 60), fills=fills)

    def _limit(self, index: int) -> float:
        known = self.learned
        told = [each for each in (known.announced[index], self.caps[index]) if each is not None]
        if not told and known.is_silent:
            return NO_LIMIT
        return known.factor * min(told, default=self.start[index] * (1 + known.growth))


class RunningCalls:
    """The running calls of one account. If the operator has set how many may run at a time, each lane gets its share of
    them: whenever a call begins, the credit of every lane with a waiting request grows by the lane's share, up to one
    call. A lane with a credit of one call is called "due": its first waiting request is granted before those of more
    urgent lanes."""

    def __init__(self, most: int | None, shares: Sequence[float]) -> None:
        self.most: float = inf if most is None else most
        self.call_s = 0.0
        """How long a call takes, on average."""
        self._shares = shares
        self._credit = [0.0 for _ in shares]
        self._running: dict[int, Reservation] = {}

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def is_limited(self) -> bool:
        return self.most < inf

    @property
    def may_begin(self) -> bool:
        return len(self._running) < self.most

    def largest(self, index: int) -> float:
        """The largest amount that is reserved for a running call."""
        return max((reservation.amounts[index] for reservation in self._running.values()), default=1.0)

    def refuse(self, request: str) -> None:
        for reservation in self._running.values():
            reservation.is_refused |= reservation.request == request != ""

    def begin(self, reservation: Reservation, lane: int, heads: Sequence[Waiter | None]) -> None:
        self._running[id(reservation)] = reservation
        if not self.is_limited:
            return
        if self.is_due(lane):
            self._credit[lane] -= 1
        for other, waiter in enumerate(heads):
            if waiter is not None:
                self._credit[other] = min(1.0, self._credit[other] + self._shares[other])

    def end(self, reservation: Reservation, now_s: float) -> None:
        self._running.pop(id(reservation), None)
        self.call_s += (max(0.0, now_s - reservation.at_s) - self.call_s) * (0.1 if self.call_s else 1.0)

    def is_due(self, lane: int) -> bool:
        return self.is_limited and self._credit[lane] >= 1 - 1e-9

    def wait_s(self, lane: int, ahead: int, ahead_in_lane: int) -> float:
        """About how many seconds pass until a lane's next request may begin its call, after `ahead_in_lane` others of
        the lane and at most `ahead` in all; 0 if it may begin now."""
        if not self.is_limited:
            return 0.0
        by_share = ceil((ahead_in_lane + 1 - self._credit[lane]) / self._shares[lane]) + 1
        missing = self.running + min(ahead, by_share) + 1 - self.most
        return max(0.0, missing * self.call_s / self.most)


# ---- waiting requests and running calls ------------------------------------------------------------------------------

_arrival = attrgetter("arrived_s")


class WaitingLines:
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

    def _at(self, waiter: Waiter) -> int | None:
        line = self._lines[waiter.lane]
        try:
            return line.index(waiter, bisect_left(line, waiter.arrived_s, key=_arrival))
        except ValueError:
            return None
