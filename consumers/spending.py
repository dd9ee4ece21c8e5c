"""Enforces the daily caps (UTC days) of lanes and tenants on requests, tokens and dollars, and counts the totals that
lanes and tenants have used.

How much of each cap is used is counted in the store, which all processes share: an estimate is added before a call, and
replaced by the real amounts after it. The totals are counted in memory, for this process alone, even if there are no
caps.

Adding an estimate and correcting it run in tasks of their own. So the estimate of a cancelled request is subtracted
again, and an answer does not wait for the correction of its estimate, and is not lost if the correction fails."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from cachetools import LRUCache

from consumers.background import Background
from consumers.state.base import DAY_S, Allowances, StoreUnavailable
from lanekeeper.telemetry import logs, signals

LEVELS = (50, 80, 100)
EVERY_TENANT = "*"
TENANTS_COUNTED = 10_000
LANE, TENANT = "lane", "tenant"
Publish = Callable[..., None]
log = logs.logger()


class Spent(NamedTuple):
    """The number of requests, the tokens and the dollars that one request, or several together, have used or are
    expected to use."""

    requests: float = 0.0
    tokens: float = 0.0
    usd: float = 0.0


class Total(NamedTuple):
    """What all answered requests of a lane or a tenant have used."""

    requests: float = 0.0
    tokens: float = 0.0
    usd: float = 0.0
    saved_usd: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """What a lane or a tenant may use in one day (UTC)."""

    requests: float | None = None
    tokens: float | None = None
    usd: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapsSpec:
    """The daily caps of lanes and of tenants, by the name of the lane or tenant."""

    lanes: Mapping[str, Cap] = field(default_factory=dict)
    tenants: Mapping[str, Cap] = field(default_factory=dict)

    @property
    def in_money(self) -> bool:
        return any(cap.usd is not None for cap in (*self.lanes.values(), *self.tenants.values()))


class Bound(NamedTuple):
    """One of the limits of a daily cap: of requests, tokens or dollars, for one lane or tenant."""

    reason: str
    who: str
    what: str
    limit: float

    @property
    def name(self) -> str:
        return f"cap {self.reason} {self.who} {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """Says that a request may not run, because it is expected to use more than is left of a daily cap today."""

    bound: Bound
    wanted: float
    used: float
    resets_in_s: float

    def __str__(self) -> str:
        bound = self.bound
        return (
            f"{bound.reason} {bound.who[:80]!r} has used {_figure(self.used, bound)} of {_figure(bound.limit, bound)} "
            f"today (UTC), and this takes {_figure(self.wanted, bound)}"
        )


@dataclass(frozen=True, slots=True)
class Hold:
    """What was counted against daily caps for one request before its call: the estimated amounts (`spent`), and the
    limits against which they were counted (`bounds`)."""

    bounds: tuple[Bound, ...]
    spent: Spent
    ends_s: float = inf


class Spending:
    """Counts what requests use against the daily caps of their lane and tenant."""

    def __init__(self, allowances: Allowances, spec: CapsSpec) -> None:
        self._allowances = allowances
        self._spec = spec
        self._reported: LRUCache[str, tuple[int, float]] = LRUCache(TENANTS_COUNTED)
        # no LRUCache: reading them all for the metrics would count as a use of each
        self._totals: OrderedDict[tuple[str, str], Total] = OrderedDict()
        self._used: OrderedDict[Bound, tuple[float, float]] = OrderedDict()
        self._background = Background()

    def bounds(self, lane: str, tenant: str) -> tuple[Bound, ...]:
        of_tenant = self._spec.tenants.get(tenant) or self._spec.tenants.get(EVERY_TENANT)
        caps = ((LANE, lane, self._spec.lanes.get(lane)), (TENANT, tenant, of_tenant))
        return tuple(
            Bound(reason=reason, who=who, what=what, limit=limit)
            for reason, who, cap in caps
            if cap is not None
            for what in Spent._fields
            if (limit := getattr(cap, what)) is not None
        )

    async def take(self, bounds: tuple[Bound, ...], spent: Spent, *, publish: Publish) -> Hold | Over:
        taking = self._take(bounds, spent, publish)
        return await self._background.sheltered(taking, name="caps", if_left=self._give_back)

    def correct(self, hold: Hold, used: Spent) -> None:
        """Replace a request's estimate by the amounts that its call used. If the store is unavailable or the day is
        over, the estimate stays counted."""
        self._background.detached(self._correct(hold, used), name="caps")

    async def finish(self, *, within_s: float) -> None:
        await self._background.finish(within_s=within_s)

    def count(self, lane: str, tenant: str | None, spent: Spent, *, saved_usd: float = 0.0) -> None:
        for key in ((LANE, lane), *(() if tenant is None else ((TENANT, tenant),))):
            before = self._totals.pop(key, Total())
            self._totals[key] = Total(*(x + y for x, y in zip(before, (*spent, saved_usd), strict=True)))
        if len(self._totals) > TENANTS_COUNTED:
            self._totals.popitem(last=False)

    def totals(self) -> Mapping[str, Mapping[str, Total]]:
        found: dict[str, dict[str, Total]] = {LANE: {}, TENANT: {}}
        for (kind, name), spent in self._totals.items():
            found[kind][name] = spent
        return found

    def used(self) -> Mapping[Bound, float]:
        now_s = asyncio.get_running_loop().time()
        return {bound: used if now_s < ends_s else 0.0 for bound, (used, ends_s) in self._used.items()}

    async def _take(self, bounds: tuple[Bound, ...], spent: Spent, publish: Publish) -> Hold | Over:
        hold = Hold((), spent)
        try:
            for bound in bounds:
                wanted = getattr(spent, bound.what)
                taken = await self._allowances.take(bound.name, wanted, limit=bound.limit, period_s=DAY_S)
                ends_s = asyncio.get_running_loop().time() + taken.resets_in_s
                self._used[bound] = taken.used, ends_s
                if len(self._used) > TENANTS_COUNTED:
                    self._used.popitem(last=False)
                is_full = not taken.granted and wanted <= bound.limit
                await self._report(bound, taken.used, is_full=is_full, ends_s=ends_s, publish=publish)
                if not taken.granted:
                    await self._correct(hold, Spent())
                    return Over(bound=bound, wanted=wanted, used=taken.used, resets_in_s=taken.resets_in_s)
                hold = Hold((*hold.bounds, bound), spent, ends_s)
        except StoreUnavailable:
            await self._correct(hold, Spent())
            raise
        return hold

    async def _correct(self, hold: Hold, used: Spent) -> None:
        for bound in hold.bounds:
            unused = getattr(hold.spent, bound.what) - getattr(used, bound.what)
            if not unused or asyncio.get_running_loop().time() >= hold.ends_s:
                continue
            try:
                await self._allowances.give_back(bound.name, unused, period_s=DAY_S)
            except StoreUnavailable as error:
                log.warning(signals.CAP_UNCORRECTED, cap=bound.name, error=str(error))
                return

    def _give_back(self, taking: "asyncio.Task[Hold | Over]") -> None:
        if not taking.cancelled() and taking.exception() is None and isinstance(hold := taking.result(), Hold):
            self.correct(hold, Spent())

    async def _report(self, bound: Bound, used: float, *, is_full: bool, ends_s: float, publish: Publish) -> None:
        reached = next((level for level in reversed(LEVELS) if is_full or used >= bound.limit * level / 100), 0)
        before, until_s = self._reported.get(bound.name, (0, inf))
        if asyncio.get_running_loop().time() >= until_s:  # a new day has begun
            before = 0
        if reached <= before:
            return
        self._reported[bound.name] = reached, ends_s
        for level in LEVELS:
            if before < level <= reached and await self._is_first_report(bound, level):
                figures = {"cap": bound.name, "percent": level, "used": round(used, 4), "limit": bound.limit}
                log.warning(signals.CAP_REACHED, cap=bound.name, percent=level, used=figures["used"], limit=bound.limit)
                publish("cap", **figures)

    async def _is_first_report(self, bound: Bound, level: int) -> bool:
        try:
            return (await self._allowances.take(f"told {level} {bound.name}", 1, limit=1, period_s=DAY_S)).granted
        except StoreUnavailable:
            return True


def _figure(amount: float, bound: Bound) -> str:
    return f"${amount:.4f}" if bound.what == "usd" else f"{amount:.0f} {bound.what}"
