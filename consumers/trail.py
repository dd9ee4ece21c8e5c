"""The trail of a followed request: entries that its worker writes to the store for whoever follows it.

Nothing waits for an entry. The entries of all trails of a process are written together: the first at once, those that
come within the next `GATHER_S` by the next write. If the store is away, or a limit is reached, the events stop, and an
entry `truncated` says so; the whole answer is stored with the result.
"""

import asyncio
import json
from contextlib import suppress
from typing import Any

from consumers.background import Background
from consumers.state.base import Held, StoreUnavailable
from consumers.state.following import EVENT, RESTART, Following, Part, Refused, Submission, Told

GATHER_S = 0.02
AGAIN_S = 0.5
FLUSH_WITHIN_S = 2.0
UNWRITTEN_BYTES = 1024 * 1024
"""The most that events of one trail may hold in memory until they are written."""
PARTS_AT_ONCE = 100
TRUNCATED = Told("truncated", b"{}")


class Trail:
    """The trail of one claim."""

    def __init__(self, trails: "Trails", held: Held, submission: Submission) -> None:
        self._trails = trails
        self._held = held
        self._submission = submission
        self._told: list[Told] = []
        self._bytes = 0
        self._has_stopped = False
        """No more events."""
        self._is_writing = False
        self._is_over = False
        """Nothing more at all: another claim goes on."""

    @property
    def is_written(self) -> bool:
        return not self._told and not self._is_writing

    def tell(self, kind: str, **detail: Any) -> None:
        """A step of the request's life."""
        self._add(Told(kind, json.dumps(detail, ensure_ascii=False).encode()))

    def part(self, kind: str, body: bytes) -> None:
        """A part of its answer: `event` or `restart`."""
        if kind == RESTART:
            self._has_stopped = False
        elif self._has_stopped:
            return
        self._bytes += len(body)
        self._add(Told(kind, body))
        if self._bytes > UNWRITTEN_BYTES:
            self._stop_events()

    async def flushed(self) -> None:
        """Wait until all entries are written, for a short time."""
        if not self.is_written:
            await self._trails.flush(self)

    def taken(self) -> Part:
        """What is to be written now."""
        told, self._told, self._bytes, self._is_writing = self._told, [], 0, True
        return Part(self._held, self._submission, told)

    def written(self, part: Part, refused: Refused | None) -> None:
        """The answer to what was taken."""
        self._is_writing = False
        if refused is Refused.FENCED:
            self._is_over = True
            self._told.clear()
        elif refused is Refused.FULL:
            self.failed(part)

    def failed(self, part: Part) -> None:
        """These entries were not written, or that is unknown: all but the events are written again."""
        self._is_writing = False
        is_restarted = any(each.kind == RESTART for each in self._told)  # then nobody needs the events before it
        self._told[:0] = [each for each in part.told if each.kind != EVENT]
        if any(each.kind == EVENT for each in part.told) and not is_restarted:
            self._stop_events()

    def _stop_events(self) -> None:
        self._has_stopped = True
        self._told = [each for each in self._told if each.kind != EVENT and each != TRUNCATED]
        self._bytes = 0
        self._add(TRUNCATED)

    def _add(self, told: Told) -> None:
        if not self._is_over:
            self._told.append(told)
            self._trails.write_soon(self)


class Trails:
    """Writes the trails of one process."""

    def __init__(self, store: Following, background: Background) -> None:
        self._store = store
        self._background = background
        self._unwritten: dict[Trail, None] = {}
        self._writing: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._round = asyncio.Event()

    def begin(self, held: Held, submission: Submission) -> Trail:
        return Trail(self, held, submission)

    def write_soon(self, trail: Trail) -> None:
        self._unwritten[trail] = None
        if self._writing is None or self._writing.done():
            self._writing = self._background.begin(self._write(), name="trails")

    async def flush(self, trail: Trail) -> None:
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
        some = list(self._unwritten)[:PARTS_AT_ONCE]
        for each in some:
            del self._unwritten[each]
        parts = [each.taken() for each in some]
        try:
            found = await self._store.append(parts)
        except StoreUnavailable:
            for trail, part in zip(some, parts, strict=True):
                trail.failed(part)
                self._unwritten[trail] = None
            return AGAIN_S
        for trail, part, why in zip(some, parts, found, strict=True):
            trail.written(part, why)
        return GATHER_S
