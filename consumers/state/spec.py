"""Settings of the store: how much it keeps and for how long, and how long a worker's claim of a request is valid."""

from dataclasses import dataclass

from consumers.state.base import LEASE_S
from topology.lanes import GIB, MIB

DAY_S = 86_400
"""The default time, in seconds, for which the store keeps the result of a request: a day."""
SEEN_LATE_S = 300
"""If a request is cancelled before any worker has seen it, the cancellation is kept for the time of the longest
deadline and this many seconds more, because clocks differ, and because a worker may see the request shortly after its
deadline."""
UNTRIED_PER_TENANT = 10_000
"""How many results of requests that ended before any attempt are kept for one tenant when the SQLite file is full. Such
requests ended because their deadline had passed, or because their tenant had too many waiting requests. Results above
this number are removed before all others. 10,000 results take 10 MB."""
EVENTS_PER_REQUEST = 50_000
"""The maximum number of events of the streamed answer that are stored for a request whose progress clients follow
(`following.py`). The store refuses further events. When another call to a provider begins for the request, the count
begins again at 0."""
EVENT_BYTES_PER_REQUEST = 8 * MIB
"""The maximum size, in bytes, of all events together that are stored for a request whose progress clients follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec:
    """The settings of the store: how much it keeps and for how long, in SQLite or in Redis."""

    keep_s: float = DAY_S
    """For how many seconds a result is kept after its request has ended."""
    max_bytes: int = GIB
    """The maximum size of the SQLite file in bytes, not counting free pages. Above it, the results of the requests that
    ended first are removed first."""
    cancelled_s: float = DAY_S + SEEN_LATE_S
    """For how many seconds the cancellation of a request that no worker has seen is kept: a little longer than the
    longest deadline of a lane, because the request can wait that long in its queue before a worker sees it. (A worker
    sees a delayed request before its delay begins.)"""
    unseen_per_tenant: int = 10_000
    """How many cancellations of requests that no worker has seen are kept for one tenant. They do not count towards the
    limit `max_bytes`."""
    untried_per_tenant: int = UNTRIED_PER_TENANT
    waiting_per_tenant: int = 10_000
    """How many requests one tenant may have waiting in the broker for a delay of over a minute."""
    waiting_in_all: int = 100_000
    """How many requests of all tenants together may wait in the broker for a delay of over a minute."""
    events_per_request: int = EVENTS_PER_REQUEST
    event_bytes_per_request: int = EVENT_BYTES_PER_REQUEST
    lease_s: float = LEASE_S
    """For how many seconds a claim (a worker's right to work on a request) is valid without renewal."""


DEFAULT = StoreSpec()
