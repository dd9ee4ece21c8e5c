"""Decides whose request gets the next free slot of a lane, and which requests are set aside.

    turns = Turns(shares, side)             one for each lane in a process
    intake = turns.bench(slots=16)          the slots of one queue
    if intake.begin(tenant) or await intake.wait(…) is Turn.BEGIN:
        …                                   a slot is held
        intake.end(tenant)

A free slot goes to the tenant that holds the fewest slots for its weight; among equals, to the one whose last turn is
the longest ago. So tenants share the slots, however many requests each has. Of the requests that wait here, a tenant
may have no more than its share; the others are set aside (`consumers/fairness/aside.py`), so that the next request can
be seen.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from typing import Final, Protocol

from consumers.spending import EVERY_TENANT

HELD_S: Final = 60.0
"""A request that has waited here for so long is set aside: a delivery may not be held for ever (`consumers/job.py`),
and another process may have a slot for it."""
LATELY_S: Final = 600.0
"""A tenant that had a request within this time may have another one in the queue."""
FIGURES_OF: Final = 256
"""Figures are kept for this many tenants of a lane: those that were active last."""


@dataclass(frozen=True, slots=True)
class TenantShare:
    """The settings of one tenant."""

    weight: float = 1.0
    in_flight: int | None = None
    """How many of its requests a process works on at a time in one lane; None: no limit."""


class Shares:
    """The settings by tenant; `*` is for every tenant that is not named."""

    def __init__(self, tenants: Mapping[str, TenantShare] | None = None) -> None:
        self._tenants = tenants or {}
        self._other = self._tenants.get(EVERY_TENANT, TenantShare())

    def of(self, tenant: str) -> TenantShare:
        return self._tenants.get(tenant, self._other)


class Turn(Enum):
    """What happens to a delivery."""

    BEGIN = auto()
    ASIDE = auto()


class SetAside(Protocol):
    """Knows which tenants have requests set aside."""

    def has(self, tenant: str) -> bool: ...


@dataclass(eq=False, slots=True)
class _Waiting:
    tenant: str
    rank: int
    """Among one tenant's requests the highest rank goes first."""
    movable: bool
    turn: "asyncio.Future[Turn]"


@dataclass(slots=True)
class Figures:
    """Counts of one tenant in one lane since the process started."""

    begun: int = 0
    set_aside: int = 0
    seen_s: float = 0.0
    """When one of its requests last began or was set aside, by the event loop's clock."""


@dataclass(slots=True)
class Turns:
    """The slots of one lane in this process."""

    shares: Shares = field(default_factory=Shares)
    side: SetAside | None = None
    """None: nothing can be set aside."""
    benches: list["Bench"] = field(default_factory=list)
    _figures: "OrderedDict[str, Figures]" = field(default_factory=OrderedDict)

    def bench(self, slots: int) -> "Bench":
        made = Bench(self, slots)
        self.benches.append(made)
        return made

    def is_at_its_cap(self, tenant: str) -> bool:
        cap = self.shares.of(tenant).in_flight
        return cap is not None and sum(bench.running_of(tenant) for bench in self.benches) >= cap

    def figures(self, tenant: str) -> Figures:
        """The counts of a tenant, for the caller to add to."""
        if (found := self._figures.get(tenant)) is None:
            if len(self._figures) >= FIGURES_OF:
                self._figures.popitem(last=False)
            found = self._figures[tenant] = Figures()
        else:
            self._figures.move_to_end(tenant)
        found.seen_s = asyncio.get_running_loop().time()
        return found

    @property
    def is_shared(self) -> bool:
        """Whether more than one tenant has had requests here lately."""
        latest = list(islice(reversed(self._figures.values()), 2))
        return len(latest) == 2 and latest[1].seen_s > asyncio.get_running_loop().time() - LATELY_S

    @property
    def in_hand(self) -> int:
        """Deliveries that wait here for a slot."""
        return sum(bench.waiting for bench in self.benches)

    def snapshot(self) -> dict[str, dict[str, int]]:
        """The figures by tenant, as JSON values; the tenant that was active last comes last."""
        return {
            tenant: {
                "running": sum(bench.running_of(tenant) for bench in self.benches),
                "in_hand": sum(bench.waiting_of(tenant) for bench in self.benches),
                "begun": each.begun,
                "set_aside": each.set_aside,
            }
            for tenant, each in self._figures.items()
        }


