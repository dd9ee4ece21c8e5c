"""Writes the progress of a request: entries in the store, from which clients that follow the request over HTTP get its
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

import structlog

from consumers.background import Background
from consumers.state.base import EVENT, RESTART, AppendRefusal, Held, NewEntries, NewEntry, StoreUnavailable, Submission
from consumers.state.store import Store
from lanekeeper.telemetry import signals

GATHER_S = 0.02
AGAIN_S = 0.5
FLUSH_WITHIN_S = 2.0
UNWRITTEN_BYTES = 1024 * 1024
"""How many bytes of stream events of one request's answer may wait in memory to be written. If there are more, the
waiting events are discarded, and an entry `truncated` is written in their place."""
PARTS_AT_ONCE = 100
TRUNCATED = NewEntry("truncated", b"{}")
log = structlog.get_logger()


class Progress:
    """The progress of one request, which clients can follow: its steps and the events of its answer, which are written
    as entries to the store."""

    def __init__(self, requests: "ProgressWriter", held: Held, submission: Submission, *, is_takeover: bool) -> None:
        self._writer = requests
        self._held = held
        self._submission = submission
        self._unwritten: list[NewEntry] = []
        self._bytes = 0
        self._must_restart = is_takeover
        self._has_stopped = False
        self._is_writing = False
        self._is_over = False

    @property
    def is_written(self) -> bool:
        return not self._unwritten and not self._is_writing

    def publish_event(self, kind: str, **detail: Any) -> None:
        self._add(NewEntry(kind, json.dumps(detail, ensure_ascii=False).encode()))

    def part(self, kind: str, body: bytes) -> None:
        """Note a part of the answer's stream for clients that follow the request: an event, or a `restart`, after which
        they must discard the events before it."""
        if kind == RESTART:
            self._has_stopped = self._must_restart = False
        elif self._must_restart:
            self.part(RESTART, b"{}")
        elif self._has_stopped:
            return
        had_room = self._bytes <= UNWRITTEN_BYTES  # one whole event fits, whatever its size
        self._bytes += len(body)
        self._add(NewEntry(kind, body))
        if not had_room:
            self._stop_events()

    async def flushed(self) -> None:
        if not self.is_written:
            await self._writer.flush(self)

    def taken(self) -> NewEntries:
        """Return all unwritten entries and remove them from this progress, because the caller writes them to the store
        now."""
        entries, self._unwritten, self._bytes, self._is_writing = self._unwritten, [], 0, True
        return NewEntries(self._held, self._submission, entries)

    def written(self, part: NewEntries, refused: AppendRefusal | None) -> None:
        self._is_writing = False
        if refused is AppendRefusal.FENCED:
            self.ended()
        elif refused is AppendRefusal.FULL:
            self.failed(part)

    def failed(self, part: NewEntries) -> None:
        self._is_writing = False
        is_restarted = any(entry.kind == RESTART for entry in self._unwritten)  # clients forget the events before it
        self._unwritten[:0] = [entry for entry in part.entries if entry.kind != EVENT]
        if any(entry.kind == EVENT for entry in part.entries) and not is_restarted:
            self._stop_events()

    def ended(self) -> None:
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
            self._writer.write_soon(self)


class ProgressWriter:
    """Writes the progress of all requests that this process works on and that clients follow."""

    def __init__(self, store: Store, background: Background) -> None:
        self._store = store
        self._background = background
        self._unwritten: dict[Progress, None] = {}
        self._writing: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._round = asyncio.Event()

    def write_soon(self, progress: Progress) -> None:
        self._unwritten[progress] = None
        if self._writing is None or self._writing.done():
            self._writing = self._background.detached(self._write(), name="progress")

    async def flush(self, progress: Progress) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_WITHIN_S):
                while not progress.is_written:
                    self._hurry.set()
                    await self._round.wait()

    async def _write(self) -> None:
        while self._unwritten:
            pause_s = await self._write_once()
            self._round.set()
            self._round = asyncio.Event()
            if pause_s == AGAIN_S:  # without a pause, a store that fails at once would be asked in a busy loop
                await asyncio.sleep(pause_s)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._hurry.wait()
            self._hurry.clear()

    async def _write_once(self) -> float:
        batch = list(self._unwritten)[:PARTS_AT_ONCE]
        for progress in batch:
            del self._unwritten[progress]
        parts = [progress.taken() for progress in batch]
        try:
            found = await self._store.append(parts)
        except StoreUnavailable:
            for progress, part in zip(batch, parts, strict=True):
                progress.failed(part)
                self._unwritten[progress] = None
            return AGAIN_S
        except Exception:  # these requests end; requests and their results do not depend on them
            log.exception(signals.HANDLER_FAILED, where="progress")
            for progress in batch:
                progress.ended()
            return AGAIN_S
        for progress, part, why in zip(batch, parts, found, strict=True):
            progress.written(part, why)
        return GATHER_S
