"""How long the store remembers, how much of it, and how long a claim holds."""

from dataclasses import dataclass

from consumers.state.base import LEASE_S

DAY_S = 86_400
GIB = 1024**3
LONGEST_WAIT_S = 366 * DAY_S
"""How long a request can wait in the broker (contract, section 1: a delay of up to a year). The cancellation of one
that waits is kept as long, whatever `keep_s` says: forgotten sooner, the request would run after all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec:
    """What is kept, by every engine."""

    keep_s: float = DAY_S
    """How long a result is kept after its request has ended."""
    max_bytes: int = GIB
    """Of the SQLite file's pages in use: beyond it what ended first is removed first. Redis has a bound of its own,
    `maxmemory`, beyond which it refuses writes (with `maxmemory-policy noeviction`)."""
    lease_s: float = LEASE_S
    """How long a claim holds that is not renewed, in seconds."""


DEFAULT = StoreSpec()
