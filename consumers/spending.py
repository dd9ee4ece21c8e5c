"""Daily caps (UTC) of lanes and tenants: how many requests, tokens and dollars they may use, and have used.

Caps are kept in the store, so that all processes share them: an estimate is taken before a call and corrected after it.
The totals of what was used, capped or not, are those of this process.

Taking and correcting run in separate tasks. If a request is cancelled, what was taken for it is given back. An answer
does not wait for its correction, and is not lost if that fails."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from consumers.background import Background
from consumers.state.base import Allowances, StoreUnavailable
from consumers.state.spec import DAY_S
from lanekeeper.telemetry import logs, signals

LEVELS = (50, 80, 100)
"""Percentages of a cap that are reported when they are reached: each once a day, by one of all processes."""
EVERY_TENANT = "*"
TENANTS_COUNTED = 10_000
LANE, TENANT = "lane", "tenant"
Tell = Callable[..., None]
"""Takes the name of a life-cycle event, and its figures."""
log = logs.logger()


class Spent(NamedTuple):
    """Amounts used, by one request or in total."""

    requests: float = 0.0
    tokens: float = 0.0
    usd: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """The limits of a day; None: no limit."""

    requests: float | None = None
    tokens: float | None = None
    """Input and output tokens, without those read from the cache."""
    usd: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapsSpec:
    """The caps of lanes and of tenants, by name."""

    lanes: Mapping[str, Cap] = field(default_factory=dict)
    tenants: Mapping[str, Cap] = field(default_factory=dict)
    """Caps by tenant; `*` is the cap of each tenant that is not named."""

    @property
    def in_money(self) -> bool:
        """Whether a cap is in dollars, so that every model needs a price."""
        return any(cap.usd is not None for cap in (*self.lanes.values(), *self.tenants.values()))


class Bound(NamedTuple):
    """One limit of a cap."""

    reason: str
    """Who is capped: "lane" or "tenant"."""
    who: str
    what: str
    """The limited amount: a field of `Spent`."""
    limit: float

    @property
    def name(self) -> str:
        return f"cap {self.reason} {self.who} {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """Too little of a cap is left."""

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
    """The amounts taken from the caps for one request."""

    bounds: tuple[Bound, ...]
    spent: Spent
    ends_s: float = inf
    """When its day ends, by the event loop's clock."""


class Spending:
    """Takes from the caps before a call, and corrects that after it."""

    def __init__(self, allowances: Allowances, spec: CapsSpec) -> None:
        self._allowances = allowances
        self._spec = spec
        self._reported: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """For each limit, by name: the highest level that was reported, and when its day ends."""
        self._totals: OrderedDict[tuple[str, str], Spent] = OrderedDict()
        self._background = Background()

    def bounds(self, lane: str, tenant: str) -> tuple[Bound, ...]:
        """All limits that a request must keep within."""
        return (*self._of(LANE, lane, self._spec.lanes.get(lane)), *self._of(TENANT, tenant, self._tenants(tenant)))

    async def take(self, bounds: tuple[Bound, ...], spent: Spent, *, tell: Tell) -> Hold | Over:
        """Take from all caps or none. `tell` is called for each level that this reaches. Raises StoreUnavailable."""
        taking = self._background.begin(self._take(bounds, spent, tell), name="caps")
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(self._unwanted)
            raise

    def correct(self, hold: Hold, used: Spent) -> None:
        """Replace the estimate by what the call used. If the store is unavailable or the day is over, the estimate
        stays counted."""
        self._background.begin(self._correct(hold, used), name="caps")

    async def finish(self, *, within_s: float) -> None:
        """Wait for the corrections in progress; what is not corrected in time stays counted as estimated."""
        await self._background.finish(within_s=within_s)

    def count(self, lane: str, tenant: str, spent: Spent) -> None:
        """Add what an answer used to the totals."""
        for key in ((LANE, lane), (TENANT, tenant)):
            before = self._totals.pop(key, Spent())
            self._totals[key] = Spent(*(x + y for x, y in zip(before, spent, strict=True)))
        if len(self._totals) > TENANTS_COUNTED:
            self._totals.popitem(last=False)

    def totals(self) -> Mapping[str, Mapping[str, Spent]]:
        """What this process has used since it began: by "lane" and "tenant", then by name."""
        found: dict[str, dict[str, Spent]] = {LANE: {}, TENANT: {}}
        for (kind, name), spent in self._totals.items():
            found[kind][name] = spent
        return found

    def _tenants(self, tenant: str) -> Cap | None:
        return self._spec.tenants.get(tenant) or self._spec.tenants.get(EVERY_TENANT)

    @staticmethod
    def _of(reason: str, who: str, cap: Cap | None) -> Iterator[Bound]:
        for what in Spent._fields:
            limit = None if cap is None else getattr(cap, what)
            if limit is not None:
                yield Bound(reason, who, what, limit)

    async def _take(self, bounds: tuple[Bound, ...], spent: Spent, tell: Tell) -> Hold | Over:
        hold = Hold((), spent)
        try:
            for bound in bounds:
                wanted = getattr(spent, bound.what)
                taken = await self._allowances.take(bound.name, wanted, limit=bound.limit, period_s=DAY_S)
                ends_s = asyncio.get_running_loop().time() + taken.resets_in_s
                is_full = not taken.granted and wanted <= bound.limit
                await self._tell(bound, taken.used, is_full=is_full, ends_s=ends_s, tell=tell)
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
            over = getattr(hold.spent, bound.what) - getattr(used, bound.what)
            if not over or asyncio.get_running_loop().time() >= hold.ends_s:
                continue
            try:
                await self._allowances.give_back(bound.name, over, period_s=DAY_S)
            except StoreUnavailable as error:
                log.warning(signals.CAP_UNCORRECTED, cap=bound.name, error=str(error))
                return

    def _unwanted(self, taking: "asyncio.Task[Hold | Over]") -> None:
        if not taking.cancelled() and taking.exception() is None and isinstance(hold := taking.result(), Hold):
            self.correct(hold, Spent())

    async def _tell(self, bound: Bound, used: float, *, is_full: bool, ends_s: float, tell: Tell) -> None:
        level = next((each for each in reversed(LEVELS) if is_full or used >= bound.limit * each / 100), 0)
        before, until_s = self._reported.get(bound.name, (0, inf))
        if asyncio.get_running_loop().time() >= until_s:  # a new day has begun
            before = 0
        if level <= before:
            return
        self._reported[bound.name] = level, ends_s
        self._reported.move_to_end(bound.name)
        if len(self._reported) > TENANTS_COUNTED:
            self._reported.popitem(last=False)
        for each in LEVELS:
            if before < each <= level and await self._is_news(bound, each):
                figures = {"cap": bound.name, "percent": each, "used": round(used, 4), "limit": bound.limit}
                log.warning(signals.CAP_REACHED, cap=bound.name, percent=each, used=figures["used"], limit=bound.limit)
                tell("cap", **figures)

    async def _is_news(self, bound: Bound, level: int) -> bool:
        """Whether no process has reported it today."""
        try:
            return (await self._allowances.take(f"told {level} {bound.name}", 1, limit=1, period_s=DAY_S)).granted
        except StoreUnavailable:
            return True


def _figure(amount: float, bound: Bound) -> str:
    return f"${amount:.4f}" if bound.what == "usd" else f"{amount:.0f} {bound.what}"
