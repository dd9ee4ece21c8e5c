"""How much of its limits an account uses at once, in seconds' worth of each: as much as is proven, up to the setting.
Pure.

What a bucket had left after a call, plus what that call took, is what it held before. So `remaining` proves how much it
holds at least, and no more than that is used at once. If nothing is proven, little is used at once.

A refusal with figures means that too much was used at once, whatever was proven: somebody else uses the account, or its
limits are announced per minute and enforced per second. Then the size is halved, and comes back slowly. It never falls
below a second's worth, which one large request may need whole. In so small a bucket the provider's estimates matter: it
takes its estimate of the input at the beginning of a call, and corrects that at the end. Refusals show how much more it
takes than we expect (`margin`)."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from consumers.limits.amounts import Amounts
from consumers.limits.headers import ROUNDED_UP_BY, RateHeaders
from consumers.limits.learned import LearnedBursts

UNKNOWN_S = 5.0
"""For a limit that is a guess: about four calls at once, until one has been answered. With fewer, few requests could
fail over to a provider that was never called before."""
UNPROVEN_S = 10.0
"""For a limit that was announced or set, while the provider does not say how much is left."""
NEWS = 1.01
"""An increase of what is proven by less than this factor is not worth telling other processes."""
BACK = 1.1
BACK_EVERY_S = 10.0
PATIENCE_S = 5.0
"""Calls that were under way during a refusal are refused as well: within this time refusals count once."""
LEAST_S = 1.0
SMALL_S = 5.0
"""In a bucket smaller than this, one request may need all that it holds."""
MARGIN_STEP = 0.2
MARGIN_MOST = 0.5
OFTEN = 0.5
"""If this part of the latest responses (smoothed) are refusals, taking less at once has not helped."""
MARGIN_KEPT = 0.99
"""How much of the margin is kept whenever a burst recovers by a step."""
SPENT = 0.01
DEAR = 2.0
"""A bucket explains a refusal if it has less left than `SPENT` of its limit, or than `DEAR` usual requests take."""
WEIGHT = 0.1
LATE = 0.05


class Size(NamedTuple):
    """The size of a bucket."""

    burst_s: float
    late: float
    """The part of it that a full bucket loses at a call, besides what the call takes. The provider's, if no larger,
    begins to refill only when the call arrives there, and calls take different times to arrive."""


class Bursts:
    """The sizes of the three buckets of an account, in the order of `Amounts`."""

    __slots__ = ("_cut", "_cut_s", "_most_s", "_moved_s", "_proven_s", "_refusals", "_usual_input", "margin")

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._proven_s: list[float | None] = [None, None, None]
        self._cut = [1.0, 1.0, 1.0]
        self._cut_s = self._moved_s = -inf
        self._usual_input = 0.0
        """Input tokens of a usual request, from the responses of this process."""
        self._refusals = 0.0
        self.margin = 0.0
        """The provider takes so much more than the expected input until a call ends (0.2: a fifth). Not shared."""

    def learned(self) -> LearnedBursts:
        return LearnedBursts(tuple(self._proven_s), tuple(self._cut), self._cut_s, self._moved_s)

    def load(self, learned: LearnedBursts) -> None:
        proven_s, cut, self._cut_s, self._moved_s = learned
        self._proven_s, self._cut = list(proven_s), list(cut)

    def sizes(self, *, guessed: Sequence[bool]) -> tuple[Size, ...]:
        """`guessed`: for each limit, True if it was neither announced nor set."""
        return tuple(
            Size(cut * min(self._most_s, UNKNOWN_S if is_guess else UNPROVEN_S), 0.0)
            if proven_s is None
            else Size(cut * proven_s, LATE if cut * proven_s < self._most_s else 0.0)
            for proven_s, cut, is_guess in zip(self._proven_s, self._cut, guessed, strict=True)
        )

    def forget(self, guessed: Sequence[bool]) -> None:
        """Forget what was proven for limits that are guessed again."""
        self._proven_s = [
            None if is_guess else proven_s for proven_s, is_guess in zip(self._proven_s, guessed, strict=True)
        ]

    def hear(self, rate: RateHeaders, counted: Amounts) -> bool:
        """Learn from a response. True if more is proven than before. `counted`: see `Heard`."""
        if counted.input_tokens > 0:
            self._usual_input += (WEIGHT if self._usual_input else 1.0) * (counted.input_tokens - self._usual_input)
        changed = False
        for each, told in enumerate(rate):
            if told.remaining is None or told.limit is None:
                continue
            left = told.remaining - ROUNDED_UP_BY[each]
            held = left + counted[each] if left >= 0 else 0.0  # below 0, the call may have left a debt
            held_s, proven_s = min(self._most_s, 60 * held / told.limit), self._proven_s[each]
            if proven_s is None or held_s > NEWS * proven_s or held_s == self._most_s > proven_s:
                self._proven_s[each] = held_s
                changed = True
        return changed

    def spent(self, rate: RateHeaders) -> tuple[bool, ...]:
        """For each bucket: True if it has so little left that this explains a refusal."""
        usual = (0.0, DEAR * self._usual_input, 0.0)
        return tuple(
            told.remaining is not None
            and told.remaining - ROUNDED_UP_BY[each] < max(1.0, SPENT * (told.limit or 0.0), usual[each])
            for each, told in enumerate(rate)
        )

    def refused(self, is_spent: Sequence[bool], now_s: float) -> bool:
        """After a refusal: reduce the burst of the buckets that are spent, or of all buckets if none is. Returns False
        if smaller bursts have not ended the refusals."""
        self._refusals += WEIGHT * (1 - self._refusals)
        if 0 <= now_s - self._cut_s < PATIENCE_S:
            return True
        self._cut_s = self._moved_s = now_s
        cut = [each for each in range(3) if is_spent[each]] or range(3)
        if 1 in cut and (self._proven_s[1] or self._most_s) < SMALL_S and self.margin < MARGIN_MOST:
            self.widen(now_s)
            return True
        if all(self._cut[each] <= self._least(each) for each in cut):
            return self._refusals < OFTEN
        for each in cut:
            self._cut[each] = max(self._least(each), self._cut[each] / 2)
        return True

    def widen(self, now_s: float) -> None:
        """Raise the margin: the provider took more for a request's input at first than was expected."""
        self._moved_s = now_s
        self.margin = min(MARGIN_MOST, self.margin + MARGIN_STEP)

    def answered(self, now_s: float) -> bool:
        """After an answer: raise a reduced burst by a step, if it is time. True if it rose."""
        self._refusals -= WEIGHT * self._refusals
        if 0 <= now_s - self._moved_s < BACK_EVERY_S or (min(self._cut) == 1 and not self.margin):
            return False
        self._moved_s = now_s
        self.margin *= MARGIN_KEPT
        self._cut = [min(1.0, BACK * each) for each in self._cut]
        return True

    def _least(self, each: int) -> float:
        """The reduction that leaves a burst of one second."""
        return min(1.0, LEAST_S / (self._proven_s[each] or UNPROVEN_S))
