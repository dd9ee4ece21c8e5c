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

from consumers.background import Background
from consumers.state.base import Allowances, StoreUnavailable
from consumers.state.spec import DAY_S
from lanekeeper.telemetry import logs, signals

LEVELS = (50, 80, 100)
"""When the use of a daily cap reaches one of these percentages, that is logged and published as an event, once a day
for each percentage, by only one of the processes."""
EVERY_TENANT = "*"
TENANTS_COUNTED = 10_000
"""For how many lanes and tenants (together) a process keeps the totals that they have used, and for how many limits of
caps it remembers the highest percentage that was reported. If there are more, those that were updated longest ago are
forgotten."""
LANE, TENANT = "lane", "tenant"
Publish = Callable[..., None]
"""A function that publishes a life-cycle event. Parameters: the event's name, and its fields as keyword arguments."""
log = logs.logger()


class Spent(NamedTuple):
    """The number of requests, the tokens and the dollars that one request, or several together, have used or are
    expected to use."""

    requests: float = 0.0
    tokens: float = 0.0
    usd: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """What a lane or a tenant may use in one day (UTC): how many requests, tokens and dollars. None: there is no such
    limit."""

    requests: float | None = None
    tokens: float | None = None
    """The limit of input and output tokens together, without those read from the provider's prompt cache."""
    usd: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapsSpec:
    """The daily caps of lanes and of tenants, by the name of the lane or tenant."""

    lanes: Mapping[str, Cap] = field(default_factory=dict)
    tenants: Mapping[str, Cap] = field(default_factory=dict)
    """The daily caps by tenant. `*` is the cap of each tenant that is not listed."""

    @property
    def in_money(self) -> bool:
        """Whether any cap is in dollars. If so, every model needs a price."""
        return any(cap.usd is not None for cap in (*self.lanes.values(), *self.tenants.values()))


class Bound(NamedTuple):
    """One of the limits of a daily cap: of requests, tokens or dollars, for one lane or tenant."""

    reason: str
    """Whether the cap belongs to a lane or to a tenant: "lane" or "tenant"."""
    who: str
    """The name of the lane or tenant that has the cap."""
    what: str
    """The limited amount (requests, tokens or dollars), as a field of `Spent`."""
    limit: float

    @property
    def name(self) -> str:
        return f"cap {self.reason} {self.who} {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """Says that a request may not run, because it is expected to use more than is left of a daily cap today."""

    bound: Bound
    wanted: float
    """How much the refused request was expected to use, in the unit of the limit (`bound.what`)."""
    used: float
    """How much the lane or tenant has used today, without the refused request, in the unit of the limit."""
    resets_in_s: float
    """The seconds until the end of the day (UTC), when the cap can be used in full again."""

    def __str__(self) -> str:
        bound = self.bound
        return (
            f"{bound.reason} {bound.who[:80]!r} has used {_figure(self.used, bound)} of {_figure(bound.limit, bound)} "
            f"today (UTC), and this takes {_figure(self.wanted, bound)}"
        )


@dataclass(frozen=True, slots=True)
class Hold:
    """What was counted against daily caps for one request before its call: the estimated amounts (`spent`), and the
    limits against which they were counted (`bounds`). The estimate is corrected after the call."""

    bounds: tuple[Bound, ...]
    spent: Spent
    ends_s: float = inf
    """When the day (UTC) ends on which the estimate was counted, by the event loop's clock."""


