"""Settings of the store: for how long and how much it keeps, and how long a claim is valid."""

from dataclasses import dataclass

from consumers.state.base import LEASE_S
from topology.lanes import GIB, MIB

DAY_S = 86_400
"""For how many seconds, by default, the store keeps the result of a request: a day."""
SEEN_LATE_S = 300
"""For how many seconds longer than the longest deadline a cancellation is kept, because clocks differ, and because a
worker may see a request shortly after its deadline."""
UNTRIED_PER_TENANT = 10_000
"""How many results are kept for one tenant when the SQLite file is full, of requests that ended before any attempt
(their deadline had passed, or their tenant had too many waiting requests). Results above this number are removed before
all others. 10,000 results take 10 MB."""
EVENTS_PER_REQUEST = 50_000
"""How many events of a stream that clients follow are stored since its last restart (`following.py`); later ones are
not stored."""
EVENT_BYTES_PER_REQUEST = 8 * MIB
"""How many bytes the stored events of one followed stream may have together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec:
    """The settings of the store: how much it keeps and for how long, in SQLite or in Redis."""

    keep_s: float = DAY_S
    """For how many seconds a result is kept after its request has ended."""
    max_bytes: int = GIB
    """The largest size of the SQLite file, not counting free pages. Above it, the results of the requests that ended
    first are removed first."""
    cancelled_s: float = DAY_S + SEEN_LATE_S
    """How long the cancellation of an unknown id is kept: the longest deadline of a lane, because a request can wait
    that long in its queue before a worker sees it. (A worker sees a delayed request before its delay begins.)"""
    unseen_per_tenant: int = 10_000
    """How many cancellations are kept for one tenant of requests that no worker has seen. They do not count towards the
    store's limit `max_bytes`."""
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
