"""What is learned about an account from the provider's answers: its limits (`Adaptive`), how much of them may be used
at once (`Bursts`), and the text in which processes exchange both. Values for the three limits are in the order of
`Amounts`; times are passed in.

**Limits.** A limit that the provider does not announce begins low, and rises by a step every few seconds while requests
wait for it and the provider refuses none of them. If a provider's answers have no headers about limits (a self-hosted
model behind a compatible API, for example), it is assumed to have no limits until it refuses a call, that is, answers
429. A refusal that does not say how much of the limits is left halves them. A refusal that says how much is left lowers
them only if smaller token buckets did not help, because then somebody else uses the account as well, or the provider
counts differently. Lowered limits rise again step by step.

**Sizes of buckets**, in seconds' worth of the limit: 60 means the amount of a minute. The size of a bucket is what the
provider's own bucket is proven to hold, but at most the setting `BudgetSpec.burst_s`. The proof: after a call, the
provider's header `remaining` plus what the call took is what the provider's bucket held before the call. As long as
nothing is proven, a small size is assumed.

A refusal that says how much is left shows that too much was used at once, although the bucket was proven to hold it:
somebody else uses the account, or the provider enforces its limits per second. Then the size is halved, and rises again
slowly. It never falls below a second's worth. One large request may need all of so small a bucket, so the provider's
estimate of the request's input tokens matters: the provider subtracts its estimate when a call begins, and corrects it
when the call ends. If refusals suggest that this estimate is higher than ours, more input tokens are reserved for each
call (`margin`).
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from math import inf
from typing import Any, Final, NamedTuple, TypeVar

from consumers.limits.base import INPUT, ROUNDED_UP_BY, AccountCaps, Amounts, RateHeaders

PATIENCE_S = 5.0
"""Refusals (429) within this time lower limits or sizes only once, because calls that began before may still be refused
for the same reason."""


# ---- limits ----------------------------------------------------------------------------------------------------------

STEP = 0.1
STEP_EVERY_S = 10.0
LEAST_FACTOR = 1 / 64
LESS = 0.8
"""The factor for a limit of which almost nothing is left at a refusal, and smaller token buckets have not helped."""
NEAR = 0.7
"""From this part of its full value on, a lowered limit is raised in smaller steps, because there the provider is likely
to refuse calls again."""
NEAR_STEP = STEP / 4
FORGOTTEN_AFTER_S = 180.0
"""A limit that the provider announced and that is below the first guess (`BudgetSpec.start`) is discarded if it is not
announced again within this time; what refusals have lowered, if no limit was lowered or raised for this time."""
NEWS_S = 60.0
"""If a provider announces the same limit again, this is recorded, and sent to other processes, at most once in this
time."""
NONE_SPENT = (False, False, False)
NO_LIMIT = 1e9
"""This number stands for "no limit"."""


class LearnedLimits(NamedTuple):
    """What was learned about an account's limits per minute. The names of the fields are part of the JSON that
    processes exchange."""

    told: tuple[float | None, ...] = (None, None, None)
    told_s: tuple[float, ...] = (-inf, -inf, -inf)
    grown: tuple[float, ...] = (0.0, 0.0, 0.0)
    is_silent: bool = False
    factors: tuple[float, ...] = (1.0, 1.0, 1.0)
    halved_s: float = -inf
    moved_s: float = -inf


class Adaptive:
    """The limits of one account as this process assumes them."""

    def __init__(self, start: Amounts, caps: AccountCaps, *, now_s: float) -> None:
        self._start = start
        self._caps = caps.per_minute()
        self.learned = LearnedLimits(moved_s=now_s)

    def per_minute(self) -> Amounts:
        return Amounts(*(self._of(index) * self.learned.factors[index] for index in range(3)))

    def guessed(self) -> tuple[bool, ...]:
        return tuple(
            announced is None and cap is None and not self.learned.is_silent
            for announced, cap in zip(self.learned.told, self._caps, strict=True)
        )

    def learn(self, rate: RateHeaders, now_s: float) -> bool:
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
        told, grown = list(self.learned.told), list(self.learned.grown)
        for index, limit in enumerate(told):
            is_old = not 0 <= now_s - self.learned.told_s[index] < FORGOTTEN_AFTER_S
            if limit is not None and limit < self._start[index] and is_old:
                told[index], grown[index] = None, 0.0
        self.learned = self.learned._replace(told=tuple(told), grown=tuple(grown))
        if now_s - self.learned.moved_s >= FORGOTTEN_AFTER_S:
            self.learned = self.learned._replace(factors=(1.0, 1.0, 1.0), moved_s=now_s)

    def learn_no_rate(self) -> bool:
        known = self.learned
        if known.is_silent or any(limit is not None for limit in known.told) or known.halved_s > -inf:
            return False
        self.learned = known._replace(is_silent=True)
        return True

    def refused(self, now_s: float, is_spent: Sequence[bool] = NONE_SPENT) -> None:
        """Lower the assumed limits after a refusal: those of which almost nothing is left (`is_spent`) by `LESS`; if
        there is no such limit, all are halved."""
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
        limits, provided that a request has waited for budget (`pressed`)."""
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


