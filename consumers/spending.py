"""What lanes and tenants may use in a day (UTC): requests, tokens, dollars; and what they have used.

Caps are kept in the store, so that all processes share them: taken by estimate before a call, corrected after it. What
was used without a cap is counted in this process alone.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog

from consumers.state.base import Allowances, StoreUnavailable
from topology import signals

DAY_S = 86_400
LEVELS = (100, 80, 50)
"""Per cent of a cap that are told once they are reached."""
EVERY_TENANT = "*"
TENANTS_COUNTED = 10_000
LANE, TENANT = "lane", "tenant"
log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Spent(NamedTuple):
    """Of one request, or in a day."""

    requests: float = 0.0
    tokens: float = 0.0
    usd: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """A day's; None: as much as there is."""

    requests: float | None = None
    tokens: float | None = None
    """Input and output, without what was read from the cache."""
    usd: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapsSpec:
    """Whose day is capped."""

    lanes: Mapping[str, Cap] = field(default_factory=dict)
    tenants: Mapping[str, Cap] = field(default_factory=dict)
    """`*`: each tenant that has no cap of its own."""

    @property
    def in_money(self) -> bool:
        """Whether a price is needed of every model."""
        return any(cap.usd is not None for cap in (*self.lanes.values(), *self.tenants.values()))


class Bound(NamedTuple):
    """One figure of a cap."""

    reason: str
    """Whose: lane or tenant."""
    who: str
    what: str
    """A field of `Spent`."""
    limit: float

    @property
    def name(self) -> str:
        return f"cap {self.reason} {self.who} {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """A cap has not so much left."""

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
    """What was taken of the caps for one request."""

    bounds: tuple[Bound, ...]
    spent: Spent


class Spending:
    """Takes and corrects."""

    def __init__(self, allowances: Allowances, spec: CapsSpec) -> None:
        self._allowances = allowances
        self._spec = spec
        self._told: dict[str, int] = {}
        self._totals: OrderedDict[tuple[str, str], Spent] = OrderedDict()

    def bounds(self, lane: str, tenant: str) -> tuple[Bound, ...]:
        """All that a request must keep within."""
        return (*self._of(LANE, lane, self._spec.lanes.get(lane)), *self._of(TENANT, tenant, self._tenants(tenant)))

    async def take(self, bounds: tuple[Bound, ...], spent: Spent) -> Hold | Over:
        """All or nothing. Raises StoreUnavailable."""
        for each, bound in enumerate(bounds):
            wanted = getattr(spent, bound.what)
            taken = await self._allowances.take(bound.name, wanted, limit=bound.limit, period_s=DAY_S)
            self._tell(bound, taken.used if taken.granted else bound.limit)
            if not taken.granted:
                await self.correct(Hold(bounds[:each], spent), Spent())
                return Over(bound=bound, wanted=wanted, used=taken.used, resets_in_s=taken.resets_in_s)
        return Hold(bounds, spent)

    async def correct(self, hold: Hold, used: Spent) -> None:
        """After the call. Where the store is away the estimate stays counted."""
        for bound in hold.bounds:
            over = getattr(hold.spent, bound.what) - getattr(used, bound.what)
            if not over:
                continue
            try:
                await self._allowances.give_back(bound.name, over, period_s=DAY_S)
            except StoreUnavailable as error:
                log.warning(signals.CAP_UNCORRECTED, cap=bound.name, error=str(error))
                return

    def count(self, lane: str, tenant: str, spent: Spent) -> None:
        """Of an answer."""
        for key in ((LANE, lane), (TENANT, tenant)):
            before = self._totals.pop(key, Spent())
            self._totals[key] = Spent(*(x + y for x, y in zip(before, spent, strict=True)))
        if len(self._totals) > TENANTS_COUNTED:
            self._totals.popitem(last=False)

    def totals(self) -> Mapping[str, Mapping[str, Spent]]:
        """By "lane" and "tenant", then by name: what this process has used since it began."""
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

    def _tell(self, bound: Bound, used: float) -> None:
        level = next((each for each in LEVELS if used >= bound.limit * each / 100), 0)
        before = self._told.get(bound.name, 0)
        if not level:  # another day
            self._told.pop(bound.name, None)
        elif level > before:
            self._told[bound.name] = level
            log.warning(signals.CAP_REACHED, cap=bound.name, percent=level, used=round(used, 4), limit=bound.limit)


def _figure(amount: float, bound: Bound) -> str:
    return f"${amount:.4f}" if bound.what == "usd" else f"{amount:.0f} {bound.what}"
