"""The limits that Lanekeeper assumes for an account: announced by the provider, capped by settings, or learned by
trial. Without I/O.

A limit that the provider does not announce begins low, and rises by a step every few seconds while requests wait for it
and the provider refuses none of them. If a provider's answers have no headers about limits (a self-hosted model behind
a compatible API, for example), it is assumed to have no limits until it refuses a call, that is, answers 429. A refusal
that does not say how much of the limits is left halves them. A refusal that says how much is left lowers them only if
smaller token buckets (`burst.py`) did not help, because then somebody else uses the account as well, or the provider
counts differently. Lowered limits rise again step by step.
"""

from collections.abc import Sequence
from math import inf

from consumers.limits.base import Amounts
from consumers.limits.headers import RateHeaders
from consumers.limits.learned import LearnedLimits
from consumers.limits.spec import AccountCaps

STEP = 0.1
"""The step by which an assumed limit is raised: a guessed limit by this part of the first guess, and a limit that
refusals (429) have lowered by this part of its full value (its value without refusals)."""
STEP_EVERY_S = 10.0
"""The shortest time, in seconds, between two raises of limits that are guessed, or that refusals (429) have lowered."""
PATIENCE_S = 5.0
"""Refusals (429) within this many seconds lower the limits only once, because calls that began before the limits were
lowered may still be refused."""
LEAST_FACTOR = 1 / 64
"""Refusals (429) never lower an assumed limit below this part of its full value (its value without refusals)."""
LESS = 0.8
"""The factor by which an assumed limit is multiplied if a refusal (429) says that almost nothing of the limit is left,
and smaller token buckets have not helped."""
NEAR = 0.7
"""When a limit that refusals (429) have lowered has risen to this part of its full value (its value without refusals),
it is raised in smaller steps (`NEAR_STEP`)."""
NEAR_STEP = STEP / 4
"""The step by which a limit that refusals (429) have lowered is raised near its full value (from the part `NEAR` on),
as a part of the full value. It is smaller than `STEP`, because there the provider is likely to refuse calls again."""
FORGOTTEN_AFTER_S = 180.0
"""A limit that the provider announced and that is below the first guess (`BudgetSpec.start`) is discarded if the
provider does not announce it again within this many seconds. If refusals (429) have lowered the limits, the reduction
is discarded when no limit was lowered or raised for this many seconds."""
NEWS_S = 60.0
"""If a provider announces the same limit again, this is recorded, and sent to other processes, at most once in this
many seconds."""
NONE_SPENT = (False, False, False)
NO_LIMIT = 1e9
"""This number stands for "no limit". It is finite, so that buckets can compute with it."""


