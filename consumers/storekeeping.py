"""Maintains the store: checks that it can be written, and removes results whose keeping time is over."""

import asyncio
import random
from contextlib import suppress

from consumers.state.base import Store, StoreUnavailable
from lanekeeper.telemetry import logs, signals

PROBE_EVERY_S = 5.0
PROBE_AGAIN_S = 0.5
"""How often an unavailable store is checked. No request is taken meanwhile, so nothing else would notice its return."""
SWEEP_EVERY_S = 60.0
STEP_PAUSE_S = 0.05
"""The pause between two steps of a sweep, so that other writes go on."""
LEASE = "sweep"
log = logs.logger()


async def probing(store: Store) -> None:
    """Probe until cancelled. `store.trouble` says what is wrong."""
    told: str | None = None
    while True:
        with suppress(StoreUnavailable):
            await store.probe()
        if store.trouble != told:
            told = store.trouble
            if told is None:
                log.info(signals.STORE_WELL)
            else:
                log.error(signals.STORE_AWAY, reason=told)
        await asyncio.sleep(PROBE_EVERY_S if told is None else PROBE_AGAIN_S)


async def sweeping(store: Store, *, owner: str, every_s: float = SWEEP_EVERY_S) -> None:
    """Sweep until cancelled, one process at a time. `owner` names this one among those that share the store."""
    while True:
        await asyncio.sleep(every_s * random.uniform(0.8, 1.2))
        try:
            await sweep_once(store, owner=owner, for_s=2 * every_s)
        except StoreUnavailable as error:
            log.warning(signals.SWEEP_FAILED, error=str(error))


async def sweep_once(store: Store, *, owner: str, for_s: float) -> int:
    """Sweep, unless another process does. Return how many entries were removed. Raises StoreUnavailable."""
    if await store.hold(LEASE, owner, for_s=for_s) is None:
        return 0
    removed = 0
    while step := await store.sweep():
        removed += step
        await asyncio.sleep(STEP_PAUSE_S)
    if removed:
        log.info(signals.STORE_SWEPT, removed=removed)
    return removed
