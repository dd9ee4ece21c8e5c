"""Checks that the store of claims and results can be written. Removes expired results from that store, and expired
bodies from the store of bodies."""

import asyncio
import random
from contextlib import suppress

from consumers.state.base import Store, StoreUnavailable
from lanekeeper.bodies import BodiesUnavailable, BodyStore
from lanekeeper.telemetry import logs, signals

PROBE_EVERY_S = 5.0
"""The seconds between two checks whether the store of claims and results works."""
PROBE_AGAIN_S = 0.5
"""The pause, in seconds, between two checks of a store that is unavailable. A worker takes no requests while the store
is unavailable, so only these checks notice that it works again."""
SWEEP_EVERY_S = 60.0
"""The seconds between two removals of expired results and bodies, on average. It is also the time limit, in seconds,
for one removal of expired bodies."""
STEP_PAUSE_S = 0.05
"""The pause, in seconds, between two steps of removing expired results. It lets other writes to the store through."""
LEASE = "sweep"
log = logs.logger()


async def probing(store: Store) -> None:
    """Check regularly, until cancelled, whether the store can be written. Log when the store becomes unavailable, and
    when it works again. `store.trouble` says what is wrong."""
    logged: str | None = None
    while True:
        with suppress(StoreUnavailable):
            await store.probe()
        if store.trouble != logged:
            logged = store.trouble
            if logged is None:
                log.info(signals.STORE_WELL)
            else:
                log.error(signals.STORE_AWAY, reason=logged)
        await asyncio.sleep(PROBE_EVERY_S if logged is None else PROBE_AGAIN_S)


async def sweeping(store: Store, bodies: BodyStore | None, *, owner: str) -> None:
    """Remove expired results from `store`, and expired bodies from `bodies`, regularly, until cancelled. Of the
    processes that share the store, one at a time does this: the one that holds a lease (a lock that expires). `owner`:
    the name under which this process takes the lease; it must be unique among the processes that share the store."""
    while True:
        await asyncio.sleep(SWEEP_EVERY_S * random.uniform(0.8, 1.2))
        try:
            if await sweep_once(store, owner=owner, for_s=2 * SWEEP_EVERY_S) is not None and bodies is not None:
                async with asyncio.timeout(SWEEP_EVERY_S):
                    await bodies.sweep()
        except StoreUnavailable as error:
            log.warning(signals.SWEEP_FAILED, error=str(error))
        except BodiesUnavailable as error:
            log.warning(signals.SWEEP_FAILED, error=error.cause)
        except TimeoutError:
            log.warning(signals.SWEEP_FAILED, error=f"the store of bodies did not answer within {SWEEP_EVERY_S:g} s")


async def sweep_once(store: Store, *, owner: str, for_s: float) -> int | None:
    """Remove from the store all requests (with their results) and counters whose retention time is over and, if the
    store is too large, the oldest results. Return how many rows were removed; None if another process does this now.
    `owner`: the unique name under which this process takes the lease, a lock that expires after `for_s` seconds. Raises
    StoreUnavailable."""
    if not await store.hold(LEASE, owner, for_s=for_s):
        return None
    removed = 0
    while step := await store.sweep():
        removed += step
        await asyncio.sleep(STEP_PAUSE_S)
    if removed:
        log.info(signals.STORE_SWEPT, removed=removed)
    return removed
