"""Writes the trail of a request: entries in the store, from which clients that follow the request over HTTP get its
progress.

An entry is a step of the request (`started`, `retrying`), an event of the answer's stream, or `restart`, which tells
clients to discard the events before it. The work on a request does not wait until its entries are written. One write
contains the entries of many requests: the first entry is written at once, and those that follow within `GATHER_S` are
written together. If events cannot be written, or are too many, no more events are written, and an entry `truncated`
says so. The client still gets the whole answer, because the answer is stored with the request's result.
"""

import asyncio
import json
from contextlib import suppress
from typing import Any

from consumers.background import Background
from consumers.state.base import Held, StoreUnavailable
from consumers.state.following import EVENT, RESTART, Following, NewEntry, Part, Refused, Submission
from lanekeeper.telemetry import logs, signals

GATHER_S = 0.02
"""The pause, in seconds, between two writes to the store of what clients follow (steps of requests, events of
answers)."""
AGAIN_S = 0.5
"""The pause, in seconds, after a write of entries to the store that failed."""
FLUSH_WITHIN_S = 2.0
"""How many seconds a worker waits at most until the store has all entries of a request's progress, before it completes
or releases the request's claim."""
UNWRITTEN_BYTES = 1024 * 1024
"""How many bytes of stream events of one request's answer may wait in memory to be written. If there are more, the
waiting events are discarded, and an entry `truncated` is written in their place."""
PARTS_AT_ONCE = 100
"""One write to the store contains the entries of at most this many requests."""
TRUNCATED = NewEntry("truncated", b"{}")
log = logs.logger()


class Trail:
    """The progress of one request, which clients can follow: its steps and the events of its answer, which are written
    as entries to the store. Only the worker that holds the request's claim (`held`) may write them. `is_takeover`:
    whether an earlier worker lost the claim, because it died or was too slow, so that the store may have events of that
    worker's call."""

    def __init__(self, trails: "Trails", held: Held, submission: Submission, *, is_takeover: bool) -> None:
        self._trails = trails
        self._held = held
        self._submission = submission
        self._unwritten: list[NewEntry] = []
        self._bytes = 0
        """How many bytes the events in `_unwritten` have."""
        self._must_restart = is_takeover
        """True if an entry `restart` must be written before the first event of the answer."""
        self._has_stopped = False
        """True if no more events of the answer are written until the next `restart`, because some could not be written
        or were too many."""
        self._is_writing = False
        self._is_over = False
        """True if no more entries of any kind are written."""

    @property
    def is_written(self) -> bool:
        """Whether nothing is left to write: the store has all entries of this request's progress, or has refused
        them."""
        return not self._unwritten and not self._is_writing

    def tell(self, kind: str, **detail: Any) -> None:
        """Note a step of the request, such as `started`, for clients that follow the request. The step is written to
        the store soon."""
        self._add(NewEntry(kind, json.dumps(detail, ensure_ascii=False).encode()))

    def part(self, kind: str, body: bytes) -> None:
        """Note a part of the answer's stream for clients that follow the request: an event, or a `restart`, after which
        they must discard the events before it. The part is written to the store soon."""
        if kind == RESTART:
            self._has_stopped = self._must_restart = False
        elif self._must_restart:
            self.part(RESTART, b"{}")
        elif self._has_stopped:
            return
        self._bytes += len(body)
        self._add(NewEntry(kind, body))
        if self._bytes > UNWRITTEN_BYTES:
            self._stop_events()

    async def flushed(self) -> None:
        """Wait until the store has all entries of this request, for at most `FLUSH_WITHIN_S`."""
        if not self.is_written:
            await self._trails.flush(self)

    def taken(self) -> Part:
        """Return all unwritten entries and remove them from this trail, because the caller writes them to the store
        now. After that write, the caller calls `written`, `failed` or `ended`."""
        entries, self._unwritten, self._bytes, self._is_writing = self._unwritten, [], 0, True
        return Part(self._held, self._submission, entries)

    def written(self, part: Part, refused: Refused | None) -> None:
        """Note the store's answer to a write of the entries in `part`. `refused`: why the store refused them; None if
        it has stored them."""
        self._is_writing = False
        if refused is Refused.FENCED:
            self.ended()
        elif refused is Refused.FULL:
            self.failed(part)

    def failed(self, part: Part) -> None:
        """Note that the write of the entries in `part` has failed, or perhaps failed. Entries for steps of the request
        are written again. Entries with events of its answer are not written again, because the store may have some of
        them, so there may be a gap; therefore no more events are written until the answer begins anew (`restart`)."""
        self._is_writing = False
        is_restarted = any(entry.kind == RESTART for entry in self._unwritten)  # clients forget the events before it
        self._unwritten[:0] = [entry for entry in part.entries if entry.kind != EVENT]
        if any(entry.kind == EVENT for entry in part.entries) and not is_restarted:
            self._stop_events()

    def ended(self) -> None:
        """Discard the entries of this request that are not written yet, and write no more of them."""
        self._is_writing, self._is_over = False, True
        self._unwritten.clear()

    def _stop_events(self) -> None:
        self._has_stopped = True
        self._unwritten = [entry for entry in self._unwritten if entry.kind != EVENT and entry != TRUNCATED]
        self._bytes = 0
        self._add(TRUNCATED)

    def _add(self, entry: NewEntry) -> None:
        if not self._is_over:
            self._unwritten.append(entry)
            self._trails.write_soon(self)


