"""Removes what has been kept for long enough, or is too much: dead letters from the queue `lane.dead`, results from the
store, bodies from the store of bodies. One process at a time does this: the one that holds a lease (a lock that
expires) in the store. Also checks that the store can be written."""

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from consumers.clock import NowMs, now_ms
from consumers.lifecycle import Lifecycle
from consumers.state.base import DAY_S, StoreUnavailable
from consumers.state.shedding import LOW_WATER, level
from consumers.state.store import Store
from lanekeeper.amqp.connection import Connection, depths
from lanekeeper.bodies import BodiesUnavailable, BodyStore, sync_folder
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import BrokerError
from lanekeeper.telemetry import signals
from topology.broker.deadletters import DeadLetter, held, line_of, scanned
from topology.lanes import GIB, MIB

LOOK_EVERY_S = 60.0
HELD: Final = 1000
"""How many letters are held at a time to be removed: meanwhile others do not see them."""
DEAD_LEASE = "dead letters"
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadSpec:
    """The limits of `lane.dead`, the queue of dead letters."""

    max_count: int = 100_000
    max_bytes: int = GIB
    keep_s: float = 30 * DAY_S
    folder: Path | None = None


class LetterSize(NamedTuple):
    """What decides whether a dead letter stays."""

    tenant: str
    key: int
    bytes: int
    at_ms: int


@dataclass(slots=True)
class _Sizes:
    """Reads all letters."""

    found: list[LetterSize] = field(default_factory=list)
    is_enough: bool = False

    def keeps(self, message: Message, tag: int) -> bool:
        letter = DeadLetter(message)
        self.found.append(LetterSize(letter.tenant, letter.key, letter.body_bytes, letter.at_ms))
        return False


def surplus(letters: Sequence[LetterSize], spec: DeadSpec, *, now_ms: int) -> set[int]:
    """The keys of the letters to remove, given in the order of the queue: those that are too old and, if there are too
    many, the oldest of the tenants that have most, so that nobody's letters push out those of another."""
    oldest_ms = now_ms - 1000 * spec.keep_s
    gone = {letter.key for letter in letters if 0 < letter.at_ms < oldest_ms}
    for limit, size_of in ((spec.max_count, lambda _: 1), (spec.max_bytes, lambda letter: letter.bytes)):
        used: Counter[str] = Counter()
        for letter in letters:
            if letter.key not in gone:
                used[letter.tenant] += size_of(letter)
        if used.total() <= limit:
            continue
        most = level(used.values(), ceil(LOW_WATER * limit))
        for letter in letters:
            if letter.key not in gone and used[letter.tenant] > most:
                gone.add(letter.key)
                used[letter.tenant] -= size_of(letter)
    return gone


@dataclass(slots=True)
class DeadLetterLimits:
    """Keeps `queue`, that of the dead letters, within the limits in `spec`. If there is a folder, each letter that is
    removed is written to a file in it before."""

    connection: Connection
    queue: str
    store: Store
    spec: DeadSpec
    lifecycle: Lifecycle
    now_ms: NowMs = now_ms
    exported: int = 0
    dropped: int = 0
    _left: list[LetterSize] | None = field(default=None, init=False)
    """What the last reading left in the queue."""

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
        if not self._may_exceed((await depths(self.connection, [self.queue]))[self.queue].ready):
            return 0
        async with self.connection.another("dead letters") as connection:  # so that no delivery waits behind them
            return await self._look(connection)

    async def _look(self, connection: Connection) -> int:
        self._left = None
        async with scanned(connection, self.queue, _Sizes) as scan:
            letters = scan.reader.found
        gone, removed = surplus(letters, self.spec, now_ms=self.now_ms()), 0
        async with aclosing(held(connection, self.queue, gone, most=HELD)) as batches:
            async for batch in batches:
                each = [letter for _, letter in batch.reader.held]
                if self.spec.folder is not None and each:
                    await asyncio.to_thread(
                        _write, self.spec.folder, [letter.message for letter in each], self.now_ms()
                    )
                await batch.remove_all()
                for letter in each:
                    self._count(letter.message)
                removed += len(each)
        self._left = [letter for letter in letters if letter.key not in gone]
        if removed:
            where = None if self.spec.folder is None else str(self.spec.folder)
            log.warning(signals.DEAD_LETTERS_REMOVED, removed=removed, exported_to=where)
        return removed

    def _may_exceed(self, count: int) -> bool:
        """Whether to read the queue, which hides it from others for a moment: AMQP tells how many messages it has, but
        neither their size nor whose they are. A letter that came since the last reading counts as a MiB."""
        if (left := self._left) is None or count > self.spec.max_count:
            return count > 0
        known_bytes = sum(letter.bytes for letter in left)
        oldest_ms = min((letter.at_ms for letter in left if letter.at_ms), default=self.now_ms())
        return (
            known_bytes + MIB * max(0, count - len(left)) > self.spec.max_bytes
            or oldest_ms < self.now_ms() - 1000 * self.spec.keep_s
        )

    def _count(self, letter: Message) -> None:
        is_exported = self.spec.folder is not None
        self.exported += is_exported
        self.dropped += not is_exported
        self.lifecycle.publish_for_letter(letter, "removed", exported=is_exported)


def _write(folder: Path, letters: Iterable[Message], now_ms: int) -> None:
    """Append dead letters to the file of the day, which `lanekeeper dead import` reads. They are on the disk when this
    function returns. If the broker then fails to remove them, they are written again later."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"dead-letters-{now_ms // (1000 * DAY_S) * DAY_S}.jsonl"
    with open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        is_new = file.tell() == 0
        file.writelines(map(line_of, letters))
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
