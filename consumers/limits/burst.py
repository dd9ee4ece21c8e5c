"""Learns the sizes of an account's token buckets: how much of a limit may be used at once. Without I/O. Sizes are given
in seconds' worth of the limit: 60 means the amount of a minute.

The size of a bucket is what the provider's own bucket is proven to hold, but at most the setting `BudgetSpec.burst_s`.
The proof: after a call, the provider's header `remaining` plus what the call took is what the provider's bucket held
before the call. As long as nothing is proven, a small size is assumed.

A refusal that says how much is left shows that too much was used at once, although the bucket was proven to hold it:
somebody else uses the account, or the provider enforces its limits per second. Then the size is halved, and rises again
slowly. It never falls below a second's worth. One large request may need all of so small a bucket, so the provider's
estimate of the request's input tokens matters: the provider subtracts its estimate when a call begins, and corrects it
when the call ends. If refusals suggest that this estimate is higher than ours, more input tokens are reserved for each
call (`margin`)."""

from collections.abc import Sequence
from typing import NamedTuple

from consumers.limits.base import INPUT, Amounts
from consumers.limits.headers import ROUNDED_UP_BY, RateHeaders
from consumers.limits.learned import LearnedBursts

UNKNOWN_S = 5.0
"""The size of a token bucket, in seconds' worth of its limit, while the limit is guessed and no size is proven: enough
for about four calls at once. If it were smaller, few requests could fail over to a provider that was never called
before."""
UNPROVEN_S = 10.0
"""The size of a token bucket, in seconds' worth of its limit, if the limit was announced or set, but no size is proven,
because the provider does not say how much is left."""
NEWS = 1.01
"""The factor by which the proven size of a bucket must grow before the larger size is recorded and sent to other
processes, so that small changes are not sent. A size that reaches the maximum is always recorded."""
RECOVERY = 1.1
"""The size of a token bucket that was reduced after a refusal (429) grows by this factor every `RECOVERY_EVERY_S`
seconds."""
RECOVERY_EVERY_S = 10.0
"""The shortest time, in seconds, between two steps in which token buckets that were reduced after refusals (429) grow
again."""
PATIENCE_S = 5.0
"""Refusals (429) within this many seconds reduce the sizes of the buckets only once, because calls that were running at
the first refusal may be refused for the same reason."""
LEAST_S = 1.0
"""A refusal (429) never reduces the size of a token bucket below this many seconds' worth of its limit."""
SMALL_S = 5.0
"""A token bucket that holds fewer seconds' worth of its limit than this counts as small, because one request may need
all that it holds."""
MARGIN_STEP = 0.2
"""By how much `Bursts.margin` (the part by which more input tokens are reserved than estimated) is raised after a
refusal (429) that shows that the provider estimates more than we do."""
MARGIN_MOST = 0.5
"""The highest value of `Bursts.margin` (the part by which more input tokens are reserved than estimated)."""
OFTEN = 0.5
"""If at least this part of the latest responses (a smoothed value) are refusals (429) although the buckets have their
smallest sizes, reducing the buckets has not helped, so the limits are lowered."""
MARGIN_DECAY = 0.99
"""At each step of the recovery after refusals (429), `Bursts.margin` (by what part the provider's estimates of input
tokens exceed ours) is multiplied by this, so that it falls again slowly."""
SPENT = 0.01
"""A token bucket counts as spent, and so explains a refusal (429), if less than this part of its limit per minute is
left in it."""
SPENT_REQUESTS = 2.0
"""The bucket of input tokens also counts as spent, and so explains a refusal (429), if less is left in it than this
many average requests need."""
WEIGHT = 0.1
"""The weight of the latest response in smoothed values, such as the share of responses that are refusals (429)."""
LOST_PART = 0.05
"""The value of `Size.lost_part` (the part of a full bucket that counts as lost when a call begins) for a bucket whose
size is proven and is below the operator's setting (`BudgetSpec.burst_s`); for other buckets it is 0."""


class Size(NamedTuple):
    """The size of one token bucket of a provider's account."""

    burst_s: float
    """The bucket's size, in seconds' worth of the limit: 60 means the amount of a minute."""
    lost_part: float
    """The part of a full bucket that counts as lost when a call begins, in addition to what the call takes. Without it,
    our bucket could become fuller than the provider's. If the provider's bucket is not larger than ours, it is full as
    well, and begins to refill only when the call arrives at the provider, but ours begins when the call begins. The
    time between these differs from call to call."""