class Trails:
    """Writes the progress of all requests that this process works on and that clients follow. (The progress of one
    request is a `Trail`.)"""

    def __init__(self, store: Following, background: Background) -> None:
        self._store = store
        self._background = background
        self._unwritten: dict[Trail, None] = {}
        """The trails with unwritten entries, in the order in which they are written."""
        self._writing: asyncio.Task[None] | None = None
        """The task that writes to the store while there are unwritten entries; None before the first entry."""
        self._hurry = asyncio.Event()
        """An event that is set to end the pause before the next write to the store."""
        self._round = asyncio.Event()
        """An event that is set when the next write to the store has ended. It is then replaced by a new one for the
        write after that."""

    def write_soon(self, trail: Trail) -> None:
        """Write the new entries (steps and events) of this request's progress with the next write to the store."""
        self._unwritten[trail] = None
        if self._writing is None or self._writing.done():
            self._writing = self._background.begin(self._write(), name="trails")

    async def flush(self, trail: Trail) -> None:
        """Write to the store without pauses until it has all entries of this request, for at most `FLUSH_WITHIN_S`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_WITHIN_S):
                while not trail.is_written:
                    self._hurry.set()
                    await self._round.wait()

    async def _write(self) -> None:
        while self._unwritten:
            pause_s = await self._write_once()
            self._round.set()
            self._round = asyncio.Event()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._hurry.wait()
            self._hurry.clear()

    async def _write_once(self) -> float:
        """Write the entries of up to `PARTS_AT_ONCE` requests to the store. Return the pause before the next write, in
        seconds."""
        batch = list(self._unwritten)[:PARTS_AT_ONCE]
        for trail in batch:
            del self._unwritten[trail]
        parts = [trail.taken() for trail in batch]
        try:
            found = await self._store.append(parts)
        except StoreUnavailable:
            for trail, part in zip(batch, parts, strict=True):
                trail.failed(part)
                self._unwritten[trail] = None
            return AGAIN_S
        except Exception:  # these trails end; requests and their results do not depend on them
            log.exception(signals.HANDLER_FAILED, where="trails")
            for trail in batch:
                trail.ended()
            return AGAIN_S
        for trail, part, why in zip(batch, parts, found, strict=True):
            trail.written(part, why)
        return GATHER_S