# ---- sizes of buckets ------------------------------------------------------------------------------------------------


class Size(NamedTuple):
    """The size of one token bucket of a provider's account."""

    burst_s: float
    lost_part: float
    """The part of a full bucket that counts as lost when a call begins, in addition to what the call takes. Without it,
    our bucket could become fuller than the provider's. If the provider's bucket is not larger than ours, it is full as
    well, and begins to refill only when the call arrives at the provider, but ours begins when the call begins."""


UNKNOWN_S = 5.0
"""The size of a bucket while its limit is guessed and no size is proven: enough for about four calls at once."""
UNPROVEN_S = 10.0
NEWS = 1.01
"""The factor by which the proven size must grow before it is recorded and sent to other processes."""
RECOVERY = 1.1
RECOVERY_EVERY_S = 10.0
LEAST_S = 1.0
SMALL_S = 5.0
MARGIN_STEP = 0.2
MARGIN_MOST = 0.5
MARGIN_DECAY = 0.99
OFTEN = 0.5
"""If at least this part of the latest responses are refusals although the buckets have their smallest sizes, reducing
the buckets has not helped, so the limits are lowered."""
SPENT = 0.01
"""A bucket counts as spent, and so explains a refusal, if less than this part of its limit per minute is left."""
SPENT_REQUESTS = 2.0
WEIGHT = 0.1
LOST_PART = 0.05


class LearnedBursts(NamedTuple):
    """What was learned about the sizes of an account's three token buckets. The names of the fields are part of the
    JSON that processes exchange."""

    proven_s: tuple[float | None, ...] = (None, None, None)
    cut: tuple[float, ...] = (1.0, 1.0, 1.0)
    cut_s: float = -inf
    moved_s: float = -inf


