"""Keeps the queue `lane.dead` within its limits of number, size and age, by removing the oldest dead letters.

If a folder is configured, each letter is written to a file in that folder before it is removed from the queue. One
process at a time does this: the one that holds a lease (a lock that expires) in the store.
"""

import asyncio
import base64
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from consumers.job import NowMs, dead_at_ms
from consumers.lifecycle import Lifecycle
from consumers.state.base import Store, StoreUnavailable
from consumers.state.spec import DAY_S
from lanekeeper.bodies import sync_folder
from lanekeeper.contract import names as n
from lanekeeper.contract.problems import BrokerError
from lanekeeper.telemetry import logs, signals
from topology.broker.admin.deadletters import FetchedMessage, OldestMessages
from topology.lanes import GIB

LOOK_EVERY_S = 60.0
"""The seconds between two checks whether the dead letters exceed the limits of their number, size or age."""
SAMPLE = 8
"""The average size of a dead letter is estimated from this many of the oldest letters, because AMQP reports how many
messages a queue has, but not their bytes."""
MAX_REMOVED = 1000
"""One call of `DeadLetters.look` removes at most this many dead letters."""
LEASE = "dead letters"
WRITTEN = (
    "message_id", "routing_key", "headers", "content_type", "content_encoding", "reply_to", "correlation_id",
    "priority", "type", "app_id",
)  # fmt: skip
"""The properties of a removed dead letter that are written, besides its body, to a file in `DeadSpec.folder`."""
log = logs.logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadSpec:
    """The limits of `lane.dead`, the queue of dead letters: how many letters it may hold, how many bytes, and for how
    long each is kept."""

    max_count: int = 100_000
    max_bytes: int = GIB
    keep_s: float = 30 * DAY_S
    folder: Path | None = None
    """The folder to which removed letters are written, as one file of JSON lines a day; None: they are not written."""


@dataclass(slots=True)
class DeadLetters:
    """Keeps `lane.dead`, the queue of dead letters, within the limits in `spec`, by removing the oldest letters.
    `exported`: how many letters were written to a file before they were removed. `dropped`: how many letters were
    removed without being written to a file."""

    oldest: Callable[[], OldestMessages]
    store: Store
    spec: DeadSpec
    lifecycle: Lifecycle
    now_ms: NowMs
    exported: int = 0
    dropped: int = 0

    async def run(self, *, owner: str, every_s: float = LOOK_EVERY_S) -> None:
        """Every `every_s` seconds, until cancelled, remove the dead letters that exceed the limits, unless another
        process holds the lease (a lock in the store that expires), because then that process does it. `owner`: the name
        under which this process takes the lease; no other process that shares the store may have the same name."""
        while True:
            await asyncio.sleep(every_s)
            try:
                if await self.store.hold(LEASE, owner, for_s=2 * every_s):
                    await self.look()
            except (BrokerError, StoreUnavailable, OSError) as error:
                log.warning(signals.DEAD_LETTERS_UNKEPT, error=str(error))

    async def look(self) -> int:
        """Remove the dead letters that exceed the limits in `spec`, the oldest first, but at most `MAX_REMOVED`. Return
        how many were removed. Raises BrokerError, OSError."""
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
        """How many dead letters must be removed so that the queue is within its limits of number and total size.
        `held`: the oldest letters, from whose average size the total size is estimated."""
        if not held:
            return 0
        count = len(held) + held[-1].behind
        each_bytes = max(1.0, sum(len(letter.message.body) for letter in held) / len(held))
        return max(count - self.spec.max_count, count - math.floor(self.spec.max_bytes / each_bytes), 0)

    def _is_old(self, letter: FetchedMessage) -> bool:
        at_ms = dead_at_ms(letter.message.headers.get(n.DEAD_AT))
        return at_ms is not None and at_ms < self.now_ms() - 1000 * self.spec.keep_s

    def _count(self, letter: FetchedMessage) -> None:
        is_exported = self.spec.folder is not None
        self.exported += is_exported
        self.dropped += not is_exported
        self.lifecycle.publish_for_letter(letter.message, "removed", exported=is_exported)


def _write(folder: Path, letter: FetchedMessage, now_ms: int) -> None:
    """Append a dead letter to the file of the day, as one line of JSON. The line is on the disk when this function
    returns. If the broker then fails to remove the letter, the letter is written again later."""
    line = {name: getattr(letter.message, name) for name in WRITTEN}
    line["body_base64"] = base64.b64encode(letter.message.body).decode()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"dead-letters-{now_ms // (1000 * DAY_S) * DAY_S}.jsonl"
    with open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        is_new = file.tell() == 0
        file.write(json.dumps(line, default=str).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        sync_folder(folder)
