"""Bounds how many bytes of messages a process holds: one bound for all its consumers.

RabbitMQ limits by number, never by size, what it delivers before anything is acknowledged. So the bytes are counted
here. A message for which there is no room is given back to the broker as soon as there is some; until then only its
delivery tag is kept. Because it counts as unacknowledged, the broker delivers no other message in its place.

No consumer can take all the room. A *holder* (a lane, or another queue) gets room only while it holds no more than is
left: one alone gets half of the bound, two get a third each, and some is always left for the next one. The reasons are
in docs/decisions/0028.
"""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from lanekeeper.contract import names

MIB: Final = 1024 * 1024
HELD_BYTES: Final = 64 * MIB
"""A worker with this bound stays below 512 MiB, the limit in deploy/kubernetes (tests/journeys/test_memory.py): while
it is worked on, a message exists several times, as what was delivered, as a request, and as what is sent."""
EXPECTED_FOR_S: Final = 2.0
"""The room for a message that was given back is kept for so long. Another process may get the message."""
LATE_S: Final = 10.0
"""After so long a holder that holds nothing gets room beyond the bound. Else one message that is large could wait as
long as others are busy."""
GIVEN_BACK_AFTER_S: Final = 600.0
"""After so long a delivery is given back although there is no room for it: the broker cancels a consumer, or closes its
channel, if one is not acknowledged for half an hour."""


_COUNTS: Final = frozenset({names.DELIVERY_COUNT, names.ACQUIRED_COUNT})


@dataclass(eq=False, slots=True)
class WaitingForRoom:
    """Something for which there was no room: its size, what is called when there is, and what is called instead after
    `GIVEN_BACK_AFTER_S`."""

    holder: str
    size: int
    then: Callable[[], None]
    after_long: Callable[[], None] | None
    since_s: float
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class HeldBytes:
    """The bytes of messages that this process holds, and what waits for room."""

    at_most: int = HELD_BYTES
    in_all: int = field(default=0, init=False)
    _held: Counter[str] = field(default_factory=Counter, init=False)
    _waiting: defaultdict[str, deque[WaitingForRoom]] = field(default_factory=lambda: defaultdict(deque), init=False)
    _expected: defaultdict[tuple[str, str, int], deque[asyncio.TimerHandle]] = field(
        default_factory=lambda: defaultdict(deque), init=False
    )

    @property
    def waiting(self) -> int:
        """How many messages have no room."""
        return sum(map(len, self._waiting.values()))

    def take(self, holder: str, queue: str, size: int, *, redelivered: bool) -> bool:
        """Count a message that was delivered. False: there is no room for it."""
        if redelivered and (kept := self._expected.get((holder, queue, size))) is not None:
            kept.popleft().cancel()
            if not kept:
                del self._expected[holder, queue, size]
            return True
        if holder in self._waiting or not self._has_room(holder, size):
            return False
        self.add(holder, size)
        return True

    def add(self, holder: str, size: int) -> None:
        """Count what is in memory already, whether or not there was room for it."""
        self.in_all += size
        self._held[holder] += size

    def release(self, holder: str, size: int) -> None:
        self.add(holder, -size)
        self._serve()

    def wait(
        self, holder: str, size: int, then: Callable[[], None], *, after_long: Callable[[], None] | None = None
    ) -> WaitingForRoom:
        """When there is room for so many bytes, count them, and call `then`: holder by holder, in order. If there is
        none for long, count nothing, and call `after_long`."""
        loop = asyncio.get_running_loop()
        waiting = WaitingForRoom(holder, size, then, after_long, loop.time())
        self._waiting[holder].append(waiting)
        waiting.timer = loop.call_later(LATE_S, self._look_late, waiting)
        return waiting

    def forget(self, waiting: WaitingForRoom) -> None:
        if waiting.timer is not None:
            waiting.timer.cancel()
        if (line := self._waiting.get(waiting.holder)) is not None and waiting in line:
            line.remove(waiting)
            if not line:
                del self._waiting[waiting.holder]
            self._serve()

    def expect(self, holder: str, queue: str, size: int) -> None:
        """Keep the room that was counted for a message until it is delivered again, or for `EXPECTED_FOR_S`."""
        kept = self._expected[holder, queue, size]

        def end() -> None:
            kept.popleft()
            if not kept:
                del self._expected[holder, queue, size]
            self.release(holder, size)

        kept.append(asyncio.get_running_loop().call_later(EXPECTED_FOR_S, end))

    def _has_room(self, holder: str, size: int) -> bool:
        return self._held[holder] + size <= self.at_most - self.in_all

    def _serve(self) -> None:
        for holder in sorted(self._waiting, key=lambda each: self._held[each]):
            while (line := self._waiting.get(holder)) and self._has_room(holder, line[0].size):
                self._admit(line[0])

    def _look_late(self, waiting: WaitingForRoom) -> None:
        loop = asyncio.get_running_loop()
        is_first = self._waiting[waiting.holder][0] is waiting
        if is_first and not self._held[waiting.holder]:
            self._admit(waiting)
        elif waiting.after_long is not None and loop.time() - waiting.since_s >= GIVEN_BACK_AFTER_S:
            self.forget(waiting)
            waiting.after_long()
        else:
            waiting.timer = loop.call_later(LATE_S, self._look_late, waiting)

    def _admit(self, waiting: WaitingForRoom) -> None:
        line = self._waiting[waiting.holder]
        line.remove(waiting)
        if not line:
            del self._waiting[waiting.holder]
        if waiting.timer is not None:
            waiting.timer.cancel()
        self.add(waiting.holder, waiting.size)
        waiting.then()


def size_of(headers: Mapping[str, Any]) -> int:
    """How many bytes a message's headers take, about: requesters may send large ones. Without those that the broker
    adds when it delivers a message again, so that this does not change it."""
    size = 0
    for name, value in headers.items():
        if name in _COUNTS:
            continue
        size += len(name) + (len(value) if isinstance(value, str | bytes) else 8)
        if isinstance(value, list | dict):
            size += len(repr(value))
    return size
