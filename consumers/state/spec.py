"""How long and how much the store keeps, and how long a claim is valid."""

from dataclasses import dataclass

from consumers.state.base import LEASE_S

DAY_S = 86_400
GIB = 1024**3
SEEN_LATE_S = 300
"""Added to the longest deadline: clocks differ, and a worker may look at a request a little after its deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec:
    """What every engine keeps."""

    keep_s: float = DAY_S
    """How long a result is kept after its request has ended."""
    max_bytes: int = GIB
    """The most that the used pages of the SQLite file take; above it, what ended first is removed first. Redis has its
    own limit, `maxmemory`, above which it refuses writes (with `maxmemory-policy noeviction`)."""
    cancelled_s: float = DAY_S + SEEN_LATE_S
    """How long the cancellation of an unknown id is kept: the longest deadline of a lane, because a request can wait
    that long in its lane before a worker sees it. A delayed request is seen before its delay, and ends then."""
    unseen_per_tenant: int = 10_000
    """How many such cancellations are kept for one tenant; above that, its oldest is forgotten. Critical's intake holds
    as many requests. They take 8 MB of the file, which do not count towards `max_bytes`."""
    untried_per_tenant: int = 10_000
    """How many requests of one tenant that ended before any attempt (past their deadline, or their tenant had too many
    waiting) are kept when the SQLite file is full: those above that are removed first. They take 10 MB of the file."""
    waiting_per_tenant: int = 10_000
    """How many requests one tenant may have waiting in the broker by `x-lane-delay-ms` and `x-lane-at` over a minute
    ahead. Each begun 16 KiB of a body counts as one request, so they take at most 160 MiB of the broker's disks."""
    waiting_in_all: int = 100_000
    """The same for all tenants together: at most 1.6 GiB, enough for ten tenants that use all of theirs."""
    lease_s: float = LEASE_S
    """How long a claim is valid without renewal."""


DEFAULT = StoreSpec()
