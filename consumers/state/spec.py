"""How long the store remembers, how much of it, and how long a claim holds."""

from dataclasses import dataclass

from consumers.state.base import LEASE_S

DAY_S = 86_400
GIB = 1024**3
SEEN_LATE_S = 300
"""Added to the longest deadline: clocks differ, and a worker may look at a request a little after its time was over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec:
    """What is kept, by every engine."""

    keep_s: float = DAY_S
    """How long a result is kept after its request has ended."""
    max_bytes: int = GIB
    """Of the SQLite file's pages in use: beyond it what ended first is removed first. Redis has a bound of its own,
    `maxmemory`, beyond which it refuses writes (with `maxmemory-policy noeviction`)."""
    cancelled_s: float = DAY_S + SEEN_LATE_S
    """How long the cancellation of an unknown id is kept: the longest lane's deadline, because a request can wait in
    its lane so long before a worker sees it. A request with a delay is seen before its delay, and ends then."""
    unseen_per_tenant: int = 10_000
    """Such cancellations that are kept for one tenant; beyond it its oldest is forgotten. 8 MB of the file, and as many
    requests as critical's intake holds; they count for nobody's results."""
    untried_per_tenant: int = 10_000
    """Requests that ended before any attempt (their time was over, their tenant had too many waiting) of one
    tenant: beyond it, they are the first to go when the SQLite file is full. 10 MB of it."""
    waiting_per_tenant: int = 10_000
    """What one tenant may have waiting in the broker by `x-lane-delay-ms` and `x-lane-at`, over a minute ahead:
    requests, each begun 16 KiB of a body counted as one, so that it is 160 MiB at most on the broker's disks."""
    waiting_in_all: int = 100_000
    """The same of all tenants together: 1.6 GiB at most, ten tenants that use all of theirs."""
    lease_s: float = LEASE_S
    """How long a claim holds that is not renewed, in seconds."""


DEFAULT = StoreSpec()
