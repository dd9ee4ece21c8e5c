"""Removes what has been kept for long enough, or is too much: dead letters from the queue `lane.dead`, results from the
store, bodies from the store of bodies. One process at a time does this: the one that holds a lease (a lock that
expires) in the store. Also checks that the store can be written."""

import asyncio
import math
import os
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from consumers.clock import NowMs, moment_ms, now_ms
from consumers.lifecycle import Lifecycle
from consumers.state.base import DAY_S, Store, StoreUnavailable
from lanekeeper.bodies import BodiesUnavailable, BodyStore, sync_folder
from lanekeeper.contract import names as n
from lanekeeper.contract.problems import BrokerError
from lanekeeper.telemetry import logs, signals
from topology.broker.consume import FetchedMessage, OldestMessages
from topology.broker.deadletters import line_of
from topology.lanes import GIB

LOOK_EVERY_S = 60.0
SAMPLE = 8
"""The average size of a dead letter is estimated from this many of the oldest letters, because AMQP reports how many
messages a queue has, but not their bytes."""
MAX_REMOVED = 1000
DEAD_LEASE = "dead letters"
log = logs.logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadSpec:
    """The limits of `lane.dead`, the queue of dead letters."""

    max_count: int = 100_000
    max_bytes: int = GIB
    keep_s: float = 30 * DAY_S
    folder: Path | None = None


@dataclass(slots=True)
class DeadLetterLimits:
    """Keeps `lane.dead`, the queue of dead letters, within the limits in `spec`, by removing the oldest letters. If
    there is a folder, each letter is written to a file in it before."""

    oldest: Callable[[], OldestMessages]
    store: Store
    spec: DeadSpec
    lifecycle: Lifecycle
    now_ms: NowMs = now_ms
    exported: int = 0
    dropped: int = 0

    async def run(self, *, owner: str, every_s: float = LOOK_EVERY_S) -> None:
        """Every `every_s` seconds, until cancelled, remove the dead letters that exceed the limits, unless another
        process holds the lease."""
        while True:
            await asyncio.sleep(every_s)
            try:
                if await self.store.hold(DEAD_LEASE, owner, for_s=2 * every_s):
                    await self.look()
            except (BrokerError, StoreUnavailable, OSError) as error:
                log.warning(signals.DEAD_LETTERS_UNKEPT, error=str(error))

    async def look(self) -> int:
        removed = 0
        async with self.oldest() as oldest:
            held: list[FetchedMessage] = []
            while len(held) < SAMPLE and (letter := await oldest.take()) is not None:
                held.append(letter)
            excess = self._excess(held)
            while held and removed < MAX_REMOVED and (removed < excess or self._is_old(held[0])):
                letter = held.pop(0)
                if self.spec.folder is not None:
                    await asyncio.to_thread(_write, self.spec.folder, letter, self.now_ms())
                await oldest.remove(letter)
                self._count(letter)
                removed += 1
                if not held and (following := await oldest.take()) is not None:
                    held.append(following)
        if removed:
            where = None if self.spec.folder is None else str(self.spec.folder)
            log.warning(signals.DEAD_LETTERS_REMOVED, removed=removed, exported_to=where)
        return removed

    def _excess(self, held: list[FetchedMessage]) -> int:
        if not held:
            return 0
        count = len(held) + held[-1].behind
        each_bytes = max(1.0, sum(len(letter.message.body) for letter in held) / len(held))
        return max(count - self.spec.max_count, count - math.floor(self.spec.max_bytes / each_bytes), 0)

    def _is_old(self, letter: FetchedMessage) -> bool:
        at_ms = moment_ms(letter.message.headers.get(n.DEAD_AT))
        return at_ms is not None and at_ms < self.now_ms() - 1000 * self.spec.keep_s

    def _count(self, letter: FetchedMessage) -> None:
        is_exported = self.spec.folder is not None
        self.exported += is_exported
        self.dropped += not is_exported
        self.lifecycle.publish_for_letter(letter.message, "removed", exported=is_exported)


def _write(folder: Path, letter: FetchedMessage, now_ms: int) -> None:
    """Append a dead letter to the file of the day, which `lanekeeper dead import` reads. The line is on the disk when
    this function returns. If the broker then fails to remove the letter, the letter is written again later."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"dead-letters-{now_ms // (1000 * DAY_S) * DAY_S}.jsonl"
    with open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        is_new = file.tell() == 0
        file.write(line_of(letter.message))
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        sync_folder(folder)


PROBE_EVERY_S = 5.0
PROBE_AGAIN_S = 0.5
SWEEP_EVERY_S = 60.0
"""The seconds between two removals of expired results and bodies, on average."""
STEP_PAUSE_S = 0.05
SWEEP_LEASE = "sweep"


async def probing(store: Store) -> None:
    """Check regularly, until cancelled, whether the store can be written."""
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
    """Remove expired results from `store`, and expired bodies from `bodies`, regularly, until cancelled."""
    loop = asyncio.get_running_loop()
    due_s, is_stuck = loop.time() + SWEEP_EVERY_S * random.uniform(0.8, 1.2), False
    while True:
        await asyncio.sleep(min(PROBE_EVERY_S, max(0.0, due_s - loop.time())))
        is_due = loop.time() >= due_s
        if not is_due and not (store.is_full and not is_stuck):
            continue
        try:
            removed = await sweep_once(store, owner=owner, for_s=2 * SWEEP_EVERY_S)
            is_stuck = store.is_full and not removed  # another process sweeps, or there is nothing to remove
            if is_due and removed is not None and bodies is not None:
                async with asyncio.timeout(SWEEP_EVERY_S):
                    await bodies.sweep()
        except StoreUnavailable as error:
            log.warning(signals.SWEEP_FAILED, error=str(error))
        except BodiesUnavailable as error:
            log.warning(signals.SWEEP_FAILED, error=error.cause)
        except TimeoutError:
            log.warning(signals.SWEEP_FAILED, error=f"the store of bodies did not answer within {SWEEP_EVERY_S:g} s")
        if is_due:
            due_s = loop.time() + SWEEP_EVERY_S * random.uniform(0.8, 1.2)


async def sweep_once(store: Store, *, owner: str, for_s: float) -> int | None:
    """Remove from the store all requests (with their results) and counters whose retention time is over and, if the
    store is too large, what the tenants that have most have beyond their share. Return how many rows were removed; None
    if another process does this now. `owner`: the unique name under which this process takes the lease, a lock that
    expires after `for_s` seconds. Raises StoreUnavailable."""
    try:
        if not await store.hold(SWEEP_LEASE, owner, for_s=for_s):
            return None
    except StoreUnavailable:
        if not store.is_full:  # a Redis without memory refuses this write, but no removal
            raise
    removed = 0
    while step := await store.sweep():
        removed += step
        await asyncio.sleep(STEP_PAUSE_S)
    if removed:
        log.info(signals.STORE_SWEPT, removed=removed)
    return removed