class Adaptive:
    """The limits of one account (requests, input tokens, output tokens per minute) as this process assumes them, and
    what it has learned about them from the provider's responses."""

    def __init__(self, start: Amounts, caps: AccountCaps, *, now_s: float) -> None:
        self._start = start
        self._caps = caps.per_minute()
        self.learned = LearnedLimits(moved_s=now_s)

    def per_minute(self) -> Amounts:
        return Amounts(*(self._of(index) * self.learned.factors[index] for index in range(3)))

    def guessed(self) -> tuple[bool, ...]:
        """For each limit: True if its value is a guess. It is not a guess if the provider announced it, if the operator
        set it, or if the account is assumed to have no limits."""
        return tuple(
            announced is None and cap is None and not self.learned.is_silent
            for announced, cap in zip(self.learned.told, self._caps, strict=True)
        )

    def learn(self, rate: RateHeaders, now_s: float) -> bool:
        """Take over the limits that a response's headers announce. Returns True if one has changed."""
        before, told_s = self.learned.told, list(self.learned.told_s)
        told = [known if header.limit is None else header.limit for header, known in zip(rate, before, strict=True)]
        for index, header in enumerate(rate):
            is_news = told[index] != before[index] or not 0 <= now_s - told_s[index] < NEWS_S
            if header.limit is not None and is_news:
                told_s[index] = now_s
        self.learned = self.learned._replace(told=tuple(told), told_s=tuple(told_s))
        return self.learned.told != before

    def is_stale(self, now_s: float) -> bool:
        """True if an assumed limit is low and no response has confirmed it for minutes. It must be discarded, because
        if it blocked all calls, no response could correct it."""
        known = self.learned
        for limit, start, at_s in zip(known.told, self._start, known.told_s):  # noqa: B905  asked before every call
            if limit is not None and limit < start and not 0 <= now_s - at_s < FORGOTTEN_AFTER_S:
                return True
        return now_s - known.moved_s >= FORGOTTEN_AFTER_S and min(known.factors) < 1

    def forget(self, now_s: float) -> None:
        """Discard limits that no response has confirmed for a long time (`is_stale`), and begin again with the first
        guesses."""
        told, grown = list(self.learned.told), list(self.learned.grown)
        for index, limit in enumerate(told):
            is_old = not 0 <= now_s - self.learned.told_s[index] < FORGOTTEN_AFTER_S
            if limit is not None and limit < self._start[index] and is_old:
                told[index], grown[index] = None, 0.0
        self.learned = self.learned._replace(told=tuple(told), grown=tuple(grown))
        if now_s - self.learned.moved_s >= FORGOTTEN_AFTER_S:
            self.learned = self.learned._replace(factors=(1.0, 1.0, 1.0), moved_s=now_s)

    def learn_no_rate(self) -> bool:
        """Learn from an answer whose headers announce no limits. The account is then assumed to have none, unless the
        provider has announced limits or refused a call before. Returns True if that changes the limits."""
        known = self.learned
        if known.is_silent or any(limit is not None for limit in known.told) or known.halved_s > -inf:
            return False
        self.learned = known._replace(is_silent=True)
        return True

    def refused(self, now_s: float, is_spent: Sequence[bool] = NONE_SPENT) -> None:
        """Lower the assumed limits after a refusal (429), unless an earlier refusal has just lowered them. Limits of
        which almost nothing is left (`is_spent`) are multiplied by `LESS`; if there is no such limit, all are halved.
        If the account was assumed to have no limits, the first guesses are assumed instead."""
        known = self.learned._replace(moved_s=now_s)
        if known.is_silent:
            known = known._replace(is_silent=False, halved_s=now_s)
        elif not 0 <= now_s - known.halved_s < PATIENCE_S:
            less = [LESS if spent else 1.0 for spent in is_spent] if any(is_spent) else [0.5, 0.5, 0.5]
            factors = [max(LEAST_FACTOR, factor * by) for factor, by in zip(known.factors, less, strict=True)]
            known = known._replace(factors=tuple(factors), halved_s=now_s)
        self.learned = known

    def answered(self, now_s: float, *, pressed: bool) -> bool:
        """After an answer: raise the limits that refusals have lowered. If no limit is lowered, raise the guessed
        limits, provided that a request has waited for budget (`pressed`). This happens at most once in `STEP_EVERY_S`.
        Returns True if a limit rose."""
        if 0 <= now_s - self.learned.moved_s < STEP_EVERY_S:  # less than 0: the clock was set back
            return False
        self.learned = known = self.learned._replace(moved_s=now_s)
        if min(known.factors) < 1:
            raised = [min(1.0, factor + (STEP if factor < NEAR else NEAR_STEP)) for factor in known.factors]
            self.learned = known._replace(factors=tuple(raised))
            return True
        guessed = [told is None and cap is None for told, cap in zip(known.told, self._caps, strict=True)]
        if not pressed or not any(guessed):
            return False
        steps = [STEP * start if is_guess else 0.0 for start, is_guess in zip(self._start, guessed, strict=True)]
        grown = tuple(grown + step for grown, step in zip(known.grown, steps, strict=True))
        self.learned = known._replace(grown=grown)
        return True

    def _of(self, index: int) -> float:
        cap, announced = self._caps[index], self.learned.told[index]
        if announced is not None:
            return announced if cap is None else min(announced, cap)
        if cap is not None:
            return cap
        return NO_LIMIT if self.learned.is_silent else self._start[index] + self.learned.grown[index]
