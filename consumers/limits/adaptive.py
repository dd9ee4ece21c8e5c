"""The assumed limits of an account: announced by the provider, capped by settings, or learned by trial. Pure.

Limits that the provider does not announce begin low, and grow by a step every few seconds if requests waited for them
and none was refused. A provider whose answers have no headers about limits is assumed to have none until it refuses a
call: a self-hosted model behind a compatible API, for example. A refusal (429) without figures halves the limits.
Refusals with figures lower them only if using less at once (`burst.py`) did not help: then somebody else uses the
account, or the provider counts differently. The limits come back step by step."""

from collections.abc import Sequence
from math import inf

from consumers.limits.amounts import Amounts
from consumers.limits.headers import RateHeaders
from consumers.limits.learned import LearnedLimits
from consumers.limits.spec import AccountCaps

STEP = 0.1
"""One step up: this part of the first guess, or of the whole limit if refusals have lowered it."""
STEP_EVERY_S = 10.0
PATIENCE_S = 5.0
"""Calls that began before a halving may still be refused: within this time refusals count once."""
LEAST_FACTOR = 1 / 64
LESS = 0.8
"""A limit that a refusal's figures show to be spent falls to this part, if taking less of it at once has not helped."""
NEAR = 0.7
NEAR_STEP = STEP / 4
"""The step above `NEAR`, where the limit may soon be too high again."""
FORGOTTEN_AFTER_S = 180.0
"""An announced limit below the first guess is forgotten if it is not announced again within this time."""
NEWS_S = 60.0
"""The repeated announcement of a limit is recorded, and sent to other processes, at most this often."""
NOTHING_IS = (False, False, False)
NO_LIMIT = 1e9
"""Stands for no limit. It is finite, so that buckets can be computed with it."""


class Adaptive:
    """The three limits of one account, per minute."""

    __slots__ = (
        "_announced",
        "_announced_s",
        "_caps",
        "_factors",
        "_grown",
        "_halved_s",
        "_is_silent",
        "_moved_s",
        "_start",
    )

    def __init__(self, start: Amounts, caps: AccountCaps, *, now_s: float) -> None:
        self._start = start
        self._caps = caps.per_minute()
        self._announced: list[float | None] = [None, None, None]
        self._announced_s = [-inf, -inf, -inf]
        self._grown = [0.0, 0.0, 0.0]
        self._is_silent = False
        self._factors = [1.0, 1.0, 1.0]
        self._halved_s = -inf
        self._moved_s = now_s

    def learned(self) -> LearnedLimits:
        return LearnedLimits(
            tuple(self._announced),
            tuple(self._announced_s),
            tuple(self._grown),
            self._is_silent,
            tuple(self._factors),
            self._halved_s,
            self._moved_s,
        )

    def load(self, learned: LearnedLimits) -> None:
        told, told_s, grown, self._is_silent, factors, self._halved_s, self._moved_s = learned
        self._announced, self._announced_s, self._grown, self._factors = (
            list(told),
            list(told_s),
            list(grown),
            list(factors),
        )

    def per_minute(self) -> Amounts:
        return Amounts(*(self._of(each) * self._factors[each] for each in range(3)))

    def guessed(self) -> tuple[bool, ...]:
        """For each limit: True if it is a guess: not announced, not set, and not treated as absent because the provider
        is silent."""
        return tuple(
            told is None and cap is None and not self._is_silent
            for told, cap in zip(self._announced, self._caps, strict=True)
        )

    def hear(self, rate: RateHeaders, now_s: float) -> bool:
        """Take over the limits in a response's headers. True if one has changed."""
        changed = False
        for each, told in enumerate(rate):
            if told.limit is None:
                continue
            if told.limit != self._announced[each]:
                self._announced[each], self._announced_s[each] = told.limit, now_s
                changed = True
            elif not 0 <= now_s - self._announced_s[each] < NEWS_S:
                self._announced_s[each] = now_s
        return changed

    def is_stale(self, now_s: float) -> bool:
        """True if a low limit slows the account down and was not announced for minutes. If it blocks all calls, no
        response would ever correct it."""
        for told, start, told_s in zip(self._announced, self._start, self._announced_s):  # noqa: B905  asked before every call
            if told is not None and told < start and not 0 <= now_s - told_s < FORGOTTEN_AFTER_S:
                return True
        return now_s - self._moved_s >= FORGOTTEN_AFTER_S and min(self._factors) < 1

    def forget(self, now_s: float) -> None:
        """Forget stale limits: they are guessed again."""
        for each, told in enumerate(self._announced):
            is_old = not 0 <= now_s - self._announced_s[each] < FORGOTTEN_AFTER_S
            if told is not None and told < self._start[each] and is_old:
                self._announced[each], self._grown[each] = None, 0.0
        if now_s - self._moved_s >= FORGOTTEN_AFTER_S:
            self._factors, self._moved_s = [1.0, 1.0, 1.0], now_s

    def heard_nothing(self) -> bool:
        """Learn from an answer without headers about limits. True if that changes the limits."""
        if self._is_silent or any(told is not None for told in self._announced) or self._halved_s > -inf:
            return False
        self._is_silent = True
        return True

    def refused(self, now_s: float, is_spent: Sequence[bool] = NOTHING_IS) -> bool:
        """Lower the limits after a refusal: spent ones a little, or all by half if none is spent. False if an earlier
        refusal has just done so."""
        self._moved_s = now_s
        if self._is_silent:
            self._is_silent, self._halved_s = False, now_s
            return True
        if 0 <= now_s - self._halved_s < PATIENCE_S:
            return False
        self._halved_s = now_s
        for each, factor in enumerate(self._factors):
            if is_spent[each] or not any(is_spent):
                self._factors[each] = max(LEAST_FACTOR, factor * (LESS if is_spent[each] else 0.5))
        return True

    def answered(self, now_s: float, *, pressed: bool) -> bool:
        """Raise limits that refusals lowered; else guessed ones, if a request waited (`pressed`). True if any rose."""
        if 0 <= now_s - self._moved_s < STEP_EVERY_S:  # less than 0: the clock was set back
            return False
        self._moved_s = now_s
        if min(self._factors) < 1:
            self._factors = [min(1.0, factor + (STEP if factor < NEAR else NEAR_STEP)) for factor in self._factors]
            return True
        guessed = [each for each in range(3) if self._announced[each] is None and self._caps[each] is None]
        if not pressed or not guessed:
            return False
        for each in guessed:
            self._grown[each] += STEP * self._start[each]
        return True

    def _of(self, each: int) -> float:
        cap, told = self._caps[each], self._announced[each]
        if told is not None:
            return told if cap is None else min(told, cap)
        if self._is_silent:
            return NO_LIMIT if cap is None else cap
        return self._start[each] + self._grown[each] if cap is None else cap
