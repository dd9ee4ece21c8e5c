"""Decides how many calls to an account at a provider may run at the same time, and which lanes may make them. Times are
passed in.

At first there is no limit, or only that of the settings. A provider that answers 529 (overloaded) may mean our calls,
or may be overloaded by others, whatever we do. Only an experiment tells: if many calls are refused, fewer may run for a
few seconds (the trial), namely as many as the provider has worked on at a time. If clearly fewer calls are refused
then, the limit stays; otherwise it was weather, and the limit ends. A limit that stays is tried by the reverse
experiment: while requests wait for it, more calls may run, in steps that double, until clearly more calls are refused;
then the last step is taken back. All processes change their limits at the same seconds of the clock, because if only
one of them made fewer calls, the others would fill the gap.

A call counts when it begins, because its answer may stream for minutes, while a refusal comes soon. Under one limit
several refused calls for the same request count once, because the request itself may be the reason.

While the number of calls is limited, each lane gets its share of them: whenever a call begins, the credit of every lane
with a waiting request grows by the lane's share, up to one call. A lane with a credit of one call is called "due": its
first waiting request is granted before those of more urgent lanes. Where overloads have lowered the limit, the most
urgent lane may make one call beside it.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from math import ceil, comb, inf
from typing import Final

from cachetools import FIFOCache

ROUND_S = 1.0
"""How often the limit of calls may change, at full seconds of the clock, so that all processes change it at the same
time. If a refusal (529) takes about as long or longer, a round is two, four, eight … times as long."""
ROUND_MOST_S = 16.0
AGEING = 0.9
"""By this factor the counts of calls that began and that were refused (529) get smaller every second."""
REFUSED_FROM = 8
SHARE_FROM = 0.1
"""A trial begins if at least this many, and this part, of the counted calls were refused."""
CLEAR = 0.01
"""Two limits differ clearly in the part of the calls that was refused if chance alone would make them differ so much
less often than this (Fisher's exact test)."""
UNCLEAR = 0.2
FALLEN = 2 / 3
STEADY = 1.2
ENOUGH = 30
ENOUGH_REFUSED = 3
"""After so many calls or refusals, a trial that has not helped ends; after half as many more calls also if it is not
clear whether it has."""
TRIAL_S = 10.0
WEATHER_S = 30.0
WEATHER_MOST_S = 300.0
"""After a trial that has not helped there is no other one for this time, and twice as long after each further one,
unless clearly more calls are refused than before it."""
RAISE_MOST_S = 4.0
"""After a raise that was taken back, the next one follows in one second; after each further one in twice the time, up
to this."""
QUIET_S = 60.0
BESIDE_S = 5.0
"""If a call that the most urgent lane made beside the limit was refused, it makes no other one for this time."""
REMEMBERED = 1000
SMOOTHING = 0.1
WHOLE: Final = 1 - 1e-9
"""A lane is due for a call if its credit is at least this."""


@dataclass(slots=True)
class Sample:
    """What was seen under one limit of calls; older calls count less (`AGEING`)."""

    since_s: float = -inf
    begun: float = 0.0
    ripe: float = 0.0
    """How many of them began so long before this round that their refusals had arrived."""
    _before: float = 0.0
    refused: float = 0.0
    requests: FIFOCache[str, None] = field(default_factory=lambda: FIFOCache(REMEMBERED))

    @property
    def is_bad(self) -> bool:
        return self.refused >= REFUSED_FROM and self.refused >= SHARE_FROM * self.begun

    def age(self, factor: float, young: float) -> None:
        self.ripe = factor * (self.begun - young * max(0.0, self.begun - self._before))
        self.begun, self.refused = factor * self.begun, factor * self.refused
        self._before = self.begun

    def add(self, other: "Sample") -> None:
        self.begun, self._before = self.begun + other.begun, self._before + other.begun
        self.ripe, self.refused = self.ripe + other.begun, self.refused + other.refused
        latest, self.requests = self.requests, FIFOCache(REMEMBERED)
        self.requests.update(dict.fromkeys((*other.requests, *latest)))

    def refuse(self, request: str) -> None:
        if request in self.requests:
            return
        self.refused += 1
        if request:
            self.requests[request] = None


def by_chance(low: Sample, high: Sample) -> float:
    """How likely at least as many of the refused calls as in fact would be among those in `high` if the calls in both
    samples were refused equally often. Calls that may still be refused count against a difference."""
    (low_calls, low_refused), (calls, refused) = _few(low.ripe, low.refused), _few(high.begun, high.refused)
    all_refused = low_refused + refused
    ways = (comb(calls, n) * comb(low_calls, all_refused - n) for n in range(refused, min(calls, all_refused) + 1))
    return sum(ways) / comb(low_calls + calls, all_refused)


def _few(calls: float, refused: float) -> tuple[int, int]:
    calls = max(calls, refused)
    part = 100 / max(100, calls)
    return round(part * calls), round(part * refused)


class Concurrency:
    """How many calls of one account may run at a time, how many run, and which lanes are due for a call."""

    def __init__(self, ceiling: int | None, shares: Sequence[float]) -> None:
        self._ceiling: float = inf if ceiling is None else ceiling
        self._shares = shares
        self._credit = [0.0 for _ in shares]
        self.limit = self._ceiling
        self.running = 0
        self._urgent = 0
        self._peak = 1
        self.call_s = 0.0
        self.is_wanted = False
        self._sample = Sample()
        self._before: Sample | None = None
        self._weather = Sample()
        self._weather_s = WEATHER_S
        self._back_to = inf
        self._step = 1.0
        self._raises_failed = 0
        self._raise_from_s = self._lower_from_s = self._overloaded_s = -inf
        self._accepted = 0.0
        self._call_s = self._passed_s = 0.0
        """In the last seconds: the time of all calls together, without those that were refused; and the time."""
        self._counted_s = -inf
        self._round_s = -inf
        self._round_length_s = ROUND_S
        self._refusal_s = 0.0
        self._beside: str | None = None
        self._beside_from_s = -inf

    @property
    def is_limited(self) -> bool:
        return self.limit < inf

    @property
    def is_set(self) -> bool:
        return self.limit == self._ceiling

    @property
    def _is_trial(self) -> bool:
        return self._before is not None and self.limit < self._back_to

    def may_begin(self, lane: int, now_s: float) -> bool:
        if not self.running or self.running + 1 <= self.limit:
            return True
        return lane == 0 and not self._urgent and self.running + 1 <= self._ceiling and now_s >= self._beside_from_s

    def begin(self, lane: int, request: str, heads: Sequence[object | None], now_s: float) -> None:
        self._count_time(now_s)
        self.running += 1
        self._urgent += lane == 0
        self._peak = max(self._peak, self.running)
        if lane == 0 and self.running > max(1.0, self.limit):
            self._beside = request
        elif request not in self._sample.requests:
            self._sample.begun += 1
        if not self.is_limited:
            return
        if self.is_due(lane):
            self._credit[lane] -= 1
        for other, waiter in enumerate(heads):
            if waiter is not None:
                self._credit[other] = min(1.0, self._credit[other] + self._shares[other])

    def is_due(self, lane: int) -> bool:
        return self.is_limited and self._credit[lane] >= WHOLE

    def calls_before(self, lane: int, count: int) -> int:
        return ceil((count + 1 - self._credit[lane]) / self._shares[lane]) + 1

    def end(self, lane: int, request: str, began_s: float, now_s: float, *, is_made: bool) -> None:
        self._count_time(now_s)
        self.running = max(0, self.running - 1)
        self._urgent = max(0, self._urgent - (lane == 0))
        if lane == 0 and request == self._beside:
            self._beside = None
        elif not is_made and began_s >= self._sample.since_s and request not in self._sample.requests:
            self._sample.begun = max(0.0, self._sample.begun - 1)
        self.call_s += (max(0.0, now_s - began_s) - self.call_s) * (SMOOTHING if self.call_s else 1.0)

    def overloaded(self, request: str, took_s: float, now_s: float) -> None:
        self._overloaded_s = now_s
        sample, took_s = self._sample, max(0.0, took_s)
        self._call_s = max(0.0, self._call_s - min(took_s, self._passed_s))
        self._refusal_s += (took_s - self._refusal_s) * SMOOTHING
        while self._round_length_s < min(ROUND_MOST_S, 1.25 * self._refusal_s):
            self._round_length_s *= 2
        while self._round_length_s > max(ROUND_S, 2.5 * self._refusal_s):
            self._round_length_s /= 2
        if request == self._beside:
            self._beside_from_s = now_s + BESIDE_S
            return
        if now_s - took_s < sample.since_s:
            return
        sample.refuse(request)
        if self._before is not None and not self._is_trial and by_chance(self._before, sample) < CLEAR:
            self._take_back_raise(now_s)

    def tick(self, now_s: float) -> None:
        if 0 <= now_s - self._round_s < self._round_length_s:
            return
        self._count_time(now_s)
        passed_s = min(max(0.0, now_s - self._round_s), 1000.0)
        self._round_s = now_s // self._round_length_s * self._round_length_s
        self._sample.age(AGEING**passed_s, min(1.0, self._refusal_s / self._round_length_s))
        before, self._accepted = self._accepted, self._call_s / (self._passed_s or 1.0)
        self._call_s, self._passed_s = self._call_s / 2, self._passed_s / 2
        if self._is_trial:
            self._judge_trial(now_s)
        elif self._before is not None:
            self._judge_raise(now_s)
        is_steady = self._accepted <= STEADY * before + 0.5
        if self._before is None and self._sample.is_bad and is_steady and self._is_trial_due(now_s):
            self._lower(now_s)
        if is_quiet := now_s - self._overloaded_s >= QUIET_S:
            self._weather_s = WEATHER_S
        if self._before is None and not self.is_set:
            if is_quiet or self.limit > self._peak:
                self.limit = self._ceiling
            elif self.is_wanted and now_s >= self._raise_from_s:
                self._change(min(self._ceiling, self.limit + self._step), now_s)
        self.is_wanted = False

    def changes_in_s(self, now_s: float) -> float:
        return inf if self.is_set else max(0.0, self._round_s + self._round_length_s - now_s)

    def shift(self, jump_s: float) -> None:
        self._sample.since_s += jump_s
        self._beside_from_s += jump_s
        self._raise_from_s += jump_s
        self._lower_from_s += jump_s
        self._overloaded_s += jump_s
        self._counted_s += jump_s
        self._round_s += jump_s

    def wait_s(self, ahead: int) -> float:
        """About how many seconds pass until one more call may begin after `ahead` other calls have begun; 0 if it may
        begin now."""
        if self.limit == inf:
            return 0.0
        missing = self.running + ahead + 1 - self.limit
        return max(0.0, missing * self.call_s / self.limit)

    # ---- experiments -------------------------------------------------------------------------------------------------

    def _change(self, limit: float, now_s: float) -> None:
        self._back_to, self.limit = self.limit, limit
        self._before, self._sample = self._sample, Sample(since_s=now_s)

    def _is_trial_due(self, now_s: float) -> bool:
        return now_s >= self._lower_from_s or by_chance(self._weather, self._sample) < CLEAR

    def _lower(self, now_s: float) -> None:
        least = 2.0 if self.is_set else 1.0  # a single long stream must not stop all others
        limit = max(1.0, min(max(least, round(self._accepted)), self.limit - 1))
        if limit < self.limit:
            self._change(limit, now_s)

    def _judge_trial(self, now_s: float) -> None:
        before, sample = self._before, self._sample
        assert before is not None
        has_fallen = sample.refused * before.begun <= FALLEN * before.refused * sample.begun
        if has_fallen and by_chance(sample, before) < CLEAR:
            self._before, self._step, self._raises_failed, self._weather_s = None, 1.0, 0, WEATHER_S
            self._raise_from_s = now_s + self._round_length_s
            return
        is_enough = sample.ripe >= ENOUGH or sample.refused >= ENOUGH_REFUSED
        if (is_enough and not has_fallen) or sample.begun >= 1.5 * ENOUGH or now_s - sample.since_s >= TRIAL_S:
            self._end(self._back_to)
            self._weather, self._lower_from_s = copy(self._sample), now_s + self._weather_s
            self._weather_s = min(WEATHER_MOST_S, 2 * self._weather_s)

    def _judge_raise(self, now_s: float) -> None:
        before, sample = self._before, self._sample
        assert before is not None
        chance = by_chance(before, sample)
        if chance < CLEAR:
            self._take_back_raise(now_s)
        elif not sample.refused or chance > UNCLEAR:
            self._end(self.limit)
            self._step, self._raises_failed = 2 * self._step, 0

    def _take_back_raise(self, now_s: float) -> None:
        assert self._before is not None
        self.limit, self._sample, self._before = self._back_to, self._before, None
        self._sample.since_s = now_s
        self._step = 1.0
        self._raise_from_s = now_s + max(self._round_length_s, min(RAISE_MOST_S, 2.0**self._raises_failed))
        self._raises_failed = min(self._raises_failed + 1, 16)

    def _end(self, limit: float) -> None:
        assert self._before is not None
        self._sample.add(self._before)
        self.limit, self._before = limit, None

    def _count_time(self, now_s: float) -> None:
        passed_s, self._counted_s = now_s - self._counted_s, now_s
        if 0 < passed_s < inf:
            self._call_s += self.running * passed_s
            self._passed_s += passed_s