class Bursts:
    """Learns how large the three token buckets of a provider's account are."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self.learned = LearnedBursts()
        self._usual_input = 0.0
        self._refusals = 0.0
        self.margin = 0.0

    def sizes(self, *, guessed: Sequence[bool]) -> tuple[Size, ...]:
        return tuple(
            Size(cut * min(self._most_s, UNKNOWN_S if is_guess else UNPROVEN_S), 0.0)
            if proven_s is None
            else Size(cut * proven_s, LOST_PART if cut * proven_s < self._most_s else 0.0)
            for proven_s, cut, is_guess in zip(self.learned.proven_s, self.learned.cut, guessed, strict=True)
        )

    def forget(self, guessed: Sequence[bool]) -> None:
        known = zip(self.learned.proven_s, guessed, strict=True)
        self.learned = self.learned._replace(
            proven_s=tuple(None if is_guess else proven_s for proven_s, is_guess in known)
        )

    def learn(self, rate: RateHeaders, counted: Amounts) -> bool:
        """Learn from a response how much the provider's buckets hold. Returns True if a bucket is now proven to hold
        more than before."""
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
        if (proven := tuple(found)) == self.learned.proven_s:
            return False
        self.learned = self.learned._replace(proven_s=proven)
        return True

    def spent(self, rate: RateHeaders) -> tuple[bool, ...]:
        usual = (0.0, SPENT_REQUESTS * self._usual_input, 0.0)
        return tuple(
            header.remaining is not None
            and header.remaining - ROUNDED_UP_BY[index] < max(1.0, SPENT * (header.limit or 0.0), usual[index])
            for index, header in enumerate(rate)
        )

    def refused(self, is_spent: Sequence[bool], now_s: float) -> bool:
        """After a refusal, reduce the sizes of the buckets that are spent, or of all buckets if none is spent. If the
        bucket of input tokens is among them and is small already, `margin` is raised instead, up to `MARGIN_MOST`.
        Returns False if many calls are refused although these buckets have their smallest sizes."""
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
        self.learned = self.learned._replace(moved_s=now_s)
        self.margin = min(MARGIN_MOST, self.margin + MARGIN_STEP)

    def answered(self, now_s: float) -> bool:
        """After an answer: undo one step of what refusals have changed, but at most every `RECOVERY_EVERY_S`."""
        self._refusals -= WEIGHT * self._refusals
        known = self.learned
        if 0 <= now_s - known.moved_s < RECOVERY_EVERY_S or (min(known.cut) == 1 and not self.margin):
            return False
        self.margin *= MARGIN_DECAY
        self.learned = known._replace(cut=tuple(min(1.0, RECOVERY * factor) for factor in known.cut), moved_s=now_s)
        return True

    def _least(self, index: int) -> float:
        return min(1.0, LEAST_S / (self.learned.proven_s[index] or UNPROVEN_S))


# ---- as text ---------------------------------------------------------------------------------------------------------

VERSION: Final = 2
"""The version of the JSON text in which processes exchange learned limits. Increase it when a field is added, is
removed, or gets another meaning: processes of two versions of Lanekeeper share one Redis while a deployment is
updated."""
MOST_NUMBER: Final = 1e12


Known = TypeVar("Known", LearnedLimits, LearnedBursts)


class UnreadableError(ValueError):
    """The text cannot be used, because another version of Lanekeeper has written it, or because it is damaged."""


class Learned(NamedTuple):
    """What was learned about the limits of an account, as processes exchange it. Times are in seconds since 1970."""

    limits: LearnedLimits
    bursts: LearnedBursts
    held_until_s: float

    def shifted(self, jump_s: float) -> "Learned":
        limits, bursts = self.limits, self.bursts
        return Learned(
            limits._replace(
                told_s=tuple(at_s + jump_s for at_s in limits.told_s),
                halved_s=limits.halved_s + jump_s,
                moved_s=limits.moved_s + jump_s,
            ),
            bursts._replace(cut_s=bursts.cut_s + jump_s, moved_s=bursts.moved_s + jump_s),
            self.held_until_s + jump_s,
        )


@lru_cache(maxsize=64)  # the same text is sent to Redis many times a second
def to_json(learned: Learned) -> str:
    """Write what was learned as text, for `from_json`."""
    return json.dumps(
        {
            "version": VERSION,
            **learned._asdict(),
            "limits": learned.limits._asdict(),
            "bursts": learned.bursts._asdict(),
        }
    )


def from_json(text: str | bytes) -> Learned:
    """Read the text that `to_json` has made. Raises UnreadableError, and no other error, for any other text."""
    try:
        found = json.loads(text)
        if (version := found["version"]) != VERSION:
            raise UnreadableError(f"version {version!r}, this process reads {VERSION}")
        limits, bursts = _read(LearnedLimits(), found["limits"]), _read(LearnedBursts(), found["bursts"])
        return Learned(limits, bursts, _number(found["held_until_s"]))
    except UnreadableError:
        raise
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError) as error:
        raise UnreadableError(f"{type(error).__name__}: {error}") from error


_BOUNDS: Final = {
    "told": (1.0, MOST_NUMBER),
    "grown": (0.0, MOST_NUMBER),
    "factors": (1e-3, 1.0),
    "proven_s": (0.0, MOST_NUMBER),
    "cut": (1e-3, 1.0),
}


def _read(nothing: Known, found: Any) -> Known:
    values: dict[str, Any] = {}
    for name, like in nothing._asdict().items():
        value, bounds = found[name], _BOUNDS.get(name, (-inf, MOST_NUMBER))
        if isinstance(like, tuple):
            first, second, third = value
            values[name] = tuple(
                None if each is None is like[0] else _number(each, *bounds) for each in (first, second, third)
            )
        elif isinstance(like, bool):
            if not isinstance(value, bool):
                raise UnreadableError(f"{name} is neither true nor false")
            values[name] = value
        else:
            values[name] = _number(value, *bounds)
    return nothing._replace(**values)


def _number(value: Any, least: float = -inf, most: float = MOST_NUMBER) -> float:
    if type(value) not in (int, float) or not least <= value <= most:
        raise UnreadableError(f"{str(value)[:40]} where a number from {least:g} to {most:g} is expected")
    return float(value)