class Bursts:
    """Learns how large the three token buckets of a provider's account are: how much may be used at once. Values for
    the three are in the order of `Amounts`: requests, input tokens, output tokens."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self.learned = LearnedBursts()
        self._usual_input = 0.0
        """The average number of input tokens of a request (smoothed), from the responses that this process has
        received."""
        self._refusals = 0.0
        self.margin = 0.0
        """By what part the provider's estimate of a request's input tokens is assumed to exceed ours (0.2: by a fifth).
        For each call, this part more is reserved than we estimate. The value is not sent to other processes."""

    def sizes(self, *, guessed: Sequence[bool]) -> tuple[Size, ...]:
        """The sizes of the three buckets. `guessed`: for each limit, True if it was neither announced by the provider
        nor set by the operator."""
        return tuple(
            Size(cut * min(self._most_s, UNKNOWN_S if is_guess else UNPROVEN_S), 0.0)
            if proven_s is None
            else Size(cut * proven_s, LOST_PART if cut * proven_s < self._most_s else 0.0)
            for proven_s, cut, is_guess in zip(self.learned.proven_s, self.learned.cut, guessed, strict=True)
        )

    def forget(self, guessed: Sequence[bool]) -> None:
        """Discard the proven sizes of buckets whose limits are guessed again, because no response has confirmed them
        for minutes."""
        known = zip(self.learned.proven_s, guessed, strict=True)
        self.learned = self.learned._replace(
            proven_s=tuple(None if is_guess else proven_s for proven_s, is_guess in known)
        )

    def learn(self, rate: RateHeaders, counted: Amounts) -> bool:
        """Learn from a response how much the provider's buckets hold. Returns True if a bucket is now proven to hold
        more than before. `counted`: what the provider had already subtracted for this call (`Feedback.counted`)."""
        if counted.input_tokens > 0:
            self._usual_input += (WEIGHT if self._usual_input else 1.0) * (counted.input_tokens - self._usual_input)
        found = list(self.learned.proven_s)
        for index, header in enumerate(rate):
            if header.remaining is None or header.limit is None:
                continue
            left = header.remaining - ROUNDED_UP_BY[index]
            # if `left` is below 0, the call may have left a debt, and proves nothing
            held = left + counted[index] if left >= 0 else 0.0
            held_s, proven_s = min(self._most_s, 60 * held / header.limit), found[index]
            if proven_s is None or held_s > NEWS * proven_s or held_s == self._most_s > proven_s:
                found[index] = held_s
        before, self.learned = self.learned, self.learned._replace(proven_s=tuple(found))
        return self.learned != before

    def spent(self, rate: RateHeaders) -> tuple[bool, ...]:
        """For each of the provider's three buckets: True if so little is left in it that this explains why a call was
        refused (429)."""
        usual = (0.0, SPENT_REQUESTS * self._usual_input, 0.0)
        return tuple(
            header.remaining is not None
            and header.remaining - ROUNDED_UP_BY[index] < max(1.0, SPENT * (header.limit or 0.0), usual[index])
            for index, header in enumerate(rate)
        )

    def refused(self, is_spent: Sequence[bool], now_s: float) -> bool:
        """After a refusal (429), reduce the sizes of the buckets that are spent, or of all buckets if none is spent. If
        the bucket of input tokens is among them and is small already, `margin` (by what part more input tokens are
        reserved than estimated) is raised instead, up to `MARGIN_MOST`. Returns False if many calls are refused
        although these buckets have their smallest sizes."""
        self._refusals += WEIGHT * (1 - self._refusals)
        if 0 <= now_s - self.learned.cut_s < PATIENCE_S:
            return True
        self.learned = known = self.learned._replace(cut_s=now_s, moved_s=now_s)
        reduced = [index for index in range(3) if is_spent[index]] or range(3)
        if INPUT in reduced and (known.proven_s[INPUT] or self._most_s) < SMALL_S and self.margin < MARGIN_MOST:
            self.widen(now_s)
            return True
        if all(known.cut[index] <= self._least(index) for index in reduced):
            return self._refusals < OFTEN
        cut = list(known.cut)
        for index in reduced:
            cut[index] = max(self._least(index), cut[index] / 2)
        self.learned = known._replace(cut=tuple(cut))
        return True

    def widen(self, now_s: float) -> None:
        """Reserve more input tokens for each call from now on (`margin`), because the provider's first estimate of a
        request's input was higher than ours."""
        self.learned = self.learned._replace(moved_s=now_s)
        self.margin = min(MARGIN_MOST, self.margin + MARGIN_STEP)

    def answered(self, now_s: float) -> bool:
        """After an answer: if refusals have reduced bucket sizes or raised `margin`, raise the sizes and lower `margin`
        by one step, but only if the last change is at least `RECOVERY_EVERY_S` ago. Returns True if this was done."""
        self._refusals -= WEIGHT * self._refusals
        known = self.learned
        if 0 <= now_s - known.moved_s < RECOVERY_EVERY_S or (min(known.cut) == 1 and not self.margin):
            return False
        self.margin *= MARGIN_DECAY
        self.learned = known._replace(cut=tuple(min(1.0, RECOVERY * factor) for factor in known.cut), moved_s=now_s)
        return True

    def _least(self, index: int) -> float:
        """The smallest factor by which refusals may multiply the size of a bucket. With it, the bucket holds one
        second's worth of its limit."""
        return min(1.0, LEAST_S / (self.learned.proven_s[index] or UNPROVEN_S))
