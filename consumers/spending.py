"""Enforces caps on what lanes, tenants, API keys and users use in a day, a week (from Monday) or a month (UTC): in
requests, tokens and dollars. Counts the totals that lanes and tenants have used.

Each cap has two counters in the store, which all processes share. What a call can use at most is added to the first
one before the call, and replaced by what it used afterwards, so that however many callers there are, a cap holds. What
was used is added to the second one; if there is room by this one alone, the calls that run will leave some, and it is
enough to wait for them. The totals are counted in memory, for this process alone, even if there are no caps.

Adding and correcting run in tasks of their own. So what is held for a cancelled request is given back, and an answer
does not wait for the correction, and is not lost if the correction fails. A correction is tried again while the store
is unavailable. What a process held that died is given back when its request takes again, or has surely ended.

What is held for the requests of one tenant may be no more than what is left of a lane's cap, as with bytes of memory
(`topology/broker/memory.py`): so there is always some left for others, however large a tenant's `max_tokens` are. One
request may always be held for. A third counter, of lane and tenant, has this sum."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from math import inf
from typing import NamedTuple, TypeVar

import structlog
from cachetools import LRUCache

from consumers.background import Background
from consumers.clock import NowMs, now_ms
from consumers.state.base import DAY_S, AllowanceReservation, Allowances, Period, StoreUnavailable, period_of
from lanekeeper.telemetry import signals

LEVELS = (50, 80, 100)
EVERY_TENANT = "*"
TENANTS_COUNTED = 10_000
CORRECT_WITHIN_S = 180.0
CORRECT_EVERY_S = 1.0
LANE, TENANT, KEY, USER = "lane", "tenant", "key", "user"
DAY, WEEK, MONTH = "day", "week", "month"
_THIS = {DAY: "today", WEEK: "this week", MONTH: "this month"}
Publish = Callable[..., None]
T = TypeVar("T")
log = structlog.get_logger()


def _tell_nobody(event: str, **figures: object) -> None:
    pass


def _week(now_ms: int) -> Period:
    number = (now_ms // _DAY_MS + 3) // 7  # 1970 began on a Thursday
    return Period(7 * DAY_S, number, ((number + 1) * 7 - 3) * _DAY_MS)


def _month(now_ms: int) -> Period:
    now = datetime.fromtimestamp(now_ms / 1000, UTC)
    number = now.year * 12 + now.month - 1
    following = datetime((number + 1) // 12, (number + 1) % 12 + 1, 1, tzinfo=UTC)
    return Period(31 * DAY_S, number, round(1000 * following.timestamp()))


_DAY_MS = 1000 * DAY_S
PERIODS: dict[str, Callable[[int], Period]] = {DAY: partial(period_of, DAY_S), WEEK: _week, MONTH: _month}


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
    """What may be used in one period."""

    requests: float | None = None
    tokens: float | None = None
    usd: float | None = None


Caps = Mapping[str, Cap]
"""The caps of one lane, tenant, key or user by the name of their period (`PERIODS`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapsSpec:
    """The caps of lanes, tenants, keys and users, each by its name; `*`: all that are not named."""

    lanes: Mapping[str, Caps] = field(default_factory=dict)
    tenants: Mapping[str, Caps] = field(default_factory=dict)
    keys: Mapping[str, Caps] = field(default_factory=dict)
    users: Mapping[str, Caps] = field(default_factory=dict)

    @property
    def in_money(self) -> bool:
        kinds = (self.lanes, self.tenants, self.keys, self.users)
        return any(cap.usd is not None for kind in kinds for caps in kind.values() for cap in caps.values())


class Bound(NamedTuple):
    """One of the limits of a cap: of requests, tokens or dollars in a period, for one lane, tenant, key or user."""

    reason: str
    who: str
    what: str
    limit: float
    per: str = DAY
    held_by: str = ""
    """Not empty: it is this tenant's share of what is left."""

    @property
    def name(self) -> str:
        name = f"cap {self.reason} {self.who} {self.what}" + ("" if self.per == DAY else f" {self.per}")
        return f"held {name} {self.held_by}" if self.held_by else name

    def period(self, now_ms: int) -> Period:
        return PERIODS[self.per](now_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """Says that a request may not run, because it might use more than is left of a cap. `ends_soon`: only because of
    calls that run now; some of what is held for them will be given back."""

    bound: Bound
    wanted: float
    used: float
    resets_in_s: float
    ends_soon: bool = False

    def __str__(self) -> str:
        bound = self.bound
        kind = "user" if bound.reason == USER else f"{bound.reason} {bound.who[:80]!r}"
        return (
            f"{kind} has used {_figure(self.used, bound)} of {_figure(bound.limit, bound)} "
            f"{_THIS[bound.per]} (UTC), and this takes up to {_figure(self.wanted, bound)}"
        )


@dataclass(frozen=True, slots=True)
class Hold:
    """What was counted against caps for one request before its call, at a moment (`at_ms`): the most that it can use
    (`spent`), and the limits against which it was counted (`bounds`)."""

    bounds: tuple[Bound, ...]
    spent: Spent
    at_ms: int = 0
    reservation: AllowanceReservation | None = None
    """None: it counts until it is corrected."""


class Spending:
    """Counts what requests use against the caps of their lane, tenant, key and user."""

    def __init__(self, allowances: Allowances, spec: CapsSpec, *, now_ms: NowMs = now_ms) -> None:
        self._allowances = allowances
        self._now_ms = now_ms
        self._reported: LRUCache[Bound, tuple[int, int]] = LRUCache(TENANTS_COUNTED)
        # no LRUCache: reading them all for the metrics would count as a use of each
        self._totals: OrderedDict[tuple[str, str], Total] = OrderedDict()
        self._used: OrderedDict[str, tuple[Bound, float, int]] = OrderedDict()
        self._background = Background()
        self._spec = spec

    @property
    def spec(self) -> CapsSpec:
        """May be replaced at any time; what was counted stays counted."""
        return self._spec

    @spec.setter
    def spec(self, spec: CapsSpec) -> None:
        self._spec = spec
        self._used.clear()

    def bounds(self, lane: str, tenant: str, *, key: str = "", user: str = "") -> tuple[Bound, ...]:
        """`key`: the name of the API key of the call; `user`: its `metadata.user_id`, hashed. Both belong to the
        tenant."""
        spec = self.spec
        if not (spec.lanes or spec.tenants or spec.keys or spec.users):
            return ()
        whose = (
            (LANE, lane, spec.lanes.get(lane)),
            (TENANT, tenant, _of(spec.tenants, tenant)),
            (KEY, f"{tenant}/{key}", _of(spec.keys, key) if key else None),
            (USER, f"{tenant}/{user}", _of(spec.users, user) if user else None),
        )
        bounds = tuple(
            Bound(reason=reason, who=who, what=what, limit=limit, per=per)
            for reason, who, caps in whose
            if caps is not None
            for per, cap in caps.items()
            for what in Spent._fields
            if (limit := getattr(cap, what)) is not None
        )
        shared = [each for each in bounds if each.reason == LANE and each.what != "requests"] if tenant else []
        return (*(each._replace(held_by=tenant) for each in shared), *bounds)

    async def take(
        self,
        bounds: tuple[Bound, ...],
        spent: Spent,
        *,
        publish: Publish,
        reservation: AllowanceReservation | None = None,
    ) -> Hold | Over:
        """`reservation`: of the request. If this process has died, what is held is given back when the request has
        surely ended, or takes again. Without one it counts until it is corrected."""
        hold = Hold((), spent, self._now_ms(), reservation)
        taking = self._take(bounds, hold, publish)
        return await self._background.sheltered(taking, name="caps", if_left=self._give_back)

    def correct(self, hold: Hold, used: Spent, *, publish: Publish = _tell_nobody) -> None:
        """Replace what is held for a request by what it used. If the store stays unavailable for `CORRECT_WITHIN_S`, or
        this process ends meanwhile, what is held stays counted in this period."""
        self._background.begin(self._correct(hold, used, publish), name="caps")

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
        now_ms = self._now_ms()
        return {bound: used if now_ms < ends_ms else 0.0 for bound, used, ends_ms in self._used.values()}

    def used_up(self) -> list[str]:
        """The caps of which nothing is left, or less than a request needed."""
        now_ms = self._now_ms()
        full = {
            bound
            for bound, (level, number) in self._reported.items()
            if level == LEVELS[-1] and number == bound.period(now_ms).number
        }
        return [name for name, (bound, _, _) in self._used.items() if bound in full]

    async def _take(self, bounds: tuple[Bound, ...], hold: Hold, publish: Publish) -> Hold | Over:
        try:
            for bound in bounds:
                wanted, period, limit = getattr(hold.spent, bound.what), bound.period(hold.at_ms), bound.limit
                if bound.held_by:
                    limit = max(wanted, limit - await self._used_of(bound._replace(held_by="").name, period))
                taken = await self._allowances.take(
                    bound.name, wanted, limit=limit, period=period, reservation=hold.reservation
                )
                if not taken.granted:
                    await self._correct(hold, Spent(), publish)
                    return await self._over(bound, wanted, period, publish)
                hold = replace(hold, bounds=(*hold.bounds, bound))
        except StoreUnavailable:
            self.correct(hold, Spent(), publish=publish)
            raise
        return hold

    async def _over(self, bound: Bound, wanted: float, period: Period, publish: Publish) -> Over:
        ends_soon, bound = bound.held_by != "", bound._replace(held_by="")
        used = await self._used_of(f"spent {bound.name}", period)
        ends_soon = ends_soon or used + wanted <= bound.limit
        if not ends_soon and wanted <= bound.limit:
            await self._report(bound, used, is_full=True, period=period, publish=publish)
        resets_in_s = (period.ends_ms - self._now_ms()) / 1000
        return Over(bound=bound, wanted=wanted, used=used, resets_in_s=resets_in_s, ends_soon=ends_soon)

    async def _used_of(self, name: str, period: Period) -> float:
        return (await self._allowances.take(name, 0, limit=inf, period=period)).used

    async def _correct(self, hold: Hold, used: Spent, publish: Publish) -> None:
        now_ms, allowances = self._now_ms(), self._allowances
        began_s = asyncio.get_running_loop().time()
        for bound in hold.bounds:
            held, period = getattr(hold.spent, bound.what), bound.period(now_ms)
            spent = 0.0 if bound.held_by else getattr(used, bound.what)
            if bound.period(hold.at_ms) != period:  # what was held ended with its period
                continue
            until_s = began_s + min(CORRECT_WITHIN_S, (period.ends_ms - now_ms) / 1000)
            try:
                if hold.reservation is not None:
                    settling = partial(allowances.settle, bound.name, spent, reservation=hold.reservation)
                    await _until(until_s, partial(settling, period=period))
                elif held != spent:
                    await _until(until_s, partial(allowances.give_back, bound.name, held - spent, period=period))
                if spent:
                    adding = partial(allowances.take, f"spent {bound.name}", spent, limit=inf, period=period)
                    taken = await _until(until_s, adding)
                    await self._report(bound, taken.used, is_full=False, period=period, publish=publish)
            except StoreUnavailable as error:
                log.warning(signals.CAP_UNCORRECTED, cap=bound.name, error=str(error))
                return

    def _give_back(self, taking: "asyncio.Task[Hold | Over]") -> None:
        if not taking.cancelled() and taking.exception() is None and isinstance(hold := taking.result(), Hold):
            self.correct(hold, Spent())

    async def _report(self, bound: Bound, used: float, *, is_full: bool, period: Period, publish: Publish) -> None:
        self._used[bound.name] = bound, used, period.ends_ms
        if len(self._used) > TENANTS_COUNTED:
            self._used.popitem(last=False)
        reached = next((level for level in reversed(LEVELS) if is_full or used >= bound.limit * level / 100), 0)
        before, in_period = self._reported.get(bound, (0, period.number))
        if in_period != period.number:
            before = 0
        if reached <= before:
            return
        self._reported[bound] = reached, period.number
        for level in LEVELS:
            if before < level <= reached and await self._is_first_report(bound, level, period):
                figures = {"cap": bound.name, "percent": level, "used": round(used, 4), "limit": bound.limit}
                log.warning(signals.CAP_REACHED, cap=bound.name, percent=level, used=figures["used"], limit=bound.limit)
                publish("cap", **figures)

    async def _is_first_report(self, bound: Bound, level: int, period: Period) -> bool:
        try:
            told = f"told {level} of {bound.limit:g} {bound.name}"
            return (await self._allowances.take(told, 1, limit=1, period=period)).granted
        except StoreUnavailable:
            return True


async def _until(until_s: float, call: Callable[[], Awaitable[T]]) -> T:
    """Raises StoreUnavailable if the store still is at that time of the event loop."""
    while True:
        try:
            return await call()
        except StoreUnavailable:
            if asyncio.get_running_loop().time() >= until_s:
                raise
            await asyncio.sleep(CORRECT_EVERY_S)


def _of(caps: Mapping[str, Caps], name: str) -> Caps | None:
    return caps.get(name) or caps.get(EVERY_TENANT)


def _figure(amount: float, bound: Bound) -> str:
    return f"${amount:.4f}" if bound.what == "usd" else f"{amount:.0f} {bound.what}"
