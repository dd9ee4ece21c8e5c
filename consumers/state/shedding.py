"""Decides what a full store removes. It takes from the tenant that has most, and there from the kind of rows that takes
most, so that nobody's rows drive out those of a tenant that has less than its share."""

from collections import deque
from collections.abc import Iterable, Mapping
from enum import StrEnum
from math import inf
from typing import Final, NamedTuple

LOW_WATER: Final = 7 / 8
"""A store that is above its limit is emptied to this part of the limit, so that it is not full again at once: to see
who has how much, all its rows are read."""
STEP_ROWS: Final = 200
STEP_BYTES: Final = 32 * 1024 * 1024
"""One step ends at this size, so that claims do not wait long for it."""
SURPLUS_ROWS: Final = 50_000


class RowKind(StrEnum):
    """The kinds of a tenant's rows, by what they cost the tenant."""

    PAID = "paid"
    """How a request ended for which a provider was called."""
    FREE = "free"
    CANCELLED = "cancelled"
    """The cancellation of a request that no worker has claimed."""
    LIVE = "live"
    """A request that has not ended: it waits, or its worker died."""
    FLOW = "flow"
    """What the steps and items of a pipeline that has not ended have come to. It is removed last of its tenant's rows,
    because it would be called and paid again."""
    KEPT = "kept"
    """What is not removed, but counts for its tenant: claims that are held, and counters."""


Share = tuple[str, RowKind]


class Surplus(NamedTuple):
    """A row that a full store is to remove, unless it changes before. `state`: what tells that it has changed."""

    tenant: str
    id: str
    size: int
    state: str | int


def next_step(rows: deque[Surplus]) -> list[Surplus]:
    """Take from `rows` what one step removes: at least one row, if there is one."""
    found: list[Surplus] = []
    size = 0
    while rows and len(found) < STEP_ROWS and size < STEP_BYTES:
        found.append(rows.popleft())
        size += found[-1].size
    return found


def cuts(used: Mapping[Share, int], at_most: float) -> list[tuple[Share, float]]:
    """How many bytes to remove of each tenant's rows of each kind, so that `used` falls to `at_most`. No tenant that
    has at most `at_most` divided by the number of tenants loses anything. The largest cut comes first."""
    tenants: dict[str, dict[RowKind, int]] = {}
    for (tenant, kind), size in used.items():
        tenants.setdefault(tenant, {})[kind] = size
    share = level((sum(sizes.values()) for sizes in tenants.values()), at_most)
    found: dict[Share, float] = {}
    for tenant, sizes in tenants.items():
        left = max(0.0, share - sizes.pop(RowKind.KEPT, 0))
        flow = sizes.pop(RowKind.FLOW, 0)
        if flow > left:
            found[tenant, RowKind.FLOW] = flow - left
        top = level(sizes.values(), max(0.0, left - flow))
        found |= {(tenant, kind): size - top for kind, size in sizes.items() if size > top}
    return sorted(found.items(), key=lambda each: -each[1])


def oldest(rows: Iterable[Surplus], cut: float) -> list[Surplus]:
    """The first of these rows, as many as together have the size `cut`."""
    found: list[Surplus] = []
    for row in rows:
        if cut <= 0:
            break
        found.append(row)
        cut -= row.size
    return found


def level(sizes: Iterable[int], at_most: float) -> float:
    """The level to which the largest sizes must fall so that the sum of all is `at_most`; infinite if it is less."""
    left = sorted(sizes)
    for at, size in enumerate(left):
        top = at_most / (len(left) - at)
        if size > top:
            return top
        at_most -= size
    return inf
