"""How long and how much the store keeps, and how long a claim is valid."""

from dataclasses import dataclass

from consumers.state.base import LEASE_S
from topology.lanes import GIB, MIB

DAY_S = 86_400
SEEN_LATE_S = 300
"""Added to the longest deadline: clocks differ, and a worker may look at a request a little after its deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec:
    """Limits and keeping times of the store, for every engine."""

    keep_s: float = DAY_S
    """How long a result is kept after its request has ended."""
    max_bytes: int = GIB
    """The most that the used pages of the SQLite file take; above it, what ended first is removed first."""
    cancelled_s: float = DAY_S + SEEN_LATE_S
    """How long the cancellation of an unknown id is kept: the longest deadline of a lane, because a request can wait
    that long in its lane before a worker sees it. A delayed request is seen before its delay, and ends then."""
    unseen_per_tenant: int = 10_000
    """How many such cancellations are kept for one tenant. They do not count towards `max_bytes`."""
    untried_per_tenant: int = 10_000
    """How many requests of one tenant that ended before any attempt (past their deadline, or their tenant had too many
    waiting) are kept when the SQLite file is full: those above that are removed first. They take 10 MB of the file."""
    waiting_per_tenant: int = 10_000
    """How many requests one tenant may have waiting in the broker for a delay of over a minute."""
    waiting_in_all: int = 100_000
    events_per_request: int = 50_000
    """How many events of a followed stream are kept (`following.py`), since its last restart; further ones are not."""
    event_bytes_per_request: int = 8 * MIB
    lease_s: float = LEASE_S
    """How long a claim is valid without renewal."""


DEFAULT = StoreSpec()
