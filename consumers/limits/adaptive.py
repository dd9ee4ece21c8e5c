"""The limits that Lanekeeper assumes for an account: announced by the provider, capped by settings, or learned by
trial. Without I/O.

A limit that the provider does not announce begins low, and rises by a step every few seconds while requests wait for it
and the provider refuses none. If a provider's answers have no headers about limits (a self-hosted model behind a
compatible API, for example), it is assumed to have none until it refuses a call. A refusal is a 429. A refusal without
figures halves the limits. A refusal that says how much is left lowers them only if smaller bursts (`burst.py`) did not
help: then somebody else uses the account, or the provider counts differently. Lowered limits rise again step by step.
"""

from collections.abc import Sequence
from math import inf

from consumers.limits.amounts import Amounts
from consumers.limits.headers import RateHeaders
from consumers.limits.learned import LearnedLimits
from consumers.limits.spec import AccountCaps

STEP = 0.1
"""By how much an assumed limit of an account is raised at a time: a guessed limit by this part of the first guess; a
limit that refusals (429) have lowered by this part of its full value."""
STEP_EVERY_S = 10.0
"""The shortest time, in seconds, between two raises of an assumed or lowered limit."""
PATIENCE_S = 5.0
"""Refusals (429) within this many seconds lower the limits only once, because calls that began before the limits were
lowered may still be refused."""
LEAST_FACTOR = 1 / 64
"""Refusals never lower an assumed limit below this part of its full value."""
LESS = 0.8
"""If a refusal (429) says that nothing of a limit is left, and smaller bursts have not helped, the assumed limit is
multiplied by this."""
NEAR = 0.7
"""From this part of its full value on, a lowered limit is raised in smaller steps (`NEAR_STEP`)."""
NEAR_STEP = STEP / 4
"""Near its full value (above the part `NEAR` of it), a lowered limit is raised by this part of the full value at a
time. It is less than `STEP`, because the next refusal is probably near."""
FORGOTTEN_AFTER_S = 180.0
"""A limit that the provider announced and that is below the first guess is discarded if the provider does not announce
it again within this many seconds."""
NEWS_S = 60.0
"""If a provider announces the same limit again, this is recorded, and sent to other processes, at most once in this
many seconds."""
NONE_SPENT = (False, False, False)
NO_LIMIT = 1e9
"""This number stands for "no limit". It is finite, so that buckets can compute with it."""


class Adaptive:
    """The limits of one account (requests, input tokens, output tokens per minute) as this process assumes them, and
    what they were learned from."""

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
        self._announced, self._announced_s = list(learned.told), list(learned.told_s)
        self._grown, self._factors = list(learned.grown), list(learned.factors)
        self._is_silent, self._halved_s, self._moved_s = learned.is_silent, learned.halved_s, learned.moved_s

    def per_minute(self) -> Amounts:
        return Amounts(*(self._of(index) * self._factors[index] for index in range(3)))

    def guessed(self) -> tuple[bool, ...]:
        """For each limit: True if it is a guess: not announced by the provider, not set by the operator, and not
        treated as absent because the provider announces no limits."""
        return tuple(
            announced is None and cap is None and not self._is_silent
            for announced, cap in zip(self._announced, self._caps, strict=True)
        )

    def learn(self, rate: RateHeaders, now_s: float) -> bool:
        """Take over the limits that a response's headers announce. Returns True if one has changed."""
        changed = False
        for index, header in enumerate(rate):
            if header.limit is None:
                continue
            if header.limit != self._announced[index]:
                self._announced[index], self._announced_s[index] = header.limit, now_s
                changed = True
            elif not 0 <= now_s - self._announced_s[index] < NEWS_S:
                self._announced_s[index] = now_s
        return changed

    def is_stale(self, now_s: float) -> bool:
        """True if an assumed limit is low and no response has confirmed it for minutes. It must be discarded, because
        if it blocked all calls, no response could correct it."""
        for limit, start, at_s in zip(self._announced, self._start, self._announced_s):  # noqa: B905  asked before every call
            if limit is not None and limit < start and not 0 <= now_s - at_s < FORGOTTEN_AFTER_S:
                return True
        return now_s - self._moved_s >= FORGOTTEN_AFTER_S and min(self._factors) < 1

    def forget(self, now_s: float) -> None:
        """Discard limits that no response has confirmed for a long time (`is_stale`), and begin again with the first
        guesses."""
        for index, limit in enumerate(self._announced):
            is_old = not 0 <= now_s - self._announced_s[index] < FORGOTTEN_AFTER_S
            if limit is not None and limit < self._start[index] and is_old:
                self._announced[index], self._grown[index] = None, 0.0
        if now_s - self._moved_s >= FORGOTTEN_AFTER_S:
            self._factors, self._moved_s = [1.0, 1.0, 1.0], now_s

    def learn_no_rate(self) -> bool:
        """Learn from an answer whose headers announce no limits: then none are assumed, unless the provider announced
        or enforced some before. Returns True if that changes the limits."""
        if self._is_silent or any(limit is not None for limit in self._announced) or self._halved_s > -inf:
            return False
        self._is_silent = True
        return True

    def refused(self, now_s: float, is_spent: Sequence[bool] = NONE_SPENT) -> bool:
        """Lower the assumed limits after a refusal (a 429): those with nothing left (`is_spent`) by the factor `LESS`,
        or all by half if there are none. Returns False if an earlier refusal has just lowered them."""
        self._moved_s = now_s
        if self._is_silent:
            self._is_silent, self._halved_s = False, now_s
            return True
        if 0 <= now_s - self._halved_s < PATIENCE_S:
            return False
        self._halved_s = now_s
        for index, factor in enumerate(self._factors):
            if is_spent[index] or not any(is_spent):
                self._factors[index] = max(LEAST_FACTOR, factor * (LESS if is_spent[index] else 0.5))
        return True

    def answered(self, now_s: float, *, pressed: bool) -> bool:
        """After an answer: raise the limits that refusals have lowered; if there are none, raise the guessed limits if
        a request has waited for them (`pressed`). At most every `STEP_EVERY_S`. Returns True if a limit rose."""
        if 0 <= now_s - self._moved_s < STEP_EVERY_S:  # less than 0: the clock was set back
            return False
        self._moved_s = now_s
        if min(self._factors) < 1:
            self._factors = [min(1.0, factor + (STEP if factor < NEAR else NEAR_STEP)) for factor in self._factors]
            return True
        guessed = [index for index in range(3) if self._announced[index] is None and self._caps[index] is None]
        if not pressed or not guessed:
            return False
        for index in guessed:
            self._grown[index] += STEP * self._start[index]
        return True

    def _of(self, index: int) -> float:
        cap, announced = self._caps[index], self._announced[index]
        if announced is not None:
            return announced if cap is None else min(announced, cap)
        if self._is_silent:
            return NO_LIMIT if cap is None else cap
        return self._start[index] + self._grown[index] if cap is None else cap