class Bench:
    """The slots of one queue, and the requests that wait here for them."""

    def __init__(self, turns: Turns, slots: int) -> None:
        self._turns = turns
        self.slots = slots
        self._running: dict[str, int] = {}
        self._passes: dict[str, float] = {}
        """For each tenant with running or waiting requests: its turns so far, divided by its weight. Among tenants with
        equally many slots, the one with the fewest turns goes first."""
        self._floor = 0.0
        """The number of turns that a new tenant starts with."""
        self._waiting: list[_Waiting] = []
        self.running = 0
        self.begun = 0
        self.is_sorting = False
        """Whether waiting requests over their tenant's share are set aside (`consumers/fairness/scouting.py`)."""

    @property
    def is_full(self) -> bool:
        return self.running >= self.slots

    @property
    def is_shared(self) -> bool:
        """Whether more than one tenant has had requests in this lane lately."""
        return self._turns.is_shared

    def running_of(self, tenant: str) -> int:
        return self._running.get(tenant, 0)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def waiting_of(self, tenant: str) -> int:
        return sum(each.tenant == tenant for each in self._waiting)

    def count_aside(self, tenant: str) -> None:
        self._turns.figures(tenant).set_aside += 1

    def resize(self, slots: int) -> None:
        """Change the number of slots. A request that holds a slot keeps it."""
        self.slots = slots
        self.serve()

    def sort(self, is_sorting: bool) -> None:
        """Begin or stop setting aside requests over their tenant's share."""
        self.is_sorting = is_sorting
        if is_sorting:
            for each in self._waiting[:]:
                if each.movable and self._is_over(each.tenant):
                    self._tell(each, Turn.ASIDE)

    def begin(self, tenant: str) -> bool:
        """Take a free slot; False if there is none. If a slot is free while requests wait, their tenants are at their
        in-flight limits."""
        if self.running >= self.slots or self._turns.is_at_its_cap(tenant):
            return False
        self._grant(tenant)
        return True

    async def wait(self, tenant: str, *, rank: int = 0, movable: bool = False, is_head: bool = False) -> Turn:
        """After `begin` was false: wait for a slot, or to be set aside. `movable`: the request may be set aside.
        `is_head`: it was set aside before, and is set aside again only if it is held for too long."""
        movable = movable and self._turns.side is not None
        if movable and not is_head and self._belongs_aside(tenant):
            return Turn.ASIDE
        waiting = _Waiting(tenant, rank, movable and not is_head, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._passes.setdefault(tenant, self._floor)
        try:
            async with asyncio.timeout(HELD_S if movable else None):
                return await waiting.turn
        except TimeoutError:
            return waiting.turn.result() if _is_told(waiting) else Turn.ASIDE
        except asyncio.CancelledError:
            if _is_told(waiting) and waiting.turn.result() is Turn.BEGIN:
                self.end(tenant)  # it was granted at the same moment
            raise
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._forget(tenant)

    def end(self, tenant: str) -> None:
        """Give a slot back, to the request that is next."""
        self.running -= 1
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
            self._forget(tenant)
        for bench in self._turns.benches:  # a tenant at its in-flight limit may wait at the lane's other queue
            bench.serve()

    def serve(self) -> None:
        """Give free slots to waiting requests."""
        while self._waiting and self.running < self.slots:
            eligible = [each for each in self._waiting if not self._turns.is_at_its_cap(each.tenant)]
            if not eligible:
                return
            # of one tenant's requests, take the first with the highest rank
            chosen = min(eligible, key=lambda each: (*self._standing(each.tenant), -each.rank))
            self._grant(chosen.tenant)
            self._tell(chosen, Turn.BEGIN)

    def _standing(self, tenant: str) -> tuple[float, float]:
        return self.running_of(tenant) / self._turns.shares.of(tenant).weight, self._passes.get(tenant, self._floor)

    def _grant(self, tenant: str) -> None:
        self.running += 1
        self.begun += 1
        self._running[tenant] = self._running.get(tenant, 0) + 1
        self._floor = self._passes.get(tenant, self._floor)
        self._passes[tenant] = self._floor + 1 / self._turns.shares.of(tenant).weight
        self._turns.figures(tenant).begun += 1

    def _tell(self, waiting: _Waiting, turn: Turn) -> None:
        self._waiting.remove(waiting)
        if not waiting.turn.done():
            waiting.turn.set_result(turn)
        self._forget(waiting.tenant)

    def _forget(self, tenant: str) -> None:
        if tenant not in self._running and not self.waiting_of(tenant):
            self._passes.pop(tenant, None)

    def _belongs_aside(self, tenant: str) -> bool:
        if self._turns.is_at_its_cap(tenant):
            return True
        side = self._turns.side
        return (self.is_sorting or (side is not None and side.has(tenant))) and self._is_over(tenant)

    def _is_over(self, tenant: str) -> bool:
        """Whether the tenant has used up its share, counting requests that wait here. A share is at least one slot."""
        tenants: Collection[str] = {*self._running, tenant, *(each.tenant for each in self._waiting)}
        weight = self._turns.shares.of(tenant).weight
        share = self.slots * weight / sum(self._turns.shares.of(each).weight for each in tenants)
        return self.running_of(tenant) + self.waiting_of(tenant) >= max(1.0, share)


def _is_told(waiting: _Waiting) -> bool:
    return waiting.turn.done() and not waiting.turn.cancelled()