class Spending:
    """Counts what requests use against the daily caps of their lane and tenant: an estimate before the call, corrected
    after it."""

    def __init__(self, allowances: Allowances, spec: CapsSpec) -> None:
        self._allowances = allowances
        self._spec = spec
        self._reported: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """For each limit of a cap, by its name (`Bound.name`): the highest of `LEVELS` that was reported today, and
        when this day ends, by the event loop's clock."""
        self._totals: OrderedDict[tuple[str, str], Spent] = OrderedDict()
        """What each lane and tenant has used. A key is a pair of "lane" or "tenant" and the name; the lane or tenant
        that was used last comes last."""
        self._background = Background()

    def bounds(self, lane: str, tenant: str) -> tuple[Bound, ...]:
        """The daily caps (requests, tokens and dollars a day) that apply to requests of this lane and this tenant."""
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
        """Count a request's estimated use against all limits in `bounds`, or against none if it would exceed one of
        them. `publish` is called for each percentage in `LEVELS` that is reached. Raises StoreUnavailable."""
        taking = self._background.begin(self._take(bounds, spent, publish), name="caps")
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(self._give_back)
            raise

    def correct(self, hold: Hold, used: Spent) -> None:
        """Replace a request's estimate by the amounts that its call used. If the store is unavailable or the day is
        over, the estimate stays counted."""
        self._background.begin(self._correct(hold, used), name="caps")

    async def finish(self, *, within_s: float) -> None:
        """Wait for at most `within_s` until the corrections of estimates that have begun are stored. An estimate that
        is not corrected by then stays counted."""
        await self._background.finish(within_s=within_s)

    def count(self, lane: str, tenant: str, spent: Spent) -> None:
        """Add what an answered call has used to the totals of its request's lane and tenant."""
        for key in ((LANE, lane), (TENANT, tenant)):
            before = self._totals.pop(key, Spent())
            self._totals[key] = Spent(*(x + y for x, y in zip(before, spent, strict=True)))
        if len(self._totals) > TENANTS_COUNTED:
            self._totals.popitem(last=False)

    def totals(self) -> Mapping[str, Mapping[str, Spent]]:
        """What requests have used in this process since it started, for each lane and each tenant. The keys of the
        outer mapping are "lane" and "tenant"; the keys of the inner ones are names of lanes or tenants."""
        found: dict[str, dict[str, Spent]] = {LANE: {}, TENANT: {}}
        for (kind, name), spent in self._totals.items():
            found[kind][name] = spent
        return found

    async def _take(self, bounds: tuple[Bound, ...], spent: Spent, publish: Publish) -> Hold | Over:
        hold = Hold((), spent)
        try:
            for bound in bounds:
                wanted = getattr(spent, bound.what)
                taken = await self._allowances.take(bound.name, wanted, limit=bound.limit, period_s=DAY_S)
                ends_s = asyncio.get_running_loop().time() + taken.resets_in_s
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
        """Subtract a request's estimate again, if it was counted, because the caller of `take` was cancelled."""
        if not taking.cancelled() and taking.exception() is None and isinstance(hold := taking.result(), Hold):
            self.correct(hold, Spent())

    async def _report(self, bound: Bound, used: float, *, is_full: bool, ends_s: float, publish: Publish) -> None:
        """Log and publish each percentage in `LEVELS` that the use of a cap has reached and that was not reported yet.
        `is_full`: whether a request was refused because too little of the cap was left, which counts as 100 %."""
        reached = next((level for level in reversed(LEVELS) if is_full or used >= bound.limit * level / 100), 0)
        before, until_s = self._reported.get(bound.name, (0, inf))
        if asyncio.get_running_loop().time() >= until_s:  # a new day has begun
            before = 0
        if reached <= before:
            return
        self._reported[bound.name] = reached, ends_s
        self._reported.move_to_end(bound.name)
        if len(self._reported) > TENANTS_COUNTED:
            self._reported.popitem(last=False)
        for level in LEVELS:
            if before < level <= reached and await self._is_first_report(bound, level):
                figures = {"cap": bound.name, "percent": level, "used": round(used, 4), "limit": bound.limit}
                log.warning(signals.CAP_REACHED, cap=bound.name, percent=level, used=figures["used"], limit=bound.limit)
                publish("cap", **figures)

    async def _is_first_report(self, bound: Bound, level: int) -> bool:
        """Whether no process has reported this percentage of the cap today. True if the store is unavailable."""
        try:
            return (await self._allowances.take(f"told {level} {bound.name}", 1, limit=1, period_s=DAY_S)).granted
        except StoreUnavailable:
            return True


def _figure(amount: float, bound: Bound) -> str:
    return f"${amount:.4f}" if bound.what == "usd" else f"{amount:.0f} {bound.what}"
